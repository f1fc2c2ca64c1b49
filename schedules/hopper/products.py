"""What a consumer multiplies of a stage: its rows of operand a by operand b, by wgmma into its sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.hopper.config import K_BYTES, ROWS
from schedules.hopper.fragments import SETS, fragments_of
from schedules.hopper.geometry import ClusterPlace, Member, Product, Work
from schedules.hopper.instructions import Multiply
from schedules.hopper.ring import Ring
from schedules.hopper.shared import UNIT, SharedTile, aligned
from schedules.hopper.turning import SlotRing
from schedules.tirx.types import Buffer, Expr, Index, Pointer
from schedules.tirx.values import named

# A sum gets the one {0} columns further, of `next` where that is another group of eight: of a lane beside it, which
# gives its own of the group that is wanted.
_SHIFT = """
__device__ __forceinline__ void hopper_shift_{0}(float& sum, float next, int lane) {{
  float given = (lane & 3) < {0} / 2 ? next : sum;
  sum = __shfl_sync(0xffffffffu, given, (lane & ~3) | ((lane + {0} / 2) & 3));
}}
"""
# the same of two neighbours by one column
_SHIFT_ONE = """
__device__ __forceinline__ void hopper_shift_1(float& even, float& odd, float next, int lane) {
  float given = (lane & 3) < 1 ? next : even;
  even = odd;
  odd = __shfl_sync(0xffffffffu, given, (lane & ~3) | ((lane + 1) & 3));
}
"""
# and back, of which the first gets the second of the lane before, or of the group before: `near`
_SHIFT_BACK = """
__device__ __forceinline__ void hopper_shift_back(float& even, float& odd, float near, int lane) {
  float given = (lane & 3) == 3 ? near : odd;
  odd = even;
  even = __shfl_sync(0xffffffffu, given, (lane & ~3) | ((lane + 3) & 3));
}
"""


def multiply_of(work: Work) -> Multiply:
    """The wgmma of `work`."""
    a, b = work.a.tile, work.b.tile
    return Multiply(work.dtype, work.config.columns, a.transposed, b.transposed, work.a.by_registers)


class Products:
    """The sums of a consumer, `member` of whose threads this is, and where it finds its operands.

    Operand a is a descriptor of the consumer's rows; or, by way of registers, the memory of their `fragments`.
    Descriptors are those of the first stage, or of operand a of the first of its `slots`; the block stands at `at`.
    """

    def __init__(
        self, work: Work, ring: Ring, filters: Buffer, member: Member, at: ClusterPlace, slots: SlotRing | None = None
    ) -> None:
        self.work, self.config, self.ring, self.at, self.slots = work, work.config, ring, at, slots
        self.multiply = multiply_of(work)
        self.blocks_m = self.config.rows // ROWS
        self.fragments = fragments_of(work.a, self.blocks_m)
        consumer_m, consumer_n = work.part_at(member.part)
        kept = work.shifts.sums(self.blocks_m) if work.shifts else 0
        self.sums = self.multiplied = _registers("sums", self.count * work.outputs + kept, self.multiply.accumulator)
        if self.config.promoted:
            self.multiplied = _registers("sums_of_stage", self.count, self.multiply.accumulator)
        assert bool(self.fragments) == self.config.by_threads
        if self.fragments:
            self.a = _registers("fragments", self.fragments.registers, "uint32")
            self.fragments.locate(ring.memory.ptr_to([0]), consumer_m * self.config.rows, member)
        else:
            memory = slots.memory if slots else ring.memory
            rows = memory.ptr_to([consumer_m * work.a.tile.row_offset(self.config.rows)])
            self.a = _descriptor("a_tile", work.a.tile, rows)
        columns = consumer_n * work.b.tile.row_offset(self.config.columns)
        start = columns if self.config.stationary else work.b_start + columns
        self.b = _descriptor("b_tile", work.b.tile, filters.ptr_to([start]))

    @property
    def count(self) -> int:
        """Sums of a thread."""
        return self.work.sums * self.blocks_m * self.multiply.registers

    @property
    def parts(self) -> Sequence[tuple[range, range]]:
        """The products of a stage and their steps along the reduction, in parts each of which is waited for while the
        next is multiplied."""
        products = len(self.work.products)
        if self.fragments:
            sets = [self.fragments.of_set(number) for number in range(SETS)]
            return [(range(number, number + 1), steps) for number, steps in product(range(products), sets)]
        return [(range(products), range(self.work.a.tile.k * self.work.a.tile.item // K_BYTES))]

    def begin_tile(self, place: Any) -> None:
        """Go to the tile at `place`."""
        if self.fragments:
            self.fragments.begin_tile(self.work.position_at(place))
        if self.config.promoted:
            for i in range(self.count * self.work.outputs):
                T.buffer_store(self.sums, T.float32(0), [i])
        self.tile = place

    def _kernel_row(self, step: Expr) -> Index:
        """Of the taps of the block's stage number `step` of a tile that needs all stages."""
        if self.work.kernel[0] == 1:
            return 0
        number = self.at.rank_k + step * self.config.split_k
        return named("ry", T.truncdiv(number, self.work.kernel[1] * self.work.chunks))

    def _chunk_of_channels(self, step: Expr) -> Expr:
        """The same for the channels."""
        return T.truncmod(self.at.rank_k + step * self.config.split_k, self.work.chunks)

    def promote_stage(self, step: Expr, release: Callable[[], None]) -> None:
        """Multiply the ring's stage, number `step` of a tile, which `release` frees, and add its sums up: to nearest,
        where tensor cores cut off towards zero."""
        ((products, steps),) = self.parts
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        self._multiply(products, steps, step)
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
        if self.work.outputs == 1:
            self.settle()
            release()
            for i in range(self.count):
                T.buffer_store(self.sums, self.sums[i] + self.multiplied[i], [i])
            return
        factors = self.work.factors(self.tile, T.truncdiv(step, self.work.chunks))
        chunk, together = self._chunk(step), self.work.together
        self.settle()
        release()
        with T.If(tirx.any(T.truncmod(chunk, together) == together - 1, chunk == self.work.chunks - 1)), T.Then():
            for output, factor in enumerate(factors):
                for i in range(output * self.count, (output + 1) * self.count):
                    T.buffer_store(self.sums, self.sums[i] + factor * self.multiplied[i % self.count], [i])

    def _chunk(self, step: Expr) -> Expr:
        """Of a tap, which stage number `step` of a tile with several outputs is."""
        return T.truncmod(step, self.work.chunks)

    def multiply_stage(self, step: Expr, release_last: Callable[[], None], of_chunk: Index = 0) -> None:
        """Multiply the ring's stage, number `step` of a tile, `of_chunk` of those that take a turned chunk;
        `release_last` frees the one before, once it is read."""
        if self.fragments:
            self.fragments.begin_stage(self.ring.start, self._kernel_row(step), self._chunk_of_channels(step))
        if self.slots:
            turned = self.work.a.turned
            assert turned
            more = units(self.slots.slot, turned.slot_bytes, 0) + T.Cast("uint64", turned.moved(of_chunk))
            self.begins = self.a + named("to_taps", more)
        for number, (products, steps) in enumerate(self.parts):
            if self.fragments:
                if steps.start == 0:
                    self.fragments.begin_product(products.start)
                for each in product(steps, range(self.blocks_m)):
                    self.fragments.read(self.a, *each)
            T.evaluate(T.ptx.wgmma.fence.sync.aligned())
            self._multiply(products, steps, step)
            T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
            T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
            if number == 0:
                with T.If(step > 0), T.Then():
                    release_last()

    def _multiply(self, products: range, steps: range, stage_step: Expr) -> None:
        """Issue some products of some steps of a stage."""
        for step, number, m in self._order(products, steps):
            each = self.work.products[number]
            # of the products that a stage adds to the same sums, the first may begin them anew
            others = (other.sums for other in self.work.products[:number])
            begins = step == 0 and each.sums not in others
            anew = T.bool(False) if self.config.promoted else stage_step > 0
            if self.work.together > 1:
                anew = T.truncmod(self._chunk(stage_step), self.work.together) > 0
            self.multiply.emit(
                self._sums(each, m), self._a(each, step, m), self._b(each, step, stage_step),
                anew if begins else T.bool(True),
            )  # fmt: skip

    def _order(self, products: range, steps: range) -> Iterator[tuple[int, int, int]]:
        """Steps, products, and blocks of ROWS rows of each; of operands that are sums products come in their own order,
        so that small ones add up before they meet large ones."""
        if self.work.a.addends > 1:
            return ((step, number, m) for number, step, m in product(products, steps, range(self.blocks_m)))
        return product(steps, products, range(self.blocks_m))

    def _sums(self, each: Product, m: int) -> list[Expr]:
        first = (each.sums * self.blocks_m + m) * self.multiply.registers
        return [self.multiplied[first + i] for i in range(self.multiply.registers)]

    def _a(self, each: Product, step: int, m: int) -> list[Expr]:
        """Operand a of block `m` of ROWS rows."""
        if self.fragments:
            return self.fragments.of(self.a, step, m)
        tile = self.work.a.tile
        offset = each.a + tile.k_offset(step) + tile.row_offset(m * ROWS)
        if self.slots:
            return [self.begins + T.uint64(offset // UNIT)]
        return [self.a + units(self.ring.stage, self.work.stage_bytes, offset)]

    def _b(self, each: Product, step: int, stage_step: Expr) -> Expr:
        """Operand b; where it stays, the tile's stages lie one behind the other."""
        offset = each.b + self.work.b.tile.k_offset(step)
        if self.config.stationary:
            return self.b + units(stage_step, aligned(self.work.b.nbytes), offset)
        return self.b + units(self.ring.stage, self.work.stage_bytes, offset)

    def shift(self, lane: Expr, phase: Expr) -> None:
        """Move all sums as the work's `shifts` say, when they are there, behind a phase."""
        shifts = self.work.shifts
        assert shifts
        self.settle()
        for time in range(shifts.back if shifts.kept else 0):
            with T.If(phase == shifts.phases - 1 - shifts.back + time), T.Then():
                for kept, own in self._kept(time):
                    T.buffer_store(self.sums, self.sums[own], [kept])
        pairs = shifts.columns == 1
        name, source = f"hopper_shift_{shifts.columns}", _SHIFT_ONE if pairs else _SHIFT.format(shifts.columns)
        for block in range(0, self.count, self.multiply.registers):
            for group, following in enumerate(shifts.following):
                own = block + 4 * group
                for i in range(0, 4, 1 + pairs):
                    moved = [self.sums[own + i + j] for j in range(1 + pairs)]
                    other = T.float32(0) if following is None else self.sums[block + 4 * following + i]
                    T.evaluate(T.cuda.func_call(name, *moved, other, lane, source_code=source))

    def shift_back(self, lane: Expr) -> None:
        """Move all sums to where they belong, behind the last phase, when they are there."""
        shifts = self.work.shifts
        assert shifts
        for time in reversed(range(shifts.back)):
            first = dict((own, kept) for kept, own in self._kept(time))
            for at in reversed(range(0, self.count, 2)):
                group, below = divmod(at % self.multiply.registers, 4)
                begins = group == 0 or shifts.following[group - 1] is None
                near = T.float32(0) if begins else self.sums[at - 3]
                call = "hopper_shift_back", self.sums[at], self.sums[at + 1], near, lane
                T.evaluate(T.cuda.func_call(*call, source_code=_SHIFT_BACK))
                if at in first:
                    value = T.Select((lane & 3) == 0, self.sums[first[at]], self.sums[at])
                    T.buffer_store(self.sums, value, [at])

    def _kept(self, time: int) -> Iterator[tuple[int, int]]:
        """Of each sum that shift number `time` of those that keep some does: where it waits, and where it was."""
        shifts = self.work.shifts
        assert shifts
        each = product(shifts.kept, range(self.blocks_m), range(2))
        for number, (group, m, below) in enumerate(each, time * len(shifts.kept) * self.blocks_m * 2):
            yield self.count + number, m * self.multiply.registers + 4 * group + 2 * below

    def settle(self) -> None:
        """Wait until all sums are there."""
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
        self.multiply.settle([self.multiplied[i] for i in range(self.count)])


def units(number: Expr, nbytes: int, offset: int) -> Expr:
    """What a descriptor has to be raised by for `offset` bytes beyond number `number` of pieces of `nbytes`."""
    return T.Cast("uint64", number * (nbytes // UNIT) + offset // UNIT)


def _registers(name: str, count: int, dtype: str) -> Buffer:
    found = T.alloc_local((count,), dtype)
    IRBuilder.name(name, found)
    return found


def _descriptor(name: str, tile: SharedTile, pointer: Pointer) -> Expr:
    """The descriptor of the tile that `pointer` points to."""
    cell = T.alloc_local((1,), "uint64")
    IRBuilder.name(name, cell)
    T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(cell[0]), pointer, *tile.descriptor))
    return cell[0]
