"""What a convolution does to its sums before it stores them: terms added, a scale, an activation, the output's dtype.

    y = scale * sum + factor * term + ..        in `work`
    output = activation(y)                      rounded to `out_dtype`, and saturated if that is int8 or int32

A problem carries this value; `definitions.epilogue` is its tensor expression, `core.reference` its reference.  The
scale and each factor is a number, or comes at run time: one for the tensor, or one for each channel.  A term of whole
numbers without a factor is added to the sum instead, before it is scaled.

Where the sums are whole numbers, each output is a certain number, bit for bit, and so the order of operations is too:
the sum is rounded to float32, then the product with `scale`; each term is rounded to float32 and added by one fused
multiply-add.  An int32 output is computed in int32 where that is exact: of whole factors that are known, and bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Union

from schedules.core.errors import ProblemError

V = TypeVar("V")
AXES = ("tensor", "channel", "pixel", "element")
RUN_TIME = AXES[:2]  # what may have a factor of its own that is an argument
# the steepest slope of each activation, which is what an error of its argument is multiplied by at most
SLOPES = {"none": 1.0, "relu": 1.0, "clamp": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13, "hardswish": 1.5}
EXACT = ("none", "relu", "clamp", "hardswish")  # that give one certain number whatever compiles them
CLAMPS = {"relu6": (0.0, 6.0)}  # those with a name
ACTIVATIONS = (*(name for name in SLOPES if name != "clamp"), *CLAMPS)
BOUNDS = {"int8": (-128.0, 127.0), "int32": (-(2.0**31), 2.0**31 - 128)}  # float32 numbers that saturation keeps


@dataclass(frozen=True)
class Term:
    """A tensor that is added, the argument `name` of `dtype`, times `factor`; or that is itself such a factor.

    `axis` says what has a value of its own: the "tensor" as a whole, each output "channel", each output "pixel" of an
    image, or each output "element".
    """

    name: str
    axis: str
    dtype: str
    factor: Factor = 1.0


Factor = Union[float, Term, None]  # noqa: UP007 (Term is not known before)


@dataclass(frozen=True)
class Activation:
    """A function of one number.  The bounds are those of a clamp.

    gelu is y/2 (1 + erf(y / sqrt 2)), gelu_tanh its approximation by tanh, silu y / (1 + exp(-y)), hardswish
    y min(max(y / 6 + 1/2, 0), 1) with one fused multiply-add; none of them, nor relu and clamp, hides a NaN.
    """

    name: str = "none"
    low: float = -math.inf
    high: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Activation:
        """From its name, or ``clamp:LOW:HIGH``.  Raises ProblemError."""
        if text in CLAMPS:
            return cls("clamp", *CLAMPS[text])
        if text in SLOPES and text != "clamp":
            return cls(text)
        name, *bounds = text.split(":")
        if name != "clamp":
            raise ProblemError(f"activation={text} is not {', '.join(ACTIVATIONS)} or clamp:LOW:HIGH")
        try:
            low, high = map(float, bounds)
        except ValueError:
            raise ProblemError(f"activation={text} has no two bounds; write clamp:LOW:HIGH, as in clamp:-1:1") from None
        if not -math.inf < low <= high < math.inf:
            raise ProblemError(f"activation={text} must have LOW <= HIGH, both finite")
        return cls("clamp", low + 0.0, high + 0.0)  # a negative zero is none

    def __str__(self) -> str:
        """The one spelling that problems with this activation have."""
        if self.name != "clamp":
            return self.name
        bounds = (self.low, self.high)
        named = next((name for name, clamp in CLAMPS.items() if clamp == bounds), None)
        return named or ":".join(["clamp", *(str(int(x) if x == int(x) else x) for x in bounds)])

    @property
    def exact(self) -> bool:
        return self.name in EXACT

    @property
    def slope(self) -> float:
        return SLOPES[self.name]


@dataclass(frozen=True)
class Epilogue:
    """See the module.  The terms are added in order, as they stand among a problem's arguments.

    Raises ProblemError where a whole-number output would depend on who computes it.
    """

    out_dtype: str
    terms: tuple[Term, ...] = ()
    scale: Factor = 1.0
    activation: Activation = Activation()

    def __post_init__(self) -> None:
        if self.out_dtype in BOUNDS and not self.activation.exact:
            raise ProblemError(
                f"activation={self.activation} cannot be exact, as out_dtype={self.out_dtype} is; use out_dtype=float32"
            )

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The scale, and those of the terms."""
        return self.scale, *(term.factor for term in self.terms)

    @property
    def operands(self) -> tuple[Term, ...]:
        """The tensors that it takes, in the order of the call: the terms, then factors that come at run time."""
        return *self.terms, *(factor for factor in self.factors if isinstance(factor, Term))

    def sorted(self, given: Sequence[V]) -> tuple[Any, list[tuple[Any, V]]]:
        """The scale, and each term with its factor before it, of what is `given` for each of the operands; factors are
        of these, numbers, or None."""
        of = {operand.name: value for operand, value in zip(self.operands, given, strict=True)}
        scale, *factors = (of[each.name] if isinstance(each, Term) else each for each in self.factors)
        return scale, [(factor, of[term.name]) for factor, term in zip(factors, self.terms, strict=True)]

    @property
    def work(self) -> str:
        """The dtype that it is computed in."""
        known = [factor for factor in self.factors if isinstance(factor, int | float)]
        if self.activation.name == "clamp":
            known += [self.activation.low, self.activation.high]
        whole = all(number == int(number) and abs(number) < 2**31 for number in known)
        exact = whole and self.operands == self.terms and self.activation.name != "hardswish"
        return "int32" if self.out_dtype == "int32" and exact else "float32"

    def of_axis(self, *axes: str) -> tuple[Term, ...]:
        """The operands of "tensor", "channel", "pixel" or "element"."""
        return tuple(operand for operand in self.operands if operand.axis in axes)

    @property
    def saturates_below(self) -> bool:
        """Whether relu is what saturation to an int8 does at its lower end, which is 0 then."""
        return self.out_dtype == "int8" and self.activation.name == "relu"
