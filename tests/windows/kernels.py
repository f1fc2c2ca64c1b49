"""What tests of `mma_windows` share: problems and configs for each operator."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = dict(
    tile_h=2, tile_w=16, block_n=32, warps_m=2, warps_n=1, num_stages=2, blocks_sm=1, grid=3
)  # fmt: skip
# fields, and what of the config is not SMALL's
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "7x7, stride 2": (dict(n=1, h=14, w=72, ci=3, co=64, kh=7, kw=7, stride=2, pad=3), dict(tile_w=32, block_n=64)),
    "3x3": (dict(n=2, h=7, w=40, ci=3, co=40, kh=3, kw=3, pad=1, bias=True, activation="relu"), {}),
    "ragged, residual": (
        dict(n=2, h=9, w=37, ci=3, co=27, kh=3, kw=5, stride="1,2", pad="1,2", bias=True, residual=True),
        dict(num_stages=1),
    ),
    "a loop": (dict(n=2, h=15, w=27, ci=3, co=8, kh=11, kw=11, stride=4, pad=2), dict(block_n=16, grid=0)),
    "one channel": (dict(n=1, h=26, w=36, ci=1, co=32, kh=20, kw=5, stride=2), dict(warps_m=1, warps_n=2)),
    "dilated, 1 of width": (dict(n=1, h=9, w=18, ci=2, co=16, kh=3, kw=1, dilation="2,3"), dict(block_n=16)),
    "four channels": (dict(n=1, h=6, w=16, ci=4, co=72, kh=3, kw=3, pad=1), dict(block_n=48, tile_h=4)),
    "1x1": (dict(n=3, h=5, w=8, ci=5, co=5, kh=1, kw=1), dict(block_n=16, tile_w=8, warps_m=1)),
}
