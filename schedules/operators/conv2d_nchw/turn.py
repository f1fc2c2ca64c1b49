"""The kernel before `tma_wgmma_turned`: images as `Positions`, channels last, and the filter packed.

A thread turns eight channels of as many neighbouring pixels as a load may bring, up to eight, in registers: whole
sectors are read along pixels and written along channels.  Or it gathers eight of what an output looks at, in the
filter's order: the larger copy, where filters then need none.  Other blocks of the launch write the zeros between rows
and images, and others the filter (`repack`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from schedules.hopper.config import WARPGROUP
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.positions import Positions
from schedules.operators.conv2d_nchw.repack import GROUP, pack_at, pack_threads, workspace_of

if TYPE_CHECKING:
    from schedules.tirx.types import Expr, Tensors

WARP = 32
# lanes of a warp along pixels by pixels of a load: sectors of 32 bytes are whole, read and written
LANES = {8: 4, 4: 8, 2: 8, 1: 16}

_WORDS = {8: "uint4", 4: "uint2", 2: "unsigned int", 1: "unsigned short"}
# {0} pixels of eight channels, {2} elements apart, of which `there` exist: eight channels of each pixel
_TURN = """
__device__ __forceinline__ void nchw_turn_{0}(const void* from, int there, void* to) {{
  unsigned short v[8][{0}];
#pragma unroll
  for (int c = 0; c < 8; ++c) {{
    {1} word = {{}};
    if (c < there) word = *(const {1}*)((const unsigned short*)from + c * {2});
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
  *(uint4*)to = make_uint4(o[0], o[1], o[2], o[3]);
}}
"""
GATHERED = 4  # lanes of a warp along what an output looks at: 64 bytes


def turn(problem: NchwProblem, positions: Positions, tensors: Tensors, gather: bool = False) -> None:
    """Emit the kernel that fills "turned" from "data", unless they lie so, and "packed" from "filter", if that is
    workspace.  With `gather` positions are those of the `gathered` problem."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder

    p = positions.problem
    vector = math.gcd(8, p.h * p.w)
    groups = positions.channels // GROUP
    across = min(WARP // LANES[vector], 1 << (groups - 1).bit_length())  # lanes along channels
    each = WARPGROUP // across  # loads of a block along pixels
    vectors = p.h * p.w // vector
    counts = [-(-groups // across), -(-vectors // each)]
    turned = p.n * math.prod(counts) if "turned" in tensors else 0
    zeros = positions.planes * p.n * groups * _zeros(positions) if "turned" in tensors else 0
    if gather:
        turned = -(-groups // GATHERED) * -(-p.pixels // (WARPGROUP // GATHERED))
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
                _gather_block(problem, positions, views, block, thread)
            else:
                _turn_block(positions, vector, (across, each), (counts[0], counts[1]), views, block, thread)
    if zeros:
        at = (block - turned) * WARPGROUP + thread
        with T.If(_all(block >= turned, at < zeros)), T.Then():
            _zero(positions, groups, views, at)
    if packed:
        at = (block - (turned - (-zeros // WARPGROUP))) * WARPGROUP + thread
        with T.If(_all(at >= 0, at < packed)), T.Then():
            pack_at(p, tensors, at)


def _all(*conditions: Expr) -> Expr:
    from tvm import tirx

    return tirx.all(*conditions)


def _turn_block(
    positions: Positions,
    vector: int,
    shape: tuple[int, int],
    counts: tuple[int, int],
    views: Tensors,
    block: Expr,
    thread: Expr,
) -> None:
    from tvm import tirx
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder

    from schedules.tirx.values import named

    p, y_axis, x_axis = positions.problem, positions.y, positions.x
    across, each = shape
    group = named("group", T.truncmod(block, counts[0]) * across + T.truncmod(thread, across))
    rest = named("rest", T.truncdiv(block, counts[0]))
    load = named("load", T.truncmod(rest, counts[1]) * each + T.truncdiv(thread, across))
    image = named("image", T.truncdiv(rest, counts[1]))
    first = load * vector
    places = []
    for j in range(vector):
        pixel = first + j
        y, x = named("y", T.truncdiv(pixel, p.w)), named("x", T.truncmod(pixel, p.w))
        (by, py), (bx, px) = _split(y, y_axis.stride), _split(x, x_axis.stride)
        plane = (by if y_axis.planes > 1 else 0) * x_axis.planes + (bx if x_axis.planes > 1 else 0)
        at = plane * positions.data + positions.at(image, py, px)
        places.append((named("place", at), tirx.all(y_axis.looked_at(by), x_axis.looked_at(bx))))
    wanted = tirx.any(*(looked_at for _, looked_at in places))
    exists = tirx.all(group * GROUP < p.ci, load * vector < p.h * p.w, wanted)
    with T.If(exists), T.Then():
        words = T.alloc_local((4 * vector,), "uint32")
        IRBuilder.name("words", words)
        start = (image * p.ci + group * GROUP) * (p.h * p.w) + first
        source = _TURN.format(vector, _WORDS[vector], p.h * p.w)
        name = f"nchw_turn_{vector}"
        taken = views["data"].ptr_to([start])
        T.evaluate(T.cuda.func_call(name, taken, p.ci - group * GROUP, words.ptr_to([0]), source_code=source))
        for j, (place, looked_at) in enumerate(places):
            with T.If(looked_at), T.Then():
                to = views["turned"].ptr_to([place * positions.channels + group * GROUP])
                four = [words[4 * j + k] for k in range(4)]
                T.evaluate(T.cuda.func_call("nchw_put", to, *four, source_code=_PUT))


def _gather_block(problem: NchwProblem, positions: Positions, views: Tensors, block: Expr, thread: Expr) -> None:
    from tvm import tirx
    from tvm.script import tirx as T

    from schedules.tirx.values import named

    p, groups = problem, positions.channels // GROUP
    count = -(-groups // GATHERED)
    group = named("group", T.truncmod(block, count) * GATHERED + T.truncmod(thread, GATHERED))
    output = T.truncdiv(block, count) * (WARPGROUP // GATHERED) + T.truncdiv(thread, GATHERED)
    output = named("output_pixel", output)
    image, pixel = T.truncdiv(output, p.out_h * p.out_w), T.truncmod(output, p.out_h * p.out_w)
    y = named("y", T.truncdiv(pixel, p.out_w) * p.stride[0] - p.pad[0])
    x = named("x", T.truncmod(pixel, p.out_w) * p.stride[1] - p.pad[1])
    source = _GATHER.format(
        taps=p.kh * p.kw, kw=p.kw, down=p.dilation[0], across=p.dilation[1], count=p.reduction, h=p.h, w=p.w
    )
    with T.If(tirx.all(group < groups, output < p.pixels)), T.Then():
        taken = views["data"].ptr_to([image * (p.ci * p.h * p.w)])
        to = views["turned"].ptr_to([output * positions.channels + group * GROUP])
        T.evaluate(T.cuda.func_call("nchw_gather", taken, group * GROUP, y, x, to, source_code=source))


def _split(at: Expr, stride: int) -> tuple[Expr, Expr]:
    """The remainder of a coordinate, and its number in that plane."""
    from tvm.script import tirx as T

    return (T.truncmod(at, stride), T.truncdiv(at, stride)) if stride > 1 else (0, at)


def _zeros(positions: Positions) -> int:
    """Positions of an image in a plane that are zeros, or may be in some plane."""
    y, x = positions.y, positions.x
    return positions.lines * (x.length - x.least) + (positions.lines - y.least) * x.least


def _zero(positions: Positions, groups: int, views: Tensors, at: Expr) -> None:
    """Write zero number `at`: right of the images, or else below."""
    from tvm import tirx
    from tvm.script import tirx as T

    from schedules.tirx.values import named

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
        place = plane * positions.data + positions.at(image, y, x)
        to = views["turned"].ptr_to([place * positions.channels + group * GROUP])
        zero = T.uint32(0)
        T.evaluate(T.cuda.func_call("nchw_put", to, zero, zero, zero, zero, source_code=_PUT))
