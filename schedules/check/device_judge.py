"""Comparing outputs with their reference where they lie: on the device, at the speed of its memory.

The same rule as `tolerance.compare`, written as a tensor expression; the reference and what is allowed are brought to
the device once and serve every candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from schedules.build.builder import compiled
from schedules.build.present import to_device
from schedules.check.verify import outputs_of
from schedules.core.arch import Arch
from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.operator import Expected
from schedules.core.problem import Problem
from schedules.core.tolerance import EDGE, compare, limits
from schedules.core.tvm import Schedule, te, tirx, tvm
from schedules.definitions.program import program_of

THREADS, BLOCKS_SM = 256, 8  # of a comparison: of a block, and blocks on each multiprocessor


class DeviceJudge:
    """The reference of one problem and one set of inputs, on the device of `arch`, for outputs of `arithmetic`."""

    def __init__(
        self, problem: Problem, arch: Arch, expected: Sequence[Expected], arithmetic: Arithmetic = FLOAT32
    ) -> None:
        self._arch = arch
        self._arguments = outputs_of(problem)
        self._host = [
            tuple(array.reshape(-1) for array in limits(reference, argument.dtype, arithmetic))
            for argument, reference in zip(self._arguments, expected, strict=True)
        ]
        self._limits = [tuple(to_device(array, arch) for array in pair) for pair in self._host]
        self._functions = [_comparison(argument.dtype, arch) for argument in self._arguments]
        self._worst = to_device(np.zeros(THREADS * blocks(arch)), arch)

    def restore(self) -> None:
        """Bring the reference to the device again, where a wild write may have damaged it."""
        for tensors, arrays in zip(self._limits, self._host, strict=True):
            for tensor, array in zip(tensors, arrays, strict=True):
                tensor.copyfrom(array)

    def error(self, outputs: Sequence[Any]) -> float:
        """The worst element's error in units of the tolerance; over 1 is wrong."""
        errors = []
        for function, output, (values, allowed) in zip(self._functions, outputs, self._limits, strict=True):
            function(output._create_view((output.numel(),)), values, allowed, self._worst)
            errors.append(float(np.max(self._worst.numpy())))
        return max(errors)


class HostJudge:
    """The same where the device is this CPU: by `tolerance.compare`."""

    def __init__(
        self, problem: Problem, arch: Arch, expected: Sequence[Expected], arithmetic: Arithmetic = FLOAT32
    ) -> None:
        self._expected, self._arguments, self._arithmetic = expected, outputs_of(problem), arithmetic

    def error(self, outputs: Sequence[Any]) -> float:
        """The worst element's error in units of the tolerance; over 1 is wrong."""
        pairs = zip(outputs, self._expected, self._arguments, strict=True)
        return max(compare(o.numpy(), e, argument.dtype, self._arithmetic).error for o, e, argument in pairs)


def blocks(arch: Arch) -> int:
    """Of a comparison on the device of `arch`."""
    return BLOCKS_SM * arch.device.multiprocessors


@lru_cache(maxsize=16)
def _comparison(dtype: str, arch: Arch) -> Any:
    """The function (got, values, allowed, worst): each thread's worst of the elements of a tensor of `dtype` that it
    looks at.  One for all extents: a build takes longer than most cases of a comparison."""
    return compiled(tvm.IRModule({"main": _program(dtype, blocks(arch))}), arch)["main"]


def _program(dtype: str, blocks: int) -> tvm.tirx.PrimFunc:
    """(size,) elements beside a reference of (period,), which repeats; extents are known at run time."""
    threads = THREADS * blocks
    size, period = te.var("size", "int64"), te.var("period", "int64")
    got = te.placeholder((size,), dtype, name="got")
    values = te.placeholder((period,), "float64", name="values")
    allowed = te.placeholder((period,), "float64", name="allowed")
    k = te.reduce_axis((0, tirx.truncdiv(size + (threads - 1), tirx.IntImm("int64", threads))), name="k")
    infinity = tirx.const(float("inf"), "float64")
    edge = tirx.const(EDGE.get(dtype, float("inf")), "float64")

    def error(thread: Any) -> Any:
        flat = tirx.Cast("int64", k) * threads + thread
        element, at = got[flat].astype("float64"), tirx.truncmod(flat, period)
        value, within = values[at], allowed[at]
        rounds = tirx.all(edge <= tirx.abs(value), tirx.abs(value) < infinity)  # to infinity
        element = tirx.Select(tirx.all(rounds, element == infinity), edge, element)
        element = tirx.Select(tirx.all(rounds, element == -infinity), -edge, element)
        ratio = tirx.abs(element - value) / within
        same = tirx.any(value == element, tirx.all(tirx.isnan(value), tirx.isnan(element)))
        # a comparison with NaN is false: what is not known to be within any bound is wrong
        judged = tirx.if_then_else(same, tirx.const(0.0, "float64"), tirx.Select(ratio < infinity, ratio, infinity))
        return tirx.if_then_else(flat < size, judged, tirx.const(0.0, "float64"))

    worst = te.compute((threads,), lambda thread: te.max(error(thread), axis=k), name="worst")
    sch = Schedule(program_of([got, values, allowed, worst]))
    block = sch.get_sblock("worst")
    thread, _ = sch.get_loops(block)
    block_index, thread = sch.split(thread, [blocks, THREADS])
    sch.bind(block_index, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return sch.mod["main"]
