"""A row program as TE stages over explicit axes, shared by all softmax schedules on GPUs.

A row of `cols` is dealt to `threads` threads in packs of `vector` elements: column (p * threads + t) * vector + v is
pack p of thread t.  With these axes in the TE, binding t of every stage to threadIdx.x gives each thread its own part
of each stage, and a pack is one 128-bit access.  After OneFlow's softmax, which deals out rows the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from schedules.arch import Arch
from schedules.primitives.tiles import widest_vector
from schedules.problem import numpy_dtype
from schedules.softmax.definition import (
    Reduction,
    SoftmaxProblem,
    Values,
    column,
    placeholders,
    row_program,
    row_results,
)

if TYPE_CHECKING:
    import tvm
    from tvm import te
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV
    from tvm.tirx import PrimExpr


def itemsize_of(dtype: str) -> int:
    return numpy_dtype(dtype).itemsize


def itemsize(problem: SoftmaxProblem) -> int:
    return itemsize_of(problem.dtype)


def max_vector(problem: SoftmaxProblem) -> int:
    """Elements of the widest access, 128 bits, that keeps every row aligned."""
    return widest_vector(problem.cols, 16 // itemsize(problem))


@dataclass(frozen=True)
class Packing:
    """How a row is dealt out: `rounds` packs of `vector` elements to each of `threads` threads.

    The rounds are a multiple of `chunk`, the packs a thread has in flight together; those past the end are predicated.
    """

    cols: int
    threads: int
    vector: int
    chunk: int = 1

    @property
    def packs(self) -> int:
        return self.cols // self.vector

    @property
    def rounds(self) -> int:
        return -(-self.packs // (self.threads * self.chunk)) * self.chunk

    @property
    def ragged(self) -> bool:
        """Whether some threads have no pack in the last round."""
        return self.rounds * self.threads != self.packs

    @property
    def elements(self) -> int:
        """Elements of a row that one thread holds."""
        return self.rounds * self.vector


@dataclass(frozen=True)
class Stages:
    """The TE graph and the names of its blocks, in program order."""

    tensors: tuple[te.Tensor, ...]
    stored: tuple[str, ...]  # blocks that bring an input where it is kept for the whole row
    loads: dict[str, tuple[str, ...]]  # for each reduction and for "value": blocks that bring inputs into registers
    reductions: tuple[str, ...]
    dropped: bool  # whether a second output, "dropped_out" from "dropped", follows "out" from "value"


def row_stages(problem: SoftmaxProblem, packing: Packing, keep: str, transposed: bool = False) -> Stages:
    """The stages of `problem`'s program, with the row's inputs kept in `keep`:

    "registers": each input is loaded once, into registers; every later stage reads those.
    "shared": each input is loaded once, into a stage to be placed in shared memory; every later stage copies its part
        into registers.  `transposed` lays that stage out as [vector][packs] instead of [packs][vector].
    "nowhere": every stage loads its inputs again.
    """
    from tvm import te

    rows, inputs = placeholders(problem)
    program = row_program(problem)
    k = packing
    shape = (rows, i64(k.rounds), i64(k.threads), i64(k.vector))
    names: dict[str, list[str]] = {}
    kept: dict[str, te.Tensor] = {}

    def stored(name: str) -> te.Tensor:
        """The input where it is kept for the whole row."""
        if name not in kept:
            if transposed:
                order = (rows, i64(k.vector), i64(k.rounds), i64(k.threads))
                element = _element(inputs[name], program.fill[name], k)
                kept[name] = te.compute(order, lambda i, v, p, t: element(i, p, t, v), name=f"{name}_row")
            else:
                kept[name] = te.compute(shape, _element(inputs[name], program.fill[name], k), name=f"{name}_row")
        return kept[name]

    class StageInputs(dict[str, "te.Tensor"]):
        """The register copies that a stage reads, made when it first asks for them."""

        def __init__(self, stage: str) -> None:
            super().__init__()
            self.stage = stage
            names[stage] = []

        def __missing__(self, name: str) -> te.Tensor:
            if keep == "registers":
                return stored(name)
            block = f"{name}_{self.stage}"
            if keep == "nowhere":
                copy = _element(inputs[name], program.fill[name], k)
            else:
                source = stored(name)

                def copy(i: PrimExpr, p: PrimExpr, t: PrimExpr, v: PrimExpr) -> PrimExpr:
                    return source[i, v, p, t] if transposed else source[i, p, t, v]

            self[name] = te.compute(shape, copy, name=block)
            names[self.stage].append(block)
            return self[name]

    class Columns(dict[str, "PrimExpr"]):
        """One column of a stage's inputs, as float32."""

        def __init__(self, local: StageInputs, at: tuple[PrimExpr, ...]) -> None:
            super().__init__()
            self.local, self.at = local, at

        def __missing__(self, name: str) -> PrimExpr:
            return self.local[name](*self.at).astype("float32")

    results: dict[str, te.Tensor] = {}

    def columns(local: StageInputs, *at: PrimExpr) -> tuple[Values, Values]:
        return Columns(local, at), row_results(program, results, at[0])

    for step in program.reductions:
        results[step.name] = _reduce(step, partial(columns, StageInputs(step.name)), rows, k)
    local = StageInputs("value")
    value = te.compute(shape, lambda *at: program.output(*columns(local, *at)).astype(problem.dtype), name="value")
    tensors = [*inputs.values(), _store(value, rows, k, "out")]
    drop_out = program.dropped
    if drop_out is not None:
        drop = _element(inputs["drop"], 0, k)

        def dropped_element(*at: PrimExpr) -> PrimExpr:
            return drop_out(value(*at).astype("float32"), drop(*at).astype("float32")).astype(problem.dtype)

        tensors.append(_store(te.compute(shape, dropped_element, name="dropped"), rows, k, "dropped_out"))
    return Stages(
        tensors=tuple(tensors),
        stored=tuple(f"{name}_row" for name in kept),
        loads={stage: tuple(blocks) for stage, blocks in names.items()},
        reductions=tuple(step.name for step in program.reductions),
        dropped=program.dropped is not None,
    )


def i64(value: int) -> PrimExpr:
    from tvm import tirx

    return tirx.IntImm("int64", value)


def _element(tensor: te.Tensor, fill: float, packing: Packing) -> Callable[..., PrimExpr]:
    """(i, p, t, v) -> that element of an input, or `fill` past the end of the row.

    Masks of drop repeat the last pack there instead (what they multiply is 0): CUDA has no wide vector of uint8
    constants.
    """
    from tvm import te

    def element(i: PrimExpr, p: PrimExpr, t: PrimExpr, v: PrimExpr) -> PrimExpr:
        pack = p * packing.threads + t
        if packing.ragged and tensor.dtype == "uint8":
            return column(tensor, i, te.min(pack, i64(packing.packs - 1)) * packing.vector + v)
        value = column(tensor, i, pack * packing.vector + v)
        return te.if_then_else(pack < packing.packs, value, _constant(fill, tensor.dtype)) if packing.ragged else value

    return element


def _constant(value: float, dtype: str) -> PrimExpr:
    from tvm import tirx

    if dtype == "bfloat16":  # by its bits: TVM 0.27 writes infinity as "inff", which is no CUDA C++
        bits = int(np.asarray(value, numpy_dtype(dtype)).view(np.uint16))
        return tirx.reinterpret(dtype, tirx.const(bits, "uint16"))
    return tirx.const(value, dtype)


def _store(value: te.Tensor, rows: PrimExpr, packing: Packing, name: str) -> te.Tensor:
    """The stage that stores `value`, by way of one over whole rounds of packs (q = p * threads + t).

    In between, each store reads the element of its own index, which is what lets it be placed beside that element even
    where the last round is ragged; `tile_rows` inlines the stage in between once that is done.
    """
    from tvm import te

    flat = te.compute(
        (rows, i64(packing.rounds * packing.threads), i64(packing.vector)),
        lambda i, q, v: value[i, q // packing.threads, q % packing.threads, v],
        name=f"{name}_flat",
    )
    return te.compute((rows, i64(packing.packs), i64(packing.vector)), lambda *at: flat(*at), name=name)


def _reduce(
    step: Reduction, columns: Callable[..., tuple[Values, Values]], rows: PrimExpr, packing: Packing
) -> te.Tensor:
    from tvm import te

    axes = [
        te.reduce_axis((i64(0), i64(extent)), name=f"{step.name}_{name}")
        for name, extent in (("p", packing.rounds), ("t", packing.threads), ("v", packing.vector))
    ]
    reduce = te.max if step.kind == "max" else te.sum
    return te.compute((rows,), lambda i: reduce(step.element(*columns(i, *axes)), axis=axes), name=step.name)


def new_schedule(stages: Stages) -> Schedule:
    from tvm import te
    from tvm.s_tir import Schedule

    return Schedule(te.create_prim_func(list(stages.tensors)))


def check(
    problem: SoftmaxProblem, arch: Arch, packing: Packing, threads: int, min_blocks: int, in_registers: bool = True
) -> str | None:
    """Why a packing with blocks of `threads` is illegal on `arch`, or None."""
    if problem.dtype == "bfloat16" and arch.kind == "cuda" and "bf16" not in arch.features:
        return f"dtype=bfloat16 needs sm_80 or newer, not {arch}"
    if packing.vector < 1 or packing.vector > max_vector(problem) or max_vector(problem) % packing.vector:
        return (
            f"vector={packing.vector} does not divide {max_vector(problem)}, the widest aligned access "
            f"for rows of {problem.cols} {problem.dtype}"
        )
    if threads > arch.max_threads:
        return f"{threads} threads a block, {arch} allows {arch.max_threads}"
    if min_blocks < 0 or min_blocks * threads > arch.threads_sm:
        return (
            f"min_blocks={min_blocks} of {threads} threads: a multiprocessor of {arch} holds {arch.threads_sm} threads"
        )
    if in_registers:
        inputs = sum(1 for argument in problem.arguments() if not argument.output)
        # ptxas widens float16 anew for each use; bfloat16, whose widening is a shift, it keeps as float32
        needed = packing.elements * inputs * (0.5 if problem.dtype == "float16" else 1) + 32
        allowed = min(arch.registers_thread, arch.registers_sm // (threads * max(1, min_blocks)))
        if needed > allowed:
            return (
                f"{packing.elements} elements a thread need about {needed:.0f} registers, {arch} has {allowed} for each"
            )
    return None


def schedule_registers(
    problem: SoftmaxProblem, packing: Packing, groups: int, rows_per_group: int, min_blocks: int
) -> tvm.IRModule:
    """The program with each row held in registers from its load to its store."""
    packing = replace(packing, chunk=packing.rounds)  # registers have no run-time index: every loop over packs unrolls
    stages = row_stages(problem, packing, "registers")
    sch = new_schedule(stages)
    row, _ = tile_rows(sch, stages, packing, groups, rows_per_group)
    for name in reversed(stages.reductions):
        place_reduction(sch, name, (), row, packing)
    for name in reversed(stages.stored):
        place_stored(sch, name, row, "local", transposed=False)
    return finish(sch, stages, packing, min_blocks)


def tile_rows(
    sch: Schedule, stages: Stages, packing: Packing, groups: int, rows_per_group: int
) -> tuple[LoopRV, LoopRV]:
    """Deal rows out to blocks and thread groups, and a row's packs to the threads of a group.

    The output's elements in registers lead; their stores follow in their loop over packs.  Returns (the loop over a
    group's rows, the loop over chunks of a thread's packs).
    """
    value = sch.get_sblock("value")
    i, p, t, v = sch.get_loops(value)
    block, group, row = sch.split(i, [None, groups, rows_per_group])
    chunk, p = split_chunks(sch, p, packing)
    sch.reorder(block, group, row, t, chunk, p, v)
    for loop, thread in ((block, "blockIdx.x"), (group, "threadIdx.y"), (t, "threadIdx.x")):
        sch.bind(loop, thread)
    sch.unroll(v)
    sch.set_scope(value, 0, "local")
    _follow(sch, "out", p)
    if stages.dropped:
        dropped = sch.get_sblock("dropped")
        sch.reverse_compute_at(dropped, p, preserve_unit_loops=True)
        sch.set_scope(dropped, 0, "local")
        sch.unroll(sch.get_loops(dropped)[-1])
        drop = sch.cache_read(dropped, 1, "local")
        sch.compute_at(drop, p, preserve_unit_loops=True)
        sch.vectorize(sch.get_loops(drop)[-1])
        _follow(sch, "dropped_out", p)
    return row, chunk


def _follow(sch: Schedule, name: str, p: LoopRV) -> None:
    """Place a store in the loop over packs, after the elements it stores."""
    flat, store = sch.get_sblock(f"{name}_flat"), sch.get_sblock(name)
    sch.reverse_compute_at(flat, p, preserve_unit_loops=True)
    sch.reverse_compute_at(store, p, preserve_unit_loops=True)
    sch.compute_inline(flat)
    sch.vectorize(sch.get_loops(store)[-1])


def split_chunks(sch: Schedule, p: LoopRV, packing: Packing) -> tuple[LoopRV, LoopRV]:
    """The loop over a thread's packs as (chunks, packs of a chunk), the inner one unrolled."""
    chunk, p = sch.split(p, [None, packing.chunk])
    sch.unroll(p)
    return chunk, p


def place_loads(sch: Schedule, names: Sequence[str], chunk: LoopRV, vectorize: bool = True) -> None:
    """Bring a chunk's packs of each input into registers, all of them in flight before the first is used."""
    for name in reversed(names):
        block = sch.get_sblock(name)
        sch.compute_at(block, chunk, preserve_unit_loops=True)
        sch.set_scope(block, 0, "local")
        p, _, lane = sch.get_loops(block)[-3:]
        sch.unroll(p)
        if vectorize:
            sch.vectorize(lane)
        else:
            sch.unroll(lane)


def place_reduction(
    sch: Schedule, name: str, loads: Sequence[str], row: LoopRV, packing: Packing, vectorize: bool = True
) -> None:
    """Reduce a row: each thread its packs, then across threadIdx.x (TVM lowers that to shuffles and shared memory)."""
    block = sch.get_sblock(name)
    sch.compute_at(block, row, preserve_unit_loops=True)
    sch.set_scope(block, 0, "local")
    p, t, v = sch.get_loops(block)[-3:]
    sch.bind(t, "threadIdx.x")
    chunk, p = split_chunks(sch, p, packing)
    sch.reorder(t, chunk, p, v)
    sch.unroll(v)
    place_loads(sch, loads, chunk, vectorize)


def place_stored(sch: Schedule, name: str, row: LoopRV, scope: str, transposed: bool) -> None:
    """Bring a row of an input where it is kept, all of a thread's packs in flight at once."""
    block = sch.get_sblock(name)
    sch.compute_at(block, row, preserve_unit_loops=True, index=0)
    sch.set_scope(block, 0, scope)
    if transposed:
        v, p, t = sch.get_loops(block)[-3:]
        sch.reorder(p, t, v)
        sch.unroll(v)
    else:
        p, t, v = sch.get_loops(block)[-3:]
        sch.vectorize(v)
    sch.bind(t, "threadIdx.x")
    sch.unroll(p)


def finish(sch: Schedule, stages: Stages, packing: Packing, min_blocks: int = 0) -> tvm.IRModule:
    """Merge the outputs' packs into columns and note the launch bound.

    Only now: with the columns as one axis from the start the index arithmetic would not simplify to whole packs.
    """
    import tvm

    from schedules.primitives.annotations import MIN_BLOCKS

    for name in ["out", "dropped_out"] if stages.dropped else ["out"]:
        sch.transform_layout(sch.get_sblock(name), ("write", 0), lambda i, q, v: (i, q * packing.vector + v))
    function = sch.mod["main"]
    return tvm.IRModule({"main": function.with_attr(MIN_BLOCKS, min_blocks) if min_blocks else function})
