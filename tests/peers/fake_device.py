"""A device's judge and clock where the device is this CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schedules.arch import Arch
from schedules.arithmetic import Arithmetic
from schedules.operator import Expected
from schedules.problem import Problem
from schedules.tolerance import compare
from schedules.verify import outputs_of
from tests.peers.fake_timer import FakeTimer


class HostJudge:
    """`DeviceJudge` where the device is this CPU."""

    def __init__(self, problem: Problem, arch: Arch, expected: Sequence[Expected], arithmetic: Arithmetic) -> None:
        self._expected, self._arguments, self._arithmetic = expected, outputs_of(problem), arithmetic

    def error(self, outputs: Sequence[Any]) -> float:
        pairs = zip(outputs, self._expected, self._arguments, strict=True)
        return max(compare(o.numpy(), e, argument.dtype, self._arithmetic).error for o, e, argument in pairs)


class Clock(FakeTimer):
    """Runs what it times, which then takes a microsecond for each call before it."""

    def times(self, call: Any, count: int) -> list[float]:
        call()
        self.turns.append("")
        return [float(len(self.turns))] * count
