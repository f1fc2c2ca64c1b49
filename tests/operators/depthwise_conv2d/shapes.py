"""Problems that every schedule of depthwise convolutions has to get right."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=2, h=8, w=8, ci=16, kh=3, kw=3, pad=1),
    "ragged, stride 2": dict(n=3, h=7, w=6, ci=13, kh=3, kw=2, pad=1, stride=2, bias=True),
    "one of everything": dict(n=1, h=1, w=1, ci=1, kh=1, kw=1, bias=True, activation="relu"),
    "asymmetric, stride 3, dilated": dict(
        n=1, h=9, w=6, ci=12, kh=5, kw=3, pad="2,0", stride="3,1", dilation="1,2", activation="silu"
    ),
    "kernel in the padding": dict(n=2, h=1, w=2, ci=20, kh=3, kw=3, pad=2, residual=True),
    "7x7": dict(n=1, h=9, w=12, ci=6, kh=7, kw=7, pad=3, bias=True, residual=True, activation="hardswish"),
    "31x3, dilated": dict(n=1, h=38, w=17, ci=2, kh=31, kw=3, pad="15,3", dilation="1,3"),
}
LAYOUTS = ("nchw", "nhwc")
LAYERS: list[dict[str, Any]] = [  # of MobileNetV2, EfficientNet-B0 and ConvNeXt, without n
    dict(h=size, w=size, ci=ci, kh=k, kw=k, pad=k // 2, stride=stride)
    for ci, size, k, stride in [
        (96, 112, 3, 2),
        (144, 56, 3, 1),
        (240, 28, 5, 1),
        (960, 7, 3, 1),
        (96, 56, 7, 1),
    ]
]
