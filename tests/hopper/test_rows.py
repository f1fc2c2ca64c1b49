"""Tiles of image rows."""

from __future__ import annotations

from typing import Any

from schedules.hopper.rows import flat_tiles, row_tiles
from schedules.hopper.shared import SharedTile
from tests.conftest import problem_of

WORK: dict[str, Any] = dict(
    n=16, h=32, w=32, ci=256, co=256, kh=3, kw=3, pad=1, dtype="float16", filter_layout="hwoi"
)  # fmt: skip


def test_tiles_of_rows() -> None:
    def box(columns: int, consumers: int = 1, **fields: Any) -> tuple[Any, ...] | None:
        found = row_tiles(problem_of("conv2d_nchw", **WORK | fields), columns, consumers)
        return found and (found.tiles.box, found.width, found.run, found.margins)

    assert box(128) == ((1, 4, 32), 32, 32, (0, 0))
    assert box(96) == ((1, 3, 32), 32, 32, (0, 0))
    assert box(128, consumers=2) == ((1, 8, 32), 32, 32, (0, 0))
    assert box(128, w=128) == ((1, 1, 128), 128, 64, (0, 0))
    assert box(48, w=40) == ((1, 1, 48), 48, 16, (0, 0))
    assert box(64, w=8, h=2, n=4) == ((2, 2, 16), 16, 16, (0, 0))
    assert box(128, w=256) == ((1, 1, 112), 128, 64, (8, 8))
    assert box(128, w=256, pad="1,0") == ((1, 1, 112), 128, 64, (0, 16))
    assert box(128, w=256, consumers=2) is None
    found = row_tiles(problem_of("conv2d_nchw", **WORK | dict(h=2, dilation="2,1", pad="2,1")), 128, 1, images=False)
    assert found and found.tiles.box == (1, 4, 32)
    assert found.with_halo().tiles.box == (1, 8, 32) and found.with_halo().pixels == 256


def test_flat_tiles() -> None:
    def box(columns: int, consumers: int = 1, images: bool = True, **fields: Any) -> tuple[Any, ...] | None:
        found = flat_tiles(problem_of("conv2d_nchw", **WORK | fields), columns, consumers, images)
        return found and (found.tiles.box, found.width, found.run, found.flat)

    assert box(224, w=56) == ((1, 4, 56), 56, 32, True)  # rows of 112 bytes, read as lines of 64 bytes
    assert box(224, w=56, images=False) is None  # rows of the kernel are no whole lines apart
    assert box(256) == ((1, 8, 32), 32, 64, True) and box(96, consumers=2) == ((2, 3, 32), 32, 32, True)
    assert box(128, h=8, w=8) == ((2, 8, 8), 8, 64, True)
    assert box(128, h=3, w=8, n=5) == ((4, 4, 8), 8, 32, True)
    assert box(128, w=256) == ((1, 1, 112), 128, 64, False)  # parts of rows have margins
    assert box(256, w=56) == ((1, 4, 64), 64, 64, False)  # rows are lengthened
    assert box(64, w=49, h=1, kh=1, kw=1, pad=0) == ((1, 1, 64), 64, 64, False)  # and so where they begin late


def test_loads_of_flat_tiles() -> None:
    """Runs of pixels, whatever rows they are of, from the first row of each image that a tap looks at."""
    found = flat_tiles(problem_of("conv2d_nchw", **WORK | dict(h=3, w=8, n=5)), 128, 1)
    assert found
    loads = found.loads(SharedTile(128, 16, 2, found.run, transposed=True), (1, 0, 0), 1, 2, -1)
    assert loads == [(slab * 1024 + 512, -8, 8, 0, 1 + slab) for slab in range(4)]
