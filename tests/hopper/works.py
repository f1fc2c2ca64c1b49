"""One case for each way in which tiles lie: operator, schedule, problem, config."""

from __future__ import annotations

from typing import Any

Case = tuple[str, str, dict[str, Any], dict[str, Any]]

HALF = dict(dtype="float16")
PACKED = dict(dtype="float16", filter_layout="hwoi")
PLAIN: dict[str, Any] = dict(
    cluster_m=1, cluster_n=1, num_stages=2, grid=0, consumers=2, blocks_sm=1, split_k=1, ping_pong=False,
    stationary=False,
)  # fmt: skip
KERNEL: dict[str, Any] = dict(kh=3, kw=3, pad=1)
NHWC: dict[str, Any] = dict(n=3, h=7, w=6, ci=24, co=40, stride=2) | KERNEL | HALF
NCHW: dict[str, Any] = dict(n=3, h=9, w=24, ci=24, co=70) | KERNEL | PACKED
FEW: dict[str, Any] = dict(n=3, h=7, w=40, ci=24, co=27) | KERNEL | PACKED
NCHW32: dict[str, Any] = dict(n=5, h=9, w=7, ci=70, co=72) | KERNEL
HWCN: dict[str, Any] = dict(n=72, h=3, w=4, ci=20, co=72) | KERNEL | HALF
WORKS: dict[str, Case] = {
    "pixels": ("conv2d_nhwc", "tma_wgmma", NHWC, PLAIN | dict(block_m=128, block_n=32, block_k=16)),
    "pixels, clusters": (
        "conv2d_nhwc", "tma_wgmma", NHWC | dict(co=80),
        dict(block_m=128, block_n=32, block_k=32, cluster_m=2, cluster_n=2, grid=120),
    ),
    "pixels, consumers in turn": (
        "conv2d_nhwc", "tma_wgmma", NHWC,
        PLAIN | dict(block_m=64, block_n=32, block_k=16, ping_pong=True, stationary=True, grid=2),
    ),
    "pixels around a tile": (
        "conv2d_nhwc", "tma_wgmma", NHWC | dict(stride=1, kh=5),
        dict(block_m=64, block_n=32, block_k=32, consumers=1, num_stages=2, cluster_m=2, cluster_n=2, grid=4,
             halo=True),
    ),
    "pixels of odd channels": (
        "conv2d_nhwc", "tma_wgmma", NHWC | dict(co=27), PLAIN | dict(block_m=128, block_n=32, block_k=16),
    ),
    "pixels of many odd channels": (
        "conv2d_nhwc", "tma_wgmma", NHWC | dict(co=67, kh=1, kw=1, pad=0, stride=1),
        PLAIN | dict(block_m=64, consumers=1, block_n=32, block_k=16),
    ),
    "pixels, TF32": (
        "conv2d_nhwc", "tf32", NHWC | dict(dtype="float32"), PLAIN | dict(block_m=128, block_n=32, block_k=16),
    ),
    "pixels around a tile, addends": (
        "conv2d_nhwc", "bf16x3", NHWC | dict(stride=1, ci=21, dtype="float32"),
        dict(block_m=64, block_n=32, block_k=32, consumers=1, num_stages=2, cluster_m=2, cluster_n=2, grid=4,
             halo=True),
    ),
    "rows": ("conv2d_nchw", "tma_wgmma", NCHW, PLAIN | dict(block_m=128, block_n=64, block_k=16)),
    "rows, clusters": (
        "conv2d_nchw", "tma_wgmma", NCHW,
        dict(block_m=128, block_n=64, block_k=16, num_stages=2, cluster_m=2, cluster_n=2, grid=120, halo=True),
    ),
    "rows, consumers side by side": (
        "conv2d_nchw", "tma_wgmma", NCHW, PLAIN | dict(block_m=64, block_n=128, block_k=32, consumers_n=2, halo=True),
    ),
    "boxes that are turned": (
        "conv2d_nchw", "tma_wgmma_boxes", NCHW | dict(stride=2, w=32),
        PLAIN | dict(block_m=64, consumers=1, block_n=32, block_k=32, num_stages=3, row=False),
    ),
    "boxes that are turned, in clusters": (
        "conv2d_nchw", "tma_wgmma_boxes", NCHW,
        PLAIN | dict(block_m=64, block_n=32, block_k=32, cluster_m=2, grid=4, ping_pong=True, row=True),
    ),
    "runs that are turned": (
        "conv2d_nchw", "tma_wgmma_runs", NCHW | dict(w=7),
        PLAIN | dict(block_m=64, consumers=1, block_n=32, block_k=32, grid=2, row=True),
    ),
    "rows wider than a tile": (
        "conv2d_nchw", "tma_wgmma", NCHW | dict(w=200), PLAIN | dict(block_m=64, consumers=1, block_n=128, block_k=16),
    ),
    "narrow rows": (
        "conv2d_nchw", "tma_wgmma", NCHW | dict(w=8, n=5, h=3), PLAIN | dict(block_m=128, block_n=64, block_k=16),
    ),
    "few": ("conv2d_nchw", "tma_wgmma_few", FEW, PLAIN | dict(block_m=256, block_n=96, block_k=32)),
    "few, half groups": ("conv2d_nchw", "tma_wgmma_few", FEW, PLAIN | dict(block_m=256, block_n=88, block_k=64)),
    "few, clusters": (
        "conv2d_nchw", "tma_wgmma_few", FEW, PLAIN | dict(block_m=128, block_n=96, block_k=16, cluster_m=2),
    ),
    "a line of pixels": (
        "conv2d_nchw", "tma_wgmma_turned", NHWC | dict(ci=20, co=41),
        PLAIN | dict(block_m=128, block_n=32, block_k=16, lines_outside=False),
    ),
    "a line of pixels, clusters": (
        "conv2d_nchw", "tma_wgmma_turned", NHWC,
        dict(block_m=128, block_n=32, block_k=32, cluster_m=2, cluster_n=2, grid=120, lines_outside=True,
             gathered=False),
    ),
    "lines of pixels as they lie": (
        "conv2d_nchw", "tma_wgmma_lines", NHWC | dict(co=41),
        PLAIN | dict(block_m=128, block_n=32, block_k=32),
    ),
    "lines of pixels as they lie, clusters": (
        "conv2d_nchw", "tma_wgmma_lines", NHWC | dict(stride=1),
        dict(block_m=64, consumers=1, block_n=32, block_k=32, cluster_m=2, cluster_n=1, grid=120),
    ),
    "images as they lie": (
        "conv2d_nchw", "tma_wgmma_images", NHWC | dict(n=5, kh=1, kw=1, pad=0, co=72),
        PLAIN | dict(block_m=64, consumers=1, block_n=32, block_k=32),
    ),
    "images as they lie, clusters": (
        "conv2d_nchw", "tma_wgmma_images", NHWC | dict(n=9, h=7, w=5, kh=1, kw=1, stride=1, pad=0, co=72),
        dict(block_m=128, block_n=32, block_k=32, cluster_m=2, cluster_n=2, grid=120),
    ),
    "slabs of pixels": (
        "conv2d_nchw", "tma_wgmma_slabs", NCHW | dict(kh=1, kw=1, pad=0),
        PLAIN | dict(block_m=128, block_n=32, block_k=32),
    ),
    "slabs of pixels, clusters": (
        "conv2d_nchw", "tma_wgmma_slabs", NCHW | dict(kh=1, kw=1, pad=0),
        dict(block_m=64, consumers=1, block_n=32, block_k=32, cluster_m=2, cluster_n=2, grid=120),
    ),
    "a line of pixels, turned in the block": (
        "conv2d_nchw", "tma_wgmma_spans", NHWC | dict(ci=20, co=41),
        PLAIN | dict(block_m=128, block_n=32, block_k=32, lines_outside=False, halo=True),
    ),
    "a line of pixels, turned in the block, clusters": (
        "conv2d_nchw", "tma_wgmma_spans", NHWC | dict(stride=1),
        dict(block_m=64, consumers=1, block_n=32, block_k=32, num_stages=4, cluster_m=2, cluster_n=1, grid=120,
             lines_outside=True, halo=False),
    ),
    "a line of pixels, addends": (
        "conv2d_nchw", "bf16x6", NHWC | dict(ci=20, co=41, dtype="float32"),
        PLAIN | dict(block_m=128, block_n=32, block_k=16, cluster_n=2, grid=120, lines_outside=True),
    ),
    "what each output looks at": (
        "conv2d_nchw", "tma_wgmma_turned", NHWC,
        PLAIN | dict(block_m=128, block_n=32, block_k=64, gathered=True, lines_outside=False),
    ),
    "whole images": (
        "conv2d_nchw", "tma_wgmma_turned", NHWC | dict(n=9),
        PLAIN | dict(block_m=128, block_n=32, block_k=32, gathered=True, lines_outside=False, whole_sectors=True),
    ),
    "whole images, clusters": (
        "conv2d_nchw", "tma_wgmma_lines", NHWC | dict(n=5, w=5, stride=1, co=72),
        dict(block_m=64, consumers=1, block_n=32, block_k=32, cluster_m=2, cluster_n=1, grid=120, whole_sectors=True),
    ),
    "whole sectors": (
        "conv2d_nchw", "tma_wgmma_runs", NHWC | dict(h=13, w=11, stride=1, co=33),
        PLAIN | dict(block_m=128, block_n=32, block_k=32, row=False, pairs=1, whole_sectors=True),
    ),
    "whole sectors, clusters": (
        "conv2d_nchw", "tma_wgmma_lines", NHWC | dict(n=1, h=19, w=17, stride=1),
        dict(block_m=64, consumers=1, block_n=32, block_k=32, cluster_m=4, cluster_n=1, grid=120, whole_sectors=True),
    ),
    "whole sectors, consumers in turn": (
        "conv2d_nchw", "tma_wgmma_turned", NHWC | dict(h=25, w=23, ci=12),
        PLAIN | dict(block_m=64, block_n=32, block_k=16, lines_outside=False, gathered=False, ping_pong=True,
                     whole_sectors=True),
    ),
    "whole sectors, zeros below an image": (
        "conv2d_nchw", "tma_wgmma_turned", NHWC | dict(h=17, w=17, kh=7, kw=1, pad="3,0", stride=1),
        PLAIN | dict(block_m=64, consumers=1, block_n=32, block_k=16, lines_outside=False, gathered=False,
                     whole_sectors=True),
    ),
    "whole sectors, two consumers": (
        "conv2d_nchw", "tma_wgmma_spans", NHWC | dict(h=15, w=14, stride=1),
        PLAIN | dict(block_m=128, block_n=32, block_k=32, lines_outside=False, halo=False, whole_sectors=True),
    ),
    "groups": (
        "conv2d_nchw32", "tma_wgmma", NCHW32, PLAIN | dict(block_m=128, block_n=64, block_k=64, row_pixels=1),
    ),
    "groups, folded, clusters": (
        "conv2d_nchw32", "tma_wgmma", NCHW32,
        dict(block_m=64, block_n=96, block_k=32, consumers=1, num_stages=3, row_pixels=2, cluster_m=2, cluster_n=2,
             tall=False, grid=0),
    ),
    "groups, tall": (
        "conv2d_nchw32", "tma_wgmma", NCHW32,
        PLAIN | dict(block_m=128, block_n=64, block_k=64, row_pixels=4, tall=True),
    ),
    "groups, padding skipped": (
        "conv2d_nchw32", "tma_wgmma", NCHW32 | dict(n=64, h=2, w=3),
        PLAIN | dict(block_m=64, consumers=1, block_n=32, block_k=64, row_pixels=1, tall=False, skip_padding=True),
    ),
    "a pixel": (
        "conv2d_hwcn", "tma_wgmma", HWCN,
        PLAIN | dict(block_m=128, block_n=64, block_k=16, window=False, turned=False, lines=1),
    ),
    "a pixel, clusters": (
        "conv2d_hwcn", "tma_wgmma", HWCN,
        dict(block_m=128, block_n=128, block_k=16, num_stages=2, cluster_m=2, cluster_n=2, grid=120, window=False,
             turned=False, lines=1),
    ),
    "images of few channels": (
        "conv2d_hwcn", "tma_wgmma", HWCN | dict(n=16, ci=3),
        PLAIN | dict(block_m=128, block_n=128, block_k=32, window=True, turned=False, lines=1, cluster_m=2),
    ),
    "images, turned": (
        "conv2d_hwcn", "tma_wgmma", HWCN | dict(n=26, co=67),
        PLAIN | dict(block_m=128, block_n=80, block_k=16, window=False, turned=True, lines=1),
    ),
    "lines of images": (
        "conv2d_hwcn", "tma_wgmma", HWCN | dict(h=5),
        dict(block_m=128, block_n=80, block_k=16, num_stages=2, cluster_m=2, cluster_n=2, grid=120, window=False,
             turned=False, lines=2),
    ),
    "a pixel, addends": (
        "conv2d_hwcn", "bf16x6", HWCN | dict(n=36, co=43, dtype="float32"),
        PLAIN | dict(block_m=128, block_n=32, block_k=16, cluster_m=2, grid=120),
    ),
    "a pixel, TF32": (
        "conv2d_hwcn", "tf32", HWCN | dict(dtype="float32"), PLAIN | dict(block_m=128, block_n=16, block_k=16),
    ),
}  # fmt: skip
