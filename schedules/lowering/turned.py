"""Small square blocks that CPU functions turn as they copy them: vectors and shuffles in place of single elements.

``for i in L: for j in L: to[i + j * apart] = from[i * apart' + j]``, for L a power of two, reads L vectors, interleaves
halves of them log2(L) times, and writes L vectors; LLVM would read or write element by element, or by a gather.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm.sym
from tvm import ir, tirx

from schedules.lowering.statements import integer, joined, of_nodes, substitute

SIDES = (4, 8, 16)


def turned(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod`, a module of lowered CPU functions, with its turning copies in vectors."""
    return of_nodes(mod, (tirx.For, lambda loop: _turned(loop) or loop))


def _turned(loop: Any) -> Any:
    """The statements in place of `loop`; None if it is another."""
    inner = loop.body
    if not isinstance(inner, tirx.For) or not isinstance(inner.body, tirx.BufferStore):
        return None
    store, side = inner.body, _side(loop)
    if not side or side != _side(inner):
        return None
    load = store.value
    if not isinstance(load, ir.TensorLoad) or len(load.indices) != 1 or len(store.indices) != 1:
        return None
    if str(load.ty) != "float32":
        return None
    i, j = loop.loop_var, inner.loop_var
    read, write = (_plane(index, i, j) for index in (load.indices[0], store.indices[0]))
    if read is None or write is None or read[2] != 1 or write[1] != 1:
        return None
    (start, apart, _), (begin, _, away) = read, write
    statements = []

    def named(name: str, value: Any) -> Any:
        variable = tirx.Var(name, value.ty)
        statements.append(tirx.Bind(variable, value))
        return variable

    def lanes(first: Any) -> list[Any]:
        return [tirx.Ramp(first, integer(1), side)]

    rows = [
        named(f"row{number}", tirx.BufferLoad(load.source, lanes(start + integer(number * apart))))
        for number in range(side)
    ]
    low = [integer(part) for at in range(side // 2) for part in (at, at + side)]
    high = [integer(part) for at in range(side // 2, side) for part in (at, at + side)]
    for step in range(side.bit_length() - 1):  # each interleaves what is half of the rows apart
        pairs = list(zip(rows[: side // 2], rows[side // 2 :], strict=True))
        halves = [tirx.Shuffle(list(pair), half) for pair in pairs for half in (low, high)]
        rows = [named(f"step{step}_{number}", half) for number, half in enumerate(halves)]
    for number, row in enumerate(rows):
        statements.append(tirx.BufferStore(store.buffer, row, lanes(begin + integer(number * away))))
    return joined(statements)


def _side(loop: Any) -> int:
    """The extent of a loop that can be that of a block; 0 of another."""
    plain = (
        loop.kind == tirx.ForKind.SERIAL and isinstance(loop.extent, tirx.IntImm) and isinstance(loop.min, tirx.IntImm)
    )
    return int(loop.extent) if plain and int(loop.min) == 0 and int(loop.extent) in SIDES else 0


def _plane(index: Any, i: Any, j: Any) -> tuple[Any, int, int] | None:
    """(start, a, b) of an `index` that is start + a * i + b * j; None of another."""
    analyzer = tvm.sym.Analyzer()

    def at(y: Any, x: Any) -> Any:
        return substitute(index, {i: y, j: x})

    start = analyzer.simplify(at(integer(0), integer(0)))
    steps = [analyzer.simplify(at(*place) - start) for place in ((integer(1), integer(0)), (integer(0), integer(1)))]
    if not all(isinstance(step, tirx.IntImm) for step in steps):
        return None
    a, b = map(int, steps)
    return (start, a, b) if analyzer.can_prove_equal(index, start + i * a + j * b) else None
