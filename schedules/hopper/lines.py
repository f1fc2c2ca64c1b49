"""Pixels of NCHW data as they lie, for layers whose image rows are no whole 16 bytes, or whose taps lie apart.

A tile is a run of output pixels, whatever images or rows they are of.  What they look at lies in `lines`: whole images
at stride 1 where output rows are as wide as input rows, since a tap then moves a whole image; else rows of an image.
The producer's threads copy lines by ``cp.async`` in whole 16 bytes, wherever a pixel stands in them, so that no pixel
needs an alignment: a channel's row of shared memory begins as far from a multiple of 16 bytes as the channel does in
the tensor, and lines as far as theirs.  The consumers' threads then read the pixels of a tap one by one into the
fragments of operand a, with zeros for padding.

Sources: PTX ISA, "cp.async", "cp.async.mbarrier.arrive", and "Register Fragments for wgmma.mma_async"; CUTLASS's sm90
mainloops whose operand a comes by way of registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from schedules.core.problem import Conv2dProblem
from schedules.core.tvm import T, tirx
from schedules.hopper.config import WARPGROUP
from schedules.hopper.lanes import BANKS
from schedules.hopper.shared import UNIT, beyond_indices
from schedules.tirx.types import Buffer, Expr, Index
from schedules.tirx.values import named

ITEM = 2  # bytes
VECTOR = UNIT // ITEM  # elements of a copy
SIDE_BY_SIDE = 8  # threads of the producer whose copies are neighbours
TOGETHER = WARPGROUP // SIDE_BY_SIDE  # channels that they copy at once, a multiple of VECTOR

_COPY = "cp.async.cg.shared.global"


def _up(size: int) -> int:
    return -(-size // VECTOR) * VECTOR


def down(at: Index) -> Index:
    """The multiple of VECTOR at `at`, or before it, also where it is negative."""
    return at // VECTOR * VECTOR if isinstance(at, int) else T.bitwise_and(at, T.int32(-VECTOR))


def beyond(at: Index) -> Index:
    """How far `at` is from there."""
    return at % VECTOR if isinstance(at, int) else T.bitwise_and(at, T.int32(VECTOR - 1))


def why_no_lines(problem: Conv2dProblem) -> str | None:
    """Why the data of `problem` cannot be read so, whatever the tile; None if they can."""
    if problem.ci % VECTOR:
        return f"ci={problem.ci} is not a multiple of {VECTOR}, after which channels begin at 16 bytes"
    return None


@dataclass(frozen=True)
class Lines:
    """What `rows` neighbouring output pixels of `problem`, whose data are `tensor`, look at by one row of the kernel,
    of `k` channels.

    The unit is an element.  Lines stand `apart` in shared memory, of which a copy never brings parts of two, channels
    `pitch`.  A tile's first line begins before its memory does, by a multiple of VECTOR.
    """

    tensor: str
    problem: Conv2dProblem
    rows: int
    k: int

    arrivals: ClassVar[int] = WARPGROUP  # that say that a stage is filled

    @property
    def whole(self) -> bool:
        """Whether lines are images; else they are what a row of the output looks at."""
        p = self.problem
        return p.stride == (1, 1) and p.out_w == p.w

    @property
    def length(self) -> int:
        """Output pixels that look at a line."""
        p = self.problem
        return p.out_h * p.out_w if self.whole else p.out_w

    @property
    def lines(self) -> int:
        p = self.problem
        return p.n if self.whole else p.n * p.out_h

    @property
    def step(self) -> int:
        """From what an output pixel looks at to what the next one does."""
        return self.problem.stride[1]

    @property
    def reach(self) -> int:
        """From what the first tap of a row looks at to what the last one does."""
        return (self.problem.kw - 1) * self.problem.dilation[1]

    @property
    def plane(self) -> int:
        """A channel of an image in the tensor."""
        return self.problem.h * self.problem.w

    @property
    def apart(self) -> int:
        # up to VECTOR - 1 before the first pixel, and no copy has both the last and what the next line has
        return _up((self.length - 1) * self.step + self.reach + 2 * VECTOR - 1)

    @property
    def crossed(self) -> int:
        """Ends of lines in a tile, at most."""
        latest = self.length - math.gcd(self.rows, self.length)
        return (latest + self.rows - 1) // self.length

    @property
    def units(self) -> int:
        """Copies that a channel of a tile may need."""
        between = max(0, self.apart - self.length * self.step)
        span = (self.rows - 1) * self.step + self.reach + self.crossed * between + 2 * VECTOR - 1
        return _up(span + VECTOR - 1) // VECTOR

    @cached_property
    def pitch(self) -> int:
        """As far from a multiple of VECTOR as channels of the tensor; of those, what spreads the channels that a warp
        reads at once, two apart, best over the banks."""
        least = self.units * VECTOR
        first = least + (self.plane - least) % VECTOR

        def spread(pitch: int) -> int:
            banks = sorted(i * pitch % BANKS for i in range(4))
            return min((later - bank) % BANKS for bank, later in zip(banks, banks[1:] + banks[:1], strict=True))

        return max(range(first, first + 8 * VECTOR, VECTOR), key=lambda pitch: (spread(pitch), -pitch))

    @property
    def nbytes(self) -> int:
        """Of shared memory."""
        return self.k * self.pitch * ITEM

    @property
    def loaded(self) -> int:
        """Bytes that are copied, about."""
        span = self.rows * self.step + self.reach + (self.crossed + 1) * VECTOR
        return self.k * min(self.units, _up(span) // VECTOR) * UNIT

    @property
    def padded(self) -> bool:
        """Whether an output pixel may look beyond the image."""
        return self.problem.pad != (0, 0)

    @property
    def paired(self) -> bool:
        """Whether neighbouring pixels of a fragment share an aligned word, whatever the tile and the channel."""
        p = self.problem
        return self.step == 1 and p.kh == p.kw == 1 and not self.padded and self.length % 2 == 0

    def reason(self) -> str | None:
        """Why the tensor cannot be read so; None if it can."""
        p = self.problem
        return why_no_lines(p) or beyond_indices(self.tensor, p.n * p.ci * self.plane)

    def row(self, line: Expr, ry: Index) -> Index:
        """The image row that a row of the kernel looks at for the first output row of a line."""
        p = self.problem
        first = 0 if self.whole else T.truncmod(line, p.out_h) * p.stride[0]
        return first + ry * p.dilation[0] - p.pad[0]

    def begin(self, line: Expr, ry: Index) -> Index:
        """Where what a row of the kernel looks at begins in its channel's plane."""
        return self.row(line, ry) * self.problem.w - self.problem.pad[1]

    def start(self, position: Expr) -> tuple[Expr, Expr, Expr]:
        """Of the tile that begins with output pixel number `position`: its line, its first pixel there, and how much of
        the line lies before the tile's memory."""
        line, first = T.truncdiv(position, self.length), T.truncmod(position, self.length)
        return line, first, T.truncdiv(first * self.step, VECTOR) * VECTOR

    def copy(
        self,
        source: Buffer,
        position: Expr,
        ry: Index,
        chunk: Expr,
        to: Buffer,
        start: Expr,
        thread: Expr,
    ) -> None:
        """Issue the copies of a thread of the producer for the tile that begins with output pixel number `position`, a
        row of the kernel and a chunk of the channels, to `start` bytes into `to`."""
        p = self.problem
        line_0, first, before = self.start(position)
        line_0, first, before = named("line", line_0), named("first", first), named("before", before)
        channel = named("channel_of_thread", T.truncdiv(thread, SIDE_BY_SIDE))
        from_channel = named("from_channel", chunk * (self.k * self.plane) + down(channel * self.plane))
        to_channel = named("to_channel", start + down(channel * self.pitch) * ITEM)
        there = named("there", p.ci - chunk * self.k - channel)
        with T.serial(-(-self.units // SIDE_BY_SIDE)) as turn:
            unit = named("unit", turn * SIDE_BY_SIDE + T.truncmod(thread, SIDE_BY_SIDE))
            at = named("at", before + unit * VECTOR)
            crossed = named("crossed", T.truncdiv(at, self.apart))
            line, rest = named("line", line_0 + crossed), named("rest", at - crossed * self.apart)
            image = line if self.whole else T.truncdiv(line, p.out_h)
            begin = named("begin", self.begin(line, ry))
            # the last output pixel of the tile, or of the line
            last = tirx.min(self.length - 1, first + (self.rows - 1) - crossed * self.length)
            wanted = tirx.all(
                unit < self.units,
                line < self.lines,
                rest <= beyond(begin) + (VECTOR - 1) + self.reach + last * self.step,
            )
            if not self.whole:
                row = named("row", self.row(line, ry))
                wanted = tirx.all(wanted, row >= 0, row < p.h)
            wanted = named("wanted", wanted)
            taken = named("taken", image * (p.ci * self.plane) + down(begin) + rest + from_channel)
            target = named("target", to_channel + unit * UNIT)
            for more in range(0, self.k, TOGETHER):
                element = taken + more * self.plane
                exists = tirx.all(element >= 0, element < p.n * p.ci * self.plane)
                nbytes: list[Expr] = []
                if p.ci % self.k:  # zeros beyond the last channel
                    exists = tirx.any(there <= more, exists)
                    nbytes = [T.Select(there > more, T.uint32(UNIT), T.uint32(0))]
                with T.If(tirx.all(wanted, exists)), T.Then():
                    place = to.ptr_to([target + more * self.pitch * ITEM])
                    T.evaluate(T.ptx[_COPY](place, source.ptr_to([element]), UNIT, *nbytes))
