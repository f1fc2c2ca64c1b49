"""What the sums of an operator are computed in, and how exact that is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arithmetic:
    """How a schedule multiplies and adds.

    `error` bounds what a sum of products may be off, in units of the sum of the absolute products, before the result is
    rounded to the output's dtype.  A tree over n terms is off by log2(n) units in the last place at most; a chain by
    about sqrt(n) / 2 where all terms are positive, by less where signs are mixed (Higham, "Accuracy and Stability of
    Numerical Algorithms", ch. 4; Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis").
    """

    name: str
    error: float
    of: str = ""  # what operands are rounded to, or split into addends of; "" for none of it
    addends: int = 1  # of an operand

    @property
    def products(self) -> int:
        """Those made for one product: of pairs of addends, all but the smallest."""
        return self.addends * (self.addends + 1) // 2

    @property
    def exact(self) -> bool:
        """Whether results are as exact as those of a convolution in float32 have to be."""
        return self.error <= FLOAT32.error


FLOAT32 = Arithmetic("float32", 2.0**-20)  # 16 units in the last place: no chain over a long row
# float32 products as three of bfloat16 parts: see `steps.split`; their sums are float32's
BF16X3 = Arithmetic("bf16x3", 3 * 2.0**-16 + FLOAT32.error, "bfloat16", 2)
# float32 products as six of bfloat16 addends: see `hopper.split`; of a product 2^-23 is left out at most
BF16X6 = Arithmetic("bf16x6", FLOAT32.error, "bfloat16", 3)
# float32 products of TF32 parts, each operand rounded to 10 bits of mantissa (2^-11 of it); the sums are float32's, of
# which tensor cores cut off what is below the last bit after every step
TF32 = Arithmetic("tf32", 2.0**-10 + 2.0**-13, "tf32")
