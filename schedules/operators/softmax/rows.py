"""A row program as TE stages over explicit axes, shared by all softmax schedules on GPUs.

A row of `cols` is dealt to `threads` threads in packs of `vector` elements: column (p * threads + t) * vector + v is
pack p of thread t.  With these axes in the TE, binding t of every stage to threadIdx.x gives each thread its own part
of each stage, and a pack is one 128-bit access.  After OneFlow's softmax, which deals out rows the same way.

A row may also be cut into parts of equal length (`split`), each dealt out like a row: stages then lead with the axes
(row, part) in place of (row).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from schedules.core.arch import Arch
from schedules.core.problem import Config, numpy_dtype
from schedules.core.tvm import LoopRV, PrimExpr, Schedule, te, tirx, tvm
from schedules.lowering.annotations import check_streaming
from schedules.operators.softmax.definition import Output, RowProgram, SoftmaxProblem, Values, row_program
from schedules.operators.softmax.graph import column, drawn, placeholders, program_of_rows, row_results
from schedules.steps.story import next_step
from schedules.steps.tiles import widest_vector


def itemsize_of(dtype: str) -> int:
    """Bytes of an element of `dtype`."""
    return numpy_dtype(dtype).itemsize


def itemsize(problem: SoftmaxProblem) -> int:
    """Bytes of an element of the rows that are reduced."""
    return itemsize_of(problem.in_dtype)


def max_vector(problem: SoftmaxProblem) -> int:
    """Elements of the widest access, 128 bits, that keeps every row of every tensor aligned."""
    widest = max(itemsize_of(argument.dtype) for argument in problem.arguments() if len(argument.shape) == 2)
    return widest_vector(problem.cols, 16 // widest)


@dataclass(frozen=True)
class Packing:
    """How a row is dealt out: `rounds` packs of `vector` elements to each of `threads` threads of each of `parts`.

    The rounds are a multiple of `chunk`, the packs a thread has in flight together; those past the end are predicated.
    """

    cols: int
    threads: int
    vector: int
    chunk: int = 1
    parts: int = 1

    @property
    def packs(self) -> int:
        return self.cols // self.vector

    @property
    def rounds(self) -> int:
        return -(-self.packs // (self.parts * self.threads * self.chunk)) * self.chunk

    @property
    def whole(self) -> int:
        """Packs of a row with those past its end."""
        return self.parts * self.rounds * self.threads

    @property
    def ragged(self) -> bool:
        """Whether some threads have no pack in the last round."""
        return self.whole != self.packs

    @property
    def elements(self) -> int:
        """Elements that one thread holds."""
        return self.rounds * self.vector


@dataclass(frozen=True)
class Stages:
    """The TE graph and the names of its blocks, in program order."""

    tensors: tuple[te.Tensor, ...]
    stored: tuple[str, ...]  # blocks that bring an input where it is kept for the whole row
    loads: dict[str, tuple[str, ...]]  # for each reduction and for "value": blocks that bring inputs into registers
    reductions: tuple[str, ...]
    numerators: bool  # whether a stage "numerator" is between the last reduction and those before it
    dropped: bool  # whether a second output, "dropped_out" from "dropped", follows "out" from "value"
    drop_read: bool  # whether that reads what is dropped
    of_row: bool  # whether the last output, "row_out", is a number a row
    elements: bool  # whether there is an output "out", and not only "row_out"


def row_stages(
    problem: SoftmaxProblem,
    packing: Packing,
    again: bool = False,
    in_flight: int = 1,
    numerators: bool = False,
) -> Stages:
    """The stages of `problem`'s program.  The row's inputs are loaded once, into registers that every later stage
    reads; or every stage loads its inputs `again`.

    `in_flight` rows are brought in at once; with `numerators` the exponentials that make the sum are kept for the
    output, in float32, instead of being computed twice.
    """
    rows, inputs = placeholders(problem)
    program = row_program(problem)
    k = packing
    axes = (i64(k.rounds), i64(k.threads), i64(k.vector))
    many = i64(in_flight)
    results: dict[str, te.Tensor] = {}

    def element(name: str, extent: PrimExpr | None = None) -> Callable[..., PrimExpr]:
        return input_element(inputs[name], program.fill[name], k, extent)

    def stored(name: str) -> te.Tensor:
        """The input where it is kept for the whole row."""
        if in_flight == 1:
            return te.compute((rows, *axes), element(name), name=f"{name}_row")
        # rows in flight as an axis of their own, or their number would be one known at run time; TVM cannot prove that
        # a rounded-up number of groups is enough, and only one group is ever stored
        inside = element(name, rows)
        return te.compute((rows, many, *axes), lambda g, i, p, t, v: inside(g * many + i, p, t, v), name=f"{name}_row")

    def where(i: PrimExpr, p: PrimExpr, t: PrimExpr, v: PrimExpr) -> tuple[PrimExpr, ...]:
        return (i // many, i % many, p, t, v) if in_flight > 1 else (i, p, t, v)

    row_loads = Loads(stored, where)

    def loads(stage: str) -> Loads:
        """The register copies that a stage reads."""

        def copy(name: str) -> te.Tensor:
            return te.compute((rows, *axes), element(name), name=f"{name}_{stage}")

        return Loads(copy) if again else row_loads

    stages = {stage: loads(stage) for stage in (*(step.name for step in program.reductions), "value")}

    def of_row(i: PrimExpr) -> Values:
        return row_results(problem, inputs, program, results, i)

    def columns(stage: str, *at: PrimExpr) -> tuple[Values, Values]:
        return Columns(stages[stage], at, beside(problem, inputs, k, *at)), of_row(at[0])

    numerator: te.Tensor | None = None
    for step in program.reductions:
        read = at_columns(step.element, partial(columns, step.name))
        if numerators and step is program.reductions[-1]:
            read = numerator = te.compute((rows, *axes), read, name="numerator")
        results[step.name] = reduce_packs(step.kind, step.name, read, (rows,), k)

    def value(*at: PrimExpr) -> PrimExpr:
        if numerator is not None:
            return numerator(*at) * of_row(at[0])["inverse"]
        return program.output(*columns("value", *at))

    outputs = output_stages(problem, program, inputs, (rows,), k, value, of_row)
    return Stages(
        tensors=(*inputs.values(), *outputs),
        stored=row_loads.blocks,
        of_row=program.of_row is not None,
        elements=bool(problem.element_outputs),
        loads={stage: copies.blocks if again else () for stage, copies in stages.items()},
        reductions=tuple(step.name for step in program.reductions),
        numerators=numerator is not None,
        dropped=program.dropped is not None,
        drop_read=program.dropped is not None and not problem.is_drawn,
    )


class Loads(dict[str, "te.Tensor"]):
    """Stages that bring inputs closer, each made when it is first asked for."""

    def __init__(
        self, make: Callable[[str], te.Tensor], where: Callable[..., tuple[PrimExpr, ...]] = lambda *at: at
    ) -> None:
        """`where` turns (i, p, t, v) into the index of a stage that `make` makes."""
        super().__init__()
        self.make, self.where = make, where

    def read(self, name: str, *at: PrimExpr) -> PrimExpr:
        return self[name](*self.where(*at))

    def __missing__(self, name: str) -> te.Tensor:
        self[name] = self.make(name)
        return self[name]

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(tensor.op.name for tensor in self.values())


class Columns(dict[str, "PrimExpr"]):
    """One column of the inputs, as float32, and what `beside` says of it."""

    def __init__(self, loads: Loads, at: tuple[PrimExpr, ...], beside: Values) -> None:
        super().__init__(beside)
        self.loads, self.at = loads, at

    def __missing__(self, name: str) -> PrimExpr:
        return self.loads.read(name, *self.at).astype("float32")


def beside(problem: SoftmaxProblem, inputs: dict[str, te.Tensor], packing: Packing, *at: PrimExpr) -> Values:
    """What is known of a column beside its elements, at (i, p, t, v) or (i, part, p, t, v)."""
    row, *part, p, t, v = at
    pack = ((part[0] * packing.rounds + p) if part else p) * packing.threads + t
    col = pack * packing.vector + v
    return {"col": col, **drawn(problem, inputs, row, col)}


def at_columns(formula: Output, read: Callable[..., tuple[Values, Values]]) -> Callable[..., PrimExpr]:
    """`formula` as a function of an index that `read` turns into its arguments."""
    return lambda *at: formula(*read(*at))


def i64(value: int) -> PrimExpr:
    """`value` as an int64 constant."""
    return tirx.IntImm("int64", value)


def input_element(
    tensor: te.Tensor, fill: float, packing: Packing, rows: PrimExpr | None = None
) -> Callable[..., PrimExpr]:
    """(i, p, t, v) or (i, part, p, t, v) -> that element of an input, or `fill` past the end of the row, or past the
    last of `rows` if that is given.

    Masks of drop repeat the last pack there instead (what they multiply is 0): CUDA has no wide vector of uint8
    constants.
    """

    def element(i: PrimExpr, *at: PrimExpr) -> PrimExpr:
        *part, p, t, v = at
        pack = ((part[0] * packing.rounds + p) if part else p) * packing.threads + t
        if tensor.dtype == "uint8":
            row = i if rows is None else te.min(i, rows - 1)
            last = te.min(pack, i64(packing.packs - 1)) if packing.ragged else pack
            return column(tensor, row, last * packing.vector + v)
        value = column(tensor, i, pack * packing.vector + v)
        inside = [pack < packing.packs] if packing.ragged else []
        if rows is not None:
            inside.append(i < rows)
        return te.if_then_else(tirx.all(*inside), value, _constant(fill, tensor.dtype)) if inside else value

    return element


def _constant(value: float, dtype: str) -> PrimExpr:
    if dtype == "bfloat16":  # by its bits: TVM 0.27 writes infinity as "inff", which is no CUDA C++
        bits = int(np.asarray(value, numpy_dtype(dtype)).view(np.uint16))
        return tirx.reinterpret(dtype, tirx.const(bits, "uint16"))
    return tirx.const(value, dtype)


def reduce_packs(
    kind: str, name: str, element: Callable[..., PrimExpr], lead: tuple[PrimExpr, ...], packing: Packing
) -> te.Tensor:
    """The stage `name` of shape `lead`: the "max" or "sum" of `element` at (*lead, p, t, v)."""
    axes = [
        te.reduce_axis((i64(0), i64(extent)), name=f"{name}_{axis}")
        for axis, extent in (("p", packing.rounds), ("t", packing.threads), ("v", packing.vector))
    ]
    reduce = te.max if kind == "max" else te.sum
    return te.compute(lead, lambda *at: reduce(element(*at, *axes), axis=axes), name=name)


def output_stages(
    problem: SoftmaxProblem,
    program: RowProgram,
    inputs: dict[str, te.Tensor],
    lead: tuple[PrimExpr, ...],
    packing: Packing,
    element: Callable[..., PrimExpr],
    of_row: Callable[[PrimExpr], Values],
) -> list[te.Tensor]:
    """The outputs (rows, packs, vector), from stages "value" and "dropped" of shape (*lead, rounds, threads, vector),
    and the one that is a number a row, (rows,).

    `element` is the output at such an index, in float32, `of_row` what is known of a row.
    """
    numbers: list[te.Tensor] = []
    number = program.of_row
    if number is not None:
        numbers.append(te.compute((lead[0],), lambda i: number(of_row(i)), name="row_out"))
    if not problem.element_outputs:
        return numbers
    dtype = problem.element_outputs[0].dtype

    shape = (*lead, i64(packing.rounds), i64(packing.threads), i64(packing.vector))
    value = te.compute(shape, lambda *at: element(*at).astype(dtype), name="value")
    outputs = [_store(value, lead, packing, "out")]
    drop_out = program.dropped
    if drop_out is not None:
        if problem.is_drawn:

            def drop(*at: PrimExpr) -> PrimExpr:
                return beside(problem, inputs, packing, *at)["drop"]

        else:
            drop = input_element(inputs["drop"], 0, packing)

        def dropped_element(*at: PrimExpr) -> PrimExpr:
            return drop_out(value(*at).astype("float32"), drop(*at).astype("float32")).astype(dtype)

        outputs.append(_store(te.compute(shape, dropped_element, name="dropped"), lead, packing, "dropped_out"))
    return outputs + numbers


def _store(value: te.Tensor, lead: tuple[PrimExpr, ...], packing: Packing, name: str) -> te.Tensor:
    """The stage that stores `value`, by way of one over whole rounds of packs (q = p * threads + t, of all parts).

    In between, each store reads the element of its own index, which is what lets it be placed beside that element even
    where the last round is ragged; `tile_rows` inlines the stage in between once that is done.
    """

    def element(i: PrimExpr, q: PrimExpr, v: PrimExpr) -> PrimExpr:
        p, t = q // packing.threads, q % packing.threads
        return value(i, p, t, v) if len(lead) == 1 else value(i, p // packing.rounds, p % packing.rounds, t, v)

    rows = lead[0]
    flat = te.compute((rows, i64(packing.whole), i64(packing.vector)), element, name=f"{name}_flat")
    return te.compute((rows, i64(packing.packs), i64(packing.vector)), lambda *at: flat(*at), name=name)


def program(stages: Stages) -> tirx.PrimFunc:
    """The program that the stages make."""
    return program_of_rows(stages.tensors, "value" if stages.of_row and stages.elements else None)


def new_schedule(stages: Stages) -> Schedule:
    """A schedule of `program`."""
    return Schedule(program(stages))


def check(
    problem: SoftmaxProblem,
    arch: Arch,
    packing: Packing,
    threads: int,
    min_blocks: int,
    *,
    rows_held: int = 1,
    streaming: str = "no",
    numerators: bool = False,
) -> str | None:
    """Why a packing with blocks of `threads` is illegal on `arch`, or None; a thread holds its part of `rows_held` rows
    in registers."""
    if problem.dtype == "bfloat16" and arch.kind == "cuda" and "bf16" not in arch.features:
        return f"dtype=bfloat16 needs sm_80 or newer, not {arch}"
    if numerators and problem.function != "softmax":
        return f"numerators=true is for function=softmax, not {problem.function}"
    if error := check_streaming(streaming, arch):
        return error
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
    if rows_held:
        inputs = len(problem.of_columns)
        # ptxas widens float16 anew for each use; bfloat16, whose widening is a shift, it keeps as float32
        needed = rows_held * packing.elements * inputs * (0.5 if problem.dtype == "float16" else 1) + 32
        needed += packing.elements if numerators else 0
        allowed = min(arch.registers_thread, arch.registers_sm // (threads * max(1, min_blocks)))
        if needed > allowed:
            held = rows_held * packing.elements
            return f"{held} elements a thread need about {needed:.0f} registers, {arch} has {allowed} for each"
    return None


@dataclass(frozen=True)
class RegisterRows:
    """How rows are dealt out to blocks: `groups` groups of threads, each with `rows` rows one after the other, of which
    `in_flight` are loaded before the first of them is computed."""

    groups: int = 1
    rows: int = 1
    in_flight: int = 1

    def check(self) -> str | None:
        if self.groups < 1 or self.rows < 1 or self.in_flight < 1:
            return f"groups={self.groups}, {self.rows} rows to a group and in_flight={self.in_flight} must be positive"
        if self.rows % self.in_flight:
            return f"in_flight={self.in_flight} does not divide the {self.rows} rows of a group"
        return None


class InRegisters(Config):
    """A config of rows held in registers: `threads` of a row, `vector`, `min_blocks`, `streaming` and `numerators`."""

    threads: int
    vector: int
    min_blocks: int
    in_flight: int
    streaming: str
    numerators: bool

    @property
    @abstractmethod
    def deal(self) -> RegisterRows:
        """How rows are dealt out to blocks."""

    def packing(self, problem: SoftmaxProblem) -> Packing:
        return Packing(problem.cols, self.threads, self.vector)

    def check_rows(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        """Why its rows are illegal, whatever the threads of one."""
        return self.deal.check() or check(
            problem,
            arch,
            self.packing(problem),
            self.threads * self.deal.groups,
            self.min_blocks,
            rows_held=self.in_flight,
            streaming=self.streaming,
            numerators=self.numerators,
        )


def _register_stages(problem: SoftmaxProblem, config: InRegisters) -> tuple[Packing, Stages]:
    """The stages of rows held in registers, and how they are packed there."""
    packing = config.packing(problem)
    packing = replace(packing, chunk=packing.rounds)  # registers have no run-time index: every loop over packs unrolls
    stages = row_stages(problem, packing, in_flight=config.in_flight, numerators=config.numerators)
    return packing, stages


def register_graph(problem: SoftmaxProblem, config: InRegisters, arch: Arch) -> tirx.PrimFunc:
    """What `schedule_registers` schedules."""
    return program(_register_stages(problem, config)[1])


def schedule_registers(problem: SoftmaxProblem, config: InRegisters, arch: Arch) -> tvm.IRModule:
    """The program for x or y, dy (rows, cols), run-time rows, with each row held in registers from its load to its
    store."""
    (packing, stages), deal = _register_stages(problem, config), config.deal
    sch = new_schedule(stages)
    row, _ = tile_rows(sch, stages, packing, deal.groups, deal.rows)
    loaded = row
    if deal.in_flight > 1:
        loaded, row = sch.split(row, [None, deal.in_flight])
        sch.unroll(row)
    for name in reversed(stages.reductions):
        place_reduction(sch, name, (), row, packing)
        if stages.numerators and name == stages.reductions[-1]:
            place_numerators(sch, row)
    for name in reversed(stages.stored):
        place_stored(sch, name, loaded)
    return finish(sch, stages, packing, config.min_blocks, config.streaming)


def tile_rows(
    sch: Schedule, stages: Stages, packing: Packing, groups: int, rows_per_group: int
) -> tuple[LoopRV, LoopRV]:
    """Deal rows out to blocks and thread groups, and a row's packs to the threads of a group.

    The output's elements in registers lead; their stores follow in their loop over packs.  Returns (the loop over a
    group's rows, the loop over chunks of a thread's packs).
    """
    next_step(sch, "Rows to blocks, a row's packs to threads; each stores its packs in whole vectors")
    if not stages.elements:
        return tile_numbers(sch, packing, groups, rows_per_group)
    value = sch.get_sblock("value")
    *lead, p, t, v = sch.get_loops(value)
    rows = sch.fuse(*lead)
    if stages.of_row:
        number = sch.get_sblock("row_out")
        _, first = sch.split(sch.add_unit_loop(number), [None, packing.threads])
        sch.bind(first, "threadIdx.x")
    block, group, row = sch.split(rows, [None, groups, rows_per_group])
    chunk, p = split_chunks(sch, p, packing)
    sch.reorder(t, chunk, p, v)
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
        if stages.drop_read:
            drop = sch.cache_read(dropped, 1, "local")
            sch.compute_at(drop, p, preserve_unit_loops=True)
            sch.vectorize(sch.get_loops(drop)[-1])
        _follow(sch, "dropped_out", p)
    return row, chunk


def tile_numbers(sch: Schedule, packing: Packing, groups: int, rows_per_group: int) -> tuple[LoopRV, LoopRV]:
    """As `tile_rows` where the output is a number a row, which a row's first thread stores."""
    number = sch.get_sblock("row_out")
    (i,) = sch.get_loops(number)
    chunk, first = sch.split(sch.add_unit_loop(number), [None, packing.threads])
    block, group, row = sch.split(i, [None, groups, rows_per_group])
    for loop, thread in ((block, "blockIdx.x"), (group, "threadIdx.y"), (first, "threadIdx.x")):
        sch.bind(loop, thread)
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


def place_loads(sch: Schedule, names: Sequence[str], chunk: LoopRV) -> None:
    """Bring a chunk's packs of each input into registers, all of them in flight before the first is used."""
    for name in reversed(names):
        block = sch.get_sblock(name)
        sch.compute_at(block, chunk, preserve_unit_loops=True)
        sch.set_scope(block, 0, "local")
        p, _, lane = sch.get_loops(block)[-3:]
        sch.unroll(p)
        sch.vectorize(lane)


def place_reduction(sch: Schedule, name: str, loads: Sequence[str], row: LoopRV, packing: Packing) -> None:
    """Reduce a row: each thread its packs, then across threadIdx.x (TVM lowers that to shuffles and shared memory)."""
    next_step(sch, f"Reduce to {name}: each thread its packs, then across the threads of the row")
    block = sch.get_sblock(name)
    sch.compute_at(block, row, preserve_unit_loops=True)
    sch.set_scope(block, 0, "local")
    p, t, v = sch.get_loops(block)[-3:]
    sch.bind(t, "threadIdx.x")
    chunk, p = split_chunks(sch, p, packing)
    sch.reorder(t, chunk, p, v)
    sch.unroll(v)
    place_loads(sch, loads, chunk)


def place_stored(sch: Schedule, name: str, row: LoopRV) -> None:
    """Bring a row of an input into registers, all of a thread's packs in flight at once."""
    next_step(sch, f"Bring {name} into registers, all packs in flight, where every stage of the row reads it")
    block = sch.get_sblock(name)
    sch.compute_at(block, row, preserve_unit_loops=True, index=0)
    sch.set_scope(block, 0, "local")
    rows, p, t, v = sch.get_loops(block)[-4:]
    sch.vectorize(v)
    sch.bind(t, "threadIdx.x")
    sch.unroll(p)
    sch.unroll(rows)


def place_numerators(sch: Schedule, row: LoopRV) -> None:
    """Compute a row's numerators into registers, where the sum and the output read them."""
    next_step(sch, "Keep the numerators in registers, for the sum and the output alike")
    block = sch.get_sblock("numerator")
    sch.compute_at(block, row, preserve_unit_loops=True)
    sch.set_scope(block, 0, "local")
    p, t, v = sch.get_loops(block)[-3:]
    sch.bind(t, "threadIdx.x")
    sch.unroll(p)
    sch.unroll(v)


def finish(sch: Schedule, stages: Stages, packing: Packing, min_blocks: int = 0, streaming: str = "no") -> tvm.IRModule:
    """Merge the outputs' packs into columns and note the launch bound and which accesses are streaming ones.

    Only now: with the columns as one axis from the start the index arithmetic would not simplify to whole packs.
    """
    from schedules.lowering.annotations import APART, MIN_BLOCKS, STREAM

    next_step(sch, "The outputs as (rows, columns) again: packs were axes of their own so that indices simplify")
    for name in (["out", "dropped_out"] if stages.dropped else ["out"]) if stages.elements else []:
        sch.transform_layout(sch.get_sblock(name), ("write", 0), lambda i, q, v: (i, q * packing.vector + v))
    function = sch.mod["main"]
    if min_blocks:
        function = function.with_attr(MIN_BLOCKS, min_blocks)
    # TVM 0.27 would give each thread's copy of a block's result the place of that result in shared memory, where every
    # element reads it again and divides by it, and where what is computed of it is a race
    function = function.with_attr(APART, True)
    return tvm.IRModule({"main": function.with_attr(STREAM, streaming)})
