"""Tiles of Hopper schedules as plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from schedules.core.arch import parse_arch
from schedules.core.registry import operator
from tests.conftest import problem_of

WorkOf = Callable[..., Any]


def in_numbers(value: Any) -> Any:
    """`value`, an expression of numbers as the number."""
    import tvm

    return tvm.sym.Analyzer().simplify(value) if isinstance(value, tvm.ir.Expr) else value


@pytest.fixture
def work_of(monkeypatch: pytest.MonkeyPatch) -> WorkOf:
    """The work that a schedule hands to `program`, whose places are numbers where tiles are."""
    import schedules.hopper.program
    import schedules.tirx.values

    def simplified(name: str, value: Any) -> Any:
        return in_numbers(value)

    def work(name: str, schedule: str, fields: dict[str, Any], words: dict[str, Any]) -> Any:
        problem, spec, arch = problem_of(name, **fields), operator(name).schedule(schedule), parse_arch("sm_90a")
        return spec.apply(problem, spec.config_for(problem, arch, words), arch)

    monkeypatch.setattr(schedules.tirx.values, "named", simplified)
    monkeypatch.setattr(schedules.hopper.program, "program", lambda work, *_, **__: work)
    return work
