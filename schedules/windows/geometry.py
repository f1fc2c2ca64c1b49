"""Where everything of a block's tile lies: the patch of the image, windows in it, filters, and pixels of fragments.

The unit is a 32-bit word of shared memory: `unit` elements, all of one kernel row, which a lane loads at once.  The
reduction is numbered by units: `row_units` to a kernel row, row after row, eight to a step of ``mma.sync``; lane l has
units l % 4 and l % 4 + 4 of a step.  Four neighbouring units lie in one kernel row or in two, which a lane tells by one
comparison, so that all its addresses are one of four registers and a constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from schedules.core.arch import Arch, shared_room
from schedules.core.problem import Conv2dProblem, numpy_dtype
from schedules.core.tvm import tirx
from schedules.tirx.types import Index

WORD = 4  # bytes
OCTET = 8  # rows of a fragment: pixels, or output channels
STEP = 8  # units of a step of mma.sync
ALL = (2**32 - 1,) * 4  # bits of four words
LONGEST = 16  # steps that are written out; of more, those of a few kernel rows are, in a loop
OTHERS = 60  # registers of a thread beside sums and fragments, about


class Tile(Protocol):
    """What a config says: see `config.WindowsConfig`."""

    @property
    def tile_h(self) -> int: ...
    @property
    def tile_w(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def warps_m(self) -> int: ...
    @property
    def warps_n(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def blocks_sm(self) -> int: ...
    @property
    def grid(self) -> int: ...
    @property
    def threads(self) -> int: ...


def strides(axes: tuple[str, ...], extents: dict[str, int]) -> dict[str, int]:
    """Elements from one of each axis to the next."""
    found, step = {}, 1
    for axis in reversed(axes):
        found[axis] = step
        step *= extents[axis]
    return found


@dataclass(frozen=True)
class Windows:
    """A problem under a config."""

    problem: Conv2dProblem
    config: Tile

    # ---- Tensors ----

    @cached_property
    def item(self) -> int:
        return numpy_dtype(self.problem.dtype).itemsize

    @property
    def unit(self) -> int:
        """Elements of a word."""
        return WORD // self.item

    @cached_property
    def data(self) -> dict[str, int]:
        return strides(self.problem.data_axes, self.problem.extents)

    @cached_property
    def channels_last(self) -> bool:
        """Whether neighbours in the output are channels; else they are pixels of a row."""
        return self.problem.output_axes[-1] != "x"

    @property
    def channel_axis(self) -> str:
        """Of the data: the one of its input channels, or of those in a group, which hold all."""
        return "li" if "li" in self.data else "ci"

    @cached_property
    def out_channels(self) -> int:
        """Output channels that are stored, those added to a group too; of all images that lie side by side."""
        return self.beside * math.prod(self.problem.shapes()[2][axis] for axis in self.problem.channel_axes)

    # ---- The patch ----

    @cached_property
    def beside(self) -> int:
        """Images whose pixels lie side by side, element by element: all, where the batch is innermost.  Windows have
        those of all of them, of which a product keeps one's; octets of output channels take turns at the images."""
        return self.problem.n if self.problem.data_axes[-1] == "n" else 1

    @property
    def elements(self) -> int:
        """Of a pixel in memory: the channels of the images that lie side by side, or the lanes of
        less than a group."""
        lanes = self.problem.extents.get("li", STEP * self.unit)
        return lanes if lanes < STEP * self.unit else self.problem.ci * self.beside

    @cached_property
    def channels(self) -> int:
        """Elements of a pixel in shared memory: enough for windows to start at whole words; of groups whole words."""
        p = self.problem
        if self.apart:
            return -(-p.ci // self.unit) * self.unit
        channels = self.elements
        while p.stride[1] * channels % self.unit:
            channels += 1
        return channels

    @property
    def apart(self) -> bool:
        """Whether a pixel has more channels in memory than it has elements: whole groups."""
        return self.channel_axis == "li" and not self.contiguous

    @property
    def contiguous(self) -> bool:
        """Whether the channels of neighbouring pixels follow each other in memory, and nothing else."""
        return self.data["w"] == self.elements

    @cached_property
    def vector(self) -> int:
        """Bytes of a piece of a line that cp.async copies; 0 where pixels lie in another way in shared memory, or none
        is aligned to 4 bytes."""
        p = self.problem
        if self.apart:
            return math.gcd(16, self.channels * self.item)
        vector = math.gcd(16, p.w * self.elements * self.item)
        return vector if vector >= WORD and self.contiguous and self.channels == self.elements else 0

    @cached_property
    def pixels(self) -> int:
        """Pixels that a thread brings at once by way of registers, as vectors; 1 where it brings single elements."""
        return 1 if self.vector else math.gcd(OCTET, self.problem.w)

    @cached_property
    def shift(self) -> int:
        """Elements of a row before the tile's first window, so that the row starts where a vector does in memory."""
        p = self.problem
        if self.apart:
            return 0
        if self.vector:
            return -p.pad[1] * self.elements % (self.vector // self.item)
        return -p.pad[1] % self.pixels * self.channels

    @property
    def lead(self) -> int:
        """Elements that are multiplied by zeros before a window, so that it starts at a whole word."""
        return self.shift % self.unit

    @cached_property
    def row_units(self) -> int:
        """Units of a kernel row, three at least, so that four reach over two rows at most; in a loop as many as make
        the fewest steps."""
        units = max(3, -(-(self.lead + self.problem.kw * self.channels) // self.unit))
        if self._steps(units) <= LONGEST:
            return units
        return min(range(units, units + STEP), key=lambda n: (self._period(n) > LONGEST, self._looped(n)))

    def _steps(self, row_units: int) -> int:
        return -(-self.problem.kh * row_units // STEP)

    def _period(self, row_units: int) -> int:
        """Steps after which a kernel row ends."""
        return row_units // math.gcd(row_units, STEP)

    def _looped(self, row_units: int) -> int:
        period = self._period(row_units)
        return -(-self._steps(row_units) // period) * period

    @cached_property
    def period(self) -> int:
        """Steps that are written out: all, or those of a loop."""
        steps = self._steps(self.row_units)
        return steps if steps <= LONGEST else self._period(self.row_units)

    @property
    def periods(self) -> int:
        return -(-self._steps(self.row_units) // self.period)

    @property
    def steps(self) -> int:
        return self.period * self.periods

    @property
    def period_rows(self) -> int:
        """Kernel rows of a period, where there are several."""
        return self.period * STEP // self.row_units

    @cached_property
    def patch(self) -> tuple[int, int]:
        """(rows, columns) of the image."""
        p, c = self.problem, self.config
        return p.under(c.tile_h, 1)[0], (c.tile_w - 1) * p.stride[1] + p.kw

    @property
    def pixel_words(self) -> int:
        """From the window of a pixel to that of its right neighbour."""
        return self.problem.stride[1] * self.channels // self.unit

    @cached_property
    def pitch(self) -> int:
        """Words of a row of the patch, whole pieces."""
        reach = (self.shift - self.lead) // self.unit + (self.config.tile_w - 1) * self.pixel_words + self.row_units
        reach = max(reach, -(-(self.shift + self.patch[1] * self.channels) // self.unit))
        whole = self.pixels * self.channels // self.unit if self.pixels > 1 else max(1, self.vector // WORD)
        return -(-reach // whole) * whole

    @property
    def patch_words(self) -> int:
        """A stage: with the rows that a last loop looks at, and the words that a last step does, whole 16 bytes."""
        rows = self.patch[0]
        if self.periods > 1:
            rows += (self.periods * self.period_rows + 1 - self.problem.kh) * self.problem.dilation[0]
        return -(-(rows * self.pitch + 2 * STEP) // 4) * 4

    @property
    def unbrought(self) -> int:
        """The word of a stage from which on nothing is brought, or not to all words."""
        every = self.pixels > 1 or (self.vector and not self.apart)
        return self.patch[0] * self.pitch if every else 0

    # ---- Fragments ----

    @property
    def weight_octets(self) -> int:
        """Octets of output channels of a warp."""
        return self.config.block_n // OCTET // self.config.warps_n

    @property
    def pixel_octets(self) -> int:
        """Octets of pixels of a warp."""
        return self.config.tile_h * self.config.tile_w // OCTET // self.config.warps_m

    @cached_property
    def run(self) -> int:
        """Octets, on the side of the output's neighbours, of which a lane has neighbours, 2 results of each: what one
        store takes, where the output is aligned so far."""
        if self.channels_last:
            return max(self.beside, math.gcd(4, self.weight_octets, -(-math.gcd(8, self.out_channels) // 2)))
        octets = self.pixel_octets, self.config.tile_w // OCTET
        return math.gcd(4, *octets, -(-math.gcd(8, self.problem.out_w) // 2))

    @property
    def pair(self) -> int:
        """Octets of filters that a lane loads at once."""
        return math.gcd(2, self.weight_octets)

    @property
    def weight_words(self) -> int:
        return self.steps * STEP * self.config.block_n

    @property
    def shared_bytes(self) -> int:
        return WORD * (self.weight_words + self.config.num_stages * self.patch_words)

    @property
    def registers(self) -> int:
        """Of a thread, about: its sums, two steps of its fragments, and others."""
        octets = self.pixel_octets + self.weight_octets
        apart = 2 * (self.beside - 1) * self.pixel_octets
        return 2 * self.pixel_octets * self.weight_octets + 2 * octets + apart + OTHERS

    def kept(self, number: int, last: bool, image: int | None = None) -> tuple[int, ...]:
        """The bits that are of the window in four units, number `number` of a period, or of the `last` one: what lies
        between and beyond kernel rows is multiplied by zeros, which an infinity or a NaN would survive.  With an
        `image`, of those side by side, its alone."""
        p, bits, found = self.problem, 8 * self.item, []
        rows = self.period_rows if self.periods > 1 and not last else p.kh - (self.periods - 1) * self.period_rows
        for unit in range(4 * number, 4 * number + 4):
            row, first = divmod(unit, self.row_units)
            at = [first * self.unit - self.lead + i for i in range(self.unit)]
            own = [row < rows and 0 <= element < p.kw * self.channels for element in at]
            own = [it and image in (None, element % self.beside) for it, element in zip(own, at, strict=True)]
            found.append(sum(((1 << bits) - 1) << bits * i for i, it in enumerate(own) if it))
        whole = self.item == 1 and self.beside == 1 and (self.periods > 1 or any(found))
        return ALL if whole else tuple(found)

    # ---- The launch ----

    @cached_property
    def tiles(self) -> tuple[int, int, int]:
        """(images, or all as one where they lie side by side, tiles along h, along w)."""
        p, c = self.problem, self.config
        return p.n // self.beside, -(-p.out_h // c.tile_h), -(-p.out_w // c.tile_w)

    @property
    def columns(self) -> int:
        """Blocks side by side along the output channels."""
        return -(-self.out_channels // self.config.block_n)

    @property
    def rows(self) -> int:
        """Blocks that share the tiles of a column of them: as few as have no more tiles each."""
        count = math.prod(self.tiles)
        most = min(count, max(1, self.config.grid // self.columns)) if self.config.grid else count
        return -(-count // -(-count // most))

    def count(self, images: Index) -> Index:
        """Tiles of so many images."""
        return (images if self.beside == 1 else 1) * (self.tiles[1] * self.tiles[2])

    def launched(self, images: Index) -> Index:
        """Blocks that share the tiles of a column, each of which has one, for so many images."""
        if isinstance(images, int):
            return self.rows
        return tirx.min(self.rows, self.count(images))

    def uneven(self) -> str | None:
        """Why the tile cannot be dealt out among the warps; None if it can."""
        c = self.config
        if c.block_n % (OCTET * self.beside * c.warps_n):
            return f"block_n={c.block_n} is not a multiple of {OCTET * self.beside} for each of warps_n={c.warps_n}"
        if c.tile_h * c.tile_w % (OCTET * c.warps_m):
            return f"tile_h={c.tile_h} x tile_w={c.tile_w} is not a multiple of 8 pixels for each of {c.warps_m} warps"
        octets, of_row = self.pixel_octets, c.tile_w // OCTET
        if octets % of_row and of_row % octets:
            return f"tile_w={c.tile_w} and the {8 * octets} pixels of a warp do not divide one another"
        rows = octets if self.channels_last else self.weight_octets
        if rows % 2:
            name = "tile_h" if self.channels_last else "block_n"
            return f"{name}={getattr(c, name)} leaves a warp {8 * rows} rows, not a multiple of 16"
        return None

    def reason(self, arch: Arch) -> str | None:
        """Why the config is not legal."""
        p, c = self.problem, self.config
        if self.channel_axis == "li" and p.extents["gi"] > 1:
            return f"ci={p.ci} is more than one group of channels; use another schedule"
        if self.unit % self.beside:
            return f"n={p.n} images side by side share no word of {self.unit} elements; use another schedule"
        reason = self.uneven()
        if reason:
            return reason
        if self.registers * c.threads * c.blocks_sm > arch.registers_sm or self.registers > arch.registers_thread:
            return f"blocks_sm={c.blocks_sm} of {c.threads} threads with about {self.registers} registers do not fit"
        if c.threads * c.blocks_sm > arch.threads_sm:
            return f"blocks_sm={c.blocks_sm} of {c.threads} threads are more than {arch.threads_sm}"
        room = shared_room(arch, c.blocks_sm)
        if self.shared_bytes > room:
            return f"the tile needs {self.shared_bytes} bytes of shared memory, blocks_sm={c.blocks_sm} leaves {room}"
        if self.period > 2 * LONGEST:
            return f"kw={p.kw} x ci={p.ci} is more than one step after another can be written out; use another schedule"
        for argument in p.arguments():
            if math.prod(argument.shape) >= 2**31:
                return f"{argument.name} has 2**31 elements or more, which 32-bit indices do not reach"
        return None
