"""The way out of `tma_wgmma_few`: the columns of an output channel's taps, each shifted along the pixels, added up.

Rows of wgmma are pixels, so that a shift is a shuffle between lanes; what crosses from one warp's sixteen pixels to the
next's goes through shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from tvm import tirx
from tvm.script import tirx as T

from schedules.hopper.config import ROWS
from schedules.hopper.epilogue import Along, Results
from schedules.hopper.geometry import Member
from schedules.hopper.residual import Residual
from schedules.hopper.rows import GROUP, shifts
from schedules.hopper.stores import STORE, barrier
from schedules.operators.conv2d_nchw.few_tiles import VECTOR, WARP_ROWS, FewPlace, FewWork
from schedules.tirx.types import Buffer, Expr, Index
from schedules.tirx.values import named
from schedules.tirx.words import pack_16

# four lanes hold eight columns: `behind` are the first four of the next eight, `ahead` the last four of these
_MIDDLE = """
__device__ __forceinline__ float hopper_middle(float ahead, float behind, int lane) {
  return __shfl_xor_sync(0xffffffffu, lane & 2 ? ahead : behind, 2);
}
"""
_STMATRIX = "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16"
_HAND_OVER = """
__device__ __forceinline__ void hopper_hand_over(void* at, float a, float b, bool hand) {
  if (hand) *(float2*)at = make_float2(a, b);
}
"""
# lanes hold rows of eight four by four; `{0}` rows on, the first rows lie in the next eight
_ROWS_ON = """
__device__ __forceinline__ float hopper_sum_{0}_rows_on(float near, float far, int lane) {{
  return __shfl_sync(0xffffffffu, (lane >> 2) < {0} ? far : near, (lane + 4 * {0}) & 31);
}}
"""
_TAKE = """
__device__ __forceinline__ float hopper_take(float own, const void* at, bool take) {
  return take ? *(const float*)at : own;
}
"""


class FewResults(Results):
    """Of tiles of pixels x (taps along a row, output channels)."""

    work: FewWork
    memory: Buffer

    def emit(self, place: FewPlace, begin: Index = 0, residual: Residual | None = None) -> None:
        """Of a whole tile, as sums of neighbouring pixels make a result."""
        work, staging, member = self.work, self.work.staging, self.member
        start = named("start", member.consumer * staging.nbytes)
        edges = start + staging.together * staging.store_bytes
        row, column = named("row", T.truncdiv(member.lane, 4)), named("column", T.truncmod(member.lane, 4) * 2)
        sums = _Sums(self, self.memory, edges, row, column)
        sums.hand_over()
        each = ROWS // staging.width  # stores of a wgmma's rows
        blocks_of_pass = staging.together // each
        for block in range(staging.columns // ROWS):
            if block % blocks_of_pass == 0:
                with T.If(member.thread == 0), T.Then():
                    T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
                barrier(member.consumer)
            base = start + block % blocks_of_pass * each * staging.store_bytes
            pixel = block * ROWS + member.warp * WARP_ROWS + row
            of_rows = [self.of_row(place, pixel + half * GROUP) for half in range(2)]
            for group in range(work.channels // GROUP):
                self._write(sums, place, of_rows, block, group, base)
            if (block + 1) % blocks_of_pass == 0:
                T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
                barrier(member.consumer)
                self._store(place, start, (block + 1) * ROWS)

    def _write(
        self, sums: _Sums, place: FewPlace, of_rows: Sequence[Along], block: int, group: int, base: Expr
    ) -> None:
        """Put results of 64 pixels and eight channels into the memory, from `base` on."""
        work, staging, member = self.work, self.work.staging, self.member
        channel = group * GROUP
        columns = self.of_columns(place, channel + sums.column)
        words = []
        for half, of_row in enumerate(of_rows):
            totals = sums.totals(block, group, half)
            values = [self.finish(total, of_row, column) for total, column in zip(totals, columns, strict=True)]
            words.append(pack_16(work.output.dtype, *values))
        # eight lanes have the addresses of the first half's channels, eight those of the second's
        pixel = member.warp * WARP_ROWS + T.truncmod(T.truncdiv(member.lane, GROUP), 2) * GROUP
        store, at = T.truncdiv(pixel, staging.width), T.truncdiv(T.truncmod(pixel, staging.width), VECTOR)
        offset = store * staging.store_bytes + staging.chunk(channel + T.truncmod(member.lane, GROUP), at)
        T.evaluate(T.ptx[_STMATRIX](self.memory.ptr_to([base + offset]), *words))

    def _store(self, place: FewPlace, start: Expr, end: int) -> None:
        """Store a pass, which ends with pixel number `end` of the consumer's."""
        work, staging = self.work, self.work.staging
        form = STORE.format(work.target.rank)
        with T.If(self.member.thread == 0), T.Then():
            for store in range(staging.together):
                pixel = end + (store - staging.together) * staging.width
                source = self.memory.ptr_to([start + store * staging.store_bytes])
                to = work.store_at(place, self.member.part, pixel)
                T.evaluate(T.ptx[form](T.address_of(self.output_map), *to, source))
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())


@dataclass
class _Sums:
    """The sums of a tile by tap and output channel.  A thread has, of each eight rows and eight channels, `row` and
    `column` and the next; `edges` bytes into `memory` lie the sums that warps hand their neighbours."""

    results: FewResults
    memory: Buffer
    edges: Expr
    row: Expr
    column: Expr
    middles: dict[tuple[int, ...], Expr] = field(default_factory=dict)

    @property
    def work(self) -> FewWork:
        return self.results.work

    @property
    def member(self) -> Member:
        return self.results.member

    def of_tap(self, tap: int, block: int, group: int, register: int) -> Expr:
        """The accumulator of a tap, of 64 rows, of a group of eight output channels; or what its lanes hold where a
        tap's columns begin in the middle of a group."""
        first, rest = divmod(tap * self.work.pitch + group * GROUP, GROUP)
        if not rest:
            return self.results.fragment(0, block, first, register)
        at = tap, block, group, register
        if at not in self.middles:
            groups = self.work.config.block_n // GROUP
            ahead = self.results.fragment(0, block, first, register)
            behind = self.results.fragment(0, block, first + 1, register) if first + 1 < groups else T.float32(0)
            value = T.cuda.func_call(
                "hopper_middle", ahead, behind, self.member.lane, source_code=_MIDDLE, return_type="float32"
            )  # fmt: skip
            self.middles[at] = named("middle", value)
        return self.middles[at]

    def edge(self, tap: int, block: int, warp: Expr) -> Expr:
        """Bytes to the sums of a tap that a warp hands over of wgmma number `block`: as many rows as the tap's shift,
        from the end of the warp's rows if it is to the left, else from their beginning."""
        work, rows = self.work, [abs(shift) for shift in shifts(self.work.problem)]
        warps = work.config.rows // WARP_ROWS
        before = sum(rows[:tap]) * warps
        return self.edges + (before + (block * (ROWS // WARP_ROWS) + warp) * rows[tap]) * work.channels * 4

    def hand_over(self) -> None:
        """Write what the neighbouring warps need of each tap's sums: the last rows of those that move right, else the
        first."""
        work, row = self.work, self.row
        for tap, shift in enumerate(shifts(work.problem)):
            if shift == 0:
                continue
            half, hand, first = (1, row >= GROUP + shift, GROUP + shift) if shift < 0 else (0, row < shift, 0)
            for block, group in product(range(work.config.rows // ROWS), range(work.channels // GROUP)):
                element = (row - first) * work.channels + group * GROUP + self.column
                two = [self.of_tap(tap, block, group, 2 * half + j) for j in range(2)]
                target = self.memory.ptr_to([self.edge(tap, block, self.member.warp) + element * 4])
                T.evaluate(T.cuda.func_call("hopper_hand_over", target, *two, hand, source_code=_HAND_OVER))

    def totals(self, block: int, group: int, half: int) -> list[Expr]:
        """The two outputs, not yet finished, of a thread in the eight rows 8 * `half` down in 64 number `block`, and in
        channels 8 * group + lane % 4 * 2 + (0, 1): each tap's sums of the pixel its shift further; zeros beyond the
        row."""
        totals: list[Expr] = []
        for tap, shift in enumerate(shifts(self.work.problem)):
            two = [self.shifted(tap, shift, block, group, half, j) for j in range(2)]
            totals = [total + value for total, value in zip(totals, two, strict=True)] if totals else two
        return totals

    def shifted(self, tap: int, shift: int, block: int, group: int, half: int, j: int) -> Expr:
        """A tap's sum of the pixel `shift` rows down from that of `totals`, in its channel number `j`."""

        def sum_of(where: int) -> Expr:
            return self.of_tap(tap, block, group, 2 * where + j) if where in (0, 1) else T.float32(0)

        eights, rows = divmod(shift, GROUP)
        near, far = half + eights, half + eights + 1
        value = sum_of(near)
        if rows:
            name, source = f"hopper_sum_{rows}_rows_on", _ROWS_ON.format(rows)
            value = T.cuda.func_call(
                name, value, sum_of(far), self.member.lane, source_code=source, return_type="float32"
            )  # fmt: skip
            value = named("sum", value)
        # rows before this one lie in the near eight, from it on in the far
        wraps = self.row >= GROUP - rows
        for where in (near, far)[: 2 if rows else 1]:
            if where not in (0, 1):
                mine = (wraps if where == far else tirx.Not(wraps)) if rows else T.bool(True)
                value = self.handed(value, tap, shift, block, group, j, -1 if where < 0 else 1, mine)
        return value

    def handed(
        self, own: Expr, tap: int, shift: int, block: int, group: int, j: int, step: int, mine: Expr
    ) -> Expr:  # fmt: skip
        """`own`, or for threads for which `mine` is true what the warp `step` on handed over, if it is of this row."""
        work, warp = self.work, self.member.warp
        border = block * ROWS + warp * WARP_ROWS + (0 if step < 0 else WARP_ROWS)
        inside = T.truncmod(border, work.width) != 0
        row = T.truncmod(self.row + shift % GROUP, GROUP) - (GROUP + shift if shift < 0 else 0)
        element = row * work.channels + group * GROUP + self.column + j
        at = self.memory.ptr_to([self.edge(tap, block, warp + step) + element * 4])
        value = T.cuda.func_call(
            "hopper_take", own, at, tirx.all(inside, mine), source_code=_TAKE, return_type="float32"
        )  # fmt: skip
        return named("sum", value)
