"""Tensors as TMA can move them, where their own rows are no whole 16 bytes or few: a kernel before copies them.

``padded`` (h, w, ci, n') is data with more images, up to a multiple of 16, ``turned`` (h, w, n, ci') data with its
channels inside, and ``filters`` (kh, kw, ci, co') a filter with more output channels, these up to a multiple of 8; what
is more is zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from schedules.core.problem import Argument
from schedules.core.tvm import T
from schedules.hopper.config import WARPGROUP
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.tirx.types import Buffer, Expr, Tensors
from schedules.tirx.values import named

GROUP = 8  # elements of a thread, 16 bytes
_VECTORS = {1: "unsigned short", 2: "unsigned int", 4: "uint2", 8: "uint4"}
SIDE_BY_SIDE = 8  # images of a thread that turns, at most

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
# read for the last time: it gives way in L2 to what is written;
# of {0} images eight channels, {2} elements apart, of which `left` are there; images are {3} elements apart in `to`
_TURN = """
__device__ __forceinline__ void hwcn_turn_{0}(const void* from, void* to, int left) {{
  union {{ {1} all; unsigned short each[{0}]; }} v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {{
#pragma unroll
    for (int j = 0; j < {0}; ++j) v[i].each[j] = 0;
    if (i < left) v[i].all = __ldcs((const {1}*)((const unsigned short*)from + i * {2}));
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
    """Emit the kernel that fills `workspace`: a thread to each eight elements."""
    beside = math.gcd(problem.n, SIDE_BY_SIDE)
    # threads for each
    counts = [
        math.prod(argument.shape) // GROUP // (beside if argument.name == "turned" else 1) for argument in workspace
    ]
    block = T.cta_id([-(-sum(counts) // WARPGROUP)])
    thread = T.thread_id([WARPGROUP])
    at, before = named("at", block * WARPGROUP + thread), 0
    for argument, count in zip(workspace, counts, strict=True):
        source = tensors["filter" if argument.name == "filters" else "data"]
        to = T.decl_buffer((math.prod(argument.shape),), argument.dtype, data=tensors[argument.name].data)
        from_ = T.decl_buffer((math.prod(map(int, source.shape)),), argument.dtype, data=source.data)
        with T.If(T.And(at >= before, at < before + count)), T.Then():
            copy = _turn if argument.name == "turned" else _pad
            copy(problem, named("group", at - before), argument.shape, int(source.shape[-1]), from_, to)
        before += count


def _pad(problem: HwcnProblem, group: Expr, shape: tuple[int, ...], size: int, source: Buffer, target: Buffer) -> None:
    groups, vector = shape[-1] // GROUP, math.gcd(size, GROUP)
    row, first = T.truncdiv(group, groups), T.truncmod(group, groups) * GROUP
    text = _PAD.format(vector, _VECTORS[vector])
    taken, to = source.ptr_to([row * size + first]), target.ptr_to([group * GROUP])
    T.evaluate(T.cuda.func_call(f"hwcn_pad_{vector}", taken, to, size - first, source_code=text))


def _turn(problem: HwcnProblem, group: Expr, shape: tuple[int, ...], size: int, source: Buffer, target: Buffer) -> None:
    """Of neighbouring threads two write neighbouring groups, a sector, and the next two read the next images."""
    channels, images = shape[-1] // GROUP, math.gcd(size, SIDE_BY_SIDE)
    beside = math.gcd(channels, 2)
    outer = T.truncdiv(group, beside)
    image = T.truncmod(outer, size // images) * images
    outer = T.truncdiv(outer, size // images)
    pixel = T.truncdiv(outer, channels // beside)
    first = (T.truncmod(outer, channels // beside) * beside + T.truncmod(group, beside)) * GROUP
    taken = source.ptr_to([(pixel * problem.ci + first) * size + image])
    to = target.ptr_to([(pixel * size + image) * (channels * GROUP) + first])
    text = _TURN.format(images, _VECTORS[images], size, channels * GROUP)
    T.evaluate(T.cuda.func_call(f"hwcn_turn_{images}", taken, to, problem.ci - first, source_code=text))
