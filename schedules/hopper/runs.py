"""Operand a from runs of NCHW pixels of any width, which TMA brings as they lie and threads turn in shared memory.

TMA takes rows that are a multiple of 16 bytes apart.  Planes of an image need not be: but eight channels are, or fewer
of them, so that every so manyth channel is a row of its own class, each of which begins by as many pixels after a
multiple of 16 bytes (`Classes`).  A box brings a run of pixels of some channels of a class: whole planes of as many
images as a tile is of, or of each image from where the tile looks at it on.  Threads read a pixel where its class has
it.

The tile's rows are positions of a line in which every tap is a run (`operators.conv2d_nchw.positions`), as they are of
`hopper.spans`; those that are no pixels are zeros.  Or they are those of a box (`hopper.boxes`), of which each line is
such a run (`TurnedLines`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from schedules.hopper.boxes import GROUP, ITEM, TO, TurnedData, TurnedLayout
from schedules.hopper.shared import LONGEST_BOX, SECTOR

MOST_LOADS = 64  # of what arrives at once, one by one


@dataclass(frozen=True)
class Classes:
    """Of channels of `plane` pixels each."""

    plane: int

    @property
    def count(self) -> int:
        return GROUP // math.gcd(self.plane, GROUP)

    def begin(self, number: int) -> int:
        """Pixels to the last multiple of 16 bytes before channels of a class, from that before the first class's."""
        return number * self.plane // GROUP * GROUP

    def late(self, number: int) -> int:
        """Pixels from there to the channel."""
        return number * self.plane % GROUP

    @property
    def latest(self) -> int:
        return max(map(self.late, range(self.count)))

    def reason(self, channels: int) -> str | None:
        """Why an image of so many `channels` has not whole classes of them; None if it has."""
        if channels % self.count:
            return f"ci={channels} is not a multiple of the {self.count} channels that are whole 16 bytes"
        return None


class ByClasses(TurnedData):
    """Of boxes whose innermost axes are (pixels, channels of a class)."""

    classes: Classes

    @property
    @abstractmethod
    def class_bytes(self) -> int:
        """From class to class."""

    @property
    def run_bytes(self) -> int:
        """From channel to channel of a class."""
        return self.source.box[0] * ITEM

    @property
    def run_loaded(self) -> int:
        """Bytes that come from L2 for a run, about."""
        return (-(-self.run_bytes // SECTOR) + 1) * SECTOR

    @property
    def offsets(self) -> Sequence[int]:
        each = self.classes.count
        return [
            i % each * self.class_bytes + i // each * self.run_bytes + self.classes.late(i % each) * ITEM
            for i in range(GROUP)
        ]

    @property
    def group_bytes(self) -> int:
        return GROUP // self.classes.count * self.run_bytes

    def reason(self) -> str | None:
        if self.source.box[0] > LONGEST_BOX:
            return f"a tile looks at {self.source.box[0]} pixels of an image side by side, TMA brings {LONGEST_BOX}"
        return self.source.reason()


@dataclass(frozen=True)
class TurnedLines(ByClasses, TurnedLayout):
    """Of boxes of a class, each of one of `lines` of an image that a tile looks at, from a multiple of 16 bytes on.
    Where tiles begin at such multiples, `units` says whether every eight rows are neighbours of the line."""

    classes: Classes
    lines: int
    units: bool

    @property
    def late(self) -> Sequence[int] | None:
        each = self.classes
        return [each.late(i % each.count) for i in range(GROUP)] if self.units else None

    def reason(self) -> str | None:
        count = self.lines * self.classes.count
        if count > MOST_LOADS:
            return f"a tile looks at {self.lines} lines in {self.classes.count} classes, at most {MOST_LOADS} loads"
        return super().reason()

    @property
    def class_bytes(self) -> int:
        return -(-self.source.box_bytes // TO) * TO

    @property
    def line_bytes(self) -> int:
        """From line to line."""
        return self.class_bytes * self.classes.count

    @property
    def arriving_bytes(self) -> int:
        return self.line_bytes * self.lines

    @property
    def loaded_bytes(self) -> int:
        return self.run_loaded * self.lines


@dataclass(frozen=True)
class TurnedRuns(ByClasses):
    """Of boxes whose axes are (pixels, channels of a class, images): `images` of them in a tile, of each `whole` planes
    by one box, or else from a multiple of 16 bytes on.  `down` and `across` are rows of the tile to what the kernel's
    rows and their taps look at."""

    classes: Classes
    images: int
    whole: bool
    down: tuple[int, ...]
    across: tuple[int, ...]

    @property
    def kernel(self) -> tuple[int, int]:
        return len(self.down), len(self.across)

    def moved_down(self, ry: int) -> int:
        return self.down[ry]

    def moved_across(self, rx: int) -> int:
        return self.across[rx]

    @property
    def image_bytes(self) -> int:
        """From image to image."""
        channels = self.run_bytes * self.source.box[1]
        return channels if self.whole else -(-channels // TO) * TO

    @property
    def class_bytes(self) -> int:
        return -(-self.image_bytes * self.images // TO) * TO

    @property
    def arriving_bytes(self) -> int:
        return self.class_bytes * self.classes.count

    @property
    def loaded_bytes(self) -> int:
        return self.run_loaded * self.images
