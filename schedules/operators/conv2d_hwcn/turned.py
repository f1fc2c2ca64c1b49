"""Tensors as TMA can move them, where their own rows are no whole 16 bytes or few: a kernel before copies them.

``padded`` (h, w, ci, n') is data with more images, ``turned`` (h, w, n, ci') data with its channels inside, and
``filters`` (kh, kw, ci, co') a filter with more output channels; what is more is zeros, up to a multiple of eight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedules.core.problem import Argument
from schedules.hopper.config import WARPGROUP
from schedules.operators.conv2d_hwcn.definition import HwcnProblem

if TYPE_CHECKING:
    from schedules.tirx.types import Buffer, Expr, Tensors

GROUP = 8  # elements of a thread, 16 bytes
_VECTORS = {1: "unsigned short", 2: "unsigned int", 4: "uint2"}

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
# the same of elements `apart` from each other
_TURN = """
__device__ __forceinline__ void hwcn_turn(const void* from, void* to, int apart, int left) {
  union { uint4 all; unsigned short each[8]; } v;
  v.all = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < 8; ++i) if (i < left) v.each[i] = ((const unsigned short*)from)[i * apart];
  *(uint4*)to = v.all;
}
"""


def whole(size: int) -> int:
    """`size` in whole groups."""
    return -(-size // GROUP) * GROUP


def data_argument(problem: HwcnProblem, turned: bool) -> Argument:
    """The data that TMA reads: the problem's, or "padded" or "turned"."""
    p = problem
    if turned:
        return Argument("turned", (p.h, p.w, p.n, whole(p.ci)), p.dtype)
    return Argument("padded" if p.n % GROUP else "data", (p.h, p.w, p.ci, whole(p.n)), p.dtype)


def filter_argument(problem: HwcnProblem) -> Argument:
    """The filter that TMA reads: the problem's, or "filters"."""
    p = problem
    return Argument("filters" if p.co % GROUP else "filter", (p.kh, p.kw, p.ci, whole(p.co)), p.dtype)


def copies(problem: HwcnProblem, workspace: Sequence[Argument], tensors: Tensors) -> None:
    """Emit the kernel that fills `workspace`: a thread to each eight elements."""
    from tvm.script import tirx as T

    from schedules.tirx.values import named

    counts = [math.prod(argument.shape) // GROUP for argument in workspace]
    block = T.cta_id([-(-sum(counts) // WARPGROUP)])
    thread = T.thread_id([WARPGROUP])
    at, before = named("at", block * WARPGROUP + thread), 0
    for argument, count in zip(workspace, counts, strict=True):
        source = tensors["filter" if argument.name == "filters" else "data"]
        to = T.decl_buffer((count * GROUP,), argument.dtype, data=tensors[argument.name].data)
        from_ = T.decl_buffer((math.prod(map(int, source.shape)),), argument.dtype, data=source.data)
        with T.If(T.And(at >= before, at < before + count)), T.Then():
            copy = _turn if argument.name == "turned" else _pad
            copy(problem, named("group", at - before), argument.shape, int(source.shape[-1]), from_, to)
        before += count


def _pad(problem: HwcnProblem, group: Expr, shape: tuple[int, ...], size: int, source: Buffer, target: Buffer) -> None:
    from tvm.script import tirx as T

    groups, vector = shape[-1] // GROUP, math.gcd(size, GROUP)
    row, first = T.truncdiv(group, groups), T.truncmod(group, groups) * GROUP
    text = _PAD.format(vector, _VECTORS[vector])
    taken, to = source.ptr_to([row * size + first]), target.ptr_to([group * GROUP])
    T.evaluate(T.cuda.func_call(f"hwcn_pad_{vector}", taken, to, size - first, source_code=text))


def _turn(problem: HwcnProblem, group: Expr, shape: tuple[int, ...], size: int, source: Buffer, target: Buffer) -> None:
    """Of neighbouring threads two write neighbouring groups, a sector, and the next two read the next image."""
    from tvm.script import tirx as T

    channels = shape[-1] // GROUP
    beside = math.gcd(channels, 2)
    outer, image = T.truncdiv(group, beside), T.truncmod(T.truncdiv(group, beside), size)
    outer = T.truncdiv(outer, size)
    pixel = T.truncdiv(outer, channels // beside)
    first = (T.truncmod(outer, channels // beside) * beside + T.truncmod(group, beside)) * GROUP
    taken = source.ptr_to([(pixel * problem.ci + first) * size + image])
    to = target.ptr_to([(pixel * size + image) * (channels * GROUP) + first])
    T.evaluate(T.cuda.func_call("hwcn_turn", taken, to, size, problem.ci - first, source_code=_TURN))
