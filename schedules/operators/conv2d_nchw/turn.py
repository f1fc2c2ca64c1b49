"""The kernel before `tma_wgmma_turned`: images as `Positions`, channels last, and the filter packed.

A thread turns eight channels of as many neighbouring pixels as a load may bring, up to eight, in registers: whole
sectors are read along pixels and written along channels.  Or it gathers eight of what an output looks at, in the
filter's order: the larger copy, where filters then need none.  Other blocks of the launch write the zeros between rows
and images, and others the filter (`repack`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from schedules.core.tvm import IRBuilder, T, tirx
from schedules.hopper.config import WARPGROUP
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.positions import Positions
from schedules.operators.conv2d_nchw.repack import GROUP, pack_at, pack_threads, workspace_of
from schedules.tirx.types import Expr, Tensors
from schedules.tirx.values import kept, named

WARP = 32
# lanes of a warp along pixels by pixels of a load: sectors of 32 bytes are whole, read and written
LANES = {8: 4, 4: 8, 2: 8, 1: 16}
RUNS = 4  # pixels that a thread loads at once, of each channel, where loads bring fewer and blocks remain
MANY = 1024  # blocks

_WORDS = {8: "uint4", 4: "uint2", 2: "unsigned int", 1: "unsigned short"}
# {0} pixels of eight channels, {2} elements apart, of which `there` exist, if not all: eight channels of each pixel
_TURN = """
__device__ __forceinline__ void nchw_turn_{0}(const void* from, void* to{3}) {{
  unsigned short v[8][{0}];
#pragma unroll
  for (int c = 0; c < 8; ++c) {{
    {1} word = {{}};
    {4}word = {5}((const {1}*)((const unsigned short*)from + c * {2}));
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
GATHERED = 4  # lanes of a warp along what an output looks at: 64 bytes


def turn(problem: NchwProblem, positions: Positions, tensors: Tensors, gather: bool = False) -> None:
    """Emit the kernel that fills "turned" from "data", unless they lie so, and "packed" from "filter", if that is
    workspace.  With `gather` positions are those of the `gathered` problem."""
    p = positions.problem
    rows = _rows(positions)
    vector = 1 if gather else math.gcd(8, rows.length)
    loads = p.n * rows.pixels // vector
    groups = positions.channels // GROUP
    across = GATHERED if gather else min(WARP // LANES[vector], 1 << (groups - 1).bit_length())
    shape = Shape(across, WARPGROUP // across, -(-groups // across), 1)
    while 2 * shape.runs * vector <= RUNS and shape.blocks(loads) >= 2 * MANY:
        shape = replace(shape, runs=2 * shape.runs)
    turned = shape.blocks(loads) if "turned" in tensors else 0
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

    if turned:
        with T.If(block < turned), T.Then():
            if gather:
                _gather_block(problem, positions, shape, views, block, thread)
            else:
                _turn_block(positions, vector, shape, views, block, thread)
    if zeros:
        at = kept("at", (block - turned) * WARPGROUP + thread)
        with T.If(_all(block >= turned, at < zeros)), T.Then():
            _zero(positions, groups, views, at)
    if packed:
        # kept, else TVM multiplies the number of the first block too, and the product need not fit into 32 bits
        at = kept("at", (block - (turned - (-zeros // WARPGROUP))) * WARPGROUP + thread)
        with T.If(_all(at >= 0, at < packed)), T.Then():
            pack_at(p, tensors, at)


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
    p, y_axis, x_axis = positions.problem, positions.y, positions.x
    across, count, rows = shape.across, shape.count, _rows(positions)
    group = named("group", T.truncmod(block, count) * across + T.truncmod(thread, across))
    ragged = (", int there", "if (c < there) ") if p.ci % GROUP else ("", "")
    # read for the last time: it gives way in L2 to what is written; but sectors of few pixels are other threads' too
    load = "__ldcs" if vector >= GROUP // 2 else "*"
    source, name = _TURN.format(vector, _WORDS[vector], p.h * p.w, *ragged, load), f"nchw_turn_{vector}"
    runs = []
    for run in range(shape.runs):  # all are loaded before any is stored
        number = (T.truncdiv(block, count) * shape.runs + run) * shape.each + T.truncdiv(thread, across)
        image = named("image", T.truncdiv(number, rows.pixels // vector))
        pixel = named("pixel", T.truncmod(number, rows.pixels // vector) * vector)
        first = named("first", T.truncdiv(pixel, rows.length) * (rows.apart - rows.length) + rows.first + pixel)
        places = []
        for j in range(vector):
            pixel = first + j
            y, x = named("y", T.truncdiv(pixel, p.w)), named("x", T.truncmod(pixel, p.w))
            (by, py), (bx, px) = _split(y, y_axis.stride), _split(x, x_axis.stride)
            plane = (by if y_axis.planes > 1 else 0) * x_axis.planes + (bx if x_axis.planes > 1 else 0)
            at = plane * positions.data + positions.at(image, py, px)
            places.append((named("place", at), tirx.all(y_axis.looked_at(by), x_axis.looked_at(bx))))
        wanted = tirx.any(*(looked_at for _, looked_at in places))
        exists = named("exists", tirx.all(group * GROUP < p.ci, image < p.n, wanted))
        words = T.alloc_local((4 * vector,), "uint32")
        IRBuilder.name("words", words)
        start = (image * p.ci + group * GROUP) * (p.h * p.w) + first
        # without a branch, which would wait for what it loads
        taken = views["data"].ptr_to([T.Select(exists, start, 0)])
        there = [p.ci - T.Select(exists, group * GROUP, 0)] if p.ci % GROUP else []
        T.evaluate(T.cuda.func_call(name, taken, words.ptr_to([0]), *there, source_code=source))
        runs.append((exists, words, places))
    for exists, words, places in runs:
        for j, (place, looked_at) in enumerate(places):
            with T.If(_all(exists, looked_at)), T.Then():
                # in 64 bits: the bound that TVM has of a large copy does not fit into 32
                to = views["turned"].ptr_to([T.Cast("int64", place) * positions.channels + group * GROUP])
                four = [words[4 * j + k] for k in range(4)]
                T.evaluate(T.cuda.func_call("nchw_put", to, *four, source_code=_PUT))


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
        # in 64 bits: the bound that TVM has of a large image's zeros does not fit into 32
        to = views["turned"].ptr_to([T.Cast("int64", place) * positions.channels + group * GROUP])
        zero = T.uint32(0)
        T.evaluate(T.cuda.func_call("nchw_put", to, zero, zero, zero, zero, source_code=_PUT))
