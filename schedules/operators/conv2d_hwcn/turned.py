"""Tensors as TMA can move them, where their own rows are no whole 16 bytes or few: a kernel before copies them.

``padded`` (h, w, ci, n') is data with more images, up to a multiple of 16, ``turned`` (h, w, n, ci') data with its
channels inside, and ``filters`` (kh, kw, ci, co') a filter with more output channels, these up to a multiple of 8; what
is more is zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from schedules.core.problem import Argument
from schedules.core.tvm import IRBuilder, T, tirx
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.tirx.types import Buffer, Expr, Tensors
from schedules.tirx.values import named

GROUP = 8  # elements of a thread, 16 bytes
THREADS = 256
_VECTORS = {1: "unsigned short", 2: "unsigned int", 4: "uint2", 8: "uint4"}
TILE = 32 * 1024  # bytes that a block turns at once, at most
IMAGES = TILE // (GROUP * 2)  # of them, for so few channels
CHANNELS = 64  # and of them, at most
BESIDE = 4  # groups of a pixel that neighbouring threads write, two sectors

# eight elements side by side, of which `left` are there, by vectors of {0}
_PAD = """
__device__ __forceinline__ void hwcn_pad_{0}(const void* from, void* to, int left) {{
  union {{ uint4 all; {1} each[8 / {0}]; }} v;
  v.all = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < 8 / {0}; ++i) if (i * {0} < left) v.each[i] = ((const {1}*)from)[i];
  *(uint4*)to = v.all;
}}
"""
# a block's part of the data, `count` vectors of {0}, all of which are under way at once; read for the last time: they
# give way in L2 to what is written
_TAKE = """
__device__ __forceinline__ void hwcn_take_{0}(const void* from, void* to, int thread, int count) {{
#pragma unroll 8
  for (int i = thread; i < count; i += {2}) (({1}*)to)[i] = __ldcs((const {1}*)from + i);
}}
"""
# of {0} images eight channels, {2} elements apart, of which `left` are there; images are {3} elements apart in `to`
_TURN = """
__device__ __forceinline__ void hwcn_turn_{0}(const void* from, void* to, int left) {{
  union {{ {1} all; unsigned short each[{0}]; }} v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {{
#pragma unroll
    for (int j = 0; j < {0}; ++j) v[i].each[j] = 0;
    if (i < left) v[i].all = *(const {1}*)((const unsigned short*)from + i * {2});
  }}
#pragma unroll
  for (int j = 0; j < {0}; ++j) {{
    unsigned int w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = v[2 * i].each[j] | (unsigned int)v[2 * i + 1].each[j] << 16;
    *(uint4*)((unsigned short*)to + j * {3}) = make_uint4(w[0], w[1], w[2], w[3]);
  }}
}}
"""


def whole(size: int, group: int = GROUP) -> int:
    """`size` in whole groups."""
    return -(-size // group) * group


def data_argument(problem: HwcnProblem, turned: bool) -> Argument:
    """The data that TMA reads: the problem's, or "padded" or "turned"."""
    p = problem
    if turned:
        return Argument("turned", (p.h, p.w, p.n, whole(p.ci)), p.dtype)
    # copied, whole sectors of L2
    padded = p.n % GROUP > 0
    return Argument("padded" if padded else "data", (p.h, p.w, p.ci, whole(p.n, 2 * GROUP) if padded else p.n), p.dtype)


def filter_argument(problem: HwcnProblem) -> Argument:
    """The filter that TMA reads: the problem's, or "filters"."""
    p = problem
    return Argument("filters" if p.co % GROUP else "filter", (p.kh, p.kw, p.ci, whole(p.co)), p.dtype)


def copies(problem: HwcnProblem, workspace: Sequence[Argument], tensors: Tensors) -> None:
    """Emit the kernel that fills `workspace`: blocks of threads for each of its tensors, one after the other."""
    counts = [_blocks(problem, argument) for argument in workspace]
    block = T.cta_id([sum(counts)])
    thread, before = T.thread_id([THREADS]), 0
    for argument, count in zip(workspace, counts, strict=True):
        source = tensors["filter" if argument.name == "filters" else "data"]
        to = T.decl_buffer((math.prod(argument.shape),), argument.dtype, data=tensors[argument.name].data)
        from_ = T.decl_buffer((math.prod(map(int, source.shape)),), argument.dtype, data=source.data)
        with T.If(T.And(block >= before, block < before + count)), T.Then():
            copy = _turn if argument.name == "turned" else _pad
            copy(problem, named("part", block - before), thread, argument.shape, int(source.shape[-1]), from_, to)
        before += count


def _blocks(problem: HwcnProblem, argument: Argument) -> int:
    """Blocks that fill `argument`."""
    if argument.name != "turned":
        return -(-math.prod(argument.shape) // GROUP // THREADS)
    channels, images = _tile(problem)
    return problem.h * problem.w * -(-problem.ci // channels) * -(-problem.n // images)


def _tile(problem: HwcnProblem) -> tuple[int, int]:
    """Channels and images that a block turns: all images, of as many channels as there is room for."""
    if problem.n > IMAGES:
        return GROUP, IMAGES
    channels = min(CHANNELS, whole(problem.ci), TILE // 2 // problem.n // GROUP * GROUP)
    return channels, problem.n


def _pad(
    problem: HwcnProblem, part: Expr, thread: Expr, shape: tuple[int, ...], size: int, source: Buffer, target: Buffer
) -> None:
    """A thread to each eight elements."""
    group = named("group", part * THREADS + thread)
    groups, vector = shape[-1] // GROUP, math.gcd(size, GROUP)
    row, first = T.truncdiv(group, groups), T.truncmod(group, groups) * GROUP
    text = _PAD.format(vector, _VECTORS[vector])
    taken, to = source.ptr_to([row * size + first]), target.ptr_to([group * GROUP])
    with T.If(group < math.prod(shape) // GROUP), T.Then():
        T.evaluate(T.cuda.func_call(f"hwcn_pad_{vector}", taken, to, size - first, source_code=text))


def _turn(
    problem: HwcnProblem, part: Expr, thread: Expr, shape: tuple[int, ...], size: int, source: Buffer, target: Buffer
) -> None:
    """By way of shared memory, into which rows come as they lie: of all images they are contiguous.  Neighbouring
    threads write neighbouring groups of channels, those after them the next images."""
    channels, images = _tile(problem)
    tile = T.alloc_shared((channels * images,), source.dtype)
    IRBuilder.name("tile", tile)
    columns, runs = -(-problem.ci // channels), -(-size // images)
    image = T.truncmod(part, runs) * images
    outer = T.truncdiv(part, runs)
    pixel, channel = named("pixel", T.truncdiv(outer, columns)), named("channel", T.truncmod(outer, columns) * channels)
    there = named("there", tirx.min(problem.ci - channel, channels))
    first = named("first", (pixel * problem.ci + channel) * size + image)
    vector = math.gcd(GROUP, problem.ci * size if runs == 1 else size)
    take = _TAKE.format(vector, _VECTORS[vector], THREADS)
    if runs == 1:
        pieces = [(0, there * size)]
    else:
        pieces = [(row, T.Select(row < there, tirx.min(size - image, images), 0)) for row in range(channels)]
    for row, count in pieces:
        taken, to = source.ptr_to([first + row * size]), tile.ptr_to([row * images])
        count = T.truncdiv(count, vector)
        T.evaluate(T.cuda.func_call(f"hwcn_take_{vector}", taken, to, thread, count, source_code=take))
    T.evaluate(T.cuda.cta_sync())
    beside, each = math.gcd(channels // GROUP, BESIDE), math.gcd(size, 2)
    items = channels // GROUP * (images // each)
    text = _TURN.format(each, _VECTORS[each], images, shape[-1])
    with T.serial(-(-items // THREADS)) as turn:
        at = named("at", turn * THREADS + thread)
        outer = T.truncdiv(at, beside)
        own = T.truncmod(outer, images // each) * each
        row = (T.truncdiv(outer, images // each) * beside + T.truncmod(at, beside)) * GROUP
        inside = tirx.all(at < items, row < there, image + own < size)
        with T.If(inside), T.Then():
            to = target.ptr_to([(pixel * size + image + own) * shape[-1] + channel + row])
            left = there - row
            T.evaluate(
                T.cuda.func_call(f"hwcn_turn_{each}", tile.ptr_to([row * images + own]), to, left, source_code=text)
            )
