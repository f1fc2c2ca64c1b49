"""What a convolution does to its sums before it stores them: terms added, a scale, an activation, the output's dtype.

    y = scale * sum + factor * term + ..        in `work`
    output = activation(y)                      rounded to `out_dtype`, and saturated if that is int8

A problem carries this value; `definitions.epilogue` is its tensor expression, `core.reference` its reference.

Where the sums are whole numbers, each output is a certain number, bit for bit, and so the order of operations is too:
the sum is rounded to float32, then the product with `scale`; each term is rounded to float32 and added by one fused
multiply-add.  An int32 output is computed in int32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedules.core.errors import ProblemError

AXES = ("channel", "pixel", "element")
# the steepest slope of each activation, which is what an error of its argument is multiplied by at most
SLOPES = {"none": 1.0, "relu": 1.0, "clamp": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13, "hardswish": 1.5}
EXACT = ("none", "relu", "clamp")  # that give one certain number whatever compiles them
CLAMPS = {"relu6": (0.0, 6.0)}  # those with a name
ACTIVATIONS = (*(name for name in SLOPES if name != "clamp"), *CLAMPS)
INT8 = (-128, 127)
LARGEST = {"int8": 2.0**7, "int32": 2.0**31}


@dataclass(frozen=True)
class Term:
    """A tensor that is added: the argument `name` of `dtype`, times `factor`.

    `axis` says what has a value of its own: each output "channel", each output "pixel" of an image, or each output
    "element".
    """

    name: str
    axis: str
    dtype: str
    factor: float = 1.0


@dataclass(frozen=True)
class Activation:
    """A function of one number.  The bounds are those of a clamp.

    gelu is y/2 (1 + erf(y / sqrt 2)), gelu_tanh its approximation by tanh, silu y / (1 + exp(-y)), hardswish
    y min(max(y + 3, 0), 6) / 6; none of them, nor relu and clamp, hides a NaN.
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
    scale: float = 1.0
    activation: Activation = Activation()

    def __post_init__(self) -> None:
        activation = self.activation
        if self.out_dtype not in LARGEST:
            return
        if not activation.exact:
            raise ProblemError(
                f"activation={activation} cannot be exact, as out_dtype={self.out_dtype} is; use out_dtype=float32"
            )
        bounds = (activation.low, activation.high) if activation.name == "clamp" and self.work == "int32" else ()
        if any(bound != int(bound) or abs(bound) >= 2**31 for bound in bounds):
            raise ProblemError(f"activation={activation} has bounds that are not whole, as out_dtype=int32 needs")

    @property
    def work(self) -> str:
        """The dtype that it is computed in."""
        return "int32" if self.out_dtype == "int32" else "float32"

    @property
    def only_rounds(self) -> bool:
        """Whether there is nothing to do but to round."""
        return self == Epilogue(self.out_dtype)

    def of_axis(self, axis: str) -> tuple[Term, ...]:
        """The terms of "channel", "pixel" or "element"."""
        return tuple(term for term in self.terms if term.axis == axis)

    def greatest(self, total: float) -> float:
        """No result is greater before it is rounded, where no sum is greater than `total`, whatever the terms."""
        parts = [(self.scale, total), *((term.factor, LARGEST.get(term.dtype, math.inf)) for term in self.terms)]
        bound = sum(abs(factor) * part for factor, part in parts if factor) * (1 + 2.0**-20)  # sums are rounded
        return min(bound, max(abs(self.activation.low), abs(self.activation.high)))
