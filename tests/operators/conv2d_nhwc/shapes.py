"""Problems that every NHWC schedule has to get right."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=2, h=8, w=8, ci=32, co=64, kh=3, kw=3, pad=1),
    "ragged, stride 2": dict(n=3, h=7, w=6, ci=13, co=27, kh=3, kw=2, pad=1, stride=2, bias=True),
    "one of everything": dict(n=1, h=1, w=1, ci=1, co=1, kh=1, kw=1, bias=True, activation="relu"),
    "asymmetric, stride 3, dilated": dict(
        n=1, h=9, w=6, ci=12, co=4, kh=5, kw=3, pad="2,0", stride="3,1", dilation="1,2", activation="relu"
    ),
    "kernel in the padding": dict(n=2, h=1, w=1, ci=40, co=3, kh=3, kw=3, pad=2),
    "1x1": dict(n=1, h=5, w=7, ci=72, co=80, kh=1, kw=1, bias=True, activation="relu"),
}
K100: dict[int, dict[str, Any]] = {
    number: dict(n=n, ci=ci, h=size, w=size, co=co, kh=3, kw=3, pad=1, dtype="float16")
    for number, (n, ci, size, co) in enumerate(
        [
            (16, 128, 64, 27),
            (16, 256, 32, 256),
            (16, 64, 128, 64),
            (2, 1920, 32, 640),
            (2, 640, 64, 640),
            (2, 320, 64, 4),
        ],
        start=1,
    )
}
