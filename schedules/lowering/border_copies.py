"""Copies of CPU functions that end in a border: a loop without tests between two that store zeros.

A test of every element keeps LLVM from copying vectors; a row's border begins and ends at places known before its loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tvm
import tvm.sym
import tvm_ffi
from tvm import tirx

from schedules.lowering.statements import integer, joined, of_nodes, substitute, variables_of

_LESS = {tirx.LT: (1, 0), tirx.LE: (0, 0), tirx.GT: (1, 1), tirx.GE: (0, 1)}  # strictly; the other way round


def borders_apart(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod`, a module of lowered CPU functions, with its innermost loops over ``to[i] = if_then_else(within, from[i],
    constant)`` taken apart where ``within`` begins and ends.

    Loops stay whose tests are others than comparisons of sums with i, or i // constant, times a constant.
    """

    def visit(loop: Any) -> Any:
        return _apart(loop) or loop

    return tirx.transform.ConvertSSA()(of_nodes(mod, (tirx.For, visit)))


def _apart(loop: Any) -> Any:
    """The three loops in place of `loop`; None if it is another."""
    guarded, store = [], loop.body
    if isinstance(store, tirx.IfThenElse) and store.else_case is None:
        guarded, store = list(_all_of(store.condition)), store.then_case
    if loop.kind != tirx.ForKind.SERIAL or not isinstance(store, tirx.BufferStore):
        return None
    value = store.value
    if str(getattr(getattr(value, "op", None), "name", "")) != "prim.if_then_else":
        return None
    within, copied, beyond = value.args
    if not isinstance(beyond, tirx.FloatImm | tirx.IntImm):
        return None
    whole = integer(0), loop.extent
    stored = _ends(loop.loop_var, guarded, *whole)
    read = stored and _ends(loop.loop_var, list(_all_of(within)), *stored)
    if not read or not stored:
        return None
    parts = ((stored[0], read[0], beyond), (*read, copied), (read[1], stored[1], beyond))
    made = [_loop(loop, store, begin, end, each) for begin, end, each in parts]
    return joined([part for part in made if not (isinstance(part.extent, tirx.IntImm) and int(part.extent) == 0)])


def _all_of(test: Any) -> Iterator[Any]:
    if isinstance(test, tirx.And):
        yield from _all_of(test.a)
        yield from _all_of(test.b)
    else:
        yield test


def _ends(variable: Any, tests: Sequence[Any], begin: Any, end: Any) -> tuple[Any, Any] | None:
    """Where in [begin, end) the `tests` of `variable` hold, at most one stretch; None if they are not understood."""
    first, last, others = begin, end, []
    for test in tests:
        if not _uses(test, variable):
            others.append(test)
            continue
        found = _bound(variable, test)
        if found is None:
            return None
        below, at = found
        first, last = (tirx.max(first, at), last) if below else (first, tirx.min(last, at))
    if others:
        last = tirx.Select(tirx.all(*others), last, begin)
    analyzer = tvm.sym.Analyzer()
    last = analyzer.simplify(tirx.max(last, begin))
    return analyzer.simplify(tirx.min(first, last)), last


def _bound(variable: Any, test: Any) -> tuple[bool, Any] | None:
    """Where `test` of `variable` begins (True) or ceases (False) to hold, as a number."""
    if type(test) not in _LESS:
        return None
    strict, turned = _LESS[type(test)]
    less, more = (test.b, test.a) if turned else (test.a, test.b)
    sizes: list[int] = []
    unit = tirx.Var("unit", str(variable.ty))

    def quotient(node: Any) -> Any:
        if not node.a.same_as(variable) or not isinstance(node.b, tirx.IntImm):
            return node
        sizes.append(int(node.b))
        return unit

    room = tvm_ffi.structural_map(more - less - strict, (tirx.FloorDiv, quotient))
    found = tvm.sym.detect_linear_equation(room, [unit if sizes else variable])
    if not found or not isinstance(found[0], tirx.IntImm) or not int(found[0]):
        return None
    if len(set(sizes)) > 1 or _uses(found[1], variable):
        return None
    factor, rest, size = int(found[0]), found[1], (sizes or [1])[0]
    if factor > 0:  # factor * i + rest >= 0
        return True, -tirx.floordiv(rest, factor) * size
    return False, (tirx.floordiv(rest, -factor) + 1) * size


def _uses(expression: Any, variable: Any) -> bool:
    return any(used.same_as(variable) for used in variables_of(expression))


def _loop(loop: Any, store: Any, begin: Any, end: Any, value: Any) -> Any:
    index = tirx.Var(loop.loop_var.name, str(loop.loop_var.ty))
    body = substitute(tirx.BufferStore(store.buffer, value, store.indices), {loop.loop_var: begin + index})
    extent = tvm.sym.Analyzer().simplify(end - begin)
    return tirx.For(index, integer(0), extent, tirx.ForKind.SERIAL, body)
