"""A scheduled GPU program as serial loops, to run on the CPU.

Threads become loops and vectors become scalars; everything else stays: tiles, predicates, padding, layouts, index
arithmetic, the stages' order.  What this cannot see: barriers, lowering, generated code.  A thread's registers become
an array over all threads' registers, which is why stages bound to threads stay correct when each runs to its end first.

What threads reduce together each of them reduces for itself first, and halves of them are combined until one is left,
as on a GPU.  One chain over all elements would be another program: its rounding errors walk, to about sqrt(n) units in
the last place for n positive numbers, where those of a tree stay below log2(n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir.stmt import SBlock, SBlockRealize

from schedules.lowering.statements import fresh, loops_of, substitute, variables_of

_KINDS = (tirx.ForKind.THREAD_BINDING, tirx.ForKind.VECTORIZED, tirx.ForKind.UNROLLED)
_REDUCTIONS = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min)
# pipelines and pragmas speak of hardware; without them the loop means the same
_DROPPED = ("pragma_", "software_pipeline", "permuted_layout", "schedules.")


def serialize(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` (scheduled, not lowered) with serial loops only, to be built for LLVM."""

    def kept_of(node: Any) -> dict[Any, Any]:
        return {key: value for key, value in dict(node.annotations).items() if not str(key).startswith(_DROPPED)}

    def plain(block: Any) -> Any:
        kept = kept_of(block)
        if len(kept) == len(block.annotations):
            return block
        return SBlock(
            block.iter_vars,
            block.reads,
            block.writes,
            block.name_hint,
            block.body,
            block.init,
            block.alloc_buffers,
            block.match_buffers,
            kept,
        )

    def serial(loop: Any) -> Any:
        kept = kept_of(loop)
        if loop.kind in _KINDS:
            return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body, None, kept)
        if len(kept) != len(loop.annotations):
            return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding, kept)
        return loop

    functions = {}
    for name, function in mod.functions.items():
        if isinstance(function, tirx.PrimFunc):
            body = tvm_ffi.structural_map(function.body, (tirx.For, _in_lanes))
            function = function.with_body(tvm_ffi.structural_map(body, ((tirx.For, serial), (SBlock, plain))))
        functions[name] = function
    return tvm.IRModule(functions)


def _in_lanes(nest: Any) -> Any:
    """`nest` with a number for each thread in those reductions that threads share and whose loops are all in it."""
    loops, found = loops_of(nest), list[Any]()
    tvm_ffi.structural_walk(nest, (SBlockRealize, found.append))
    for realize in found:
        if realize.block.init is not None and _accumulates(realize.block.body):
            nest = _one_in_lanes(nest, loops, realize)
    return nest


def _accumulates(store: Any) -> bool:
    """Whether it is  number = number + element,  or another reduction than the sum."""
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, _REDUCTIONS):
        return False
    return bool(tvm_ffi.structural_equal(store.value.a, tirx.BufferLoad(store.buffer, store.indices)))


def _one_in_lanes(nest: Any, loops: Sequence[Any], realize: Any) -> Any:
    """`nest`, which `loops` are of, with a number for each thread in the reduction `realize`."""
    block, store = realize.block, realize.block.body
    values = {axis.var: value for axis, value in zip(block.iter_vars, realize.iter_values, strict=True)}
    of_sum = [values[axis.var] for axis in block.iter_vars if axis.iter_type == tirx.IterVar.CommReduce]
    used, reduced = set(variables_of([*values.values(), realize.predicate])), set(variables_of(of_sum))
    kept = [loop for loop in loops if loop.loop_var in used - reduced]
    shared = [loop for loop in loops if loop.loop_var in reduced and loop.kind == tirx.ForKind.THREAD_BINDING]
    if not shared or not reduced <= {loop.loop_var for loop in loops}:
        return nest

    combine, element = type(store.value), store.value.b
    own, threads = tirx.const(0, "int64"), 1
    for loop in shared:
        own, threads = own * loop.extent + (loop.loop_var - loop.min), threads * int(loop.extent)
    lanes = tirx.decl_buffer((*(loop.extent for loop in kept), threads), store.buffer.dtype, "lanes", scope="local")

    def at(lane: Any) -> list[Any]:
        return [*(loop.loop_var - loop.min for loop in kept), lane]

    def add(lane: Any, value: Any) -> Any:
        return tirx.BufferStore(lanes, combine(tirx.BufferLoad(lanes, at(lane)), value), at(lane))

    def folded(distance: int, lane: Any) -> Any:
        return add(lane, tirx.BufferLoad(lanes, at(lane + distance)))

    def inside(statement: Any) -> Any:
        return substitute(tirx.IfThenElse(realize.predicate, statement, None), values)

    def each(count: int, statement: Callable[[Any], Any]) -> Any:
        lane, zero = tirx.Var("lane", "int64"), tirx.const(0, "int64")
        return everywhere(tirx.For(lane, zero, tirx.const(count, "int64"), tirx.ForKind.SERIAL, statement(lane)))

    def everywhere(statement: Any) -> Any:
        for loop in reversed(kept):
            statement = tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, statement)
        return fresh(statement)

    part = inside(add(own, element))
    parts = tvm_ffi.structural_map(nest, (SBlockRealize, lambda node: part if node.same_as(realize) else node))
    steps = [each(threads, lambda lane: tirx.BufferStore(lanes, block.init.value, at(lane))), parts]
    while threads > 1:
        threads, half = (threads + 1) // 2, threads // 2
        steps.append(each(half, partial(folded, threads)))
    first = {loop.loop_var: loop.min for loop in loops if loop.loop_var in reduced}
    result = inside(tirx.BufferStore(store.buffer, tirx.BufferLoad(lanes, at(0)), store.indices))
    steps.append(everywhere(substitute(result, first)))
    return SBlockRealize([], True, SBlock([], [], [], block.name_hint, tirx.SeqStmt(steps), alloc_buffers=[lanes]))
