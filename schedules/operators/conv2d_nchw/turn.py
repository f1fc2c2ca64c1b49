"""The kernel before `tma_wgmma_turned`: images as `Positions`, channels last, and the filter packed.

A block copies what it turns into shared memory, by ``cp.async`` in whole 16 bytes wherever a pixel stands in them, as
`hopper.lines` has it; a thread then writes eight channels of a pixel, or of two: whole sectors are read along pixels
and written along channels.  Of small images a block has whole planes, of which those of eight channels side by side are
one bulk copy.  Of rows that a stride leaves others between, a thread turns eight channels of four or eight
pixels in registers, if a load may bring so many.  Or a thread gathers eight of what an output looks at, in the filter's
order: the larger copy, where filters then need none.  Other blocks of the launch write the zeros between rows and
images, and others the filter (`repack`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from schedules.core.tvm import IRBuilder, T, tirx
from schedules.hopper.config import WARPGROUP
from schedules.hopper.lines import down
from schedules.hopper.shared import UNIT
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.positions import Positions
from schedules.operators.conv2d_nchw.repack import GROUP, pack_block, pack_threads, workspace_of
from schedules.tirx.types import Expr, Tensors
from schedules.tirx.values import kept, named, where

WARP = 32
ITEM = 2  # bytes of an element
_COPY = "cp.async.cg.shared.global"
_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
# lanes of a warp along pixels by pixels of a load: sectors of 32 bytes are whole, read and written
LANES = {8: 4, 4: 8}
GATHERED = 4  # lanes of a warp along what an output looks at: 64 bytes
RUNS = 4  # outputs that a thread gathers for, where blocks remain
MANY = 1024  # blocks
RESIDENT = 8  # blocks on a multiprocessor, at least
PIXELS = 64  # of a tile in shared memory, or fewer
SIDE_BY_SIDE = 8  # groups of channels that neighbouring threads write: 128 bytes
BANKS = 64  # elements of all banks of shared memory
LARGEST = 26 * 1024  # bytes of the planes of a block, of which a multiprocessor then has as many as there are RESIDENT
FEWEST = 256  # blocks, where a block with less than a plane would leave more

_WORDS = {8: "uint4", 4: "uint2", 2: "unsigned int", 1: "unsigned short"}
# {0} pixels of eight channels, {2} elements apart, of which `there` exist, if not all: eight channels of each pixel
_TURN = """
__device__ __forceinline__ void nchw_turn_{0}(const void* from, void* to{3}) {{
  unsigned short v[8][{0}];
#pragma unroll
  for (int c = 0; c < 8; ++c) {{
    {1} word = {{}};
    {4}word = __ldcs((const {1}*)((const unsigned short*)from + c * {2}));
    *({1}*)v[c] = word;
  }}
#pragma unroll
  for (int p = 0; p < {0}; ++p)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      ((unsigned int*)to)[4 * p + k] = v[2 * k][p] | (unsigned int)v[2 * k + 1][p] << 16;
}}
"""
_PUT = """
__device__ __forceinline__ void nchw_put(void* to, unsigned int a, unsigned int b, unsigned int c, unsigned int d) {
  *(uint4*)to = make_uint4(a, b, c, d);
}
"""


_GATHER = """
__device__ __forceinline__ void nchw_gather(const void* image, int k, int y, int x, void* to) {{
  const unsigned short* v = (const unsigned short*)image;
  unsigned int o[4] = {{0, 0, 0, 0}};
#pragma unroll
  for (int i = 0; i < 8; ++i) {{
    int c = (k + i) / {taps}, tap = (k + i) % {taps};
    int at_y = y + tap / {kw} * {down}, at_x = x + tap % {kw} * {across};
    if (k + i < {count} && at_y >= 0 && at_y < {h} && at_x >= 0 && at_x < {w})
      o[i / 2] |= (unsigned int)v[(c * {h} + at_y) * {w} + at_x] << i % 2 * 16;
  }}
#pragma unroll
  for (int i = 0; i < 4; ++i) ((unsigned int*)to)[i] = o[i];
}}
"""
# eight channels of {0} pixels in a tile, {2} elements apart, of which `there` exist; the first begins `start` elements
# into the tensor, each {3} elements further, and by as much beyond a multiple of eight in the tile
_COLUMN = """
__device__ __forceinline__ void nchw_column_{0}(const void* tile, int start, int there, void* to) {{
  {1} v[8] = {{}};
#pragma unroll
  for (int c = 0; c < 8; ++c)
    if (c < there) v[c] = *(const {1}*)((const unsigned short*)tile + c * {2} + (start + c * {3} & 7));
#pragma unroll
  for (int p = 0; p < {0}; ++p)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      ((unsigned int*)to)[4 * p + k] = (v[2 * k] >> 16 * p & 0xffff) | (unsigned int)(v[2 * k + 1] >> 16 * p) << 16;
}}
"""


def turn(problem: NchwProblem, positions: Positions, tensors: Tensors, gather: bool = False) -> None:
    """Emit the kernel that fills "turned" from "data", unless they lie so, and "packed" from "filter", if that is
    workspace.  With `gather` positions are those of the `gathered` problem."""
    p = positions.problem
    rows = _rows(positions)
    vector = math.gcd(GROUP, rows.length)
    groups = positions.channels // GROUP
    shape: Shape | Tile | Planes
    if gather:
        shape = _shape(GATHERED, groups)
        while 2 * shape.runs <= RUNS and shape.blocks(p.pixels) >= 2 * MANY:
            shape = replace(shape, runs=2 * shape.runs)
        turned = shape.blocks(p.pixels)
    elif rows.count > 1 and vector in LANES:
        shape = _shape(WARP // LANES[vector], groups)
        turned = shape.blocks(p.n * rows.pixels // vector)
    else:
        planes = Planes(rows.length, groups)
        shape = planes if rows.count == 1 and planes.serve(p) else Tile(rows, groups)
        turned = shape.blocks(p.n)
    turned = turned if "turned" in tensors else 0
    zeros = positions.planes * p.n * groups * _zeros(positions) if "turned" in tensors else 0
    packed = pack_threads(p) if workspace_of(p) else 0
    grid = turned - (-zeros // WARPGROUP) - (-packed // WARPGROUP)
    block = T.cta_id([grid])
    thread = T.thread_id([WARPGROUP])
    views = {}
    for name in ("data", "turned"):
        if name in tensors:
            size = math.prod(tensors[name].shape)
            views[name] = T.decl_buffer((size,), p.dtype, data=tensors[name].data)
            IRBuilder.name(f"flat_{name}", views[name])

    # said, else ptxas keeps to fewer registers than a packed filter needs
    with T.attr({"tirx.launch_bounds_min_blocks_per_sm": RESIDENT}):
        if turned:
            with T.If(block < turned), T.Then():
                if isinstance(shape, Tile):
                    _turn_tile(positions, shape, views, block, thread)
                elif isinstance(shape, Planes):
                    _turn_planes(positions, shape, views, block, thread)
                elif gather:
                    _gather_block(problem, positions, shape, views, block, thread)
                else:
                    _turn_block(positions, vector, shape, views, block, thread)
        if zeros:
            at = kept("at", (block - turned) * WARPGROUP + thread)
            with T.If(_all(block >= turned, at < zeros)), T.Then():
                _zero(positions, groups, views, at)
        if packed:
            # kept, else TVM multiplies the number of the first block too, and the product need not fit into 32 bits
            first = kept("first_block", block - (turned - (-zeros // WARPGROUP)))
            with T.If(first >= 0), T.Then():
                beside = shape.nbytes + UNIT if isinstance(shape, Tile | Planes) and turned else 0
                pack_block(p, tensors, first, thread, beside)


def _all(*conditions: Expr) -> Expr:
    return tirx.all(*conditions)


@dataclass(frozen=True)
class Shape:
    """A block that turns: lanes `across` channels, loads of `each` of them along pixels, of each `runs`; and how many
    blocks side by side have all channels."""

    across: int
    each: int
    count: int
    runs: int

    def blocks(self, loads: int) -> int:
        """Blocks for so many loads along pixels."""
        return self.count * -(-loads // (self.each * self.runs))


def _across(most: int, groups: int) -> int:
    """How many groups of channels a block has side by side: a power of two that covers all `groups`, at most `most`."""
    return min(most, 1 << (groups - 1).bit_length())


def _shape(most: int, groups: int) -> Shape:
    """That of blocks with up to `most` lanes along channels."""
    across = _across(most, groups)
    return Shape(across, WARPGROUP // across, -(-groups // across), 1)


@dataclass(frozen=True)
class Rows:
    """The pixels of an image that are loaded: `count` runs of `length`, `apart`, the first from `first` on."""

    count: int
    length: int
    apart: int
    first: int

    @property
    def pixels(self) -> int:
        return self.count * self.length


@dataclass(frozen=True)
class Tile:
    """What a block turns by way of shared memory: `count` pieces of `rows`, each of `length` pixels or, of the last
    piece of a row, fewer; and `across` groups of channels of the image's `groups`.

    A channel's piece is `units` copies of 16 bytes.  Channels stand `pitch` elements apart, those of a group `across`
    times as many: then neighbouring groups, which threads read at once, lie in other banks.
    """

    rows: Rows
    groups: int

    @property
    def across(self) -> int:
        return _across(SIDE_BY_SIDE, self.groups)

    @property
    def pieces(self) -> int:
        """Of a row."""
        return -(-self.rows.length // PIXELS)

    @property
    def each(self) -> int:
        """Pixels that a thread takes at once: pieces have whole words of them, or not."""
        return math.gcd(2, self.rows.length)

    @property
    def length(self) -> int:
        return -(-self.rows.length // self.pieces // self.each) * self.each

    @property
    def count(self) -> int:
        return max(1, PIXELS // self.length)

    @property
    def units(self) -> int:
        return (self.length + 2 * (GROUP - 1)) // GROUP

    @property
    def pitch(self) -> int:
        return (self.count * self.units | 1) * GROUP

    @property
    def nbytes(self) -> int:
        """Of shared memory."""
        return self.across * GROUP * self.pitch * ITEM

    @property
    def of_image(self) -> int:
        """Pieces of an image."""
        return self.rows.count * self.pieces

    def blocks(self, images: int) -> int:
        return -(-self.groups // self.across) * -(-images * self.of_image // self.count)

    def piece(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """The image of a piece, its first pixel there, and how many it has."""
        image = named("image", T.truncdiv(number, self.of_image))
        rest = named("rest", T.truncmod(number, self.of_image))
        row, before = T.truncdiv(rest, self.pieces), named("before", T.truncmod(rest, self.pieces) * self.length)
        first = named("first", self.rows.first + row * self.rows.apart + before)
        return image, first, tirx.min(self.length, self.rows.length - before)


@dataclass(frozen=True)
class Planes:
    """What a block turns of an image by way of shared memory: whole planes of `length` pixels, of `across` groups of
    channels of the image's `groups`.

    The planes of a group lie side by side in memory, whole 16 bytes.  Groups stand `pitch` elements apart: then
    neighbouring groups, which threads read at once, lie in other banks.
    """

    length: int
    groups: int

    @property
    def across(self) -> int:
        return _across(SIDE_BY_SIDE, self.groups)

    @property
    def each(self) -> int:
        """Pixels that a thread takes at once."""
        return math.gcd(2, self.length)

    @property
    def pitch(self) -> int:
        taken = GROUP * self.length
        return taken + (GROUP - taken) % BANKS

    @property
    def nbytes(self) -> int:
        """Of shared memory, beside a barrier."""
        return self.across * self.pitch * ITEM

    def blocks(self, images: int) -> int:
        return -(-self.groups // self.across) * images

    def serve(self, problem: NchwProblem) -> bool:
        """Whether blocks can take whole planes: groups have eight channels, planes fit, and enough blocks remain."""
        few = self.length > PIXELS and self.blocks(problem.n) < FEWEST
        return problem.ci % GROUP == 0 and self.nbytes <= LARGEST and not few


def _rows(positions: Positions) -> Rows:
    """All pixels at once, or the rows that are looked at, where that are not all."""
    p, y = positions.problem, positions.y
    if y.planes > 1 or y.stride == 1:
        return Rows(1, p.h * p.w, p.h * p.w, 0)
    remainder = next(iter(y.moves))
    return Rows(y.most, p.w, y.stride * p.w, remainder * p.w)


def _turn_block(
    positions: Positions,
    vector: int,
    shape: Shape,
    views: Tensors,
    block: Expr,
    thread: Expr,
) -> None:
    p, across, count, rows = positions.problem, shape.across, shape.count, _rows(positions)
    group = named("group", T.truncmod(block, count) * across + T.truncmod(thread, across))
    ragged = (", int there", "if (c < there) ") if p.ci % GROUP else ("", "")
    # read for the last time: it gives way in L2 to what is written
    source, name = _TURN.format(vector, _WORDS[vector], p.h * p.w, *ragged), f"nchw_turn_{vector}"
    number = T.truncdiv(block, count) * shape.each + T.truncdiv(thread, across)
    image = named("image", T.truncdiv(number, rows.pixels // vector))
    pixel = named("pixel", T.truncmod(number, rows.pixels // vector) * vector)
    first = named("first", T.truncdiv(pixel, rows.length) * (rows.apart - rows.length) + rows.first + pixel)
    places = [_place(positions, image, first + j) for j in range(vector)]
    wanted = tirx.any(*(looked_at for _, looked_at in places))
    exists = named("exists", tirx.all(group * GROUP < p.ci, image < p.n, wanted))
    words = T.alloc_local((4 * vector,), "uint32")
    IRBuilder.name("words", words)
    start = (image * p.ci + group * GROUP) * (p.h * p.w) + first
    # without a branch, which would wait for what it loads
    taken = views["data"].ptr_to([T.Select(exists, start, 0)])
    there = [p.ci - T.Select(exists, group * GROUP, 0)] if p.ci % GROUP else []
    T.evaluate(T.cuda.func_call(name, taken, words.ptr_to([0]), *there, source_code=source))
    for j, (place, looked_at) in enumerate(places):
        with T.If(_all(exists, looked_at)), T.Then():
            _put(positions, views, place, group, [words[4 * j + k] for k in range(4)])


def _turn_tile(positions: Positions, tile: Tile, views: Tensors, block: Expr, thread: Expr) -> None:
    p, plane, across = positions.problem, positions.problem.h * positions.problem.w, tile.across
    count, total = -(-tile.groups // across), p.n * p.ci * plane
    memory = T.alloc_shared((across * GROUP * tile.pitch,), p.dtype, align=UNIT)
    IRBuilder.name("tile", memory)
    group = named("group", T.truncmod(block, count) * across)
    number = named("number", T.truncdiv(block, count) * tile.count)
    copies = across * GROUP * tile.count * tile.units
    with T.serial(-(-copies // WARPGROUP)) as turn:
        at = named("at", turn * WARPGROUP + thread)
        unit, rest = named("unit", T.truncmod(at, tile.units)), named("rest", T.truncdiv(at, tile.units))
        piece, of_block = named("piece", T.truncmod(rest, tile.count)), named("of_block", T.truncdiv(rest, tile.count))
        image, first, length = tile.piece(number + piece)
        channel = named("channel", group * GROUP + of_block)
        start = named("start", (image * p.ci + channel) * plane + first)
        taken = named("taken", down(start) + unit * GROUP)
        exists = tirx.all(of_block < across * GROUP, channel < p.ci, image < p.n, taken < start + length)
        with T.If(exists), T.Then():
            row = T.truncmod(of_block, GROUP) * across + T.truncdiv(of_block, GROUP)
            place = memory.ptr_to([row * tile.pitch + (piece * tile.units + unit) * GROUP])
            # of the tensor's last the bytes that there are
            there = [T.Cast("uint32", tirx.min(total - taken, GROUP) * ITEM)] if total % GROUP else []
            T.evaluate(T.ptx[_COPY](place, views["data"].ptr_to([taken]), UNIT, *there))
    T.evaluate(T.ptx.cp.async_.wait_all())
    T.evaluate(T.cuda.cta_sync())
    each = tile.each
    source = _COLUMN.format(each, _WORDS[each], across * tile.pitch, plane)
    with T.serial(-(-across * tile.count * (tile.length // each) // WARPGROUP)) as turn:
        at = named("at", turn * WARPGROUP + thread)
        of_block, rest = named("of_block", T.truncmod(at, across)), named("rest", T.truncdiv(at, across))
        x = named("x", T.truncmod(rest, tile.length // each) * each)
        piece = named("piece", T.truncdiv(rest, tile.length // each))
        image, first, length = tile.piece(number + piece)
        places = [_place(positions, image, first + x + j) for j in range(each)]
        channel = named("channel", (group + of_block) * GROUP)
        with T.If(_all(piece < tile.count, channel < p.ci, image < p.n, x < length)), T.Then():
            words = T.alloc_local((4 * each,), "uint32")
            IRBuilder.name("words", words)
            start = named("start", (image * p.ci + channel) * plane + first)
            waits = memory.ptr_to([of_block * tile.pitch + piece * (tile.units * GROUP) + x])
            filled = p.ci - channel if p.ci % GROUP else GROUP
            call = f"nchw_column_{each}", waits, start, filled, words.ptr_to([0])
            T.evaluate(T.cuda.func_call(*call, source_code=source))
            for j, (place, looked_at) in enumerate(places):
                with T.If(_all(looked_at)), T.Then():
                    _put(positions, views, place, group + of_block, [words[4 * j + k] for k in range(4)])


def _turn_planes(positions: Positions, planes: Planes, views: Tensors, block: Expr, thread: Expr) -> None:
    from tvm.backend.cuda.lang.pipeline import TMABar

    p, across, each = positions.problem, planes.across, planes.each
    count, taken = -(-planes.groups // across), GROUP * planes.length
    pool = T.SMEMPool()
    memory = pool.alloc((across * planes.pitch,), p.dtype, align=UNIT)
    IRBuilder.name("planes", memory)
    first = thread == 0
    arrived = TMABar(pool, 1, leader=first)
    pool.commit()
    arrived.init(1)
    T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
    T.evaluate(T.cuda.cta_sync())
    group = named("group", T.truncmod(block, count) * across)
    image = named("image", T.truncdiv(block, count))
    whole = planes.groups % across == 0
    there = across if whole else named("there", tirx.min(across, planes.groups - group))
    with T.If(first), T.Then():
        arrived.arrive(0, there * (taken * ITEM))
        for number in range(across):
            with where(None if whole else number < there):
                source = views["data"].ptr_to([(image * planes.groups + group + number) * taken])
                to, barrier = memory.ptr_to([number * planes.pitch]), arrived.ptr_to([0])
                T.evaluate(T.ptx[_BULK](to, source, taken * ITEM, barrier))
    arrived.wait(0, 0)
    source = _COLUMN.format(each, _WORDS[each], planes.length, 0)
    pixels = planes.length // each
    with T.serial(-(-across * pixels // WARPGROUP)) as turn:
        at = named("at", turn * WARPGROUP + thread)
        of_block, x = named("of_block", T.truncmod(at, across)), named("x", T.truncdiv(at, across) * each)
        places = [_place(positions, image, x + j) for j in range(each)]
        with T.If(_all(x < planes.length, of_block < there)), T.Then():
            words = T.alloc_local((4 * each,), "uint32")
            IRBuilder.name("words", words)
            call = f"nchw_column_{each}", memory.ptr_to([of_block * planes.pitch + x]), 0, GROUP, words.ptr_to([0])
            T.evaluate(T.cuda.func_call(*call, source_code=source))
            for j, (place, looked_at) in enumerate(places):
                with T.If(_all(looked_at)), T.Then():
                    _put(positions, views, place, group + of_block, [words[4 * j + k] for k in range(4)])


def _place(positions: Positions, image: Expr, pixel: Expr) -> tuple[Expr, Expr]:
    """Where in the copy a pixel of an image stands, and whether any tap looks at it."""
    p, y_axis, x_axis = positions.problem, positions.y, positions.x
    y, x = named("y", T.truncdiv(pixel, p.w)), named("x", T.truncmod(pixel, p.w))
    (by, py), (bx, px) = _split(y, y_axis.stride), _split(x, x_axis.stride)
    plane = (by if y_axis.planes > 1 else 0) * x_axis.planes + (bx if x_axis.planes > 1 else 0)
    at = plane * positions.data + positions.at(image, py, px)
    return named("place", at), tirx.all(y_axis.looked_at(by), x_axis.looked_at(bx))


def _put(positions: Positions, views: Tensors, place: Expr, group: Expr, words: Sequence[Expr]) -> None:
    """Write eight channels of a place."""
    # in 64 bits: the bound that TVM has of a large copy does not fit into 32
    to = views["turned"].ptr_to([T.Cast("int64", place) * positions.channels + group * GROUP])
    T.evaluate(T.cuda.func_call("nchw_put", to, *words, source_code=_PUT))


def _gather_block(
    problem: NchwProblem, positions: Positions, shape: Shape, views: Tensors, block: Expr, thread: Expr
) -> None:
    p, groups, each = problem, positions.channels // GROUP, shape.each
    group = named("group", T.truncmod(block, shape.count) * shape.across + T.truncmod(thread, shape.across))
    source = _GATHER.format(
        taps=p.kh * p.kw, kw=p.kw, down=p.dilation[0], across=p.dilation[1], count=p.reduction, h=p.h, w=p.w
    )
    found = []
    for run in range(shape.runs):
        output = (T.truncdiv(block, shape.count) * shape.runs + run) * each + T.truncdiv(thread, shape.across)
        output = named("output_pixel", output)
        exists = named("exists", tirx.all(group < groups, output < p.pixels))
        image, pixel = T.truncdiv(output, p.out_h * p.out_w), T.truncmod(output, p.out_h * p.out_w)
        y = named("y", T.truncdiv(pixel, p.out_w) * p.stride[0] - p.pad[0])
        x = named("x", T.truncmod(pixel, p.out_w) * p.stride[1] - p.pad[1])
        words = T.alloc_local((4,), "uint32")
        IRBuilder.name("words", words)
        taken = views["data"].ptr_to([T.Select(exists, image, 0) * (p.ci * p.h * p.w)])
        T.evaluate(T.cuda.func_call("nchw_gather", taken, group * GROUP, y, x, words.ptr_to([0]), source_code=source))
        found.append((exists, output, words))
    for exists, output, words in found:
        with T.If(exists), T.Then():
            to = views["turned"].ptr_to([output * positions.channels + group * GROUP])
            T.evaluate(T.cuda.func_call("nchw_put", to, *(words[k] for k in range(4)), source_code=_PUT))


def _split(at: Expr, stride: int) -> tuple[Expr, Expr]:
    """The remainder of a coordinate, and its number in that plane."""
    return (T.truncmod(at, stride), T.truncdiv(at, stride)) if stride > 1 else (0, at)


def _zeros(positions: Positions) -> int:
    """Positions of an image in a plane that are zeros, or may be in some plane."""
    y, x = positions.y, positions.x
    return positions.lines * (x.length - x.least) + (positions.lines - y.least) * x.least


def _zero(positions: Positions, groups: int, views: Tensors, at: Expr) -> None:
    """Write zero number `at`: right of the images, or else below."""
    p, y_axis, x_axis = positions.problem, positions.y, positions.x
    group, rest = T.truncmod(at, groups), named("rest", T.truncdiv(at, groups))
    k, rest = named("k", T.truncmod(rest, _zeros(positions))), named("rest", T.truncdiv(rest, _zeros(positions)))
    image, plane = T.truncmod(rest, p.n), T.truncdiv(rest, p.n)
    wide = x_axis.length - x_axis.least
    right = positions.lines * wide
    below = k - right
    y, x = y_axis.least + T.truncdiv(below, x_axis.least), T.truncmod(below, max(1, x_axis.least))
    if wide:
        is_right = k < right
        y = T.Select(is_right, T.truncdiv(k, wide), y)
        x = T.Select(is_right, x_axis.least + T.truncmod(k, wide), x)
    y, x = named("y", y), named("x", x)
    by = T.truncdiv(plane, x_axis.planes) if y_axis.planes > 1 else next(iter(y_axis.moves))
    bx = T.truncmod(plane, x_axis.planes) if x_axis.planes > 1 else next(iter(x_axis.moves))
    is_image = tirx.all(y < y_axis.real(by), x < x_axis.real(bx))
    with T.If(tirx.Not(is_image)), T.Then():
        place = named("place", plane * positions.data + positions.at(image, y, x))
        _put(positions, views, place, group, [T.uint32(0)] * 4)
