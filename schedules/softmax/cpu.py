"""Softmax on the CPU: rows in parallel, columns in vector lanes.

Each reduction keeps one partial result for each lane over the whole vectors of a row, then joins the lanes and the
columns left over; a sum over a long row is made of sums of blocks, whose rounding grows with the square root of its
length (Higham, "The Accuracy of Floating Point Summation", 1993).  exp is a polynomial in the lanes rather than a call
of the C library for each element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from schedules.arch import Arch
from schedules.operator import ScheduleSpec
from schedules.primitives.steps import next_step
from schedules.problem import Config
from schedules.softmax.definition import (
    Reduction,
    SoftmaxProblem,
    Values,
    column,
    placeholders,
    row_program,
)

if TYPE_CHECKING:
    import tvm
    from tvm import te
    from tvm.tirx import PrimExpr


BLOCK = 512  # vectors that a lane sums up one after the other, at most, before a sum is made in blocks


@dataclass(frozen=True)
class CpuConfig(Config):
    vector: int = 16  # lanes
    unroll: int = 2  # vectors of the output in one iteration
    rows_per_task: int = 4  # rows of one parallel task

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if self.vector not in (2, 4, 8, 16, 32, 64):
            return f"vector={self.vector} is not a power of two from 2 to 64"
        if self.unroll < 1 or self.rows_per_task < 1:
            return f"unroll={self.unroll} and rows_per_task={self.rows_per_task} must be at least 1"
        return None


def exp2(x: PrimExpr) -> PrimExpr:
    """2**x of a float32 expression in arithmetic that vectorises: 2**n from the exponent bits, times Taylor's
    polynomial of 2**f, |f| <= 1/2 (its eighth term is under 6e-9).

    0 below -126, where results would be denormal; infinity above 128; NaN of NaN.
    """
    from tvm import tirx

    def f32(value: float) -> PrimExpr:
        return tirx.const(value, "float32")

    low, high = f32(-126.0), f32(127.0)
    bounded = tirx.Select(x > low, tirx.Select(x < high, x, high), low)  # a NaN becomes low here, and stays NaN below
    whole = tirx.floor(bounded + f32(0.5))
    fraction = x - whole
    power = f32(math.log(2) ** 7 / math.factorial(7))
    for k in range(6, -1, -1):
        power = power * fraction + f32(math.log(2) ** k / math.factorial(k))
    bits = (whole.astype("int32") + tirx.const(127, "int32")) << tirx.const(23, "int32")
    result = power * tirx.reinterpret("float32", bits)
    return tirx.Select(x < low, f32(0.0), tirx.Select(x > f32(128.0), tirx.infinity("float32"), result))


@dataclass(frozen=True)
class _Stages:
    tensors: list[te.Tensor]  # arguments, outputs last
    rows: list[str]  # stages of one row, in program order; names ending in _lanes have a vector axis


def schedule(problem: SoftmaxProblem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for x or y, dy (rows, cols), run-time rows."""
    from tvm import te
    from tvm.s_tir import Schedule

    stages = _stages(problem, config.vector)
    sch = Schedule(te.create_prim_func(stages.tensors))
    outputs = ["out", "dropped_out"] if problem.has_dropout and not problem.is_grad else ["out"]

    next_step(sch, "Rows to parallel tasks, and every stage of a row inside them, in vector lanes")
    task, row = sch.split(sch.get_loops("out")[0], [None, config.rows_per_task])
    sch.parallel(task)
    for name in outputs[1:]:
        sch.reverse_compute_at(name, row, preserve_unit_loops=True)
    for name in reversed(stages.rows):
        sch.compute_at(name, row, preserve_unit_loops=True)
        sch.set_scope(name, 0, "local")
        if name.endswith("_lanes"):
            lane, k = sch.get_loops(name)[-2:]
            sch.reorder(k, lane)
            sch.vectorize(lane)

    # which would make every lane conditional
    next_step(sch, "Whole vectors of the outputs apart from the columns left over")
    whole = problem.cols // config.vector * config.vector
    for name in outputs if whole else []:
        j = sch.get_loops(name)[-1]
        if whole < problem.cols:
            j, _ = sch.loop_partition(j, [whole, None])
        _, u, lane = sch.split(j, [None, math.gcd(config.unroll, whole // config.vector), config.vector])
        sch.unroll(u)
        sch.vectorize(lane)
    return sch.mod


def _stages(problem: SoftmaxProblem, vector: int) -> _Stages:
    from tvm import te, tirx

    rows, inputs = placeholders(problem)
    program = row_program(problem, exp2)
    names: list[str] = []
    results: dict[str, te.Tensor] = {}

    def i64(value: int) -> PrimExpr:
        return tirx.IntImm("int64", value)

    def at(i: PrimExpr, j: PrimExpr) -> tuple[Values, Values]:
        columns = {name: column(tensor, i, j).astype("float32") for name, tensor in inputs.items()}
        return columns, {name: tensor[i] for name, tensor in results.items()}

    def stage(name: str, shape: tuple[PrimExpr, ...], formula: Callable[..., PrimExpr]) -> te.Tensor:
        names.append(name)
        return te.compute(shape, formula, name=name)

    def in_lanes(step: Reduction, vectors: int) -> te.Tensor:
        """(rows, lane): what each lane makes of the whole vectors."""
        reduce = te.max if step.kind == "max" else te.sum
        k = te.reduce_axis((i64(0), i64(vectors)), name=f"{step.name}_vector")
        return stage(
            f"{step.name}_lanes",
            (rows, i64(vector)),
            lambda i, lane: reduce(step.element(*at(i, k * vector + lane)), axis=k),
        )

    def in_blocks(step: Reduction, vectors: int) -> te.Tensor:
        """As `in_lanes`, by the sums of about sqrt(vectors) blocks."""
        blocks = 2 ** round(math.log2(vectors) / 2)
        size = -(-vectors // blocks)
        k = te.reduce_axis((i64(0), i64(size)), name=f"{step.name}_vector")
        b = te.reduce_axis((i64(0), i64(blocks)), name=f"{step.name}_block")

        def element(i: PrimExpr, block: PrimExpr, lane: PrimExpr) -> PrimExpr:
            at_vector = block * size + k
            value = step.element(*at(i, at_vector * vector + lane))
            return te.if_then_else(at_vector < vectors, value, 0.0) if size * blocks > vectors else value

        sums = stage(
            f"{step.name}_block_lanes",
            (rows, i64(blocks), i64(vector)),
            lambda i, block, lane: te.sum(element(i, block, lane), axis=k),
        )
        return stage(f"{step.name}_lanes", (rows, i64(vector)), lambda i, lane: te.sum(sums[i, b, lane], axis=b))

    def reduction(step: Reduction) -> te.Tensor:
        reduce, join = (te.max, te.max) if step.kind == "max" else (te.sum, lambda a, b: a + b)
        vectors, rest = divmod(problem.cols, vector)
        parts: list[te.Tensor] = []
        if vectors:
            lanes = in_blocks(step, vectors) if step.kind == "sum" and vectors > BLOCK else in_lanes(step, vectors)
            across = te.reduce_axis((i64(0), i64(vector)), name=f"{step.name}_lane")
            parts.append(stage(f"{step.name}_joined", (rows,), lambda i: reduce(lanes[i, across], axis=across)))
        if rest:
            r = te.reduce_axis((i64(0), i64(rest)), name=f"{step.name}_rest_col")
            parts.append(
                stage(
                    f"{step.name}_rest", (rows,), lambda i: reduce(step.element(*at(i, r + vectors * vector)), axis=r)
                )
            )
        return parts[0] if len(parts) == 1 else stage(step.name, (rows,), lambda i: join(parts[0][i], parts[1][i]))

    def derived(name: str, formula: Callable[[Values], PrimExpr]) -> te.Tensor:
        return stage(name, (rows,), lambda i: formula({known: tensor[i] for known, tensor in results.items()}))

    for step in program.reductions:
        results[step.name] = reduction(step)
    for name, formula in program.derived:
        results[name] = derived(name, formula)
    shape = (rows, i64(problem.cols))
    out = te.compute(shape, lambda i, j: program.output(*at(i, j)).astype(problem.dtype), name="out")
    tensors = [*inputs.values(), out]
    if program.dropped is not None:
        drop, dropped = inputs["drop"], program.dropped

        def element(i: PrimExpr, j: PrimExpr) -> PrimExpr:
            return dropped(out[i, j].astype("float32"), drop[i, j].astype("float32")).astype(problem.dtype)

        tensors.append(te.compute(shape, element, name="dropped_out"))
    return _Stages(tensors, names)


def default(problem: SoftmaxProblem, arch: Arch) -> CpuConfig:
    """The lanes, up to 16, with the fewest vectors and columns left over."""

    def steps(vector: int) -> int:
        return sum(divmod(problem.cols, vector))

    return CpuConfig(vector=min((16, 8, 4), key=steps))


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[CpuConfig]:
    for fields in product((8, 16, 32, 64), (1, 2, 4), (1, 4, 16)):
        yield CpuConfig(*fields)


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="rows in parallel, columns in vector lanes, exp as a polynomial",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
)
