"""Tiles of image rows."""

from __future__ import annotations

from typing import Any

from schedules.hopper.rows import row_tiles
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
