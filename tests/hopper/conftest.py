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
    """The work that a schedule hands to `program`, whose places are numbers where tiles are.

    What stands in lies where it is looked up by name at each call: a module imported meanwhile would keep a function.
    """
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder

    import schedules.hopper.program

    def work(name: str, schedule: str, fields: dict[str, Any], words: dict[str, Any]) -> Any:
        problem, spec, arch = problem_of(name, **fields), operator(name).schedule(schedule), parse_arch("sm_90a")
        return spec.apply(problem, spec.config_for(problem, arch, words), arch)

    monkeypatch.setattr(T, "Bind", in_numbers)
    monkeypatch.setattr(IRBuilder, "name", lambda name, value: None)
    monkeypatch.setattr(schedules.hopper.program, "program", lambda work, *_, **__: work)
    return work
