"""Zeros where a tensor has no elements: borders, and the round-up to whole tiles."""

from __future__ import annotations

from collections.abc import Sequence

from schedules.core.tvm import PrimExpr, te, tirx


def select(tests: Sequence[tuple[bool, PrimExpr]], value: PrimExpr) -> PrimExpr:
    """`value` where every test holds that is needed at all, else zero."""
    needed = [test for is_needed, test in tests if is_needed]
    value = tirx.convert(value)
    return te.if_then_else(te.all(*needed), value, tirx.const(0, str(value.ty))) if needed else value
