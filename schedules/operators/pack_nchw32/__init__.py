"""Tensors into groups of 32 channels of int8, and back."""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import Operator
from schedules.operators.pack_nchw32 import cpu, tiles
from schedules.operators.pack_nchw32.definition import PackProblem, definition, inputs, reference


def choose(problem: PackProblem, arch: Arch) -> str:
    """The rule: there is one schedule for GPUs and one for CPUs."""
    return "tiles" if arch.is_gpu else "cpu"


OPERATOR = Operator(
    name="pack_nchw32",
    summary="NCHW or NHWC in floating point to NCHW32 in int8, by a scale given at each call, and back",
    problem=PackProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(tiles.SCHEDULE, cpu.SCHEDULE),
    choose=choose,
)
