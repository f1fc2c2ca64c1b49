"""Problems that every schedule of pooling has to get right."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "maximum 3x3, stride 2": dict(n=2, h=9, w=6, ci=40, kh=3, kw=3, stride=2, pad=1),
    "all of an image": dict(n=1, h=7, w=5, ci=3, kh=7, kw=5, kind="average"),
    "an addition, a range of batches": dict(
        n=3, n_from=1, h=2, w=4, ci=64, kh=1, kw=1, kind="average", residual=True, activation="relu"
    ),
    "asymmetric, dilated, activated": dict(
        n=1, h=5, w=6, ci=10, kh=2, kw=3, pad="0,2", stride="1,3", dilation="2,1", kind="average", activation="relu6"
    ),
    "maximum, a range of batches": dict(n=2, n_from=1, h=5, w=4, ci=36, kh=2, kw=1),
}
