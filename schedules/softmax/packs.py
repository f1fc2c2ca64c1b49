"""Rows as the packs of 16 bytes that they lie in.

A row that does not start at a multiple of 16 bytes keeps its place among them: the packs from the one its first element
lies in to the one its last lies in are read, computed and stored as they lie in memory.  Only those two hold elements
of other rows, which count as neutral and are not stored.  So any width moves 16 bytes at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedules.problem import Argument
from schedules.softmax.definition import SoftmaxProblem
from schedules.softmax.rows import itemsize

PACK = 16  # bytes: what bulk copies count in and the widest access
MOST_ROUNDS = 32  # packs of a thread, which are unrolled


@dataclass(frozen=True)
class Frame:
    """`rows` rows of `cols` elements of one tensor, as the whole packs of 16 bytes that they lie in."""

    cols: int
    rows: int
    itemsize: int

    @classmethod
    def of_row(cls, problem: SoftmaxProblem) -> Frame:
        """One row of the tensors of the problem's dtype."""
        return cls(problem.cols, 1, itemsize(problem))

    @property
    def pack(self) -> int:
        """Elements of a pack."""
        return PACK // self.itemsize

    @property
    def aligned(self) -> bool:
        """Whether any multiple of `rows` rows starts with a pack."""
        return self.rows * self.cols % self.pack == 0

    @property
    def unit(self) -> int:
        """Elements: every row starts and ends at a multiple of so many."""
        return math.gcd(self.cols, self.pack)

    @property
    def most(self) -> int:
        """Packs that the rows lie in, at most."""
        before = self.pack - math.gcd(self.rows * self.cols, self.pack)
        return -(-(before + self.rows * self.cols) // self.pack)

    @property
    def nbytes(self) -> int:
        return self.most * PACK


def row_inputs(problem: SoftmaxProblem) -> tuple[Argument, ...]:
    """The inputs that have rows."""
    return tuple(a for a in problem.arguments() if not a.output and a.runtime_axis is not None)
