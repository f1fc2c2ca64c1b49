"""Small and odd convolutions that every schedule must compute."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=2, h=8, w=16, ci=8, co=16, kh=3, kw=3, pad=1),
    "ragged, stride 2, fused": dict(
        n=3, h=7, w=11, ci=5, co=13, kh=3, kw=2, pad="1,0", stride=2, bias=True, activation="relu"
    ),
    "one of everything": dict(n=1, h=1, w=1, ci=1, co=1, kh=1, kw=1),
    "1x1 image": dict(n=1, h=1, w=1, ci=9, co=20, kh=1, kw=1, bias=True),
    "1x1 images": dict(n=3, h=1, w=1, ci=4, co=1, kh=3, kw=3, pad=1),
    "asymmetric, stride 3, dilated": dict(
        n=2, h=12, w=8, ci=3, co=7, kh=4, kw=3, pad="2,1", stride="3,1", dilation="2,1", activation="relu"
    ),
    "kernel in the padding": dict(n=2, h=2, w=4, ci=2, co=3, kh=3, kw=3, pad=3),
    "1x1 kernel": dict(n=2, h=4, w=6, ci=12, co=9, kh=1, kw=1),
    "float16": dict(n=1, h=6, w=8, ci=6, co=10, kh=3, kw=3, pad=1, dtype="float16", bias=True, activation="relu"),
    "packed filter": dict(n=2, h=6, w=8, ci=6, co=9, kh=3, kw=2, pad=1, bias=True, filter_layout="hwoi"),
    "packed filter, float16": dict(n=1, h=6, w=8, ci=8, co=10, kh=2, kw=2, dtype="float16", filter_layout="hwoi"),
    "bfloat16": dict(n=2, h=5, w=4, ci=7, co=6, kh=2, kw=2, stride=2, dtype="bfloat16", bias=True),
}
