"""cp.async: copies from global to shared memory that pass by the registers, zeros where a border or round-up has no
element."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.primitives.statements import loops_of, substitute, variables_of, zero_or

BYTES = (4, 8, 16)  # that one cp.async can copy


def call(function: tuple[str, str], *arguments: Any) -> Any:
    """A statement that calls `function` = (name, CUDA source)."""
    from tvm.script import tirx as T

    return tirx.Evaluate(T.cuda.func_call(function[0], *arguments, source_code=function[1]))


def commit() -> Any:
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


def _source(size: int) -> tuple[str, str]:
    name = f"cp_async_{size}"
    cache = "cg" if size == 16 else "ca"
    return name, (
        f"__device__ __forceinline__ void {name}(void* to, const void* from, bool inside) {{\n"
        f'  asm volatile("cp.async.{cache}.shared.global [%0], [%1], {size}, %2;\\n"\n'
        '               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? '
        f'{size} : 0) : "memory");\n}}\n'
    )


def to_async(statement: Any) -> Any:
    """`statement` with its copies as cp.async; one it cannot do stays as it is."""
    analyzer = tvm.sym.Analyzer()
    loops = loops_of(statement)
    for loop in loops:
        analyzer.bind(loop.loop_var, ir.Range(loop.min, loop.min + loop.extent))

    def vector(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.VECTORIZED:
            return loop
        found = _copy(loop.body, loop.loop_var, int(loop.extent), analyzer)
        return loop if found is None else found

    def scalar(store: Any) -> Any:
        found = _copy(store, None, 1, analyzer)
        return store if found is None else found

    if any(loop.kind == tirx.ForKind.VECTORIZED for loop in loops):
        return tvm_ffi.structural_map(statement, (tirx.For, vector))
    return tvm_ffi.structural_map(statement, (tirx.BufferStore, scalar))


def _copy(body: Any, lane: Any, lanes: int, analyzer: Any) -> Any:
    """The cp.async of  for lane in lanes: shared[..] = condition ? global[..] : 0 ; None if it is not that."""
    guards = []
    while isinstance(body, tirx.IfThenElse) and body.else_case is None:
        guards.append(body.condition)
        body = body.then_case
    if not isinstance(body, tirx.BufferStore):
        return None
    inside, value = zero_or(body.value) or (tirx.const(True, "bool"), body.value)
    size = lanes * tvm.DataType(str(body.buffer.dtype)).bits // 8
    if not isinstance(value, ir.TensorLoad) or size not in BYTES or value.source.scope() not in ("", "global"):
        return None
    conditions = [analyzer.simplify(condition) for condition in (inside, *guards)]
    if any(var.same_as(lane) for condition in conditions for var in variables_of(condition)):
        return None

    def first(node: Any) -> Any:
        return node if lane is None else substitute(node, {lane: tirx.const(0, str(lane.ty))})

    statement = call(
        _source(size),
        tirx.op.address_of(first(tirx.BufferLoad(body.buffer, body.indices))),
        tirx.op.address_of(first(value)),
        conditions[0],
    )
    for guard in conditions[1:]:
        statement = tirx.IfThenElse(guard, statement, None)
    return statement
