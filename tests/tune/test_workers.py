"""Whose fault a failure is: a worker whose process is played by this one, or does not do as it is told."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from schedules.core.arch import Arch
from schedules.core.child import Ended, Overdue, Stopped
from schedules.core.errors import BuildError, MachineError, TuningError
from schedules.core.machine import prove_machine
from schedules.tune import evaluate, workers
from schedules.tune.evaluate import Failure
from schedules.tune.workers import DOUBTS, TRIES, Order, Orders, Setup, Worker

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Machine:
    """What the calls of all processes come to: for each function a list of results and errors, the last one for good."""

    def __init__(self) -> None:
        self.answers: dict[Callable[..., Any], list[Any]] = {}
        self.calls: list[Callable[..., Any]] = []
        self.started = 0

    def child(self, setup: Setup) -> _Child:
        self.started += 1
        return _Child(self)

    def times(self, function: Callable[..., Any]) -> int:
        return self.calls.count(function)


class _Child:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.alive = machine, True

    def call(self, function: Callable[..., Any], arguments: Any, seconds: float, cancelled: Any) -> Any:
        assert self.alive
        self.machine.calls.append(function)
        answers = self.machine.answers.get(function, [None])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Ended | Stopped | Overdue):
            self.alive = False
        if isinstance(found, BaseException):
            raise found
        return found

    def kill(self) -> None:
        self.alive = False


def work(problem: Any, arch: Any) -> None:
    """What the orders of these tests ask for."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(Setup, "child", lambda setup: machine.child(setup))
    monkeypatch.setattr(Worker, "_sleep", lambda worker, seconds: time.sleep(0.001))
    return machine


@pytest.fixture
def ask(machine: Machine, host: Arch) -> Iterator[Callable[..., Any]]:
    """The result of an order whose call comes to each of `answers` in turn; what it raises is raised."""
    orders = Orders()
    worker = Worker(host, Setup("", None, {}), orders)
    worker.start(evaluate.warm_up, host).result()

    def ask(*answers: Any, outcome: str = "compile", first: Any = ()) -> Any:
        machine.calls.clear()
        machine.answers[work] = list(answers)
        done: Future[Any] = orders.put(Order(work, (None, host), 5.0, outcome, first))
        return done.result(30)

    yield ask
    worker.close()


@pytest.mark.parametrize(
    "failure", [Failure("compile", "refused"), Failure("constraints", "illegal"), Failure("correctness", "off")]
)
def test_a_failure_on_a_machine_that_is_well(machine: Machine, ask: Callable[..., Any], failure: Failure) -> None:
    assert ask(failure) == failure
    assert machine.times(work) == 1
    assert machine.times(prove_machine) == (failure.outcome == "compile")  # the others are the candidate's by their kind


def test_a_failure_on_a_machine_that_is_not(machine: Machine, ask: Callable[..., Any]) -> None:
    """However it reads; and no other order is taken until the machine is well."""
    machine.answers[prove_machine] = [MachineError("no space"), MachineError("no space"), None]
    with pytest.raises(MachineError, match="no space"):
        ask(Failure("compile", "refused"))
    assert ask("built") == "built"
    assert len(machine.answers[prove_machine]) == 1


@pytest.mark.parametrize("fault", [FULL, Failure("compile", "linker failed", suspect="No space left on device")])
def test_what_reads_like_a_fault_of_the_machine(machine: Machine, ask: Callable[..., Any], fault: Any) -> None:
    """It may have passed by the time that the machine is looked at; what stays is the candidate's."""
    assert ask(fault, fault, "built") == "built"
    failed = ask(fault)
    assert failed.outcome == "compile" and machine.times(work) == 1 + len(DOUBTS) == machine.times(prove_machine)


@pytest.mark.parametrize("fault", [Ended(-11), Ended(3), MemoryError()])
def test_a_process_that_died_is_tried_once_more(machine: Machine, ask: Callable[..., Any], fault: Any) -> None:
    assert ask(fault, "built") == "built"
    failed = ask(fault)
    assert failed.outcome == "compile" and machine.times(work) == 2


def test_a_timeout_is_the_candidates(machine: Machine, ask: Callable[..., Any]) -> None:
    assert ask(Overdue(5.0)).outcome == "timeout" and machine.times(work) == 1 == machine.times(prove_machine)


def test_processes_that_are_killed_or_stopped(machine: Machine, ask: Callable[..., Any]) -> None:
    for lost in (Ended(-9), Ended(-15), Stopped()):
        assert ask(lost, lost, "built") == "built"
        assert machine.times(work) == TRIES
    killed = ask(Ended(-9))
    assert killed.outcome == "compile" and "killed 3 times" in killed.reason and machine.times(work) == TRIES
    with pytest.raises(MachineError, match="stopped by a signal .* 3 times in turn"):
        ask(Stopped())
    machine.answers[evaluate.warm_up] = [Stopped(), Ended(-9), None]  # as they start
    assert ask(Ended(-9), "built") == "built"


def test_a_device_that_is_lost(machine: Machine, ask: Callable[..., Any]) -> None:
    """What could be prepared before cannot be now, or is not what was written."""
    first = (("problem", "arch", 0),)
    lost = Failure("runtime", "CUDA: unknown error", fatal=True)
    assert ask("timed", outcome="runtime", first=first) == "timed"
    machine.answers[evaluate.prepare] = [RuntimeError("no device"), RuntimeError("no device"), None]
    with pytest.raises(MachineError, match="cannot be prepared: RuntimeError: no device"):
        ask(lost, outcome="runtime", first=first)
    assert ask("timed", outcome="runtime", first=first) == "timed"
    machine.answers[evaluate.prove_device] = [RuntimeError("not what was written"), None]
    with pytest.raises(MachineError, match="fails without any candidate: RuntimeError: not what was written"):
        ask(lost, outcome="runtime", first=first)
    assert ask("timed", outcome="runtime", first=first) == "timed"


def test_what_never_could_be_prepared(machine: Machine, ask: Callable[..., Any]) -> None:
    """A problem that is too large for the machine is no fault that passes; a full disk is."""
    first = (("problem", "arch", 0),)
    for error in (MemoryError(), RuntimeError("too many elements"), Ended(-11)):
        machine.answers[evaluate.prepare] = [error]
        with pytest.raises(TuningError, match="data and reference cannot be prepared"):
            ask("timed", first=first)
    machine.answers[evaluate.prepare] = [FULL]
    with pytest.raises(MachineError, match="No space left"):
        ask("timed", first=first)


def test_memory_that_is_short(machine: Machine, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def short() -> None:
        raise MachineError("only 5 MiB are left")

    monkeypatch.setattr(workers, "prove_memory", short)
    machine.answers[evaluate.prepare] = [Ended(-9)]
    with pytest.raises(MachineError, match="only 5 MiB"):
        ask("timed", first=(("problem", "arch", 0),))


def test_a_build_says_what_its_error_came_from(host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the line that is kept may leave it out."""
    from schedules.build import builder

    def fails(*_: Any) -> None:
        raise BuildError("cc failed: first line") from FULL

    monkeypatch.setattr(builder, "build", fails)
    candidate: Any = type("Candidate", (), {"schedule": "cpu", "config": None})
    problem: Any = None
    found = evaluate.build_candidate(problem, host, candidate)
    assert found == Failure("compile", "cc failed: first line", suspect="No space left on device")
