"""Problems small enough for the emulator that together reach every edge."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=2, h=8, w=8, ci=64, co=64, kh=3, kw=3, pad=1),
    "ragged everything, stride 2": dict(n=3, h=7, w=5, ci=40, co=33, kh=3, kw=2, pad=1, stride=2),
    "one of everything": dict(n=1, h=1, w=1, ci=1, co=1, kh=1, kw=1),
    "asymmetric, stride 3, dilated": dict(
        n=1, h=11, w=9, ci=3, co=100, kh=5, kw=1, pad="2,0", stride="3,1", dilation="1,2"
    ),
    "kernel in the padding": dict(n=2, h=1, w=1, ci=32, co=3, kh=3, kw=3, pad=2),
    "1x1, many channels": dict(n=1, h=3, w=5, ci=200, co=130, kh=1, kw=1),
    "7x7": dict(n=1, h=7, w=6, ci=33, co=20, kh=7, kw=7, pad=3),
}
FEW_LANES: dict[str, dict[str, Any]] = {
    "3 of 4": dict(n=2, h=9, w=7, ci=3, co=40, kh=7, kw=7, pad=3, stride=2, lanes=4),
    "11 of 16, 1x1": dict(n=1, h=4, w=5, ci=11, co=32, kh=1, kw=1, lanes=16),
}
EPILOGUES: dict[str, dict[str, Any]] = {
    "bias": dict(bias=True, beta=0.0625),
    "residual": dict(residual=True, gamma=0.5),
    "both, relu": dict(bias=True, residual=True, alpha=0.1 / 3, gamma=1.0, activation="relu"),
    "scales of channels": dict(bias=True, residual=True, alpha="channel", beta="channel", gamma="channel"),
    "scales of the tensor, hardswish": dict(
        bias=True, residual=True, alpha="tensor", beta="tensor", gamma="tensor", activation="hardswish"
    ),
    "bias in the sum, float16": dict(
        bias=True, residual=True, alpha="channel", beta="alpha", gamma="tensor", activation="relu", out_dtype="float16"
    ),
    "int32, rounded": dict(bias=True, alpha="channel", beta="alpha", out_dtype="int32"),
    "half of whole numbers: ties": dict(alpha=0.5, ci=1, kh=1, kw=1, pad=0),
    "saturated": dict(alpha=1.0),
    "float32": dict(out_dtype="float32", bias=True, residual=True, activation="relu"),
    "int32": dict(out_dtype="int32", alpha=2.0, beta=1.0, gamma=3.0, bias=True, residual=True, activation="relu"),
    "int32 sums": dict(out_dtype="int32", alpha=1.0),
}
EPILOGUE_SHAPE: dict[str, Any] = dict(n=2, h=5, w=4, ci=33, co=40, kh=3, kw=3, pad=1)
