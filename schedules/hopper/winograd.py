"""Winograd's tiles along the image's rows on Hopper's 16-bit tensor cores: F(m, r) of the columns, taps of the rows.

A kernel before transforms data and filters to the points of each tile (`definitions.winograd`) and splits what it finds
into addends of bfloat16 (`split`).  The product takes a point where a direct one takes a tap: it multiplies a tile's
data and filters at a point, and its consumers add the sums of a stage, times the point's factors, to those of each of
the tile's outputs, which stay in registers: what is transformed back never leaves them.  A kernel row's tap is a tap as
before, so that a stage's sums are few, and the errors of one axis alone are amplified.

Of `m` outputs of three taps are multiplied m + 2 points, not 3 * m.  The last tile of a row may have fewer outputs,
where the boxes of a block have one tile of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, TypeVar

import numpy as np

from schedules.core.arch import Arch
from schedules.core.arithmetic import BF16X3, FLOAT32, Arithmetic
from schedules.core.problem import Argument, Conv2dProblem
from schedules.core.space import ProductSpace
from schedules.core.tvm import T
from schedules.definitions.winograd import POINTS, Matrix, Transform, gain, transform
from schedules.definitions.winograd_errors import CHAIN, TRANSFORMS, UNIT, chain, error
from schedules.hopper.config import DEPTHS, WARPGROUP, clusters, first_legal, stage_channels
from schedules.hopper.geometry import Work
from schedules.hopper.split import ACROSS, DTYPE, GROUP, PART, VECTORS, SplitConfig, addends_text, whole
from schedules.tirx.types import Expr, Index, Tensors
from schedules.tirx.values import kept, named

SIZES = (4, 3, 2)  # outputs of a tile, the most first
SPARE = 0.35  # of the square of a chain's error: what is left is for data that cancel less than normal numbers
# of a product, by its addends: what it is off in proportion, as a deviation; half of what `split` says it is at most
SPLIT = {2: BF16X3, 3: FLOAT32}
DROPPED = {2: 2.0**-17, 3: 2.0**-24}

# {1} elements at a time of eight, {5} apart, of {3} lines {2} apart from number `first` of `width`; of the eight those
# `there` exist
_POINTS = """
__device__ __forceinline__ void {0}(const float* from, void* at, int there, int first, int width) {{
  union {{ {6} vectors[8 / {1}]; float each[8]; }} x[{3}];
#pragma unroll
  for (int line = 0; line < {3}; ++line) {{
#pragma unroll
    for (int i = 0; i < 8; ++i) x[line].each[i] = 0.f;
    bool inside = first + line >= 0 && first + line < width;
#pragma unroll
    for (int i = 0; i < 8; i += {1})
      if (inside && i < there)
        x[line].vectors[i / {1}] = *(const {6}*)(from + (long long)(first + line) * {2} + (long long)i * {5});
  }}
{4}
}}
"""
_POINT = """  {{
    float each[8];
    void* to = (char*)at + {0}ll;
#pragma unroll
    for (int i = 0; i < 8; ++i) each[i] = {1};
{2}  }}
"""
_FACTOR = """
__constant__ float {0}_table[] = {{{1}}};
__device__ __forceinline__ float {0}(int at) {{ return {0}_table[at]; }}
"""


@lru_cache
def transform_of(outputs: int, taps: int) -> Transform:
    """F(`outputs`, `taps`); of one output the products of its taps."""
    if outputs > 1:
        return transform(outputs, taps)
    one = tuple(tuple(Fraction(i == j) for j in range(taps)) for i in range(taps))
    return Transform(((Fraction(1),) * taps,), one, one)


@dataclass(frozen=True)
class RowTiles:
    """How a row of `out` outputs of `taps` taps is cut: into tiles of `size`, the last of which may have the `rest`.

    Points of the filter are those of a whole tile, and behind them those of the rest; of data those of a tile, and
    behind them those of the next.
    """

    size: int
    taps: int
    out: int
    ragged: bool  # whether the last tile has fewer outputs and not ones beyond the end

    @property
    def count(self) -> int:
        return -(-self.out // self.size)

    @property
    def rest(self) -> int:
        """Outputs of a last tile that is not whole; 0 if all are."""
        return self.out % self.size if self.ragged else 0

    @property
    def full(self) -> int:
        """Whole tiles."""
        return self.count - (self.rest > 0)

    @property
    def reach(self) -> int:
        """Points, and inputs, of a whole tile."""
        return self.size + self.taps - 1

    @property
    def beyond(self) -> int:
        """Points of the rest."""
        return self.rest + self.taps - 1 if self.rest else 0

    @property
    def stored(self) -> int:
        """Points of a row's data."""
        return self.full * self.reach + self.beyond

    @property
    def distinct(self) -> int:
        """Points of a filter's row."""
        return self.reach + self.beyond

    @property
    def mean(self) -> float:
        """Points of a tile on average."""
        return self.stored / self.count

    @cached_property
    def transforms(self) -> tuple[Transform, ...]:
        """Of a whole tile, and of the rest if there is one."""
        return tuple(transform_of(size, self.taps) for size in (self.size, self.rest) if size)

    @property
    def filter(self) -> Matrix:
        """Points x taps."""
        return tuple(row for each in self.transforms for row in each.filter)

    @property
    def factors(self) -> list[float]:
        """Of each of the filter's points, what it counts in each output of a tile."""
        found: list[float] = []
        for each in self.transforms:
            for point in range(len(each.filter)):
                own = [float(row[point]) for row in each.inverse]
                found += own + [0.0] * (self.size - len(own))
        return found

    def window(self, tile: Expr) -> tuple[Index, Index]:
        """The first and the last (exclusive) of the filter's points that tile number `tile` has."""
        if not self.rest:
            return 0, self.reach
        if not self.full:
            return self.reach, self.distinct
        whole_tile = tile < self.full
        return T.Select(whole_tile, 0, self.reach), T.Select(whole_tile, self.reach, self.distinct)

    def at(self, tile: Expr, point: Expr) -> Expr:
        """Where in a row of the data lies tile number `tile` at the filter's `point`."""
        start = tile * self.reach + point
        return start - T.Select(tile < self.full, 0, self.reach) if self.rest else start


@dataclass(frozen=True)
class RowTilesConfig(SplitConfig):
    """The fields of a schedule that cuts rows into tiles, of `addends` at each point."""

    ragged: ClassVar[bool] = False  # whether tiles of a row are told apart by a block

    tile_w: int = 4  # outputs of a tile along a row
    together: int = 1  # stages of a point whose sums add up on tensor cores, before they are added to the outputs'

    def row_tiles(self, problem: Conv2dProblem) -> RowTiles:
        return RowTiles(self.tile_w, problem.kw, problem.out_w, self.ragged)

    def as_points(self, problem: Any) -> Any:
        """The problem whose data and filter are those of the points, as far as their shapes go."""
        tiles = self.row_tiles(problem)
        return problem.unchecked(w=tiles.stored, kw=tiles.distinct)

    def as_strides(self, problem: Any) -> Any:
        """The problem whose taps are a tile's points: each output stands for a tile, none of which is ragged."""
        reach = self.row_tiles(problem).reach
        return self.as_points(problem).unchecked(stride=(problem.stride[0], reach), pad=(problem.pad[0], 0))

    def stage_length(self, problem: Conv2dProblem) -> int:
        """Products of a stage for one of its sums."""
        return self.block_k

    def as_tiles(self, problem: Any) -> Any:
        """The problem whose outputs along a row are tiles."""
        return problem.unchecked(w=self.row_tiles(problem).count, kw=1, pad=(problem.pad[0], 0))

    def check_block(self, dtype: str, arch: Arch, sums: int = 1, more: int = 0) -> str | None:
        return super().check_block(dtype, arch, sums * self.tile_w, more)

    def check_tiles(self, problem: Conv2dProblem) -> str | None:
        """Why rows are not cut so; None if they are."""
        p = problem
        for name in ("block_k", "together"):
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        if p.stride[1] != 1 or p.dilation[1] != 1:
            return f"stride={p.stride} and dilation={p.dilation}: along a row both have to be 1; use another schedule"
        if self.tile_w not in SIZES:
            return f"tile_w={self.tile_w} is not {', '.join(map(str, SIZES))}"
        if p.kw == 1 or self.tile_w + p.kw - 1 not in POINTS:
            return f"tile_w={self.tile_w} outputs of kw={p.kw} taps are no tile that there are points for"
        rest = self.row_tiles(p).rest
        if rest > 1 and rest + p.kw - 1 not in POINTS:
            return f"tile_w={self.tile_w} leaves {rest} outputs of kw={p.kw} taps, which there are no points for"
        if self.split_k > 1:
            return f"split_k={self.split_k} has no way to add sums of several outputs, give 1"
        if 2 * p.pad[1] > p.kw - 1:
            return f"pad={p.pad} shows more border than a window's half; use another schedule"
        if self.arithmetic_of(p).error == math.inf:
            return f"ci={p.ci}: sums of so few products may be below their neighbours' errors; use another schedule"
        return None

    def arithmetic_of(self, problem: Conv2dProblem) -> Arithmetic:
        """By `winograd_errors.error`: a stage's sums, which are added up, are as exact as a chain over its channels,
        though tensor cores cut off: they do so once for sixteen."""
        found, direct = error(problem, gain(self.tile_w, problem.kw), self._length(problem)), SPLIT[self.addends]
        return direct if found <= direct.error else Arithmetic("winograd", found)

    def _length(self, problem: Conv2dProblem) -> float:
        """Of the chain that sums at a point are as exact as, if their products are."""
        length = chain(problem.ci * problem.kh, self.stage_length(problem) * self.together)
        return length + (DROPPED[self.addends] / UNIT) ** 2 / CHAIN

    def as_exact(self, problem: Conv2dProblem) -> bool:
        """Whether errors are those that it is called by: of three addends at most a float32 chain's over all
        products."""
        if self.tile_w + problem.kw - 1 not in POINTS or self.arithmetic_of(problem) != SPLIT[self.addends]:
            return False
        own = gain(self.tile_w, problem.kw) * (CHAIN * self._length(problem) + TRANSFORMS)
        return self.addends < 3 or own <= SPARE * CHAIN * (problem.ci * problem.kh * problem.kw)


C = TypeVar("C", bound=RowTilesConfig)


@dataclass(frozen=True)
class Lined:
    """Where a tensor (rows, columns, lines, length) of `shape` lies: `at` says of a row and a line where its first
    column begins, and whether it is there; `column` and `element` are the elements from one to the next.

    Of the points `number` says of a row, a tile and a line where the first lies, in lines; `point` is how many lines
    further on the next.
    """

    shape: tuple[int, int, int, int]
    column: int
    element: int
    at: Callable[[Expr, Expr], tuple[Expr, Expr | None]]
    point: int
    number: Callable[[Expr, Expr, Expr], Expr]


def contiguous(shape: tuple[int, int, int, int], tiles: RowTiles, points: int) -> Lined:
    """The tensor of that shape, and the points of its columns in their place, `points` of them."""
    _, columns, lines, length = shape

    def number(row: Expr, tile: Expr, line: Expr) -> Expr:
        return (row * points + tile * tiles.reach) * lines + line

    return Lined(
        shape, lines * length, 1, lambda row, line: ((row * (columns * lines) + line) * length, None), lines, number
    )


@dataclass(frozen=True)
class Transformed:
    """What threads transform of a tensor `name`, `count` tiles of each of its rows and lines from number `before` on,
    each with `matrix`, `step` columns after the last, the first of which lies `pad` before the tensor."""

    name: str
    given: Lined
    matrix: Matrix
    count: int = 1
    before: int = 0
    step: int = 0
    pad: int = 0

    @property
    def numbers(self) -> int:
        """Rows, tiles and lines."""
        return self.given.shape[0] * self.count * self.given.shape[2]

    @property
    def groups(self) -> int:
        return -(-self.given.shape[3] // GROUP)

    @property
    def across(self) -> int:
        """Neighbouring threads that have groups of one line."""
        return self.groups if self.given.element == 1 else min(ACROSS, self.groups)

    @property
    def threads(self) -> int:
        return self.numbers * self.across * -(-self.groups // self.across)


def transform_tensors(work: Work[Any], sources: Sequence[Transformed], tensors: Tensors) -> None:
    """Emit the kernel that fills the workspace of `work` from `sources`: a thread to each eight elements of a tile."""
    block = T.cta_id([sum(-(-source.threads // WARPGROUP) for source in sources)])
    thread = T.thread_id([WARPGROUP])
    targets, before = dict(zip(("data", "filter"), work.workspace, strict=True)), 0
    for number, source in enumerate(sources):
        at = kept("at", (block - before) * WARPGROUP + thread)
        with T.If(T.And(at >= 0, at < source.threads)), T.Then():
            _transform_group(f"hopper_points_{number}", source, targets[source.name], tensors, at)
        before += -(-source.threads // WARPGROUP)


def _transform_group(name: str, source: Transformed, target: Argument, tensors: Tensors, at: Expr) -> None:
    """Emit what thread number `at` of a tensor transforms."""
    lined, count, across = source.given, target.shape[0], source.across
    _, columns, lines, length = lined.shape
    given, addends = tensors[source.name], tensors[target.name]
    from_ = T.decl_buffer((math.prod(map(int, given.shape)),), DTYPE, data=given.data)
    to = T.decl_buffer((math.prod(target.shape),), PART, data=addends.data)
    rest = named("rest", T.truncdiv(at, across))
    group = named("group", T.truncdiv(rest, source.numbers) * across + T.truncmod(at, across))
    number = named("number", T.truncmod(rest, source.numbers))
    line, rest = named("line", T.truncmod(number, lines)), named("rest", T.truncdiv(number, lines))
    row, tile = named("row", T.truncdiv(rest, source.count)), named("tile", T.truncmod(rest, source.count))
    if source.before:
        tile = tile + source.before
    start, is_there = lined.at(row, line)
    there: Expr = length - group * GROUP
    start = start + group * (GROUP * lined.element)
    if is_there is not None:
        there, start = T.Select(is_there, there, 0), T.Select(is_there, start, 0)
    vector = math.gcd(4, length) if lined.element == 1 else 1
    nbytes, each = math.prod(target.shape[1:]) * 2, whole(length)
    points = "".join(
        _POINT.format(number * lined.point * each * 2, _sum(row), addends_text(count, nbytes))
        for number, row in enumerate(source.matrix)
    )
    inputs = len(source.matrix[0])
    text = _POINTS.format(name, vector, lined.column, inputs, points, lined.element, VECTORS[vector])
    place = lined.number(row, tile, line) * each + group * GROUP
    with T.If(group < source.groups), T.Then():
        call = (from_.ptr_to([start]), to.ptr_to([place]), there, tile * source.step - source.pad, columns)
        T.evaluate(T.cuda.func_call(name, *call, source_code=text))


def _sum(row: Sequence[Fraction]) -> str:
    """The terms of a point, in CUDA C++."""
    found = ""
    for line, factor in enumerate(row):
        value, term = float(np.float32(float(factor))), f"x[{line}].each[i]"
        if not value:
            continue
        plain = {1.0: term, -1.0: f"-{term}"}.get(value)
        if not found:
            found = plain or f"{value.hex()}f * {term}"
        elif plain:
            found = f"{found} {plain[0] if value < 0 else '+'} {term}"
        else:
            found = f"fmaf({value.hex()}f, {term}, {found})"
    return found


def factors(tiles: RowTiles, tile: Index, number: Expr) -> list[Expr]:
    """What sums of tap number `number` of tile number `tile`, a point of one kernel row after the other, count in each
    output of it."""
    point = T.truncmod(number, tiles.reach)
    if tiles.rest:
        point = T.Select(tile < tiles.full, point, tiles.reach + T.truncmod(number, tiles.beyond))
    point = named("point", point)
    text = _FACTOR.format("hopper_factor", ", ".join(f"{value.hex()}f" for value in tiles.factors))
    return [
        named(
            "factor",
            T.cuda.func_call("hopper_factor", point * tiles.size + i, source_code=text, return_type="float32"),
        )
        for i in range(tiles.size)
    ]


def more(work: Work[Any], tiles: RowTiles, pad: int, data: Lined, weight: Lined) -> dict[str, Any]:
    """What `program` takes for `work`, of data with `pad` columns of padding, and of filters."""
    parts = zip(tiles.transforms, (tiles.full, 1), (0, tiles.full), strict=False)
    if not tiles.full:
        parts = zip(tiles.transforms[1:], (1,), (0,), strict=True)
    sources = [Transformed("data", data, each.data, count, before, tiles.size, pad) for each, count, before in parts]
    sources.append(Transformed("filter", weight, tiles.filter))
    return dict(prepare=partial(transform_tensors, work, sources))


# (block_m, block_n, consumers) by outputs of a tile: as many sums as registers hold
SHAPES = {
    4: ((128, 64, 2), (64, 64, 1), (128, 32, 2), (64, 32, 1)),
    3: ((128, 80, 2), (128, 64, 2), (64, 64, 1), (64, 32, 1)),
    2: ((128, 96, 2), (128, 64, 2), (64, 96, 1), (64, 64, 1), (64, 32, 1)),
}


def _shapes() -> list[dict[str, Any]]:
    return [
        dict(tile_w=size, block_m=m, block_n=n, consumers=consumers)
        for size, found in SHAPES.items()
        for m, n, consumers in found
    ]


def space_of(kind: type[C], problem: Conv2dProblem, arch: Arch, *axes: Any) -> Sequence[C]:
    """Every config of `kind` worth trying, legal or not, that is as exact as the schedule is said to be."""
    tiles = [dict(shape, block_k=k, together=t) for shape in _shapes() for k in (16, 32, 64) for t in (1, 2, 4)]
    tiles = [words for words in tiles if words["together"] == 1 or words["block_k"] * words["together"] <= problem.ci]
    tiles = [words for words in tiles if kind(**words).as_exact(problem)]
    shared = [words for count in (1, 2) for words in clusters(count, arch.device) if words["split_k"] == 1]
    return ProductSpace(kind, tiles, shared, *axes, DEPTHS)


def default_of(base: C, problem: Conv2dProblem, arch: Arch) -> C:
    """`base` with the first tile that is legal, of as many outputs as errors allow."""
    k = stage_channels(problem.ci, 32, 16)
    found = [
        replace(base, **shape, block_k=k, num_stages=stages, cluster_m=1).filling(arch.device)
        for shape in _shapes()
        for stages in (4, 2)
    ]
    exact = [config for config in found if config.as_exact(problem)]
    return first_legal([*exact, *found], problem, arch)
