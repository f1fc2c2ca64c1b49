"""The main loop of a tensor-core product: shared memory in stages, fragments in two sets, one barrier an iteration.

TVM's own pipeline pass is not used: in 0.27 it emits two barriers an iteration or wrong wait counts, it cannot pad
integers asynchronously, and a fused loop over (kh, kw, ci) makes it divide.  Here the loops stay a nest; a position is
advanced like an odometer.  Source: CUTLASS's multistage main loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.s_tir.stmt import SBlock, SBlockRealize

from schedules.primitives.annotations import ASYNC, PIPELINE

MAIN_LOOP = "main loop"  # name of the block that it becomes
ASYNC_BYTES = (4, 8, 16)  # that one cp.async can copy


def _cp_async_source(size: int) -> tuple[str, str]:
    name = f"cp_async_{size}"
    cache = "cg" if size == 16 else "ca"
    return name, (
        f"__device__ __forceinline__ void {name}(void* to, const void* from, bool inside) {{\n"
        f'  asm volatile("cp.async.{cache}.shared.global [%0], [%1], {size}, %2;\\n"\n'
        '               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? '
        f'{size} : 0) : "memory");\n}}\n'
    )


_COMMIT = (
    "cp_async_commit",
    '__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\\n" ::: "memory"); }\n',
)


def _wait_source(groups: int) -> tuple[str, str]:
    name = f"cp_async_wait_{groups}"
    return name, (
        f"__device__ __forceinline__ void {name}() "
        f'{{ asm volatile("cp.async.wait_group {groups};\\n" ::: "memory"); }}\n'
    )


def _call(function: tuple[str, str], *arguments: Any) -> Any:
    from tvm.script import tirx as T

    return tirx.Evaluate(T.cuda.func_call(function[0], *arguments, source_code=function[1]))


def multistage(body: Any) -> Any:
    """`body` with every annotated reduction nest turned into a multi-stage loop; lanes and tiles already compact.

    With ASYNC, copies that cp.async can do are left to it.  Of the others an iteration loads the next tile into
    registers and stores it at its end into the stage that the iteration before has read.
    """

    def visit(loop: Any) -> Any:
        annotations = dict(loop.annotations)
        if PIPELINE not in annotations:
            return loop
        return _Nest(loop).emit(int(annotations[PIPELINE]), bool(annotations.get(ASYNC, 0)))

    return tvm_ffi.structural_map(body, (tirx.For, visit))


@dataclass(frozen=True)
class _Copy:
    """One tile's copy from global to shared memory, as this thread's loop nest."""

    statement: Any
    buffer: Any


def _sequence(statement: Any) -> list[Any]:
    return list(statement.seq) if isinstance(statement, tirx.SeqStmt) else [statement]


def _seq(statements: Sequence[Any]) -> Any:
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(list(statements))


def _loops(statement: Any) -> list[Any]:
    """The loops of `statement`, outermost first."""
    found: list[Any] = []
    tvm_ffi.structural_walk(statement, (tirx.For, found.append), order="pre")
    return found


def _fresh(statement: Any) -> Any:
    """A copy of `statement` with loop variables of its own."""
    names = {loop.loop_var: tirx.Var(loop.loop_var.name, loop.loop_var.ty) for loop in _loops(statement)}
    return _substitute(statement, names)


def _substitute(node: Any, values: dict[Any, Any]) -> Any:
    return tvm_ffi.structural_map(node, (ir.Var, lambda var: values.get(var, var)))


def _stores(statement: Any) -> list[Any]:
    found: list[Any] = []
    tvm_ffi.structural_walk(statement, (tirx.BufferStore, found.append))
    return found


def _int(value: int) -> Any:
    return tirx.const(value, "int32")


class _Nest:
    """An annotated nest  for .. for: {allocate tiles; copy, copy, for k step: {load fragments; multiply}}."""

    def __init__(self, root: Any) -> None:
        self.loops = [root]
        while isinstance(self.loops[-1].body, tirx.For):
            self.loops.append(self.loops[-1].body)
        inner = self.loops[-1].body
        self.tiles = list(inner.block.alloc_buffers)
        *copies, self.steps = _sequence(inner.block.body)
        self.copies = [self._copy(statement) for statement in copies]
        fragments = self.steps.body
        self.fragments = list(fragments.block.alloc_buffers)
        *self.loads, self.multiply = _sequence(fragments.block.body)
        if int(self.steps.extent) % 2:
            raise ValueError("fragments are double-buffered: the k steps of a tile must be even in number")

    def _copy(self, statement: Any) -> _Copy:
        stores = _stores(statement)
        if len(stores) != 1 or not str(stores[0].buffer.scope()).startswith("shared"):
            raise ValueError("a stage of the pipeline is not one store into shared memory")
        return _Copy(_plain(statement), stores[0].buffer)

    def emit(self, stages: int, asynchronous: bool) -> Any:
        """The loop as a block.  Raises ValueError where fewer than two stages would need a second barrier."""
        if stages < 2 or (not asynchronous and stages != 2):
            raise ValueError(f"{stages} stages do not fit this pipeline")
        return _Emitter(self, stages, asynchronous).block()


def _plain(statement: Any) -> Any:
    """`statement` without opaque blocks: their predicates become conditions."""

    def realize(node: Any) -> Any:
        body = node.block.body
        if isinstance(node.predicate, tirx.IntImm) and int(node.predicate) == 1:
            return body
        return tirx.IfThenElse(node.predicate, body, None)

    return tvm_ffi.structural_map(statement, (SBlockRealize, realize))


class _Emitter:
    def __init__(self, nest: _Nest, stages: int, asynchronous: bool) -> None:
        self.nest, self.stages, self.asynchronous = nest, stages, asynchronous
        self.extents = [int(loop.extent) for loop in nest.loops]
        self.total = 1
        for extent in self.extents:
            self.total *= extent
        self.staged = {tile: _with_axis(tile, stages) for tile in nest.tiles}
        self.doubled = {fragment: _with_axis(fragment, 2) for fragment in nest.fragments}
        self.axes = [axis for axis, extent in enumerate(self.extents) if extent > 1]
        # the odometer of the tile to fetch next, then the stages to read and to write
        self.state = tirx.decl_buffer([len(self.axes) + 2], "int32", "at", scope="local")
        self.read, self.write = len(self.axes), len(self.axes) + 1
        self.registers: dict[Any, Any] = {}

    # ---- the state ----

    def get(self, slot: int) -> Any:
        return tirx.BufferLoad(self.state, [_int(slot)])

    def set(self, slot: int, value: Any) -> Any:
        return tirx.BufferStore(self.state, tirx.convert(value), [_int(slot)])

    def position(self) -> dict[Any, Any]:
        """Loop variables of the nest as the odometer has them."""
        values = {loop.loop_var: tirx.const(0, str(loop.loop_var.ty)) for loop in self.nest.loops}
        for slot, axis in enumerate(self.axes):
            loop = self.nest.loops[axis]
            values[loop.loop_var] = tirx.Cast(str(loop.loop_var.ty), self.get(slot))
        return values

    def advance(self) -> Any:
        statement: Any = None
        for slot, axis in enumerate(self.axes):  # outermost first: each inner wheel carries into what was built
            step = self.set(slot, self.get(slot) + 1)
            if statement is None:
                statement = step
                continue
            carry = _seq([self.set(slot, _int(0)), statement])
            full = self.get(slot) == _int(self.extents[axis])
            statement = _seq([step, tirx.IfThenElse(full, carry, None)])
        return statement if statement is not None else tirx.Evaluate(_int(0))

    # ---- the pieces ----

    def shift(self, statement: Any, buffers: dict[Any, Any], index: Any) -> Any:
        """`statement` on version `index` of `buffers`."""

        def load(node: Any) -> Any:
            new = buffers.get(node.source)
            return node if new is None else tirx.BufferLoad(new, [index, *node.indices])

        def store(node: Any) -> Any:
            new = buffers.get(node.buffer)
            return node if new is None else tirx.BufferStore(new, node.value, [index, *node.indices])

        def block(node: Any) -> Any:
            def regions(given: Sequence[Any]) -> list[Any]:
                return [
                    region
                    if (new := buffers.get(region.source)) is None
                    else tirx.BufferRegion(new, [ir.Range(0, extent) for extent in new.shape])
                    for region in given
                ]

            return SBlock(
                node.iter_vars,
                regions(node.reads),
                regions(node.writes),
                node.name_hint,
                node.body,
                node.init,
                node.alloc_buffers,
                node.match_buffers,
                node.annotations,
            )

        return tvm_ffi.structural_map(statement, ((ir.TensorLoad, load), (tirx.BufferStore, store), (SBlock, block)))

    def fetch(self, stage: Any) -> list[Any]:
        """Start what brings the tile at the odometer's position into `stage`, and advance."""
        pieces = []
        for copy in self.nest.copies:
            moved = _fresh(_substitute(copy.statement, self.position()))
            if self.through_registers(copy):
                pieces.append(self.to_registers(copy, moved))
            else:
                pieces.append(self.shift(_to_async(moved), self.staged, stage))
        return [*pieces, self.advance()]

    def through_registers(self, copy: _Copy) -> bool:
        return not self.asynchronous or bool(_stores(_to_async(copy.statement)))

    def store(self, stage: Any) -> list[Any]:
        """Store what `fetch` left in registers."""
        return [self.from_registers(copy, stage) for copy in self.nest.copies if self.through_registers(copy)]

    def to_registers(self, copy: _Copy, statement: Any) -> Any:
        loops = _loops(statement)
        at = [loop.loop_var for loop in loops]
        if copy.buffer not in self.registers:
            shape = [loop.extent for loop in loops]
            self.registers[copy.buffer] = tirx.decl_buffer(
                shape or [1], copy.buffer.dtype, copy.buffer.name + "_next", scope="local"
            )
        buffer = self.registers[copy.buffer]
        return tvm_ffi.structural_map(
            statement, (tirx.BufferStore, lambda node: tirx.BufferStore(buffer, node.value, at or [_int(0)]))
        )

    def from_registers(self, copy: _Copy, stage: Any) -> Any:
        statement = _fresh(copy.statement)
        at = [loop.loop_var for loop in _loops(statement)]
        value = tirx.BufferLoad(self.registers[copy.buffer], at or [_int(0)])
        moved = tvm_ffi.structural_map(
            statement, (tirx.BufferStore, lambda node: tirx.BufferStore(node.buffer, value, node.indices))
        )
        return self.shift(moved, self.staged, stage)

    def load(self, stage: Any, step: Any, version: Any) -> list[Any]:
        """Fragments of k step `step` of the tile in `stage` into set `version`."""
        pieces = []
        for statement in self.nest.loads:
            moved = _substitute(_fresh(statement), {self.nest.steps.loop_var: step})
            pieces.append(self.shift(self.shift(moved, self.staged, stage), self.doubled, version))
        return pieces

    def ready(self) -> list[Any]:
        """Wait until the tile to read next is in shared memory, and everyone is done with the stage to write next."""
        barrier = tirx.Evaluate(tirx.op.tvm_storage_sync(str(self.nest.tiles[0].scope())))
        return [_call(_wait_source(self.stages - 2)), barrier] if self.asynchronous else [barrier]

    # ---- the whole ----

    def block(self) -> Any:
        prologue = [self.set(slot, _int(0)) for slot in range(len(self.axes) + 1)]
        for stage in range(self.stages - 1):
            if stage < self.total:
                prologue += [*self.fetch(_int(stage)), *self.store(_int(stage))]
            if self.asynchronous:
                prologue.append(_call(_COMMIT))
        prologue.append(self.set(self.write, _int(self.stages - 1)))
        prologue += self.ready()
        prologue += self.load(_int(0), _int(0), _int(0))
        ending = [_call(_wait_source(0))] if self.asynchronous else []
        # what follows may reuse this memory
        ending.append(tirx.Evaluate(tirx.op.tvm_storage_sync(str(self.nest.tiles[0].scope()))))
        body = _seq([*prologue, self.main_loop(), *ending])
        allocations = [*self.staged.values(), *self.doubled.values(), *self.registers.values(), self.state]
        block = SBlock([], [], [], MAIN_LOOP, body, None, allocations, [], {})
        return SBlockRealize([], tirx.const(True, "bool"), block)

    def main_loop(self) -> Any:
        count = int(self.nest.steps.extent)
        tile, step = tirx.Var("tile", "int32"), tirx.Var("step", "int32")
        left = tile < _int(self.total - (self.stages - 1))
        more = _seq(self.fetch(self.get(self.write)))
        first: list[Any] = [] if self.total < self.stages else [tirx.IfThenElse(left, more, None)]
        if self.asynchronous:
            first.append(_call(_COMMIT))
        stores = self.store(self.get(self.write))
        after = self.get(self.read) + 1
        # all modes store before the stages turn: `write` is then still the stage of the tile that was fetched
        turn = [
            *([tirx.IfThenElse(left, _seq(stores), None)] if stores and self.total >= self.stages else []),
            *(self.ready() if self.total >= self.stages or self.asynchronous else []),
            self.set(self.write, self.get(self.read)),
            self.set(self.read, tirx.Select(after == _int(self.stages), _int(0), after)),
        ]
        following = tirx.truncmod(step + 1, _int(count))
        iteration = [
            *([tirx.IfThenElse(step == 0, _seq(first), None)] if first else []),
            tirx.IfThenElse(step == _int(count - 1), _seq(turn), None),
            *self.load(self.get(self.read), following, tirx.truncmod(step + 1, _int(2))),
            self.shift(
                _substitute(_fresh(self.nest.multiply), {self.nest.steps.loop_var: step}),
                self.doubled,
                tirx.truncmod(step, _int(2)),
            ),
        ]
        steps = tirx.For(step, _int(0), _int(count), tirx.ForKind.UNROLLED, _seq(iteration))
        return tirx.For(tile, _int(0), _int(self.total), tirx.ForKind.SERIAL, steps)


def _with_axis(buffer: Any, extent: int) -> Any:
    return tirx.decl_buffer([extent, *buffer.shape], buffer.dtype, buffer.name, scope=buffer.scope())


def _to_async(statement: Any) -> Any:
    """`statement` with its vector copies as cp.async; one it cannot do stays as it is."""
    analyzer = tvm.sym.Analyzer()
    for loop in _loops(statement):
        analyzer.bind(loop.loop_var, ir.Range(loop.min, loop.min + loop.extent))

    def visit(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.VECTORIZED:
            return loop
        found = _async_copy(loop, analyzer)
        return loop if found is None else found

    return tvm_ffi.structural_map(statement, (tirx.For, visit))


def _async_copy(loop: Any, analyzer: Any) -> Any:
    """The cp.async of a vector loop  shared[..] = condition ? global[..] : 0 ; None if it is not that."""
    body, guards = loop.body, []
    while isinstance(body, tirx.IfThenElse) and body.else_case is None:
        guards.append(body.condition)
        body = body.then_case
    if not isinstance(body, tirx.BufferStore):
        return None
    value, inside = body.value, tirx.const(True, "bool")
    if isinstance(value, ir.Call) and str(getattr(value.op, "name", "")).endswith(".if_then_else"):
        inside, value, other = value.args
        if not isinstance(other, tirx.IntImm | tirx.FloatImm) or other.value != 0:
            return None
    size = int(loop.extent) * tvm.DataType(str(body.buffer.dtype)).bits // 8
    if not isinstance(value, ir.TensorLoad) or size not in ASYNC_BYTES:
        return None
    conditions = [analyzer.simplify(condition) for condition in (inside, *guards)]
    lane = loop.loop_var
    if any(_uses(condition, lane) for condition in conditions):
        return None

    def first(node: Any) -> Any:
        return _substitute(node, {lane: tirx.const(0, str(lane.ty))})

    call = _call(
        _cp_async_source(size),
        tirx.op.address_of(first(tirx.BufferLoad(body.buffer, body.indices))),
        tirx.op.address_of(first(value)),
        conditions[0],
    )
    for guard in conditions[1:]:
        call = tirx.IfThenElse(guard, call, None)
    return call


def _uses(node: Any, var: Any) -> bool:
    found = False

    def visit(other: Any) -> None:
        nonlocal found
        found = found or other.same_as(var)

    tvm_ffi.structural_walk(node, (ir.Var, visit))
    return found
