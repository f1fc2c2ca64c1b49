"""A convolution as a sum over taps and channels, in whichever form a schedule wants: the TE graphs of all operators.

Stages: ``columns`` (data under each tap) and ``weights``, both with zeros beyond their ends; ``conv``, their sums of
products; ``finished``, the epilogue; ``output``, the part that was asked for.  `textbook` has ``padded`` (data with its
border) in place of ``columns``.

Axes go by these names: n h w ci of data, kh kw ci co of the filter, n y x co of the output; ``pixel`` is (n, y, x) as
one, ``k`` (ci, kh, kw); channels in groups are gi li and go lo; ``kt`` is kw in whole words; ``part`` is one of several
parts of the reduction.  A form is a line of them for each stage.  Extents are rounded up to whole tiles, so that a
schedule's tiles are free of tests but for the first load and the last store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from schedules.core.problem import Conv2dProblem
from schedules.definitions.epilogue import ACCUMULATOR, finish, operands_at, placeholders
from schedules.definitions.padding import select
from schedules.definitions.program import program_of
from schedules.definitions.scatter import scatter
from schedules.definitions.tf32 import rounded

if TYPE_CHECKING:
    from tvm import te, tirx
    from tvm.tirx import PrimExpr

At = Mapping[str, "PrimExpr"]  # the index along each axis
P = TypeVar("P", bound=Conv2dProblem)

# what loops are called; those of a reduction
LOOPS = {
    **{"n": "b", "ci": "c", "co": "f", "h": "y", "w": "x", "kh": "ry", "kw": "rx"},
    **{"gi": "g", "li": "c", "go": "g", "lo": "f"},
}
REDUCED = {**LOOPS, "ci": "rc", "gi": "rg", "li": "rc"}
CHANNELS = ("ci", "gi", "li", "k")  # of the reduction
PART = "part"


def at_run_time(problem: P) -> P:
    """`problem`, whose number of images is a variable if a built function takes any."""
    from tvm import te

    return problem.unchecked(n=te.var("n", "int32")) if problem.n_from else problem


@dataclass(frozen=True)
class Stage:
    """A tensor and its axes; called with an index along all axes there are."""

    tensor: te.Tensor
    axes: tuple[str, ...]

    def __call__(self, at: At) -> PrimExpr:
        return self.tensor(*(at[axis] for axis in self.axes))


def stage(name: str, axes: Sequence[str], extents: Sequence[Any], element: Callable[[At], PrimExpr]) -> Stage:
    """A stage of `element` over `axes`."""
    from tvm import te

    loops = [LOOPS.get(axis, axis) for axis in axes]
    made = te.compute(
        tuple(extents), lambda *at: element(dict(zip(axes, at, strict=True))), name=name, varargs_names=loops
    )
    return Stage(made, tuple(axes))


@dataclass(frozen=True)
class Implicit:
    """The stages of one problem, as `at_run_time` has it.  `tile` is what the extents of axes are rounded up to
    multiples of; with `wide`, operands are cast to the accumulator's dtype as they are fetched, else as they are
    multiplied; with `tf32` they are rounded to it as they are fetched.  ``part`` counts the `parts` of as many channels
    each that the reduction is cut into."""

    problem: Conv2dProblem
    tile: Mapping[str, int] = field(default_factory=dict)
    wide: bool = False
    parts: int = 1
    tf32: bool = False
    sums: str = ""  # another dtype of them than is usual
    begun: tuple[str, ...] = ()  # terms that they begin with, and that the epilogue does not add

    @cached_property
    def given(self) -> dict[str, te.Tensor]:
        """The inputs."""
        return placeholders(self.problem)

    @property
    def data(self) -> Stage:
        return Stage(self.given["data"], self.problem.data_axes)

    @property
    def filter(self) -> Stage:
        return Stage(self.given["filter"], self.problem.filter_axes)

    def real(self, axis: str) -> int:
        """The extent of an axis."""
        return self.parts if axis == PART else self.problem.extents[axis]

    def extent(self, axis: str) -> int:
        """The same in whole tiles, of channels those of a part."""
        tile, real = self.tile.get(axis, 1), self.real(axis)
        if self.parts > 1 and axis in CHANNELS:
            real = -(-real // self.parts)
        return (real + (tile - 1)) // tile * tile if self.ragged(axis) else real

    def ragged(self, axis: str) -> bool:
        """Whether an axis is no whole tiles, as far as is known before run time."""
        tile, real = self.tile.get(axis, 1), self.real(axis)
        if axis in CHANNELS:
            tile *= self.parts
        return real % tile > 0 if isinstance(real, int) else tile > 1

    def of_all(self, at: At) -> At:
        """The index with channels counted through all parts."""
        if PART not in at:
            return at
        return {axis: at[PART] * self.extent(axis) + i if axis in CHANNELS else i for axis, i in at.items()}

    def _ends(self, at: At, *axes: str) -> list[tuple[bool, PrimExpr]]:
        """Tests that `at` is within the ends of those of `axes` that it has."""
        return [(self.ragged(axis), at[axis] < self.real(axis)) for axis in axes if axis in at]

    def apart(self, at: At) -> dict[str, PrimExpr]:
        """The index with what its ``pixel``, ``k`` and group of channels are made of."""
        from tvm import tirx

        p, full = self.problem, dict(at)
        if "pixel" in at:
            pixel, image = at["pixel"], p.out_h * p.out_w
            full |= {"n": pixel // image, "y": pixel % image // p.out_w, "x": pixel % p.out_w}
        if "k" in at:
            k, taps = at["k"], p.kh * p.kw
            # a main loop that counts k in a variable cannot prove it positive, hence division towards zero
            ry = tirx.truncdiv(tirx.truncmod(k, taps), p.kw)
            full |= {"ci": tirx.truncdiv(k, taps), "kh": ry, "kw": tirx.truncmod(k, p.kw)}
        if "go" in at:
            full["co"] = at["go"] * self.real("lo") + at["lo"]
        if "kw" in at:
            full["kt"] = at["kw"]
        return full

    def columns(self, axes: str, name: str = "columns", source: Callable[[At], PrimExpr] | None = None) -> Stage:
        """Data, or another `source`, under each tap; zero in the padding."""
        from tvm import te

        p = self.problem

        def element(at: At) -> PrimExpr:
            at = self.of_all(at)
            full = self.apart(at)
            y = full["y"] * p.stride[0] + full["kh"] * p.dilation[0] - p.pad[0]
            x = full["x"] * p.stride[1] + full["kw"] * p.dilation[1] - p.pad[1]
            tests = [
                (p.pad[0] > 0, te.all(y >= 0, y < p.h)),
                (p.pad[1] > 0, te.all(x >= 0, x < p.w)),
                *self._ends(at, *CHANNELS, "n", "pixel"),
            ]
            found = (source or self.data)({**full, "h": y, "w": x, "hw": y * p.w + x})
            return self._fetched(select(tests, found))

        return self._stage(name, axes, element)

    def weights(self, axes: str, name: str = "weights", source: Callable[[At], PrimExpr] | None = None) -> Stage:
        """The filter, or another `source`."""

        def element(at: At) -> PrimExpr:
            at = self.of_all(at)
            return self._fetched(select(self._ends(at, *CHANNELS, "co"), (source or self.filter)(self.apart(at))))

        return self._stage(name, axes, element)

    def conv(self, axes: str, *operands: tuple[Stage, Stage]) -> Stage:
        """The sums over what only the operands have of the products of each pair of them."""
        reduced = self._reductions([axis for axis in operands[0][0].axes if axis not in axes.split()])

        def element(at: At) -> PrimExpr:
            full = {**at, **reduced}
            return self._sum([(a(full), b(full)) for a, b in operands], list(reduced.values()))

        return self._stage("conv", axes, element)

    def summed(self, conv: Stage) -> Stage:
        """The sums of all parts of ``conv``, which are kept as ``partial``."""
        partial = self._stage("partial", " ".join(conv.axes), conv)

        def element(at: At) -> PrimExpr:
            first, *others = (partial({**at, PART: number}) for number in range(self.parts))
            return sum(others, first)

        return self._stage("summed", " ".join(axis for axis in conv.axes if axis != PART), element)

    def output(self, conv: Stage, *, staged: bool = False) -> Stage:
        """The part of ``conv`` that was asked for, after the epilogue, which is a stage ``finished`` of its own if
        `staged`."""
        finished = conv
        if staged:
            finished = self._stage("finished", " ".join(conv.axes), lambda at: self.finish(conv(at), at))
        # beyond an end that is known at run time only, `program` leaves out the store: TVM cannot prove that whole
        # tiles cover what they are rounded up from
        extents = [self.extent(axis) if self._open(axis) else self.real(axis) for axis in conv.axes]
        return stage("output", conv.axes, extents, lambda at: finished(at) if staged else self.finish(conv(at), at))

    def _open(self, axis: str) -> bool:
        """Whether what is stored along an axis ends at a number that is known at run time only, within a tile."""
        return self.ragged(axis) and not isinstance(self.real(axis), int)

    def finish(self, total: PrimExpr, at: At) -> PrimExpr:
        """The element `at` of the output, of the sum `total`.  Beyond the ends there are no terms to read; what stands
        there is dropped."""
        from tvm import te

        p, total = self.problem, total.astype("int32") if self.problem.dtype == "int8" else total
        ragged = [axis for axis in at if self.ragged(axis)]
        full = self.apart({**at, **{axis: te.min(at[axis], self.real(axis) - 1) for axis in ragged}})
        operands = operands_at(p, self.given, [full[axis] for axis in p.output_axes])
        pairs = zip(p.epilogue.operands, operands, strict=True)
        return finish(p.epilogue, total, [0 if term.name in self.begun else operand for term, operand in pairs])

    def program(self, output: Stage) -> tirx.PrimFunc:
        """The program whose ``output`` is stored as the problem's lies.

        The pixels of an image stay one index of the last axis where they can: taken apart into y and x, the pixels of
        one vector no longer look like neighbours to TVM, which then stores them one by one and by indices that CUDA has
        no vectors for.
        """
        from tvm import tirx

        p = self.problem
        func = program_of([*self.given.values(), output.tensor])
        opened = [axis for axis in output.axes if self._open(axis)]
        if output.axes == p.output_axes and not opened:
            return func

        def place(*index: PrimExpr) -> tuple[PrimExpr | None, tuple[PrimExpr, ...]]:
            at = dict(zip(output.axes, index, strict=True))
            inside = tirx.all(*(at[axis] < self.real(axis) for axis in opened)) if opened else None
            full = self.apart(at)
            if "pixel" in full and p.output_axes[-1] == "x":
                pixel = full["pixel"]
                full |= {"y": tirx.const(0, str(pixel.ty)), "x": pixel % (p.out_h * p.out_w)}
            return inside, tuple(full[axis] for axis in p.output_axes)

        return scatter(func, p.shapes()[2], place)

    @property
    def accumulator(self) -> str:
        """The dtype of sums."""
        return self.sums or ("int32" if self.problem.dtype == "int8" else ACCUMULATOR)

    def _fetched(self, value: PrimExpr) -> PrimExpr:
        value = value.astype(self.accumulator) if self.wide else value
        return rounded(value) if self.tf32 else value

    def _stage(self, name: str, axes: str, element: Callable[[At], PrimExpr]) -> Stage:
        names = axes.split()
        return stage(name, names, [self.extent(axis) for axis in names], element)

    def _reductions(self, axes: Sequence[str]) -> dict[str, te.IterVar]:
        from tvm import te

        return {axis: te.reduce_axis((0, self.extent(axis)), REDUCED.get(axis, axis)) for axis in axes}

    def _sum(self, pairs: Sequence[tuple[PrimExpr, PrimExpr]], over: Sequence[te.IterVar]) -> PrimExpr:
        from tvm import te

        first, *others = (a.astype(self.accumulator) * b.astype(self.accumulator) for a, b in pairs)
        return te.sum(sum(others, first), axis=list(over))


def product(
    problem: Conv2dProblem,
    columns: str,
    weights: str,
    conv: str,
    tile: Mapping[str, int],
    *,
    wide: bool = False,
    staged: bool = True,
    parts: int = 1,
    tf32: bool = False,
) -> tirx.PrimFunc:
    """The matrix product of ``columns`` and ``weights`` over these axes, for each of the outer axes of ``conv``; the
    operand that has the rows comes first.  See `Implicit` for the rest."""
    graph = Implicit(at_run_time(problem), tile, wide, parts, tf32)
    operands = graph.columns(columns), graph.weights(weights)
    row = conv.split()[-2]
    pair = operands if row in operands[0].axes else operands[::-1]
    sums = graph.conv(conv, pair)
    return graph.program(graph.output(graph.summed(sums) if parts > 1 else sums, staged=staged))


def textbook(
    problem: Conv2dProblem, tile: Mapping[str, int] | None = None, *, wide: bool = False, finished: bool = True
) -> list[te.Tensor]:
    """The graph with ``padded``, data with its border, as the problem's tensors lie.  Stages that change nothing are
    left out, but not with `wide`; so is ``output``, if not `finished`.

    Returns [data, filter, the epilogue's terms, the output].
    """
    from tvm import te

    p = at_run_time(problem)
    graph = Implicit(p, tile or {}, wide)
    (top, left), channels = p.pad, [axis for axis in p.data_axes if axis not in "hwn"]
    size = dict(zip("hw", p.under(graph.extent("y"), graph.extent("x")), strict=True))

    def pixel(at: At) -> PrimExpr:
        y, x = at["h"], at["w"]
        tests = [
            (top > 0 or size["h"] > p.h, te.all(y >= top, y - top < p.h)),
            (left > 0 or size["w"] > p.w, te.all(x >= left, x - left < p.w)),
            *graph._ends(at, *CHANNELS, "n"),
        ]
        return graph._fetched(select(tests, graph.data({**at, "h": y - top, "w": x - left})))

    data, weights = graph.data, graph.filter
    if wide or p.pad != (0, 0) or any(map(graph.ragged, (*channels, "n", "x", "y"))):
        extents = [size.get(axis) or graph.extent(axis) for axis in p.data_axes]
        data = stage("padded", p.data_axes, extents, pixel)
    if wide or any(map(graph.ragged, (*channels, "co"))):
        weights = graph.weights(" ".join(p.filter_axes))
    taps = {"h": "kh", "w": "kw"}
    reduced = graph._reductions([taps.get(axis, axis) for axis in p.data_axes if axis not in p.output_axes])

    def element(at: At) -> PrimExpr:
        full = graph.apart({**at, **reduced})
        full["h"] = full["y"] * p.stride[0] + full["kh"] * p.dilation[0]
        full["w"] = full["x"] * p.stride[1] + full["kw"] * p.dilation[1]
        return graph._sum([(data(full), weights(full))], list(reduced.values()))

    conv = graph._stage("conv", " ".join(p.output_axes), element)
    return [*graph.given.values(), (graph.output(conv) if finished else conv).tensor]
