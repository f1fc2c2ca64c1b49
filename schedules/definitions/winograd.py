"""A convolution as products of transformed tiles, by Winograd's minimal filtering: the TE graph of all layouts.

F(m, r) makes m outputs of a filter of r taps from m + r - 1 products, one for each point at which the polynomials of
tile and filter are multiplied; direct multiplication takes m * r.  An axis is cut into periods of one or several tiles,
which may be unequal: 14 = 6 + 4 + 4 takes 8 + 6 + 6 products.  A dilated filter's outputs of one phase are a
convolution without dilation.  With a stride, so are the taps of each phase over the inputs of that phase, of which all
are added up: at stride 2 four outputs of three taps take 5 + 4 products in place of 12.  Two axes nest: a tile of a
plane has as many products as the product of its sides'.

Sources: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015; Toom-Cook by way of Lagrange's
interpolation, with points chosen after Barabasz et al., "Error Analysis and Improving the Accuracy of Winograd
Convolution for Deep Neural Networks", 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

from schedules.core.problem import Conv2dProblem
from schedules.core.tvm import PrimExpr, te, tirx
from schedules.definitions.implicit import At, Implicit, Stage, stage
from schedules.definitions.padding import select
from schedules.definitions.program import program_of
from schedules.definitions.scatter import scatter

Matrix = tuple[tuple[Fraction, ...], ...]
# of the symmetric points with up to four bits, those of the least `gain`, by the number of points; infinity is one more
POINTS = {
    3: ("11/16", "-11/16"),
    4: ("0", "1", "-1"),
    5: ("3/8", "-3/8", "5/4", "-5/4"),
    6: ("0", "11/16", "-11/16", "3/2", "-3/2"),
    7: ("5/16", "-5/16", "7/8", "-7/8", "13/8", "-13/8"),
    8: ("0", "1/2", "-1/2", "1", "-1", "2", "-2"),
}


@dataclass(frozen=True)
class Transform:
    """F(outputs, taps): outputs = inverse @ ((filter @ taps) * (data @ inputs))."""

    inverse: Matrix  # outputs x points
    filter: Matrix  # points x taps
    data: Matrix  # points x inputs


def phases(taps: int, stride: int) -> list[int]:
    """The taps of each phase of a stride that has any."""
    return [len(range(phase, taps, stride)) for phase in range(min(taps, stride))]


def points_of(outputs: int, taps: int, stride: int = 1) -> int:
    """Products of `outputs` outputs."""
    return sum(outputs + each - 1 for each in phases(taps, stride))


def is_known(outputs: int, taps: int, stride: int = 1) -> bool:
    """Whether POINTS has what `transform` needs."""
    return all(1 in (outputs, each) or outputs + each - 1 in POINTS for each in phases(taps, stride))


@lru_cache
def transform(outputs: int, taps: int, stride: int = 1) -> Transform:
    """F(`outputs`, `taps`) over every `stride`-th input, where it `is_known`."""
    if stride > 1:
        return _of_phases(outputs, taps, stride)
    if 1 in (outputs, taps):
        plain, ones = _identity(outputs + taps - 1), ((Fraction(1),) * taps,)
        return Transform(plain if taps == 1 else ones, plain if outputs == 1 else ones * outputs, plain)
    points = [Fraction(point) for point in POINTS[outputs + taps - 1]]
    zero, one = Fraction(0), Fraction(1)
    inverse = [[point**i for point in points] + [one if i == outputs - 1 else zero] for i in range(outputs)]
    filters, data = [], []
    for point in points:
        others = [other for other in points if other != point]
        scale = math.prod((point - other for other in others), start=one)
        filters.append([point**j / scale for j in range(taps)])
        data.append([*_polynomial(others), zero])
    filters.append([zero] * (taps - 1) + [one])
    data.append(_polynomial(points))
    return Transform(*(tuple(map(tuple, matrix)) for matrix in (inverse, filters, data)))


def _identity(size: int) -> Matrix:
    return tuple(tuple(Fraction(row == column) for column in range(size)) for row in range(size))


def _of_phases(outputs: int, taps: int, stride: int) -> Transform:
    """The transforms of all phases: their points one after the other, their inputs and taps as they lie."""
    inputs = stride * (outputs - 1) + taps
    made = [transform(outputs, each) for each in phases(taps, stride)]

    def apart(row: Sequence[Fraction], phase: int, size: int) -> tuple[Fraction, ...]:
        at = range(phase, size, stride)
        return tuple(row[at.index(i)] if i in at and at.index(i) < len(row) else Fraction(0) for i in range(size))

    return Transform(
        tuple(tuple(x for each in made for x in each.inverse[row]) for row in range(outputs)),
        tuple(apart(row, phase, taps) for phase, each in enumerate(made) for row in each.filter),
        tuple(apart(row, phase, inputs) for phase, each in enumerate(made) for row in each.data),
    )


@lru_cache
def gain(outputs: int, taps: int, stride: int = 1) -> float:
    """How much larger errors of F(`outputs`, `taps`) are than those of sums over the channels alone: the variance of
    the worst output's, for data and filters at random, of which each point's sum has its own rounding.  Over two axes
    it is the gains' product."""
    made = transform(outputs, taps, stride)
    squares = [[sum(x * x for x in row) for row in matrix] for matrix in (made.filter, made.data)]
    each = [float(a * b) for a, b in zip(*squares, strict=True)]
    return max(sum(float(x * x) * e for x, e in zip(row, each, strict=True)) for row in made.inverse) / taps


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """The coefficients of the polynomial with these roots and 1 before the highest power, the lowest first."""
    found = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *found]
        found = [high - root * low for high, low in zip(shifted, [*found, Fraction(0)], strict=True)]
    return found


@dataclass(frozen=True)
class Split:
    """How an axis of `out` outputs is cut: into periods of tiles of `sizes` outputs each."""

    sizes: tuple[int, ...]
    taps: int
    out: int
    dilation: int = 1
    stride: int = 1

    @property
    def period(self) -> int:
        """Outputs of a period."""
        return sum(self.sizes)

    @property
    def reach(self) -> int:
        """Inputs of a period."""
        return self.stride * (self.period - 1) + self.taps

    @property
    def repeats(self) -> int:
        """Periods of each phase of a dilated filter."""
        of_phase = -(-self.out // self.dilation)
        return -(-of_phase // self.period)

    @property
    def periods(self) -> int:
        return self.dilation * self.repeats

    @property
    def points(self) -> int:
        """Points of a period: products for each pair of channels."""
        return sum(points_of(size, self.taps, self.stride) for size in self.sizes)

    @property
    def gain(self) -> float:
        """That of the tile with the largest errors."""
        return max(gain(size, self.taps, self.stride) for size in self.sizes)

    @cached_property
    def _tiles(self) -> list[tuple[Transform, int, int]]:
        """Each tile of a period: its transform, first output and first point."""
        found, output, point = [], 0, 0
        for size in self.sizes:
            found.append((transform(size, self.taps, self.stride), output, point))
            output, point = output + size, point + points_of(size, self.taps, self.stride)
        return found

    @cached_property
    def data(self) -> Matrix:
        """Points x inputs of a period."""
        rows = []
        for tile, output, _ in self._tiles:
            for row in tile.data:
                first = output * self.stride
                after = self.reach - first - len(row)
                rows.append((Fraction(0),) * first + row + (Fraction(0),) * after)
        return tuple(rows)

    @cached_property
    def inverse(self) -> Matrix:
        """Outputs x points of a period."""
        rows = []
        for tile, _, point in self._tiles:
            for row in tile.inverse:
                rows.append((Fraction(0),) * point + row + (Fraction(0),) * (self.points - point - len(row)))
        return tuple(rows)

    @cached_property
    def filter(self) -> Matrix:
        """Distinct points x taps."""
        found = (transform(size, self.taps, self.stride) for size in dict.fromkeys(self.sizes))
        return tuple(row for each in found for row in each.filter)

    def filter_point(self, point: PrimExpr) -> PrimExpr:
        """The row of `filter` that belongs to a point of a period."""
        first, before = dict[int, int](), 0
        for size in dict.fromkeys(self.sizes):
            first[size], before = before, before + points_of(size, self.taps, self.stride)
        row = point
        for size, (_, _, start) in zip(self.sizes, self._tiles, strict=True):
            if start != first[size]:
                row = tirx.Select(point >= start, point - (start - first[size]), row)
        return row

    def at(self, period: PrimExpr, within: PrimExpr, inputs: bool = False) -> PrimExpr:
        """The output, or the input of the padded image, that is `within` a period of its phase."""
        if self.dilation == 1:
            return period * self.period * (self.stride if inputs else 1) + within
        return period % self.dilation + (period // self.dilation * self.period + within) * self.dilation


def linear(matrix: Matrix, row: PrimExpr, values: Sequence[PrimExpr]) -> PrimExpr:
    """Row number `row` of `matrix` times `values`; the rows are told apart where the loop over them is unrolled."""
    from tvm.tirx.op import fma

    def term(coefficients: Sequence[Fraction]) -> PrimExpr:
        found = None
        for coefficient, value in zip(coefficients, values, strict=True):
            factor = tirx.const(float(coefficient), "float32")
            if found is None and coefficient:
                found = value if coefficient == 1 else factor * value
            elif coefficient:
                found = (
                    found + value
                    if coefficient == 1
                    else found - value
                    if coefficient == -1
                    else fma(factor, value, found)
                )
        return found

    result = term(matrix[-1])
    for number in range(len(matrix) - 2, -1, -1):
        result = tirx.Select(row == number, term(matrix[number]), result)
    return result


@dataclass(frozen=True)
class Winograd:
    """The graph of a problem with its rows and columns cut by `rows` and `columns`.

    Stages, all float32: ``pixels``, the inputs of each tile, zero in the padding; ``data_rows`` and ``data_points``,
    transformed along the rows and then the columns; ``filter_rows`` and ``filter_points``; ``columns`` and
    ``weights``, both with zeros up to whole tiles of the product; ``conv``, the products of each point; ``products``,
    what is real of them; ``sum_rows``, transformed back along the rows; ``finished``, along the columns too, after the
    epilogue; ``output``.

    A tile is a ``column`` of the products: images outside tiles, or inside where the layout has them so.  `tile` is
    what the extents of (co, column, ci) are rounded up to in the products; with `whole` in every stage but the output,
    where beyond an end stands the last once more.  With `part`, which divides the channels, ``conv`` has the sums of so
    many channels, and ``products`` adds those up: far fewer additions to a large sum, so that less is rounded off.
    With `turned`, channels are inside of columns though they are not of the data.
    """

    problem: Conv2dProblem
    rows: Split
    columns: Split
    tile: tuple[int, int, int] = (1, 1, 1)
    whole: bool = False
    part: int = 0
    turned: bool = False

    @property
    def images_inside(self) -> bool:
        """Whether the images are the innermost axis of a column, as they are of the data."""
        return self.problem.data_axes[-1] == "n"

    @property
    def channels_inside(self) -> bool:
        """Whether channels are inside of columns, as they are of the data or of what is made of it."""
        return self.turned or self.problem.data_axes[-1] == "ci"

    @property
    def lanes(self) -> str:
        """What neighbours along the innermost axis of transformed data are."""
        return "channels" if self.channels_inside else "images" if self.images_inside else "tiles"

    @property
    def tiles(self) -> int:
        """Columns of the products."""
        return self.problem.n * self.rows.periods * self.columns.periods

    @property
    def owned(self) -> bool:
        """Whether a tile of the products has all columns, so that its filters are read there alone."""
        return self.tile[1] >= self.tiles

    @property
    def filter_axes(self) -> str:
        """The channels of a transformed filter: those inside are its own innermost, as they are read and written."""
        return "co ci" if self.channels_inside else "ci co"

    def _extents(self, axes: str, whole: bool = False) -> list[int]:
        p, rows, columns = self.problem, self.rows, self.columns
        found = {
            "py": rows.points, "px": columns.points, "iy": rows.reach, "ix": columns.reach,
            "oy": rows.period, "ox": columns.period, "kh": p.kh, "kw": p.kw,
            "uy": len(rows.filter), "ux": len(columns.filter), "ci": p.ci, "co": p.co, "column": self.tiles,
            "part": p.ci // self.part if self.part else 1,
        }  # fmt: skip
        if whole:
            for axis, tile in zip(("co", "column", "ci"), self.tile, strict=True):
                found[axis] = -(-found[axis] // tile) * tile
        return [found[axis] for axis in axes.split()]

    def _stage(self, name: str, axes: str, element: object, whole: bool = False) -> Stage:
        return stage(name, axes.split(), self._extents(axes, whole or self.whole), element)  # type: ignore[arg-type]

    def _inside(self, at: At) -> dict[str, PrimExpr]:
        """The index with what is beyond the end of an axis at its last."""
        ends = {"co": self.problem.co, "column": self.tiles, "ci": self.problem.ci}
        ragged = [axis for axis in ends if axis in at and self.whole and self._extents(axis, True) != [ends[axis]]]
        images = self.problem.n if self.images_inside else 1

        def last(axis: str) -> PrimExpr:
            if axis == "column":  # of the last tile, whose images are neighbours still
                tile, image = at[axis] // images, at[axis] % images
                return te.min(tile, self.tiles // images - 1) * images + image
            return te.min(at[axis], ends[axis] - 1)

        return {**at, **{axis: last(axis) for axis in ragged}}

    def place(self, column: PrimExpr) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
        """The image, the period along the rows and that along the columns of a column of the products."""
        down, across = self.rows.periods, self.columns.periods
        if self.images_inside:
            n = self.problem.n
            return column % n, column // (across * n), column // n % across
        return column // (down * across), column // across % down, column % across

    def program(self) -> tirx.PrimFunc:
        """The program, not yet scheduled."""
        p, made = self.problem, Implicit(self.problem)
        rows, columns = self.rows, self.columns
        inside = self.channels_inside
        side = "column ci" if inside else "ci column"
        result = "column co" if inside else "co column"

        def pixel(at: At) -> PrimExpr:
            at = self._inside(at)
            image, down, across = self.place(at["column"])
            y = rows.at(down, at["iy"], inputs=True) - p.pad[0]
            x = columns.at(across, at["ix"], inputs=True) - p.pad[1]
            tests = [(True, te.all(y >= 0, y < p.h)), (True, te.all(x >= 0, x < p.w))]
            return select(tests, made.data({"n": image, "h": y, "w": x, "ci": at["ci"]}))

        def along(matrix: Matrix, source: Stage, row: str, axis: str, at: At) -> PrimExpr:
            return linear(matrix, at[row], [source({**at, axis: j}) for j in range(len(matrix[0]))])

        pixels = self._stage("pixels", f"iy ix {side}", pixel)
        data_rows = self._stage("data_rows", f"py ix {side}", lambda at: along(rows.data, pixels, "py", "iy", at))
        points = self._stage("data_points", f"py px {side}", lambda at: along(columns.data, data_rows, "px", "ix", at))
        axes = self.filter_axes
        filter_rows = self._stage(
            "filter_rows", f"uy kw {axes}", lambda at: along(rows.filter, made.filter, "uy", "kh", self._inside(at))
        )
        filters = self._stage(
            "filter_points", f"uy ux {axes}", lambda at: along(columns.filter, filter_rows, "ux", "kw", at)
        )

        def fetched(source: Stage, *ends: tuple[str, int]) -> object:
            def element(at: At) -> PrimExpr:
                at = {**at, "uy": rows.filter_point(at["py"]), "ux": columns.filter_point(at["px"])}
                tests = [(not self.whole and self._extents(axis, True) != [end], at[axis] < end) for axis, end in ends]
                return select(tests, source(at))

            return element

        of_ci = ("ci", p.ci)
        operands = {
            "columns": self._stage("columns", "py px ci column", fetched(points, of_ci, ("column", self.tiles)), True),
            "weights": self._stage("weights", "py px ci co", fetched(filters, of_ci, ("co", p.co)), True),
        }
        (channels,) = self._extents("ci", True)
        (parts,) = self._extents("part")
        rc = te.reduce_axis((0, channels // parts), "rc")
        first, second = operands.values() if inside else reversed(operands.values())

        def of_channels(at: At) -> PrimExpr:
            at = {**at, "ci": at["part"] * self.part + rc if parts > 1 else rc}
            return te.sum(first(at) * second(at), axis=rc)

        conv = self._stage("conv", f"{'part ' * (parts > 1)}py px {result}", of_channels, True)
        rp = te.reduce_axis((0, parts), "rp")
        added = (lambda at: te.sum(conv({**at, "part": rp}), axis=rp)) if parts > 1 else conv
        products = self._stage("products", f"py px {result}", added)
        sums = self._stage("sum_rows", f"oy px {result}", lambda at: along(rows.inverse, products, "oy", "py", at))

        def place(at: At) -> dict[str, PrimExpr]:
            image, down, across = self.place(at["column"])
            return {"n": image, "y": rows.at(down, at["oy"]), "x": columns.at(across, at["ox"]), "co": at["co"]}

        def finished(at: At) -> PrimExpr:
            full = place(self._inside(at))
            full |= {"y": te.min(full["y"], p.out_h - 1), "x": te.min(full["x"], p.out_w - 1)}
            return made.finish(along(columns.inverse, sums, "ox", "px", at), full)

        output = self._stage("finished", f"oy ox {result}", finished)
        extents = self._extents(f"oy ox {result}")
        output = stage("output", output.axes, extents, output)

        def stored(*index: PrimExpr) -> tuple[PrimExpr | None, tuple[PrimExpr, ...]]:
            full = place(dict(zip(output.axes, index, strict=True)))
            ends = [
                full[axis] < size
                for axis, size, split in (("y", p.out_h, rows), ("x", p.out_w, columns))
                if split.dilation * split.repeats * split.period != size
            ]
            return (tirx.all(*ends) if ends else None), tuple(full[axis] for axis in p.output_axes)

        return scatter(program_of([*made.given.values(), output.tensor]), p.shapes()[2], stored)
