"""The config of `mma_windows`, what is legal, and what is tried."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from schedules.core.arch import Arch
from schedules.core.problem import Config, Conv2dProblem
from schedules.core.space import ProductSpace, axis
from schedules.windows.geometry import STEP, WORD, Windows


@dataclass(frozen=True)
class WindowsConfig(Config):
    """A block computes `tile_h` x `tile_w` output pixels of an image and `block_n` output channels, `warps_m` x
    `warps_n` warps of them; it keeps its filters and goes from tile to tile, `num_stages` - 1 patches ahead.

    `grid` blocks are launched at most, or one to a tile where that is 0; `blocks_sm` of them share a multiprocessor.
    """

    tile_h: int = 8
    tile_w: int = 32
    block_n: int = 64
    warps_m: int = 4
    warps_n: int = 1
    num_stages: int = 2
    blocks_sm: int = 2
    grid: int = 264

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def check(self, problem: Conv2dProblem, arch: Arch) -> str | None:
        p = problem
        if "mma" not in arch.features:
            return f"{arch} has no mma.sync with 16 rows of 32 bytes; use sm_80 or newer"
        if p.dtype not in ("float16", "bfloat16", "int8"):
            return f"dtype={p.dtype} is not float16, bfloat16 or int8, which tensor cores take"
        if p.dilation[1] > 1 and p.kw > 1:
            return f"dilation={p.dilation[1]} along a row leaves gaps in a window; use dilation 1 along w"
        for name, least in (("tile_h", 1), ("warps_m", 1), ("warps_n", 1), ("blocks_sm", 1), ("grid", 0)):
            if getattr(self, name) < least:
                return f"{name}={getattr(self, name)} must be at least {least}"
        if self.num_stages not in (1, 2):
            return f"num_stages={self.num_stages} is not 1 or 2"
        for name in ("tile_w", "block_n"):
            if getattr(self, name) < 8 or getattr(self, name) % 8:
                return f"{name}={getattr(self, name)} is not a multiple of 8, the rows of a fragment"
        if self.threads > arch.max_threads:
            return f"warps_m={self.warps_m} x warps_n={self.warps_n} is more than {arch.max_threads // 32} warps"
        return Windows(p, self).reason(arch)


def default(problem: Conv2dProblem, arch: Arch) -> WindowsConfig:
    """The first legal config; where there is none, one that says why."""
    return next((config for config in space(problem, arch) if config.check(problem, arch) is None), WindowsConfig())


def is_few(problem: Conv2dProblem) -> bool:
    """Whether a pixel's elements are less than a step of the reduction, 32 bytes, which other schedules fill up."""
    w = Windows(problem, WindowsConfig())
    return w.elements * w.item < WORD * STEP


def space(problem: Conv2dProblem, arch: Arch) -> ProductSpace[WindowsConfig]:
    p = problem
    rows = [size for size in (2, 4, 8, 16) if size < 2 * p.out_h] or [2]
    channels = [size for size in (16, 32, 64, 128) if size < 2 * p.co] or [16]
    warps = ((2, 1), (4, 1), (8, 1), (4, 2))
    names = ("tile_h", "tile_w", "block_n", "warps_m", "warps_n")
    shapes = ((h, w, n, *of) for h, w, n, of in product(rows, _widths(p.out_w), channels[-3:], warps))
    return ProductSpace(
        WindowsConfig,
        [
            dict(zip(names, shape, strict=True))
            for shape in shapes
            if Windows(problem, WindowsConfig(*shape)).uneven() is None
        ],
        axis("num_stages", (1, 2)),
        [dict(blocks_sm=count, grid=count * arch.device.multiprocessors) for count in (1, 2, 3, 4)],
    )


def _widths(out_w: int) -> list[int]:
    """Widths of tiles that leave few pixels of their last one empty, most of all others."""
    parts = range(1, out_w // 16 + 2)
    widths = {-(out_w // -(8 * count)) * 8 for count in parts}
    return sorted(widths, key=lambda size: (-(-out_w // size) * size, abs(size - 48)))[:3]
