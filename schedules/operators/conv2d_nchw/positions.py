"""Pixels in one line: copies of images, of which every tap is the same run of pixels, moved.

The kernel before (`turn`) copies the images with their channels last and their rows lengthened by zeros, so that a tap
that looks beyond a row, or an image, finds zeros of the copy, and a tile is any run of the line, whatever the image's
width: one box of TMA.  With a stride the copy has a plane for each remainder of the coordinates, in which a tap's
pixels are neighbours again.  Zeros that stand between images serve both.  A line of images in turn (n, y, x) has their
output in long pieces; with `lines_outside` it has a line of all of them after the other, (y, n, x), and needs no zeros
below an image: there the line ends, or begins.

Source: the padding between rows that convolutions by one-dimensional correlation have always had; the planes are those
of polyphase filters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from schedules.core.tvm import T, tirx
from schedules.hopper.pixels import flattened
from schedules.hopper.shared import SECTOR
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named

SECTOR_RESULTS = SECTOR // 2  # of 16 bits in a sector of L2


@dataclass(frozen=True)
class Axis:
    """An axis of an image: `size` pixels in, `out` out."""

    size: int
    out: int
    k: int
    stride: int
    pad: int
    dilation: int

    def tap(self, r: Index) -> tuple[Index, Index]:
        """The plane that tap `r` looks at, and how many of its pixels after the output's number."""
        at = r * self.dilation - self.pad
        if self.stride == 1:
            return 0, at
        if isinstance(r, int):
            return (0 if self.planes == 1 else at % self.stride), at // self.stride
        # truncated division is of numbers that are not negative
        lift = -(-self.pad // self.stride)
        moved = T.truncdiv(at + lift * self.stride, self.stride) - lift
        return (0 if self.planes == 1 else at - moved * self.stride), moved

    @cached_property
    def moves(self) -> Mapping[int, list[int]]:
        """What the taps of each remainder that any looks at are moved by."""
        found: dict[int, list[int]] = {}
        for r in range(self.k):
            moved, remainder = divmod(r * self.dilation - self.pad, self.stride)
            found.setdefault(remainder, []).append(moved)
        return found

    @property
    def planes(self) -> int:
        return 1 if len(self.moves) == 1 else self.stride

    def real(self, remainder: Index) -> Any:
        """Pixels of the image in the plane of a remainder."""
        if isinstance(remainder, int):
            return max(0, -(-(self.size - remainder) // self.stride))
        return T.truncdiv(tirx.max(self.size - remainder, 0) + self.stride - 1, self.stride)

    @cached_property
    def most(self) -> int:
        return max(self.real(remainder) for remainder in self.moves)

    @cached_property
    def least(self) -> int:
        """The fewest pixels that a plane has of the image."""
        return min(self.real(remainder) for remainder in self.moves)

    @cached_property
    def length(self) -> int:
        """Pixels of a plane with the zeros that keep its taps out of the next."""
        reaches = [(self.real(remainder), moved) for remainder, moves in self.moves.items() for moved in moves]
        return max(self.out, *(max(real, real - moved, self.out + moved) for real, moved in reaches))

    def looked_at(self, remainder: Expr) -> Expr | bool:
        """Whether a tap looks at pixels of that remainder."""
        if len(self.moves) == self.stride:
            return True
        return tirx.any(*(remainder == each for each in self.moves))


@lru_cache(maxsize=256)
def simplest(problem: NchwProblem) -> NchwProblem:
    """The same problem of fewer axes, if tensors lie as they are: kernels of a whole image are a 1x1 kernel of more
    channels, and images of which each pixel is alone are one row."""
    p = problem
    whole = (p.kh, p.kw, p.pad, p.dilation) == (p.h, p.w, (0, 0), (1, 1)) and not p.packed
    if whole and p.h * p.w > 1:
        p = replace(p, ci=p.ci * p.kh * p.kw, h=1, w=1, kh=1, kw=1, stride=(1, 1))
    found: NchwProblem = flattened(p, batch=False)
    return found


@lru_cache(maxsize=256)
def gathered(problem: NchwProblem) -> NchwProblem:
    """The 1x1 convolution of what every output looks at, in the filter's order (ci, kh, kw)."""
    p = problem
    ones = (1, 1)
    return replace(p, h=1, w=p.out_h * p.out_w, ci=p.reduction, kh=1, kw=1, stride=ones, pad=(0, 0), dilation=ones)


@dataclass(frozen=True)
class Positions:
    """The line of `problem`, of the simplest kind."""

    problem: NchwProblem
    lines_outside: bool

    @cached_property
    def y(self) -> Axis:
        p = self.problem
        return Axis(p.h, p.out_h, p.kh, p.stride[0], p.pad[0], p.dilation[0])

    @cached_property
    def x(self) -> Axis:
        p = self.problem
        return Axis(p.w, p.out_w, p.kw, p.stride[1], p.pad[1], p.dilation[1])

    @property
    def planes(self) -> int:
        return self.y.planes * self.x.planes

    @property
    def lines(self) -> int:
        """Of an image in a plane."""
        return self.y.most if self.lines_outside else self.y.length

    @property
    def data(self) -> int:
        """Positions of a plane."""
        return self.problem.n * self.lines * self.x.length

    @property
    def outputs(self) -> int:
        """Positions that are computed."""
        lines = self.y.out if self.lines_outside else self.y.length
        return self.problem.n * lines * self.x.length

    @property
    def of_image(self) -> int:
        """Positions from an image's first to the next image's, where images follow each other."""
        return self.y.length * self.x.length

    @property
    def overlap(self) -> int:
        """Positions that have all but one of a sector's results, wherever in an image they begin."""
        between = self.x.length - self.problem.out_w
        results = SECTOR_RESULTS - 1
        return results + (1 + (results - 1) // self.problem.out_w) * between

    @property
    def dense(self) -> bool:
        """Whether every position is an output."""
        return self.outputs == self.problem.pixels

    @property
    def channels(self) -> int:
        """Input channels of a position, in whole 16 bytes."""
        return -(-self.problem.ci // 8) * 8

    @property
    def as_they_lie(self) -> bool:
        """Whether the data are such a line already."""
        p = self.problem
        return p.h * p.w == 1 and self.data == p.n and p.ci == self.channels

    def at(self, n: Expr, y: Expr, x: Expr) -> Expr:
        """The position of a plane's pixel."""
        p = self.problem
        line = y * p.n + n if self.lines_outside else n * self.lines + y
        return line * self.x.length + x

    def source(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """The image and the pixel of number `number` of all planes' positions, and whether it is there: else a zero."""
        p, y_axis, x_axis = self.problem, self.y, self.x
        plane = named("plane", T.truncdiv(number, self.data))
        position = named("position", T.truncmod(number, self.data))
        line, x = named("row", T.truncdiv(position, x_axis.length)), T.truncmod(position, x_axis.length)
        if self.lines_outside:
            n, y = T.truncmod(line, p.n), T.truncdiv(line, p.n)
        else:
            n, y = T.truncdiv(line, self.lines), T.truncmod(line, self.lines)
        by = T.truncdiv(plane, x_axis.planes) if y_axis.planes > 1 else next(iter(y_axis.moves))
        bx = T.truncmod(plane, x_axis.planes) if x_axis.planes > 1 else next(iter(x_axis.moves))
        y, x = named("y", y * y_axis.stride + by), named("x", x * x_axis.stride + bx)
        return n, y * p.w + x, tirx.all(y < p.h, x < p.w)

    def of_tap(self, ry: Expr, rx: Expr) -> tuple[Expr, Expr]:
        """The plane of a tap, and how many positions after an output's its pixel stands."""
        (plane_y, y), (plane_x, x) = self.y.tap(ry), self.x.tap(rx)
        return plane_y * self.x.planes + plane_x, y * self.down + x

    @property
    def down(self) -> int:
        """Positions from a pixel to the one below it."""
        return (self.problem.n if self.lines_outside else 1) * self.x.length

    @property
    def piece(self) -> int:
        """Outputs of a channel side by side in memory: of an image, or of one of its lines."""
        p = self.problem
        return p.out_w if self.lines_outside and p.n > 1 else p.out_h * p.out_w

    def pixel(self, position: Expr) -> tuple[Expr, Expr, Expr]:
        """(n, y, x) of a position, if that is of an image."""
        line, x = T.truncdiv(position, self.x.length), T.truncmod(position, self.x.length)
        if self.lines_outside:
            return T.truncmod(line, self.problem.n), T.truncdiv(line, self.problem.n), x
        return T.truncdiv(line, self.y.length), T.truncmod(line, self.y.length), x

    def number(self, position: Expr) -> Expr:
        """How many outputs stand before a position."""
        p = self.problem
        if self.dense:
            return tirx.min(position, p.pixels)
        n, y, x = self.pixel(position)
        x = tirx.min(x, p.out_w)
        if self.lines_outside:
            return tirx.min((y * p.n + n) * p.out_w + x, p.pixels)
        image = p.out_h * p.out_w
        return tirx.min(n * image + tirx.min(y * p.out_w + x, image), p.pixels)

    def element(self, number: Expr) -> Expr:
        """Where output number `number` of the first channel lies in the output."""
        p = self.problem
        image = p.out_h * p.out_w
        piece, rest = T.truncdiv(number, self.piece), T.truncmod(number, self.piece)
        if self.piece == image:
            return piece * (p.co * image) + rest
        return T.truncmod(piece, p.n) * (p.co * image) + T.truncdiv(piece, p.n) * p.out_w + rest
