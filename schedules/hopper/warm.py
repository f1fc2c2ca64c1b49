"""What consumers do before their first stage is there: bring its rows from memory into L2.

TMA's first loads wait for their tensor maps, and only then for memory; threads know where the rows lie without them.
It is no read: what a kernel before still writes goes into L2 too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from schedules.core.problem import Argument, numpy_dtype
from schedules.core.tvm import T, tirx
from schedules.hopper.config import WARPGROUP
from schedules.hopper.geometry import ClusterPlace, Load, Work
from schedules.hopper.shared import TensorMap, beyond_indices
from schedules.hopper.spans import WARP, Pixel, Spans
from schedules.tirx.types import Buffer, Expr, Index, Tensors
from schedules.tirx.values import named

SECTORS = 64  # bytes that a miss brings at once, at least
_WARM = """
__device__ __forceinline__ void hopper_warm(const void* tensor, int bytes, int element) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"((const char*)tensor + (long long)element * bytes));
}
"""


def bring(tensor: Buffer, element: Expr) -> None:
    """Have what memory has around an element of a flat or whole `tensor`, by its number, come into L2."""
    start, item = tensor.ptr_to([0] * len(tensor.shape)), numpy_dtype(str(tensor.dtype)).itemsize
    T.evaluate(T.cuda.func_call("hopper_warm", start, item, element, source_code=_WARM))


def warm(
    work: Work, arguments: Sequence[Argument], tensors: Tensors, at: ClusterPlace, tile: Expr, thread: Expr
) -> None:
    """Have `thread` of the consumers bring its rows of the first stage of tile number `tile`, of those of `arguments`
    whose elements can be numbered."""
    place = work.place(tile, at.rank_m, at.rank_n)
    first_y, _, first_x, _ = work.taps(place)
    known = [each.name for each in arguments if beyond_indices(each.name, math.prod(each.shape)) is None]
    threads = work.config.consumers * WARPGROUP
    with T.If(tile < work.clusters), T.Then():
        for operand, loads, part in ((work.a, work.loads_a, at.rank_n), (work.b, work.loads_b, at.rank_m)):
            source = operand.source
            if isinstance(source, Spans) and source.tensor in known:
                _pixels(source, partial(work.pixel_at, place, first_y), tensors, thread, threads)
            boxed = operand.tensor_map
            if boxed and boxed.tensor in known:
                boxes = loads(place, first_y, first_x, at.rank_k, part)
                _rows(boxed, boxes, tensors[source.tensor], thread, threads)


def _pixels(spans: Spans, pixel: Pixel, tensors: Tensors, thread: Expr, threads: int) -> None:
    """Of all channels, for the first row of the kernel: of each block of rows where it begins."""
    for row in range(0, spans.asked, WARP):
        first, exists = pixel(row, T.int32(0))
        first, exists = named("first", first), named("exists", exists)
        with T.serial(-(-spans.channels // threads)) as turn:
            channel = named("channel", turn * threads + thread)
            with T.If(tirx.all(exists, channel < spans.channels)), T.Then():
                bring(tensors[spans.tensor], first + channel * spans.plane)


def _rows(source: TensorMap, boxes: Sequence[Load], tensor: Buffer, thread: Expr, threads: int) -> None:
    item = numpy_dtype(source.dtype).itemsize
    pieces = -(-source.box[0] * item // SECTORS)  # of a row
    rows = math.prod(source.box[1:]) * pieces
    for box in boxes:
        with T.serial(-(-rows // threads)) as turn:
            number = named("row", turn * threads + thread)
            outer: Expr = T.truncdiv(number, pieces)
            element: Index = box.at[0] + T.truncmod(number, pieces) * (SECTORS // item)
            inside = [number < rows, element < source.sizes[0]]
            for axis, stride in enumerate(source.strides, start=1):
                own = box.at[axis] + T.truncmod(outer, source.box[axis]) * source.steps[axis]
                outer = T.truncdiv(outer, source.box[axis])
                inside += [own >= 0, own < source.sizes[axis]]
                element = element + own * (stride // item)
            with T.If(tirx.all(*inside)), T.Then():
                bring(tensor, element)
