"""Problems that every schedule of depthwise int8 convolutions has to get right."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "a layer": dict(
        n=2, h=8, w=8, ci=40, kh=3, kw=3, pad=1, bias=True, alpha="channel", beta="alpha", activation="relu"
    ),
    "ragged, stride 2": dict(n=3, h=7, w=6, ci=13, kh=3, kw=2, pad=1, stride=2, bias=True),
    "one of everything": dict(n=1, h=1, w=1, ci=1, kh=1, kw=1, bias=True, activation="relu6"),
    "asymmetric, stride 3, dilated": dict(
        n=1, h=9, w=6, ci=12, kh=5, kw=3, pad="2,0", stride="3,1", dilation="1,2", out_dtype="float32",
        activation="silu", alpha="tensor",
    ),
    "kernel in the padding": dict(n=2, h=1, w=2, ci=20, kh=3, kw=3, pad=2, residual=True, gamma="tensor"),
    "5x5, stride 2": dict(
        n=1, h=14, w=11, ci=65, kh=5, kw=5, pad=2, stride=2, bias=True, residual=True, alpha="channel", beta="channel",
        gamma="channel", activation="hardswish",
    ),
    "whole words": dict(n=1, h=9, w=12, ci=6, kh=2, kw=4, pad="0,1", out_dtype="float16", bias=True, beta="alpha"),
    "7x7, whole numbers": dict(
        n=1, h=9, w=12, ci=33, kh=7, kw=7, pad=3, out_dtype="int32", alpha=1.0, activation="clamp:-900:900"
    ),
    "31x3, dilated": dict(n=1, h=38, w=17, ci=2, kh=31, kw=3, pad="15,3", dilation="1,3"),
}  # fmt: skip
