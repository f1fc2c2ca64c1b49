"""Problems that every schedule of packing has to get right."""

from __future__ import annotations

from typing import Any

LAYOUTS = ("nchw", "nhwc")
SHAPES: dict[str, dict[str, Any]] = {
    "ragged channels": dict(n=2, h=4, w=6, ci=40),
    "three channels, odd images": dict(n=1, h=7, w=5, ci=3),
    "whole groups": dict(n=3, h=2, w=4, ci=64),
    "one of everything": dict(n=1, h=1, w=1, ci=1),
    "three of four lanes": dict(n=2, h=4, w=6, ci=3, lanes=4),
    "eleven of sixteen lanes": dict(n=1, h=3, w=5, ci=11, lanes=16),
    "a range of batches": dict(n=3, n_from=1, h=4, w=4, ci=36),
}
