"""A program written in TIRx as it grows, part by part.

Its author marks where each part begins (`schedules.steps.story`).  A mark holds up to the next one in the same
sequence of statements, and for what lies inside of the statements between them.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from schedules.steps.story import INSIDE, OUTSIDE, PART

WHOLE = "The program, as it was written"


def parts(mod: tvm.IRModule) -> list[tuple[str, tvm.IRModule]]:
    """The title of each part of ``main`` in order, and the program with this part and those before it; the last is the
    whole program.  No program has marks any more."""
    body = mod["main"].body
    titles = list(dict.fromkeys([WHOLE, *_marks(body)]))
    grown = []
    for count in range(1, len(titles) + 1):
        told = _Told(titles[:count])
        function = mod["main"].with_body(told.keep(body, WHOLE) or tirx.Evaluate(0))
        if told.kept:
            grown.append((titles[count - 1], tvm.IRModule({"main": function}, attrs=mod.attrs)))
    return grown


def _mark(statement: Any) -> tuple[str, str] | None:
    """(kind, title) if `statement` is a mark."""
    if not isinstance(statement, tirx.Evaluate):
        return None
    call = statement.value
    if str(getattr(getattr(call, "op", None), "name", "")) != "tirx.call_extern":
        return None
    kind = str(call.args[0].value)
    return (kind, str(call.args[1].value)) if kind in (PART, INSIDE, OUTSIDE) else None


def _marks(node: Any) -> list[str]:
    found: list[str] = []

    def visit(statement: Any) -> None:
        if mark := _mark(statement):
            found.append(mark[1])

    tvm_ffi.structural_walk(node, (tirx.Evaluate, visit))
    return found


class _Told:
    """Leaves out what belongs to none of `titles`."""

    def __init__(self, titles: list[str]) -> None:
        self.titles = set(titles)
        self.latest = titles[-1]
        self.kept = False  # whether anything of the latest part was

    def keep(self, node: Any, current: str) -> Any | None:
        """`node`, which lies in the part `current`, as far as it is told; None if nothing of it is."""
        if isinstance(node, tirx.SeqStmt):
            left = []
            interrupted: list[str] = []
            for each in node.seq:
                mark = _mark(each)
                if mark is None:
                    kept = self.keep(each, current)
                    left += [] if kept is None else [kept]
                elif mark[0] == OUTSIDE:
                    current = interrupted.pop()
                else:
                    if mark[0] == INSIDE:
                        interrupted.append(current)
                    current = mark[1]
            return None if not left else left[0] if len(left) == 1 else tirx.SeqStmt(left)
        if _mark(node):
            return None
        if isinstance(node, tirx.IfThenElse):
            then = self.keep(node.then_case, current)
            other = None if node.else_case is None else self.keep(node.else_case, current)
            if then is None and other is None:
                return None
            return tirx.IfThenElse(node.condition, tirx.Evaluate(0) if then is None else then, other)
        if isinstance(node, (tirx.AttrStmt, tirx.For, tirx.While)):
            body = self.keep(node.body, current)
            return None if body is None else _around(node, body)
        if current not in self.titles:
            return None
        self.kept = self.kept or current == self.latest
        return node


def _around(node: Any, body: Any) -> Any:
    """The statement `node` with another body."""
    if isinstance(node, tirx.AttrStmt):
        return tirx.AttrStmt(node.node, node.attr_key, node.value, body)
    if isinstance(node, tirx.While):
        return tirx.While(node.condition, body)
    return tirx.For(
        node.loop_var, node.min, node.extent, node.kind, body, node.thread_binding, node.annotations, node.step
    )
