"""From accumulators to global memory: each consumer's results pass through shared memory, from where TMA stores them.

A store takes `width` columns of all of a consumer's rows; TMA clips it at the tensor's end.  Several stores make a
pass, as many as the staging memory holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from tvm.script import tirx as T

from schedules.hopper.config import ROWS, WARPGROUP
from schedules.hopper.shared import Staging
from schedules.hopper.work import Fragment, Member, Tensors, Work

STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group"
_STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
_FIRST_BARRIER = 1  # named barriers of the consumers; 0 is the whole block's
_PACK_16 = """
__device__ __forceinline__ unsigned int hopper_pack_{0}(float a, float b) {{
  unsigned int r; asm("cvt.rn.{0}x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r;
}}
"""
# 1.5 * 2**23: what is added to it is rounded to a whole number, to nearest even, in the lowest bits
_PACK_8 = """
__device__ __forceinline__ unsigned int hopper_byte(float y) {
  return __float_as_uint(fminf(fmaxf(y, -128.f), 127.f) + 12582912.f);
}
__device__ __forceinline__ unsigned int hopper_pack_s8(float a, float b, float c, float d) {
  unsigned int low = __byte_perm(hopper_byte(a), hopper_byte(b), 0x0040);
  unsigned int high = __byte_perm(hopper_byte(c), hopper_byte(d), 0x0040);
  return __byte_perm(low, high, 0x5410);
}
"""
# u and v are groups of eight columns, two bytes of row lane / 4 and two of the row eight below.  Neighbouring lanes
# exchange, so that even ones have four bytes of u and odd ones four of v.
_STORE_8 = """
__device__ __forceinline__ void hopper_store_s8(unsigned int u, unsigned int v, void* above, void* below, int lane) {
  unsigned int mine = lane & 1 ? v : u, other = lane & 1 ? u : v;
  unsigned int got = __shfl_xor_sync(0xffffffffu, other, 1);
  unsigned int left = lane & 1 ? got : mine, right = lane & 1 ? mine : got;
  int at = (lane & 1) * 8 + (lane >> 1 & 1) * 4;
  *(unsigned int*)((char*)above + at) = __byte_perm(left, right, 0x5410);
  *(unsigned int*)((char*)below + at) = __byte_perm(left, right, 0x7632);
}
"""
_STORE_32 = """
__device__ __forceinline__ void hopper_store_{0}({0} a, {0} b, void* at) {{ *({0}2*)at = make_{0}2(a, b); }}
"""


def fragment_of(work: Work, sums: Any) -> Fragment:
    """The accumulators of `sums` by what they are of."""
    blocks_m, groups = work.config.rows // ROWS, work.config.columns // 8

    def fragment(which: int, m: int, group: int, register: int) -> Any:
        return sums[((which * blocks_m + m) * groups + group) * 4 + register]

    return fragment


def barrier(consumer: Any) -> None:
    """Wait for all threads of the consumer."""
    T.evaluate(T.ptx.bar.sync(T.Cast("uint32", _FIRST_BARRIER + consumer), T.uint32(WARPGROUP)))


def emit(work: Work, tensors: Tensors, output_map: Any, place: Any, sums: Any, memory: Any, member: Member) -> None:
    """Finish the tile of one consumer and issue its stores."""
    from schedules.hopper.program import named

    consumer, warp, lane, thread = member.consumer, member.warp, member.lane, member.thread
    fragment = fragment_of(work, sums)
    staging = work.output.staging
    write = _WRITERS[work.output.dtype]
    top = named("top", warp * 16 + T.truncdiv(lane, 4))
    left = named("left", T.truncmod(lane, 4) * 2)
    start = named("start", consumer * staging.nbytes)
    form = STORE.format(work.output.target.rank)

    row_terms = [
        work.row_term(tensors, place, consumer, top + (m * ROWS + below))
        for m in range(staging.rows // ROWS)
        for below in (0, 8)
    ]

    for first in range(0, staging.columns // staging.width, staging.together):
        with T.If(thread == 0), T.Then():
            T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
        barrier(consumer)
        for store in range(staging.together):
            base = start + store * staging.store_bytes
            for pair in range(staging.width // 16):
                column = (first + store) * staging.width + pair * 16
                columns = [left + column + 8 * half + j for half in range(2) for j in range(2)]
                terms = [work.column_term(tensors, place, at) for at in columns]
                for m in range(staging.rows // ROWS):
                    values = []
                    for half, below in product(range(2), range(2)):
                        group, of_row = (column + work.margin) // 8 + half, row_terms[2 * m + below]
                        for i, total in enumerate(work.totals(fragment, m, group, below, lane)):
                            j = 2 * half + i
                            values.append(work.finish(tensors, place, total, of_row, terms[j], columns[j]))
                    write(staging, memory, base, values, m * ROWS + warp * 16, pair, lane)
        T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
        barrier(consumer)
        with T.If(thread == 0), T.Then():
            for store in range(staging.together):
                to = work.store_at(place, consumer, (first + store) * staging.width)
                source = memory.ptr_to([start + store * staging.store_bytes])
                T.evaluate(T.ptx[form](T.address_of(output_map), *to, source))
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())


def packed_16(dtype: str, low: Any, high: Any) -> Any:
    """Two float32 rounded to `dtype`, of 16 bits, in a word."""
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    return T.cuda.func_call(f"hopper_pack_{kind}", low, high, source_code=_PACK_16.format(kind), return_type="uint32")


def _writer_16(dtype: str) -> Callable[..., None]:
    def write(staging: Staging, memory: Any, base: Any, values: Sequence[Any], row: Any, pair: int, lane: Any) -> None:
        words = [packed_16(dtype, *values[at : at + 2]) for at in range(0, 8, 2)]
        at = staging.chunk(row + T.truncmod(lane, 16), 2 * pair + T.truncdiv(lane, 16))
        T.evaluate(T.ptx[_STMATRIX](memory.ptr_to([base + at]), *words))

    return write


def _write_8(staging: Staging, memory: Any, base: Any, values: Sequence[Any], row: Any, pair: int, lane: Any) -> None:
    words = [
        T.cuda.func_call("hopper_pack_s8", *values[at : at + 4], source_code=_PACK_8, return_type="uint32")
        for at in (0, 4)
    ]
    rows = [row + T.truncdiv(lane, 4) + below for below in (0, 8)]
    targets = [memory.ptr_to([base + staging.chunk(at, pair)]) for at in rows]
    T.evaluate(T.cuda.func_call("hopper_store_s8", *words, *targets, lane, source_code=_STORE_8))


def _writer_32(kind: str) -> Callable[..., None]:
    def write(staging: Staging, memory: Any, base: Any, values: Sequence[Any], row: Any, pair: int, lane: Any) -> None:
        for half in range(2):
            for below in range(2):
                at = staging.chunk(
                    row + T.truncdiv(lane, 4) + 8 * below, 4 * pair + 2 * half + T.truncdiv(T.truncmod(lane, 4), 2)
                )
                target = memory.ptr_to([base + at + T.truncmod(lane, 2) * 8])
                two = values[4 * half + 2 * below : 4 * half + 2 * below + 2]
                T.evaluate(T.cuda.func_call(f"hopper_store_{kind}", *two, target, source_code=_STORE_32.format(kind)))

    return write


_WRITERS: dict[str, Callable[..., None]] = {
    "float16": _writer_16("float16"),
    "bfloat16": _writer_16("bfloat16"),
    "int8": _write_8,
    "float32": _writer_32("float"),
    "int32": _writer_32("int"),
}
