"""The way out for tiles of Winograd's (`hopper.winograd`): the sums of each of their outputs, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from schedules.hopper.epilogue import Results
from schedules.hopper.residual import Residual
from schedules.tirx.types import Expr, Index


class TileResults(Results):
    """Of places each of which has several outputs."""

    output = 0

    def totals(self, m: int, group: int, below: int) -> Sequence[Expr]:
        return [self.fragment(self.output, m, group, 2 * below + j) for j in range(2)]

    def emit(self, place: Any, begin: Index = 0, residual: Residual | None = None) -> None:
        for number in range(self.work.outputs):
            self.output = number
            there, own = self.work.output_at(place, number)
            if there is None:
                super().emit(own, begin, residual)
            else:
                with T.If(there), T.Then():
                    super().emit(own, begin, residual)
