"""Copies of a process whose other threads hold what a copy needs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedules.core import child as module
from schedules.core.arch import Arch
from schedules.core.child import Child
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.store import kernels
from schedules.store.kernels import Chosen
from tests.forked import SUBPROCESS

HELD = threading.Event()


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And the other thread goes on once the test is over."""
    monkeypatch.setattr(module, "subprocess", SUBPROCESS)
    HELD.clear()
    yield
    HELD.set()


def answer_of_a_copy(function: Any, *arguments: Any) -> Any:
    child = Child(main=False)
    try:
        return child.call(function, arguments, 20.0)
    finally:
        child.kill()


def imported(name: str) -> int:
    return int(__import__(name).VALUE)


def test_a_module_that_another_thread_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "slow_module.py").write_text(
        "import sys\nfrom tests import test_forked\nif sys.argv != ['copy']: test_forked.HELD.wait(60)\nVALUE = 7\n"
    )
    thread = threading.Thread(target=__import__, args=("slow_module",), daemon=True)
    thread.start()
    while "slow_module" not in sys.modules:
        thread.join(0.01)
    monkeypatch.setattr(sys, "argv", ["copy"])
    assert answer_of_a_copy(imported, "slow_module") == 7
    HELD.set()
    thread.join(60)
    sys.modules.pop("slow_module")


def key_of(chosen: Chosen) -> str:
    return chosen.key


def test_a_property_that_another_thread_computes(host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, caller = threading.Event(), threading.get_ident()

    def slow(_: object) -> str:
        begun.set()
        assert threading.get_ident() == caller or HELD.wait(60)
        return "key"

    monkeypatch.setattr(kernels, "digest", slow)
    chosen = Chosen(SoftmaxProblem(3, 41), host, "cpu", {}, "", "default", "", True)
    thread = threading.Thread(target=key_of, args=(replace(chosen),), daemon=True)
    thread.start()
    assert begun.wait(60)
    assert answer_of_a_copy(key_of, chosen) == "key"
    HELD.set()
    thread.join(60)
