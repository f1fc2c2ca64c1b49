"""Softmax with a row cut into parts, a block to a part: for rows too few to fill the GPU by themselves.

Two kernels.  The first holds each part in registers and writes what its reductions come to, relative to the part
itself (the maximum, and the sum of exp(v - that maximum); of a gradient the sum), to a workspace: two numbers a part.
In the second each block writes the same part of the output; it reads the inputs once more, which for few rows still lie
in the second-level cache.  Every warp of it combines the row's numbers for itself: that saves a third kernel, and where
a block does it together the compiler puts the loads of the inputs after its barriers instead of before.

One kernel would need blocks that wait for one another: a cooperative launch or a cluster's shared memory, which the
schedule language has not; for Hopper `cluster` is one.  Source: the parallel form of the online softmax (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.core.tvm import LoopRV, PrimExpr, Schedule, te, tirx, tvm
from schedules.operators.softmax import rows
from schedules.operators.softmax.definition import Reduction, SoftmaxProblem, Values, row_program
from schedules.operators.softmax.graph import placeholders, row_results
from schedules.steps.story import next_step

PARTIALS = "partials"
SHARES = 16  # parts of a row that one thread combines, at most: they lie in registers


@dataclass(frozen=True)
class SplitConfig(Config):
    threads: int = 256  # of a part and block, a multiple of the wave
    vector: int = 8  # elements of one access
    packs: int = 2  # of a thread, at most: with `threads` they set the length of a part
    min_blocks: int = 0  # blocks a multiprocessor should hold (caps registers); 0 leaves it to the compiler

    def packing(self, problem: SoftmaxProblem) -> rows.Packing:
        part = self.threads * self.packs
        packs = -(-problem.cols // max(1, self.vector))  # `check` refuses a vector of 0
        return rows.Packing(problem.cols, self.threads, self.vector, parts=-(-packs // part))

    def warps(self, problem: SoftmaxProblem, arch: Arch) -> rows.Packing:
        """The same with each wave's columns as a part: as the second kernel sees it."""
        parts = self.packing(problem).parts * (self.threads // arch.wave)
        return rows.Packing(problem.cols, arch.wave, self.vector, parts=parts)

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if self.threads < 1 or self.threads % arch.wave:
            return f"threads={self.threads} is not a multiple of the wave, {arch.wave} on {arch}"
        if self.packs < 1:
            return f"packs={self.packs} must be at least 1"
        packing, most = self.packing(problem), SHARES * arch.wave
        if reason := rows.check(problem, arch, packing, self.threads, self.min_blocks):
            return reason
        return (
            f"{packing.parts} parts of a row, a wave of {arch} combines at most {most}"
            if packing.parts > most
            else None
        )


@dataclass(frozen=True)
class SplitStages(rows.Stages):
    """`stored` are the inputs of a part in the first kernel, `reread` those in the second; `parts` are the part's
    reductions, `shares` bring the numbers of a row's parts into the second kernel."""

    reread: tuple[str, ...]
    parts: tuple[str, ...]
    shares: tuple[str, ...]
    of_row_reductions: tuple[str, ...]
    of_row_shares: tuple[str, ...]


def split_stages(
    problem: SoftmaxProblem, packing: rows.Packing, dealt: rows.Packing, warps: rows.Packing
) -> SplitStages:
    """The stages of `problem`'s program: for each reduction r one over each part, "r_part" (rows, parts); the
    workspace "partials" (rows, parts, reductions), float32; r itself (rows,) over the parts, `dealt` to a wave as
    columns are; and the outputs, from inputs loaded again in the order of `warps`."""
    extent, inputs = placeholders(problem)
    program = row_program(problem)
    steps = program.reductions
    lead = (extent, rows.i64(packing.parts))

    def loads(suffix: str, k: rows.Packing) -> rows.Loads:
        shape = (extent, *map(rows.i64, (k.parts, k.rounds, k.threads, k.vector)))

        def load(name: str) -> te.Tensor:
            element = rows.input_element(inputs[name], program.fill[name], k)
            return te.compute(shape, element, name=f"{name}_{suffix}")

        return rows.Loads(load)

    stored, reread = loads("part", packing), loads("again", warps)
    parts: dict[str, te.Tensor] = {}

    def of_row(found: dict[str, te.Tensor], *row: PrimExpr) -> Values:
        return row_results(problem, inputs, program, found, *row)

    def part_columns(*at: PrimExpr) -> tuple[Values, Values]:
        return rows.Columns(stored, at, rows.beside(problem, inputs, packing, *at)), of_row(parts, *at[:2])

    for step in steps:
        element = rows.at_columns(step.element, part_columns)
        parts[step.name] = rows.reduce_packs(step.kind, f"{step.name}_part", element, lead, packing)

    def numbers_of_part(i: PrimExpr, part: PrimExpr, number: PrimExpr) -> PrimExpr:
        *others, value = [parts[step.name][i, part] for step in steps]
        for k, other in enumerate(others):
            value = tirx.Select(number == k, other, value)
        return value

    partials = te.compute((*lead, rows.i64(len(steps))), numbers_of_part, name=PARTIALS)

    def share(step: Reduction, number: int, suffix: str) -> te.Tensor:
        """The step's number of each part; past the last part, what adds nothing to the row's."""
        neutral = te.min_value("float32") if step.kind == "max" else tirx.const(0, "float32")

        def element(i: PrimExpr, p: PrimExpr, t: PrimExpr, _: PrimExpr) -> PrimExpr:
            part = p * dealt.threads + t
            value = partials[i, part, number]
            return te.if_then_else(part < dealt.packs, value, neutral) if dealt.ragged else value

        axes = (rows.i64(dealt.rounds), rows.i64(dealt.threads), rows.i64(1))
        return te.compute((extent, *axes), element, name=f"{step.name}_shares{suffix}")

    def combined(suffix: str, steps: Sequence[Reduction]) -> tuple[dict[str, te.Tensor], dict[str, te.Tensor]]:
        """Stages that bring in the row's numbers of its parts, and those that combine them."""
        shares = {step.name: share(step, program.reductions.index(step), suffix) for step in steps}
        results: dict[str, te.Tensor] = {}

        def part_numbers(*at: PrimExpr) -> tuple[Values, Values]:
            return {name: tensor(*at) for name, tensor in shares.items()}, of_row(results, at[0])

        for step in steps:
            element = rows.at_columns(step.of_part, part_numbers)
            results[step.name] = rows.reduce_packs(step.kind, f"{step.name}{suffix}", element, (extent,), dealt)
        return shares, results

    shares, results = combined("", [step for step in steps if not step.of_row])
    # the kernel of what is a number a row: blocks of the others have parts
    own_shares, own_results = combined("_of_row", steps if program.of_row else ())

    def columns(*at: PrimExpr) -> tuple[Values, Values]:
        return rows.Columns(reread, at, rows.beside(problem, inputs, warps, *at)), of_row(results, at[0])

    value = rows.at_columns(program.output, columns)
    outputs = rows.output_stages(
        problem, program, inputs, (extent, rows.i64(warps.parts)), warps, value, partial(of_row, own_results)
    )
    return SplitStages(
        tensors=(*inputs.values(), *outputs),
        stored=stored.blocks,
        loads={},
        reductions=tuple(results),
        of_row_reductions=tuple(tensor.op.name for tensor in own_results.values()),
        of_row_shares=tuple(tensor.op.name for tensor in own_shares.values()),
        numerators=False,
        dropped=program.dropped is not None,
        drop_read=program.dropped is not None and not problem.is_drawn,
        of_row=False,
        elements=bool(problem.element_outputs),
        reread=reread.blocks,
        parts=tuple(tensor.op.name for tensor in parts.values()),
        shares=tuple(tensor.op.name for tensor in shares.values()),
    )


def _dealt(
    problem: SoftmaxProblem, config: SplitConfig, arch: Arch
) -> tuple[rows.Packing, rows.Packing, rows.Packing, SplitStages]:
    """How columns, parts and warps are packed, and the stages."""
    parts = rows.Packing(config.packing(problem).parts, arch.wave, 1)
    packing, dealt, warps = (
        replace(k, chunk=k.rounds)  # registers have no run-time index: every loop over packs unrolls
        for k in (config.packing(problem), parts, config.warps(problem, arch))
    )
    return packing, dealt, warps, split_stages(problem, packing, dealt, warps)


def graph(problem: SoftmaxProblem, config: SplitConfig, arch: Arch) -> tirx.PrimFunc:
    return rows.program(_dealt(problem, config, arch)[-1])


def schedule(problem: SoftmaxProblem, config: SplitConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for x or y, dy (rows, cols), run-time rows; rows * parts blocks of each kernel."""
    packing, dealt, warps, stages = _dealt(problem, config, arch)
    sch = rows.new_schedule(stages)
    if stages.elements:
        row, _ = rows.tile_rows(sch, stages, warps, config.threads // arch.wave, 1)
        for name in reversed(stages.reductions):
            rows.place_reduction(sch, name, (), row, dealt)
        for name in reversed((*stages.reread, *stages.shares)):
            rows.place_stored(sch, name, row)
    if stages.of_row_reductions:
        row, _ = rows.tile_numbers(sch, dealt, 1, 1)
        for name in reversed(stages.of_row_reductions):
            rows.place_reduction(sch, name, (), row, dealt)
        for name in reversed(stages.of_row_shares):
            rows.place_stored(sch, name, row)
    part = _tile_parts(sch, packing)
    for name in reversed(stages.parts):
        rows.place_reduction(sch, name, (), part, packing)
    for name in reversed(stages.stored):
        rows.place_stored(sch, name, part)
    return rows.finish(sch, stages, packing, config.min_blocks)


def _tile_parts(sch: Schedule, packing: rows.Packing) -> LoopRV:
    """A block to a part in the first kernel: once the reductions are made, every thread has their results, and thread
    k stores the kth.  Returns the loop over parts."""
    next_step(sch, "The first kernel: a block to a part of a row, whose numbers go to a workspace")
    i, part, number = sch.get_loops(sch.get_sblock(PARTIALS))
    block = sch.fuse(i, part)
    _, number = sch.split(number, [None, packing.threads])
    sch.bind(block, "blockIdx.x")
    sch.bind(number, "threadIdx.x")
    return block


def default(problem: SoftmaxProblem, arch: Arch) -> SplitConfig:
    """The longest parts, up to eight packs (or 32 elements) a thread of 256, with which the rows fill the GPU twice
    over; longer ones for rows of more parts than can be combined."""
    vector = rows.max_vector(problem)
    config = SplitConfig(min(256, arch.max_threads), vector, max(8, 32 // vector))
    while config.packs > 1 and problem.rows * config.packing(problem).parts < 2 * arch.device.multiprocessors:
        config = replace(config, packs=config.packs // 2)
    longer = [
        replace(config, threads=config.threads * more, packs=config.packs * times)
        for more, times in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (4, 2), (2, 4), (4, 4))
    ]
    return next((longer_one for longer_one in longer if longer_one.check(problem, arch) is None), config)


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[SplitConfig]:
    for threads, packs, min_blocks in product((64, 128, 256, 512, 1024), (1, 2, 4, 8, 16), (0, 2, 4)):
        yield SplitConfig(threads, rows.max_vector(problem), packs, min_blocks)


SCHEDULE = ScheduleSpec(
    name="split",
    summary="a row cut into parts, a block to a part; a second kernel combines what the parts came to",
    kinds=("cuda", "rocm"),
    config=SplitConfig,
    apply=schedule,
    default=default,
    space=space,
    graph=graph,
)
