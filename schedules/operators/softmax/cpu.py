"""Softmax on the CPU: rows in parallel, columns in vector lanes.

Each reduction keeps one partial result for each lane over the whole vectors of a row, then joins the lanes half by
half, with the columns left over as ever shorter vectors.  A sum over a long row is made of sums of blocks, whose
rounding grows with the square root of its length (Higham, "The Accuracy of Floating Point Summation", 1993).  exp is a
polynomial in the lanes rather than a call of the C library for each element.  Outputs of a problem larger than the last
cache are stored past it, which saves fetching the lines that they fill.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from schedules.core.arch import Arch, physical_cores, vector_unit
from schedules.core.cpu import beyond_caches
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config, numpy_dtype
from schedules.lowering.annotations import LEAST, STREAM, check_streaming
from schedules.operators.softmax.definition import Reduction, SoftmaxProblem, Values, row_program, row_values
from schedules.operators.softmax.graph import column, cut, definition, elements, is_kept, placeholders, program_of_rows
from schedules.steps.story import next_step

if TYPE_CHECKING:
    import tvm
    from tvm import te, tirx
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV
    from tvm.tirx import PrimExpr


KEPT = "kept"
DRAWN, DROP = "drawn", "drop"  # of the counters that a row lies in, and of the row
TASKS, COLUMNS = 4, 65536  # tasks of a core at least, where there are as many rows; columns of a task at most
ALONE = 8192  # elements of a problem that is one task, which the caller runs: done before another thread is awake
LONG_ROW, KEPT_COLUMNS = 512, 2048
BLOCK = 512  # vectors that a lane sums up one after the other, at most, before a sum is made in blocks


@dataclass(frozen=True)
class CpuConfig(Config):
    vector: int = 16  # lanes
    unroll: int = 2  # vectors of the output in one iteration
    rows_per_task: int = 4  # rows of one parallel task
    keep: bool = True  # a row's exponentials stay in a buffer between the sum and the output, rather than come anew
    streaming: str = "no"  # "stores": the outputs go past the caches

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if self.vector not in (2, 4, 8, 16, 32, 64):
            return f"vector={self.vector} is not a power of two from 2 to 64"
        if self.unroll < 1 or self.rows_per_task < 1:
            return f"unroll={self.unroll} and rows_per_task={self.rows_per_task} must be at least 1"
        if problem.cols_from and (self.streaming != "no" or problem.cols > BLOCK * self.vector):
            return f"cols_from={problem.cols_from} is for rows of {BLOCK} vectors that are not streamed; leave it out"
        if self.streaming != "no" and problem.cols * numpy_dtype(problem.dtype).itemsize % LEAST:
            return f"streaming={self.streaming} is for rows of whole {LEAST} bytes"
        if self.streaming != "no" and problem.has_dropout and not problem.is_grad:
            return f"streaming={self.streaming} is not for dropout, which reads y again"
        return check_streaming(self.streaming, arch)


@dataclass(frozen=True)
class _Stages:
    tensors: list[te.Tensor]  # arguments, outputs last
    rows: list[str]  # stages of one row, in program order; names ending in _lanes have a vector axis
    sums: set[str]  # those of them that reduce what their lanes see, rather than one another


def _program(problem: SoftmaxProblem, stages: _Stages) -> tirx.PrimFunc:
    beside = "out" if problem.element_outputs and problem.row_output else None
    return program_of_rows(stages.tensors, beside)


def graph(problem: SoftmaxProblem, config: CpuConfig, arch: Arch) -> tirx.PrimFunc:
    from tvm import te

    if problem.cols_from:
        return te.create_prim_func(definition(problem))
    return _program(problem, _stages(problem, config))


def schedule(problem: SoftmaxProblem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for x or y, dy (rows, cols), run-time rows, and columns of a range."""
    import tvm
    from tvm.s_tir import Schedule

    if problem.cols_from:
        from schedules.operators.softmax.cpu_widths import program

        formulas = row_program(problem)
        return program(problem, formulas, config.vector, config.rows_per_task, config.keep)

    stages = _stages(problem, config)
    sch = Schedule(_program(problem, stages))
    outputs = ["out", "dropped_out"][: len(problem.element_outputs)]

    next_step(sch, "Rows to parallel tasks, and every stage of a row inside them, in vector lanes")
    row = sch.get_loops(outputs[0] if outputs else "row_out")[0]
    draws = [DRAWN, DROP] if problem.is_drawn else []
    if draws and len(outputs) > 1:  # what only the second output reads comes behind the first
        own = sch.get_loops(outputs[1])[0]
        _place(sch, draws, stages, own)
        row, outputs, draws = sch.merge(row, own), outputs[:1], []
    task, row = sch.split(row, [None, config.rows_per_task])
    sch.parallel(task)
    for name in outputs[1:]:
        sch.reverse_compute_at(name, row, preserve_unit_loops=True)
    _place(sch, [*draws, *stages.rows], stages, row)
    if problem.is_drawn:
        next_step(sch, "Draw what a row drops: lanes of counters, four elements each, from where its first one lies")
        _, lane, word = sch.split(sch.get_loops(DRAWN)[-1], [None, config.vector, 4])
        sch.reorder(word, lane)
        sch.unroll(word)
        sch.vectorize(lane)

    next_step(sch, "Whole vectors of every column's results apart from the columns left over, one shorter vector")
    of_columns = [name for name, there in ((KEPT, KEPT in stages.rows), (DROP, problem.is_drawn)) if there]
    for name in [*of_columns, *("out", "dropped_out")[: len(problem.element_outputs)]]:
        _vectorize_columns(sch, name, problem.cols, config)
    return tvm.IRModule({"main": sch.mod["main"].with_attr(STREAM, config.streaming)})


def _place(sch: Schedule, names: list[str], stages: _Stages, row: LoopRV) -> None:
    """Stages, in program order, into the loop over rows, in vector lanes those that have them."""
    for name in reversed(names):
        if name == DROP:  # all that a row lies in, or its first counter would not be whole
            whole = sch.get(sch.get_loops(DRAWN)[-1]).extent
            reads = lambda i, _, whole=whole: ((i, i + 1), (0, whole))  # noqa: E731
            sch.annotate_buffer_access(sch.get_sblock(DROP), 0, "read", reads)
        sch.compute_at(name, row, preserve_unit_loops=True)
        sch.set_scope(name, 0, "local")
        if name in stages.sums:
            lane, k = sch.get_loops(name)[-2:]
            sch.reorder(k, lane)
            sch.vectorize(lane)
        elif name.endswith("_lanes"):
            sch.vectorize(sch.get_loops(name)[-1])


def _vectorize_columns(sch: Schedule, name: str, cols: int, config: CpuConfig) -> None:
    whole, rest = cols // config.vector * config.vector, cols % config.vector
    j = sch.get_loops(name)[-1]
    if whole and rest:
        j, left = sch.loop_partition(j, [whole, None])
        sch.vectorize(left)
    elif rest:
        sch.vectorize(j)
    if whole:
        _, u, lane = sch.split(j, [None, math.gcd(config.unroll, whole // config.vector), config.vector])
        sch.unroll(u)
        sch.vectorize(lane)


def drawn_columns(problem: SoftmaxProblem, vector: int) -> int:
    """Elements of whole vectors of counters that any row lies in: up to three are of an earlier one."""
    most = problem.cols + (3 if problem.cols % 4 else 0)
    return -(-most // (4 * vector)) * 4 * vector


def _stages(problem: SoftmaxProblem, config: CpuConfig) -> _Stages:
    from tvm import te, tirx

    rows, inputs = placeholders(problem)
    program = row_program(problem)
    vector = config.vector
    vectors = problem.cols // vector
    names: list[str] = []
    sums: set[str] = set()
    results: dict[str, te.Tensor] = {}
    kept: te.Tensor | None = None

    def i64(value: int) -> PrimExpr:
        return tirx.IntImm("int64", value)

    def at(i: PrimExpr, j: PrimExpr) -> tuple[Values, Values]:
        return {**{name: column(tensor, i, j).astype("float32") for name, tensor in read.items()}, "col": j}, found(i)

    def found(i: PrimExpr) -> Values:
        return {name: tensor[i] for name, tensor in results.items()} | cut(problem, inputs, i)

    def stage(name: str, shape: tuple[PrimExpr, ...], formula: Callable[..., PrimExpr]) -> te.Tensor:
        names.append(name)
        return te.compute(shape, formula, name=name)

    def drop() -> te.Tensor:
        """What is kept of a row, uint8."""

        def element(i: PrimExpr, k: PrimExpr) -> PrimExpr:
            number = i * problem.cols // 4 * 4 + k
            return is_kept(problem, inputs["philox"][0], inputs["philox"][1], number).astype("uint8")

        made = te.compute((rows, i64(drawn_columns(problem, vector))), element, name=DRAWN)
        return te.compute(shape, lambda i, j: made[i, i * problem.cols % 4 + j], name=DROP)

    def element(step: Reduction, i: PrimExpr, j: PrimExpr) -> PrimExpr:
        return kept[i, j] if kept is not None and step is program.reductions[-1] else step.element(*at(i, j))

    def in_lanes(step: Reduction) -> te.Tensor:
        """(rows, lane): what each lane makes of the whole vectors."""
        reduce = te.max if step.kind == "max" else te.sum
        k = te.reduce_axis((i64(0), i64(vectors)), name=f"{step.name}_vector")
        sums.add(f"{step.name}_lanes")
        return stage(
            f"{step.name}_lanes",
            (rows, i64(vector)),
            lambda i, lane: reduce(element(step, i, k * vector + lane), axis=k),
        )

    def in_blocks(step: Reduction) -> te.Tensor:
        """As `in_lanes`, by the sums of about sqrt(vectors) blocks."""
        blocks = 2 ** round(math.log2(vectors) / 2)
        size = -(-vectors // blocks)
        k = te.reduce_axis((i64(0), i64(size)), name=f"{step.name}_vector")
        b = te.reduce_axis((i64(0), i64(blocks)), name=f"{step.name}_block")

        def partial(i: PrimExpr, block: PrimExpr, lane: PrimExpr) -> PrimExpr:
            at_vector = block * size + k
            value = element(step, i, at_vector * vector + lane)
            return te.if_then_else(at_vector < vectors, value, 0.0) if size * blocks > vectors else value

        sums.update((f"{step.name}_block_lanes", f"{step.name}_lanes"))
        parts = stage(
            f"{step.name}_block_lanes",
            (rows, i64(blocks), i64(vector)),
            lambda i, block, lane: te.sum(partial(i, block, lane), axis=k),
        )
        return stage(f"{step.name}_lanes", (rows, i64(vector)), lambda i, lane: te.sum(parts[i, b, lane], axis=b))

    def reduction(step: Reduction) -> te.Tensor:
        """(rows,): the lanes joined in halves, with the columns left over as vectors of as many lanes as each half."""
        lanes: te.Tensor | None = None
        if vectors:
            lanes = in_blocks(step) if step.kind == "sum" and vectors > BLOCK else in_lanes(step)
        done, width = vectors * vector, vector
        while width > 1:
            width //= 2
            left = (problem.cols - vectors * vector) & width
            if lanes is None and not left:
                continue
            lanes = halved(step, lanes, width, done if left else None)
            done += left
        assert lanes is not None
        return lanes

    def halved(step: Reduction, lanes: te.Tensor | None, width: int, left: int | None) -> te.Tensor:
        join = tirx.max if step.kind == "max" else lambda a, b: a + b

        def formula(i: PrimExpr, lane: PrimExpr) -> PrimExpr:
            values = [] if lanes is None else [lanes[i, lane], lanes[i, lane + width]]
            values += [] if left is None else [element(step, i, left + lane)]
            return functools.reduce(join, values)

        if width == 1:
            return stage(step.name, (rows,), lambda i: formula(i, i64(0)))
        return stage(f"{step.name}_{width}_lanes", (rows, i64(width)), formula)

    def derived(name: str, formula: Callable[[Values], PrimExpr]) -> te.Tensor:
        return stage(name, (rows,), lambda i: formula({known: tensor[i] for known, tensor in results.items()}))

    def known(name: str) -> te.Tensor:
        def formula(i: PrimExpr) -> PrimExpr:
            number, x = (lambda of: inputs[of][i]), (lambda col: inputs["x"][i, col].astype("float32"))
            return row_values(problem, number, x)[name]

        return stage(name, (rows,), formula)

    shape = (rows, i64(problem.cols))
    kinds = [argument.dtype for argument in problem.element_outputs]
    read = elements(problem, inputs)
    if problem.is_drawn:
        read = {**read, DROP: drop()}
    for name in row_values(problem, lambda _: tirx.const(1, "float32"), lambda _: tirx.const(0, "float32")):
        results[name] = known(name)
    for step in program.reductions:
        if config.keep and kinds and program.from_element is not None and step is program.reductions[-1]:
            kept = stage(KEPT, shape, functools.partial(element, step))
        results[step.name] = reduction(step)
    for name, formula in program.derived:
        results[name] = derived(name, formula)

    def output(i: PrimExpr, j: PrimExpr) -> PrimExpr:
        inside, results_of_row = at(i, j)
        if kept is not None and program.from_element is not None:
            return program.from_element(kept[i, j], inside, results_of_row)
        return program.output(inside, results_of_row)

    numbers: list[te.Tensor] = []
    of_row = program.of_row
    if of_row is not None:
        numbers.append(te.compute((rows,), lambda i: of_row(found(i)), name="row_out"))
    if not kinds:
        return _Stages([*inputs.values(), *numbers], names, sums)
    out = te.compute(shape, lambda i, j: output(i, j).astype(kinds[0]), name="out")
    tensors = [*inputs.values(), out]
    if program.dropped is not None:
        dropped = program.dropped

        def dropped_element(i: PrimExpr, j: PrimExpr) -> PrimExpr:
            return dropped(out[i, j].astype("float32"), read[DROP][i, j].astype("float32")).astype(kinds[1])

        tensors.append(te.compute(shape, dropped_element, name="dropped_out"))
    return _Stages(tensors + numbers, names, sums)


def default(problem: SoftmaxProblem, arch: Arch) -> CpuConfig:
    """The machine's vectors, or the widest that a short row fills; several at a time where exponentials, which take
    long, are added up over a long row, or rows are longer than a core's caches.  Exponentials are kept while they fit
    the first-level cache beside their row.  Tasks of many columns, since each asks for its buffers anew, but several
    for each core, except of a small problem."""
    lanes, cols = vector_unit(arch).lanes, problem.cols
    keep = cols <= KEPT_COLUMNS
    single = cols < LONG_ROW or (problem.is_grad and cols <= COLUMNS)
    vector = lanes if single else 2 * lanes if keep else 4 * lanes
    while vector > 4 and vector > cols:
        vector //= 2
    rows, share = max(1, COLUMNS // cols), problem.rows // (TASKS * physical_cores())
    # a problem of a row or few stands for any number of them
    if share and problem.rows * cols > ALONE:
        rows = min(rows, share)
    config = CpuConfig(vector=vector, unroll=4, rows_per_task=rows, keep=keep)
    past_caches = replace(config, streaming="stores")
    worthwhile = beyond_caches(problem.min_bytes) and past_caches.check(problem, arch) is None
    return past_caches if worthwhile else config


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[CpuConfig]:
    streaming = [way for way in ("no", "stores") if CpuConfig(streaming=way).check(problem, arch) is None]
    found = [
        CpuConfig(*fields) for fields in product((8, 16, 32, 64), (1, 2, 4), (1, 4, 16, 64), (True, False), streaming)
    ]
    yield from dict.fromkeys([default(problem, arch), *found])


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="rows in parallel, columns in vector lanes, exp as a polynomial",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
