"""exp, exp2 and erf of float32 on a CPU, as arithmetic that vectorises: LLVM calls the C library for each element.

Definitions ask for TVM's own; a call, of a number or a vector, is written out in a program that is lowered, where loops
are vectors and nothing is copied any more that has a name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import ir, tirx

from schedules.lowering.statements import of_nodes

# log 2 as a number of 12 bits, whose product with a small whole number is exact, and what is left of it
LN2_HIGH = round(math.log(2) * 2**12) / 2**12
LN2_LOW = math.log(2) - LN2_HIGH
# the highest power first; from N. Juffa, "erff", who fitted both for an error below one unit in the last place: erf a/a
# - 1 by the powers of a**2 up to a = NEAR, and beyond it log(1 - erf |a|)/|a| + 1 by those of |a|
NEAR = 0.927734375
ERF_NEAR = (-5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)
ERF_FAR = (
    *(-1.72853470e-5, 3.83197126e-4, -3.88396438e-3, 2.42546219e-2),
    *(-1.06777877e-1, -6.34846687e-1, -1.28717512e-1),
)


def written_out(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` with its calls on CPUs in arithmetic."""

    def visit(call: Any) -> Any:
        made = FUNCTIONS.get(str(getattr(call.op, "name", "")))
        return bound(call.args[0], made) if made and str(call.ty).startswith("float32") else call

    return of_nodes(mod, (ir.Call, visit), "llvm")


def bound(value: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of `value`, which is computed once."""
    variable = tirx.Var("x", value.ty)
    return tirx.Let(variable, value, function(variable))


def exp2(x: Any) -> Any:
    """2**x: 0 below -126, where results would be denormal; infinity from 127.5 on; NaN of NaN."""
    return bound(tirx.floor(x + like(x, 0.5)), lambda whole: _power(x - whole, whole, x, 1.0))


def exp(x: Any) -> Any:
    """e**x, in the same bounds."""
    per = math.log2(math.e)

    def from_whole(whole: Any) -> Any:
        return _power((x - whole * like(x, LN2_HIGH) - whole * like(x, LN2_LOW)) * like(x, per), whole, x, 1 / per)

    return bound(tirx.floor(x * like(x, per) + like(x, 0.5)), from_whole)  # TVM 0.27 has no vector of nearbyint


def _power(fraction: Any, whole: Any, x: Any, bits: float) -> Any:
    """2**(fraction + whole), within the bounds of `x`, of which `bits` double the result: a float32 near 1.5 * 2**23
    counts in ones, so that the last bits of a sum with it are the exponent with its bias."""
    biased = tirx.reinterpret(_ints(x), whole + like(x, 1.5 * 2**23 + 127))
    scale = tirx.reinterpret(x.ty, biased << _wide(tirx.const(23, "int32"), x))
    result = bound(fraction, lambda f: polynomial(power_of_fraction()[::-1], f)) * scale
    infinity = like(x, math.inf)
    return tirx.Select(x < like(x, -126 * bits), like(x, 0), tirx.Select(x > like(x, 127.5 * bits), infinity, result))


def erf(x: Any) -> Any:
    """The error function, to one unit in the last place."""

    def joined(size: Any, rest: Any) -> Any:
        one = like(x, 1)
        beyond = tirx.Select(x < like(x, 0), rest - one, one - rest)
        return tirx.Select(size > like(x, NEAR), beyond, polynomial(ERF_NEAR, x * x) * x + x)

    def of_size(size: Any) -> Any:
        exponent = polynomial(ERF_FAR, size) * size - size
        return bound(exponent, lambda e: bound(exp(e), lambda rest: joined(size, rest)))

    return bound(tirx.Select(x < like(x, 0), -x, x), of_size)


def polynomial(coefficients: Sequence[float], x: Any) -> Any:
    """The polynomial of `x` with these coefficients, that of the highest power first."""
    first, *others = (like(x, c) for c in coefficients)
    return functools.reduce(lambda total, c: total * x + c, others, first)


@functools.lru_cache
def power_of_fraction() -> tuple[float, ...]:
    """Coefficients, that of 1 first, of a polynomial that is 2**f to within 3e-9 for |f| <= 1/2."""
    from numpy.polynomial import Chebyshev, Polynomial

    fitted = Chebyshev.interpolate(lambda f: 2.0**f, 6, domain=[-0.5, 0.5])
    return tuple(float(c) for c in fitted.convert(kind=Polynomial).coef)


def like(x: Any, value: float) -> Any:
    """`value` in every lane of what is like `x`."""
    return _wide(tirx.const(value, "float32"), x)


def _lanes(x: Any) -> int:
    return int(str(x.ty).partition("x")[2] or 1)


def _wide(value: Any, x: Any) -> Any:
    return tirx.Broadcast(value, _lanes(x)) if _lanes(x) > 1 else value


def _ints(x: Any) -> str:
    return f"int32x{_lanes(x)}" if _lanes(x) > 1 else "int32"


FUNCTIONS: dict[str, Callable[[Any], Any]] = {"tirx.exp": exp, "tirx.exp2": exp2, "tirx.erf": erf}
