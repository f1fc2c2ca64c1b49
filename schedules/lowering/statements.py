"""What passes over lowered statements share: walking, copying and substituting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.s_tir.stmt import SBlockRealize


def integer(value: int) -> Any:
    """`value` as an int32 constant."""
    return tirx.const(value, "int32")


def sequence(statement: Any) -> list[Any]:
    """The statements that `statement` consists of."""
    return list(statement.seq) if isinstance(statement, tirx.SeqStmt) else [statement]


def joined(statements: Sequence[Any]) -> Any:
    """The statements as one."""
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(list(statements))


def loops_of(statement: Any) -> list[Any]:
    """The loops of `statement`, outermost first."""
    found: list[Any] = []
    tvm_ffi.structural_walk(statement, (tirx.For, found.append), order="pre")
    return found


def stores_of(statement: Any) -> list[Any]:
    """The stores inside of `statement`."""
    found: list[Any] = []
    tvm_ffi.structural_walk(statement, (tirx.BufferStore, found.append))
    return found


def variables_of(expression: Any) -> list[Any]:
    """The variables that `expression` uses."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expression, (ir.Var, found.append))
    return found


def of_functions(mod: tvm.IRModule, change: Callable[[Any], Any], kind: str = "") -> tvm.IRModule:
    """`mod` with `change` of every program in it, or of those for targets of `kind`."""

    def changed(function: Any) -> Any:
        fits = isinstance(function, tirx.PrimFunc) and (not kind or function.attrs["target"].kind.name == kind)
        return change(function) if fits else function

    return tvm.IRModule({name: changed(function) for name, function in mod.functions.items()}, attrs=mod.attrs)


def of_nodes(mod: tvm.IRModule, change: Any, kind: str = "") -> tvm.IRModule:
    """The same with `change` of nodes, as `structural_map` takes it."""
    return of_functions(mod, lambda f: f.with_body(tvm_ffi.structural_map(f.body, change)), kind)


def reads_memory(expression: Any) -> bool:
    """Whether `expression` loads from a buffer."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expression, (ir.TensorLoad, found.append))
    return bool(found)


def substitute(node: Any, values: dict[Any, Any]) -> Any:
    """`node` with variables replaced by their `values`."""
    return tvm_ffi.structural_map(node, (ir.Var, lambda var: values.get(var, var)))


def fresh(statement: Any) -> Any:
    """A copy of `statement` with loop variables of its own."""
    return substitute(
        statement, {loop.loop_var: tirx.Var(loop.loop_var.name, loop.loop_var.ty) for loop in loops_of(statement)}
    )


def without_blocks(statement: Any) -> Any:
    """`statement` without opaque blocks: their predicates become conditions."""

    def realize(node: Any) -> Any:
        body = node.block.body
        if isinstance(node.predicate, tirx.IntImm) and int(node.predicate) == 1:
            return body
        return tirx.IfThenElse(node.predicate, body, None)

    return tvm_ffi.structural_map(statement, (SBlockRealize, realize))


def zero_or(value: Any) -> tuple[Any, Any] | None:
    """(condition, load) of  condition ? load : 0 ; None if `value` is not that."""
    if not isinstance(value, ir.Call) or not str(getattr(value.op, "name", "")).endswith(".if_then_else"):
        return None
    condition, load, other = value.args
    other = other.value if isinstance(other, tirx.Broadcast) else other
    if not isinstance(other, tirx.IntImm | tirx.FloatImm) or other.value != 0:
        return None
    return condition, load


def flat(load: Any) -> Any:
    """The index of what `load` reads, as if its buffer had one axis."""
    index = integer(0)
    for extent, inner in zip(load.source.shape, load.indices, strict=True):
        index = index * extent + inner
    return index


def bounds_of(program: Any) -> tvm.sym.Analyzer:
    """An analyzer that knows the bounds of every loop of `program`, those of its threads among them."""
    analyzer = tvm.sym.Analyzer()
    for loop in loops_of(program):
        analyzer.bind(loop.loop_var, ir.Range(loop.min, loop.min + loop.extent))
    return analyzer
