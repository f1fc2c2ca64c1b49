"""The steps in which a program is made, told by whoever makes it to whoever listens; `show.explain` does.

A schedule calls `next_step` before the primitives of each of its steps, the first before any primitive at all.  A
program written in TIRx calls `part` before the statements of each of its parts.  A step lasts until the next one
begins; its title says what it is for.  Without a listener nothing is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from schedules.core.tvm import Schedule, T, tvm
from schedules.lowering.annotations import PREFIX

# the functions that marks in a program call, with the part's title: it begins; it begins within another; it ends there
PART, INSIDE, OUTSIDE = (PREFIX + name for name in ("part", "part_inside", "part_outside"))


@dataclass(frozen=True)
class Told:
    """A step that has begun: the schedule, its program, and how many instructions its trace had by then."""

    title: str
    schedule: Schedule
    program: tvm.IRModule
    instructions: int


_listener: ContextVar[list[Told] | None] = ContextVar("steps", default=None)


@contextlib.contextmanager
def listening() -> Iterator[list[Told]]:
    """Collect the steps told inside; programs written in TIRx then carry a mark before each part."""
    told: list[Told] = []
    token = _listener.set(told)
    try:
        yield told
    finally:
        _listener.reset(token)


def next_step(sch: Schedule, title: str) -> None:
    """What follows, up to the next step, is for `title`."""
    told = _listener.get()
    if told is not None:
        told.append(Told(title, sch, sch.mod.clone(), len(sch.trace.insts)))


def only_step(sch: Schedule, title: str, program: tvm.IRModule) -> None:
    """All that has been done to make `sch` of `program` was for `title`."""
    told = _listener.get()
    if told is not None:
        told.append(Told(title, sch, program, 0))


def part(title: str) -> None:
    """The statements that follow in a program being written in TIRx, up to the next part, are for `title`."""
    _mark(PART, title)


@contextlib.contextmanager
def inside_part(title: str) -> Iterator[None]:
    """The same for the statements of a ``with``; after them the part goes on that they interrupt."""
    _mark(INSIDE, title)
    yield
    _mark(OUTSIDE, title)


def _mark(kind: str, title: str) -> None:
    if _listener.get() is not None:
        T.evaluate(T.call_extern("int32", kind, title))
