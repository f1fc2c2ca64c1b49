"""The way out for tiles of image rows (`hopper.rows`): each tap's sums shifted along their row, and added up; or of a
stride of two every other one.

Columns of wgmma are pixels, so that a shift is a choice of registers and a shuffle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from schedules.hopper.epilogue import Results
from schedules.hopper.rows import GROUP, RowTiles, shifts
from schedules.tirx.types import Expr
from schedules.tirx.values import named

# lanes on within four; the first lanes of the four lie in the next group
_ACROSS = """
__device__ __forceinline__ float hopper_sum_{0}_lanes_on(float near, float far, int lane) {{
  return __shfl_sync(0xffffffffu, (lane & 3) < {0} ? far : near, (lane & ~3) | ((lane + {0}) & 3));
}}
"""


# of a lane's four the lane 2 * lane + {0} of them, of the first two lanes from `near`, of others from `far`
_EVERY_OTHER = """
__device__ __forceinline__ float hopper_every_other_{0}(float near, float far, int lane) {{
  int from = (lane & ~3) | ((2 * lane + {0}) & 3);
  float a = __shfl_sync(0xffffffffu, near, from), b = __shfl_sync(0xffffffffu, far, from);
  return (lane & 2) ? b : a;
}}
"""


class ShiftedResults(Results):
    """Of tiles `rows`, each set of whose sums is a tap's of a kernel row."""

    def __init__(self, rows: RowTiles, *given: Any) -> None:
        super().__init__(*given)
        self.rows = rows

    def totals(self, m: int, group: int, below: int) -> Sequence[Expr]:
        if self.rows.step > 1:
            return [self._every_other(m, group, below, j) for j in range(2)]
        first, *others = (
            self._shifted(tap, shift, m, group, below) for tap, shift in enumerate(shifts(self.rows.tiles.problem))
        )
        return [sum(taps[1:], taps[0]) for taps in zip(first, *others, strict=True)]

    def _every_other(self, m: int, group: int, below: int, j: int) -> Expr:
        """A thread's sum number `j` of a stored group, whose columns are the even ones of two that are loaded."""
        near, far = (self.fragment(0, m, 2 * group + i, 2 * below) for i in range(2))
        source = _EVERY_OTHER.format(j)
        value = T.cuda.func_call(
            f"hopper_every_other_{j}", near, far, self.member.lane, source_code=source, return_type="float32"
        )
        return named("sum", value)

    def _shifted(self, tap: int, shift: int, m: int, group: int, below: int) -> list[Expr]:
        """A thread's two sums of a tap, `shift` columns right of those of `totals`; zeros beyond the row.

        Where a sum lies in another lane, that lane knows which of its two candidates, a group apart, is asked for.
        """
        row = self.rows.width // GROUP

        def sum_of(where: int, j: int) -> Expr:
            inside = where // row == group // row
            return self.fragment(tap, m, where, 2 * below + j) if inside else T.float32(0)

        sums = []
        for j in range(2):
            pair, parity = divmod(j + shift, 2)
            groups, lanes = divmod(pair, 4)
            near = sum_of(group + groups, parity)
            if lanes:
                far = sum_of(group + groups + 1, parity)
                name, source = f"hopper_sum_{lanes}_lanes_on", _ACROSS.format(lanes)
                # bound, as all lanes must take part whatever becomes of the value
                value = T.cuda.func_call(
                    name, near, far, self.member.lane, source_code=source, return_type="float32"
                )  # fmt: skip
                near = named("sum", value)
            sums.append(near)
        return sums
