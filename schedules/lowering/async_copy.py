"""What runs beside the threads: cp.async, copies from global to shared memory that pass by the registers, zeros where a
border or round-up has no element; and what waits for it, or for wgmma."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.lowering.cursor import split
from schedules.lowering.statements import flat, integer, loops_of, stores_of, substitute, variables_of, zero_or

BYTES = (4, 8, 16)  # that one cp.async can copy


def call(function: tuple[str, str], *arguments: Any) -> Any:
    """A statement that calls `function` = (name, CUDA source)."""
    from tvm.script import tirx as T

    return tirx.Evaluate(T.cuda.func_call(function[0], *arguments, source_code=function[1]))


def commit() -> Any:
    """cp.async.commit_group."""
    return call(
        (
            "cp_async_commit",
            "__device__ __forceinline__ void cp_async_commit() "
            '{ asm volatile("cp.async.commit_group;\\n" ::: "memory"); }\n',
        )
    )


def wait(groups: int) -> Any:
    """Wait until all but the last `groups` committed groups have landed."""
    name = f"cp_async_wait_{groups}"
    return call(
        (
            name,
            f"__device__ __forceinline__ void {name}() "
            f'{{ asm volatile("cp.async.wait_group {groups};\\n" ::: "memory"); }}\n',
        )
    )


def fence() -> Any:
    """Let the async proxy, which wgmma reads by, see what this thread has written to shared memory."""
    return call(
        (
            "fence_async_proxy",
            "__device__ __forceinline__ void fence_async_proxy() "
            '{ asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }\n',
        )
    )


def settle(sums: Any) -> Any:
    """Wait for every wgmma that this thread has committed, and keep the compiler from reading its `sums` earlier."""
    count = math.prod(int(extent) for extent in sums.shape)
    name = f"wgmma_settle_{count}"
    source = (
        f"__device__ __forceinline__ void {name}(float* c) {{\n"
        '  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");\n'
        f'  #pragma unroll\n  for (int i = 0; i < {count}; ++i) asm volatile("" : "+f"(c[i]) :: "memory");\n}}\n'
    )
    first = tirx.BufferLoad(sums, [integer(0) for _ in sums.shape])
    return call((name, source), tirx.op.address_of(first))


def _source(size: int) -> tuple[str, str]:
    name = f"cp_async_{size}"
    cache = "cg" if size == 16 else "ca"
    # the steps are constants once the loop around is unrolled, and then part of the instruction
    return name, (
        "template <typename T, typename Offset, typename Step>\n"  # int, or long where the tensor is large
        f"__device__ __forceinline__ void {name}(T* to, int to_step, const T* from, Offset offset, Step step, "
        "bool inside) {\n"
        f'  asm volatile("cp.async.{cache}.shared.global [%0], [%1], {size}, %2;\\n"\n'
        '               :: "r"((unsigned)__cvta_generic_to_shared(to) + to_step * (int)sizeof(T)), '
        f'"l"(from + offset + step), "r"(inside ? {size} : 0) : "memory");\n}}\n'
    )


class Copies:
    """Turns copies from global to shared memory into cp.async.

    `analyzer` knows the bounds of the program's loops.  `follow` gives what to use in place of an index, which is the
    sum of its two arguments: one that stays the same, and one that depends only on `loops`, those of the pipeline; None
    if it has nothing better.
    """

    def __init__(self, analyzer: tvm.sym.Analyzer, loops: Sequence[Any], follow: Callable[[Any, Any], Any]) -> None:
        self.analyzer, self.follow = analyzer, follow
        self.loops = {loop.loop_var for loop in loops}

    def convert(self, statement: Any) -> Any:
        """`statement`, a copy's loop nest, as cp.async; None if that cannot do it."""
        loops = loops_of(statement)
        rounds = {
            loop.loop_var: tirx.const(0, str(loop.loop_var.ty))
            for loop in loops
            if loop.kind in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED)
        }

        def vector(loop: Any) -> Any:
            if loop.kind != tirx.ForKind.VECTORIZED:
                return loop
            return self._copy(loop.body, loop.loop_var, int(loop.extent), rounds) or loop

        def scalar(store: Any) -> Any:
            return self._copy(store, None, 1, rounds) or store

        if any(loop.kind == tirx.ForKind.VECTORIZED for loop in loops):
            statement = tvm_ffi.structural_map(statement, (tirx.For, vector))
        else:
            statement = tvm_ffi.structural_map(statement, (tirx.BufferStore, scalar))
        return None if stores_of(statement) else statement

    def _copy(self, body: Any, lane: Any, lanes: int, rounds: dict[Any, Any]) -> Any:
        """The cp.async of  for lane in lanes: shared[..] = condition ? global[..] : 0 ; None if it is not that."""
        guards = []
        while isinstance(body, tirx.IfThenElse) and body.else_case is None:
            guards.append(body.condition)
            body = body.then_case
        if not isinstance(body, tirx.BufferStore):
            return None
        inside, value = zero_or(body.value) or (tirx.const(True, "bool"), body.value)
        size = lanes * tvm.DataType(str(body.buffer.dtype)).bits // 8
        if not isinstance(value, ir.TensorLoad) or size not in BYTES:
            return None
        conditions = [self.analyzer.simplify(condition) for condition in (inside, *guards)]
        if any(var.same_as(lane) for condition in conditions for var in variables_of(condition)):
            return None
        first = {} if lane is None else {lane: tirx.const(0, str(lane.ty))}
        to, to_step = self._apart(substitute(tirx.BufferLoad(body.buffer, body.indices), first), rounds)
        source, step = self._apart(substitute(value, first), rounds)
        source, offset = self._along(source, rounds)
        statement = call(
            _source(size), tirx.op.address_of(to), to_step, tirx.op.address_of(source), offset, step, conditions[0]
        )
        for guard in conditions[1:]:
            statement = tirx.IfThenElse(guard, statement, None)
        return statement

    def _apart(self, load: Any, rounds: dict[Any, Any]) -> tuple[Any, Any]:
        """`load` in the first round, and how far that of this round lies behind it; (`load`, 0) if that is no function
        of the round alone."""
        found = split(flat(load), rounds, self.analyzer)
        return (load, integer(0)) if found is None else (substitute(load, rounds), found[1])

    def _along(self, load: Any, rounds: dict[Any, Any]) -> tuple[Any, Any]:
        """An element of the same buffer, and how far `load` lies behind it at the pipeline's position."""
        found = split(flat(load), self.loops, self.analyzer)
        if found is None or any(var in rounds for var in variables_of(found[0])):
            return load, integer(0)
        followed = self.follow(*found)
        if followed is None:
            return load, integer(0)
        return tirx.BufferLoad(load.source, [integer(0) for _ in load.indices]), followed
