"""float32 numbers rounded to TF32, whose mantissa has 10 bits, for matrix cores that would cut off the others.

gfx942's cut (https://github.com/ROCm/rocm-libraries/pull/9176), twice as much and always towards zero; the ISA guide
says both that they cut and that they round.  What has no bits below is the same either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm.tirx import PrimExpr

BELOW = 13  # bits of a float32's mantissa that TF32 has not
OVERFLOWS = 2.0**128 - 2.0**116  # what is as large, or larger, would be rounded to infinity


def rounded(x: PrimExpr) -> PrimExpr:
    """`x` to the nearest TF32, halves away from zero; infinities, NaN and what would become infinite as they are."""
    from tvm import tirx

    given = tirx.Var("given", "float32")
    bits = tirx.reinterpret("int32", given) + tirx.const(1 << (BELOW - 1), "int32")
    nearest = tirx.reinterpret("float32", bits & tirx.const(-1 << BELOW, "int32"))
    return tirx.Let(given, x, tirx.Select(tirx.abs(given) < tirx.const(OVERFLOWS, "float32"), nearest, given))
