"""float32 on Hopper's 16-bit tensor cores: operands as sums of bfloat16 addends, products of addends for one product.

A kernel before splits both operands into workspace, each number into two or three addends, every one the rest that the
ones before leave, rounded to nearest: of x at most 2^-16 |x| is left over by two, nothing by three (but what lies below
2^-133).  bfloat16 has the exponents of float32, so that nothing is scaled.  A stage has a tile of every addend; wgmma
multiplies the pairs of PAIRS, small products first, of one stage, whose sums are then added to the tile's on CUDA
cores: tensor cores cut off towards zero what they add.

- `bf16x3`: two addends, three products; errors up to 3 * 2^-16 of the sum of the absolute products: only if named.
- `bf16x6`: three addends, six products; what is left out of a product is at most 2^-23 of it, and of a sum less than a
  sum in float32 rounds away: used unasked where it is estimated to be the fastest.

An infinity and NaN are split into 1 with its sign, zeros, and itself as the last addend, which is multiplied by none
but the first: were they the first, their products with addends that are 0 would make NaN of every sum.  No addend is
rounded up to more than float32 holds with those before; sums of products beyond may overflow.
Sources: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations" (2019), for the split; Ootomo and Yokota (2022) for sums outside the tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.problem import Argument, Conv2dProblem
from schedules.core.tvm import T
from schedules.hopper.config import WARPGROUP, HopperConfig
from schedules.hopper.geometry import Operand, Product, Work
from schedules.tirx.types import Expr, Tensors
from schedules.tirx.values import kept, named

DTYPE = "float32"
PART = "bfloat16"
GROUP = 8  # elements of a thread: 16 bytes of each addend
ACROSS = 4  # neighbouring threads that have a line's groups where its elements lie apart; the others have other lines
# addends of operands a and b whose products are made, the smallest first
PAIRS = {2: ((0, 1), (1, 0), (0, 0)), 3: ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))}
# of each addend in turn: what with those before is no more than float32 holds
LARGEST = ("0x1.fep127f", "0x1.fep119f", "0x1.fep111f")

# {1} elements at a time of eight, {2} apart, of which `there` exist
_SPLIT = """
__device__ __forceinline__ void {0}(const float* from, void* to, int there) {{
  union {{ {3} vectors[8 / {1}]; float each[8]; }} x;
#pragma unroll
  for (int i = 0; i < 8; ++i) x.each[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i += {1})
    if (i < there) x.vectors[i / {1}] = *(const {3}*)(from + (long long)i * {2});
  {{
    float* each = x.each;
{4}
  }}
}}
"""
# of the eight numbers `each`, which are used up, {0} addends, {1} bytes apart from `to` on
_ADDENDS = """
    const float most[] = {{{2}}};
    float last[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {{
      bool finite = fabsf(each[i]) <= 0x1.fffffep127f;
      last[i] = finite ? 0.f : each[i];
      each[i] = finite ? each[i] : copysignf(1.f, each[i]);
    }}
#pragma unroll
    for (int addend = 0; addend < {0}; ++addend) {{
      unsigned int words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {{
        float a = fminf(fmaxf(each[2 * i], -most[addend]), most[addend]);
        float b = fminf(fmaxf(each[2 * i + 1], -most[addend]), most[addend]);
        if (addend == {0} - 1) {{
          a = last[2 * i] == 0.f ? a : last[2 * i];
          b = last[2 * i + 1] == 0.f ? b : last[2 * i + 1];
        }}
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(b), "f"(a));
        each[2 * i] -= __uint_as_float(words[i] << 16);
        each[2 * i + 1] -= __uint_as_float(words[i] & 0xffff0000u);
      }}
      *(uint4*)((char*)to + addend * {1}ll) = make_uint4(words[0], words[1], words[2], words[3]);
    }}
"""
VECTORS = {1: "float", 2: "float2", 4: "float4"}


def addends_text(count: int, apart: int) -> str:
    """What splits eight numbers `each` of a function in CUDA C++ into `count` addends, `apart` bytes apart from
    `to`."""
    return _ADDENDS.format(count, apart, ", ".join(LARGEST))


def whole(size: int) -> int:
    """`size` in whole groups."""
    return -(-size // GROUP) * GROUP


@dataclass(frozen=True)
class SplitConfig(HopperConfig):
    """The fields of a schedule whose operands are sums of `addends`."""

    addends: ClassVar[int] = 2
    promoted: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = (DTYPE,)

    def check_block(self, dtype: str, arch: Arch, sums: int = 1, more: int = 0) -> str | None:
        return super().check_block(PART, arch, sums + self.promoted, more)


@dataclass(frozen=True)
class Source:
    """A tensor that is split: in the tensor called `name` a line of `length` elements, each `apart` from the next, for
    every of `count` numbers; of the addends the line is as many whole groups."""

    name: str
    count: int
    length: int
    apart: int
    # number -> the line of the addends, where it begins in the tensor, and whether it is there; None if all are
    at: Callable[[Expr], tuple[Expr, Expr, Expr | None]]

    @property
    def groups(self) -> int:
        """Of a line."""
        return -(-self.length // GROUP)

    @property
    def across(self) -> int:
        """Neighbouring threads that have groups of one line."""
        return self.groups if self.apart == 1 else min(ACROSS, self.groups)

    @property
    def threads(self) -> int:
        return self.count * self.across * -(-self.groups // self.across)


def contiguous(name: str, shape: Sequence[int]) -> Source:
    """The tensor called `name`, of lines side by side."""
    *outer, length = shape
    return Source(name, math.prod(outer), length, 1, lambda number: (number, number * length, None))


def addends_of(name: str, shape: Sequence[int]) -> Argument:
    """The tensor of the addends of one called `name`, as TMA reads it, without their axis."""
    *outer, inner = shape
    return Argument(f"{name}_addends", (*outer, whole(inner)), PART)


def split(work: Work[Any], *tensors: Argument) -> None:
    """Have the operands of `work`, which are of `tensors`, be sums: workspace, boxes and products of their addends."""
    count = work.config.addends
    work.workspace = tuple(replace(each, shape=(count, *each.shape)) for each in tensors)
    work.a, work.b = (_split(operand, count) for operand in (work.a, work.b))
    work.products = tuple(
        Product(each.sums, each.a + i * work.a.addend_bytes, each.b + j * work.b.addend_bytes)
        for (i, j), each in product(PAIRS[count], work.products)
    )


def _split(operand: Operand, count: int) -> Operand:
    return replace(operand, source=operand.boxes.of_addends(count), addends=count)


def split_tensors(work: Work[Any], sources: Sequence[Source], tensors: Tensors) -> None:
    """Emit the kernel that fills the workspace of `work` from `sources`, in its order: a thread to each eight
    elements."""
    block = T.cta_id([sum(-(-source.threads // WARPGROUP) for source in sources)])
    thread = T.thread_id([WARPGROUP])
    before = 0  # blocks
    for source, target in zip(sources, work.workspace, strict=True):
        at = kept("at", (block - before) * WARPGROUP + thread)
        with T.If(T.And(at >= 0, at < source.threads)), T.Then():
            _split_group(source, target, tensors, at)
        before += -(-source.threads // WARPGROUP)


def _split_group(source: Source, target: Argument, tensors: Tensors, at: Expr) -> None:
    """Emit what thread number `at` of a tensor splits."""
    count, across, groups = target.shape[0], source.across, source.groups
    given, addends = tensors[source.name], tensors[target.name]
    from_ = T.decl_buffer((math.prod(map(int, given.shape)),), DTYPE, data=given.data)
    to = T.decl_buffer((math.prod(target.shape),), PART, data=addends.data)
    rest = named("rest", T.truncdiv(at, across))
    group = named("group", T.truncdiv(rest, source.count) * across + T.truncmod(at, across))
    line, start, is_there = source.at(named("number", T.truncmod(rest, source.count)))
    there: Expr = source.length - group * GROUP
    first = start + group * (GROUP * source.apart)
    if is_there is not None:
        there, first = T.Select(is_there, there, 0), T.Select(is_there, first, 0)
    vector = math.gcd(4, source.length) if source.apart == 1 else 1
    name, apart = f"hopper_split_{target.name}", math.prod(target.shape[1:]) * 2
    text = _SPLIT.format(name, vector, source.apart, VECTORS[vector], addends_text(count, apart))
    with T.If(group < groups), T.Then():
        place = to.ptr_to([line * (groups * GROUP) + group * GROUP])
        T.evaluate(T.cuda.func_call(name, from_.ptr_to([first]), place, there, source_code=text))


def split_as_they_lie(problem: Conv2dProblem, work: Work) -> dict[str, Any]:
    """Of `schedule.split_schedules`: both operands are split as they lie."""
    return dict(prepare=partial(split_tensors, work, [contiguous(a.name, a.shape) for a in problem.arguments()[:2]]))
