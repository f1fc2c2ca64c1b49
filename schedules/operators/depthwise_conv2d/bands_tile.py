"""What a block of `bands` has, and where it lies in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from schedules.core.arch import Arch
from schedules.core.problem import Config
from schedules.operators.depthwise_conv2d.definition import DepthwiseProblem
from schedules.steps.tiles import widest_vector

ITEM = 2  # bytes of an element
OCTET = 8  # columns of mma.sync, and elements of a row of its matrices in shared memory
POSITIONS = 16  # rows of mma.sync
VECTOR = 8  # elements of the widest access
OTHERS = 40  # registers of a thread beside sums and bands, about
MOST_REGISTERS = 200


@dataclass(frozen=True)
class BandsConfig(Config):
    images: int = 1  # of a block
    tile_h: int = 8  # output rows of a block, of each image
    rows: int = 4  # of them in a thread's registers at once
    channels: int = 8  # of a block
    together: int = 1  # channels of a position
    warps_c: int = 4  # warps along the groups of channels
    warps_m: int = 1  # warps that share the positions of a group

    @property
    def threads(self) -> int:
        return 32 * self.warps_c * self.warps_m

    def check(self, problem: DepthwiseProblem, arch: Arch) -> str | None:
        p = problem
        if not {"mma", "cp_async"} <= arch.features:
            return f"{arch} has no mma.sync and cp.async; use sm_80 or newer, or another schedule"
        if p.dtype not in ("float16", "bfloat16"):
            return f"dtype={p.dtype} is not float16 or bfloat16, which tensor cores take; use schedule windows"
        for name in ("images", "tile_h", "rows", "channels", "warps_c", "warps_m"):
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        if self.together not in (1, 2, 4, 8) or (self.together > 1 and not p.channels_last):
            return f"together={self.together} is not 1, or with layout=nhwc 1, 2, 4 or 8"
        if p.ci % self.together:
            return f"together={self.together} does not divide ci={p.ci}; use a power of two that does"
        if self.channels % (self.together * self.warps_c):
            return f"channels={self.channels} are no whole groups of {self.together} for warps_c={self.warps_c}"
        if self.tile_h % self.rows:
            return f"tile_h={self.tile_h} is not a multiple of rows={self.rows}"
        if self.threads > arch.max_threads:
            return f"warps_c={self.warps_c} x warps_m={self.warps_m} is more than {arch.max_threads // 32} warps"
        b = Bands(p, self)
        if b.registers > MOST_REGISTERS:
            return f"rows={self.rows} and a kernel of {p.kh}x{p.kw} need about {b.registers} registers; use fewer rows"
        if b.shared_bytes > arch.shared_block:
            return f"the tile needs {b.shared_bytes} bytes of shared memory, over {arch.shared_block}; make it smaller"
        if any(math.prod(argument.shape) >= 2**31 for argument in p.arguments()):
            return f"n={p.n} makes a tensor of 2**31 elements or more, which 32-bit indices do not reach"
        return None


@dataclass(frozen=True)
class Bands:
    """Where everything of a block lies.  In elements, if nothing else is said."""

    problem: DepthwiseProblem
    config: BandsConfig

    # ---- A position and its band ----

    @property
    def across(self) -> int:
        """Output columns of a position."""
        return OCTET // self.config.together

    @property
    def groups(self) -> int:
        """Groups of channels of a block."""
        return self.config.channels // self.config.together

    def _octets(self, lead: int) -> int:
        p = self.problem
        pixels = p.under(1, self.across)[1] + lead
        return -(-pixels * self.config.together // OCTET)

    @cached_property
    def piece(self) -> int:
        """Elements that are copied at once into shared memory: channels of a pixel, or pixels of a row that rows keep
        aligned, if the band is no wider for it."""
        p, c = self.problem, self.config
        if p.channels_last:
            return c.together
        fitting = (v for v in (8, 4, 2) if p.w % v == 0 and self._octets(-p.pad[1] % v) <= -(-self._octets(0) // 2) * 2)
        return next(fitting, 1)

    @property
    def lead(self) -> int:
        """Columns of zeros of a row before the border, so that pieces are aligned in shared memory."""
        return 0 if self.problem.channels_last else -self.problem.pad[1] % self.piece

    @property
    def octets(self) -> int:
        """Eights of inputs of a position along a row."""
        return self._octets(self.lead)

    # ---- Shared memory ----

    @property
    def left(self) -> int:
        """Columns of a row before the image's first."""
        return self.lead + self.problem.pad[1]

    @property
    def positions_x(self) -> int:
        return -(-self.problem.out_w // self.across)

    @property
    def positions_y(self) -> int:
        return self.config.tile_h // self.config.rows

    @property
    def positions(self) -> int:
        """Of a group of channels of a block."""
        return self.config.images * self.positions_y * self.positions_x

    @property
    def fragments(self) -> int:
        return -(-self.positions // POSITIONS)

    @cached_property
    def pitch(self) -> int:
        """A row of a group."""
        p, b = self.problem, self.config.together
        reach = (self.positions_x - 1) * OCTET * p.stride[1] + self.octets * OCTET
        return -(-max(reach, (self.left + p.w) * b) // OCTET) * OCTET

    @property
    def in_rows(self) -> int:
        return self.problem.under(self.config.tile_h, 1)[0]

    @cached_property
    def plane(self) -> int:
        """A group, an odd number of eights, so that groups begin in different banks."""
        return (self.in_rows * self.pitch // OCTET | 1) * OCTET

    @property
    def data_elements(self) -> int:
        return self.config.images * self.groups * self.plane

    @property
    def out_rows(self) -> int:
        return min(self.config.tile_h, self.problem.out_h)

    @property
    def out_pixel(self) -> int:
        """From a pixel of the results to the next, with channels last."""
        return self.config.channels + OCTET

    @property
    def out_line(self) -> int:
        """From a row of the results to the next."""
        return self.problem.out_w * (self.out_pixel if self.problem.channels_last else 1)

    @property
    def out_image(self) -> int:
        """The results of an image."""
        p, pixels = self.problem, self.out_rows * self.problem.out_w
        return -(-pixels * (self.out_pixel if p.channels_last else self.config.channels) // OCTET) * OCTET

    @property
    def shared_bytes(self) -> int:
        return ITEM * (self.data_elements + self.config.images * self.out_image)

    @property
    def whole(self) -> bool:
        """Whether a block has whole planes, which follow each other in memory."""
        return self.config.tile_h >= self.problem.out_h

    @property
    def run(self) -> int:
        """Elements that pass through registers at once on their way in, where pieces are single elements."""
        p = self.problem
        if self.piece > 1 or p.channels_last or not self.whole:
            return 1
        return widest_vector(math.gcd(p.ci, self.config.channels) * p.h * p.w, VECTOR)

    @property
    def stored(self) -> int:
        """Elements of one store."""
        p, c = self.problem, self.config
        if p.channels_last:
            return widest_vector(math.gcd(p.ci, c.channels), VECTOR)
        pixels = p.out_h * p.out_w
        if self.whole:
            return widest_vector(math.gcd(p.ci, c.channels) * pixels, VECTOR)
        return widest_vector(math.gcd(pixels, c.tile_h * p.out_w), VECTOR)

    @property
    def registers(self) -> int:
        """Of a thread, about."""
        return 4 * self.config.rows + self.problem.kh * self.octets + 4 * self.octets + OTHERS

    # ---- The launch ----

    @property
    def tiles(self) -> tuple[int, int]:
        """Blocks along the rows of an image, and along the channels."""
        return -(-self.problem.out_h // self.config.tile_h), -(-self.problem.ci // self.config.channels)
