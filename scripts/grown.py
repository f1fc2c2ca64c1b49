"""Trees that xgboost grew, as the table that the package reads."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schedules.predict.trees import Trees


def save(grown: Trees, file: Path) -> None:
    """Write them as `trees.load` reads them."""
    parts = {
        "roots": grown.roots.astype(np.int32),
        "feature": grown.feature.astype(np.uint8),
        "threshold": grown.threshold.astype(np.float32),
        "left": (grown.left - np.arange(len(grown.left))).astype(np.int16),
        "missing_left": grown.missing_left,
    }
    words = json.dumps({"names": grown.names, "depth": grown.depth, "base": grown.base, **grown.header})
    content = io.BytesIO()
    np.savez_compressed(content, words=np.frombuffer(words.encode(), np.uint8), **parts)  # type: ignore[arg-type]
    file.write_bytes(content.getvalue())


def from_xgboost(
    grown: Sequence[tuple[Sequence[str], float]], base: float, names: Sequence[str], header: Mapping[str, Any]
) -> Trees:
    """The trees of several ``Booster.get_dump(dump_format="json")`` without names of features, which are columns of
    `names`; the leaves of each times a factor."""
    nodes: list[list[Any]] = []  # feature, threshold, left, missing_left
    roots, deepest = [], 0

    def put(at: int, node: Mapping[str, Any], depth: int, factor: float) -> None:
        nonlocal deepest
        deepest = max(deepest, depth)
        if "leaf" in node:
            nodes[at] = [0, node["leaf"] * factor, at, False]
            return
        children = {child["nodeid"]: child for child in node["children"]}
        left = len(nodes)
        nodes.extend([[], []])
        nodes[at] = [
            int(node["split"].removeprefix("f")),
            node["split_condition"],
            left,
            node["missing"] == node["yes"],
        ]
        put(left, children[node["yes"]], depth + 1, factor)
        put(left + 1, children[node["no"]], depth + 1, factor)

    for dumped, factor in grown:
        for text in dumped:
            roots.append(len(nodes))
            nodes.append([])
            put(roots[-1], json.loads(text), 0, factor)
    feature, threshold, left, missing = zip(*nodes, strict=True)
    return Trees(
        tuple(names),
        header,
        np.array(roots),
        np.array(feature),
        np.array(threshold, np.float32),
        np.array(left),
        np.array(missing),
        deepest,
        base,
    )
