"""Filters as they lie, (co, ci, kh, kw), for schedules that read them tap by tap: a kernel before packs them.

A thread has eight input channels of an output channel, whose taps lie side by side, and writes eight channels of each
tap, as `packing.pack_filter` would.  What the threads of a block have is one run of memory: they copy it into shared
memory together, in whole sectors, and then read each its own from there.  A filter of 1x1 is packed as it lies.
"""

from __future__ import annotations

from schedules.core.problem import Argument
from schedules.core.tvm import IRBuilder, T
from schedules.hopper.config import WARPGROUP
from schedules.hopper.shared import UNIT
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.tirx.types import Expr, Tensors
from schedules.tirx.values import named

GROUP = 8  # channels of a thread, 16 bytes
IN_REGISTERS = 25  # taps that a thread reads at once, in words; it reads more of them one by one
STAGED = 48 * 1024  # bytes of a block's filters at most that it copies into shared memory
_COPY = "cp.async.cg.shared.global"

# {0} taps of eight channels, as many vectors of 16 bytes; in `to` a tap's begin {1} bytes after those of the tap before
_AT_ONCE = """
__device__ __forceinline__ void nchw_repack_{0}(const void* from, void* to) {{
  unsigned int w[4 * {0}];
#pragma unroll
  for (int i = 0; i < {0}; ++i) {{
    uint4 v = ((const uint4*)from)[i];
    w[4 * i] = v.x; w[4 * i + 1] = v.y; w[4 * i + 2] = v.z; w[4 * i + 3] = v.w;
  }}
#pragma unroll
  for (int tap = 0; tap < {0}; ++tap) {{
    unsigned int o[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {{
      int a = 2 * k * {0} + tap, b = a + {0};
      o[k] = __byte_perm(w[a / 2], w[b / 2], (a % 2 ? 0x32 : 0x10) | (b % 2 ? 0x7600 : 0x5400));
    }}
    *(uint4*)((char*)to + tap * {1}) = make_uint4(o[0], o[1], o[2], o[3]);
  }}
}}
"""
_ONE_BY_ONE = """
__device__ __forceinline__ void nchw_repack_{0}(const void* from, void* to) {{
  const unsigned short* v = (const unsigned short*)from;
#pragma unroll 1
  for (int tap = 0; tap < {0}; ++tap) {{
    unsigned int o[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      o[k] = v[2 * k * {0} + tap] | (unsigned int)v[(2 * k + 1) * {0} + tap] << 16;
    *(uint4*)((char*)to + tap * {1}) = make_uint4(o[0], o[1], o[2], o[3]);
  }}
}}
"""


# channels that may not all exist: of {0} taps, {2} elements apart, those of a channel {3} apart
_RAGGED = """
__device__ __forceinline__ void nchw_repack_{0}(const void* from, void* to, int there) {{
  const unsigned short* v = (const unsigned short*)from;
#pragma unroll 1
  for (int tap = 0; tap < {0}; ++tap) {{
    unsigned int o[4] = {{0, 0, 0, 0}};
#pragma unroll
    for (int c = 0; c < 8; ++c)
      if (c < there) o[c / 2] |= (unsigned int)v[c * {3} + tap * {2}] << c % 2 * 16;
    *(uint4*)((char*)to + tap * {1}) = make_uint4(o[0], o[1], o[2], o[3]);
  }}
}}
"""


def _groups(problem: NchwProblem) -> int:
    """Of an output channel's input channels."""
    return -(-problem.ci // GROUP)


def by_classes(problem: NchwProblem, classes: int) -> NchwProblem:
    """`problem`, whose kernel is 1x1, with its channels by `classes`, each of every so manyth: a class as a tap."""
    if classes == 1:
        return problem
    return problem.unchecked(ci=problem.ci // classes, kw=classes, filter_layout="oihw")


def filter_argument(problem: NchwProblem) -> Argument:
    """The tensor of the filter (kh, kw, co, ci), or of its bytes: the problem's own, or workspace named "packed", in
    which ci is lengthened to a multiple of 8 with zeros."""
    p = problem
    weight = next(argument for argument in p.arguments() if argument.name == "filter")
    if p.ci % GROUP == 0 and (p.packed or p.kh * p.kw == 1):
        return weight
    return Argument("packed", (p.kh, p.kw, p.co, _groups(p) * GROUP), p.dtype)


def workspace_of(problem: NchwProblem) -> tuple[Argument, ...]:
    """What `repack` fills: the packed filter, or nothing where the problem has it."""
    argument = filter_argument(problem)
    return (argument,) if argument.name == "packed" else ()


def pack_threads(problem: NchwProblem) -> int:
    """Threads that pack the filter."""
    return problem.co * _groups(problem)


def pack_block(problem: NchwProblem, tensors: Tensors, block: Expr, thread: Expr, beside: int = 0) -> None:
    """Emit what block number `block` packs, of WARPGROUP threads; elements have 16 bits.  Other blocks of the kernel
    have `beside` bytes of shared memory, which count as if each block had them too."""
    p, taps, groups, count = problem, problem.kh * problem.kw, _groups(problem), pack_threads(problem)
    at = named("at", block * WARPGROUP + thread)
    filter_: Expr = named("filter_", T.truncdiv(at, groups))
    first = named("first", T.truncmod(at, groups) * GROUP)
    start = filter_ * p.ci + first  # counted whatever the shape
    taken = tensors["filter"].ptr_to([0, 0, 0, start if p.packed else start * taps])
    to = tensors["packed"].ptr_to([0, 0, filter_, first])
    whole = p.ci % GROUP == 0
    pitch = taps | 1  # 16 bytes from thread to thread: so eight of them read from all banks
    if whole and pitch * WARPGROUP * UNIT + beside <= STAGED:
        memory = T.alloc_shared((WARPGROUP * pitch * GROUP,), p.dtype, align=UNIT)
        IRBuilder.name("filters", memory)
        for turn in range(taps):
            unit = turn * WARPGROUP + thread
            of_all = named("unit", block * (WARPGROUP * taps) + unit)
            with T.If(of_all < count * taps), T.Then():
                source = tensors["filter"].ptr_to([0, 0, 0, of_all * GROUP])
                place = unit if pitch == taps else T.truncdiv(unit, taps) * pitch + T.truncmod(unit, taps)
                T.evaluate(T.ptx[_COPY](memory.ptr_to([place * GROUP]), source, UNIT))
        T.evaluate(T.ptx.cp.async_.wait_all())
        T.evaluate(T.cuda.cta_sync())
        taken = memory.ptr_to([thread * (pitch * GROUP)])
    source = _RAGGED if not whole else _AT_ONCE if taps <= IN_REGISTERS else _ONE_BY_ONE
    apart = (p.co * p.ci, 1) if p.packed else (1, taps)
    text = source.format(taps, p.co * groups * GROUP * 2, *apart)
    there = [] if whole else [p.ci - first]
    with T.If(at < count), T.Then():
        T.evaluate(T.cuda.func_call(f"nchw_repack_{taps}", taken, to, *there, source_code=text))


def repack(problem: NchwProblem, tensors: Tensors) -> None:
    """Emit the kernel that fills "packed" from "filter"."""
    count = pack_threads(problem)
    block = T.cta_id([-(-count // WARPGROUP)])
    thread = T.thread_id([WARPGROUP])
    pack_block(problem, tensors, block, thread)
