"""Layers of networks, listed in a file or drawn as networks have them: what trials are collected of."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schedules.core.errors import SchedulesError
from schedules.core.registry import operator, operator_of
from scripts.trials import problem_of

# (operator, dtype, how often)
MIX = (
    ("conv2d_nhwc", "float16", 42),
    ("conv2d_nchw", "float16", 26),
    ("conv2d_hwcn", "float16", 10),
    ("conv2d_nchw32", "int8", 12),
    ("conv2d_nhwc", "float32", 3),
    ("conv2d_nchw", "float32", 3),
    ("conv2d_hwcn", "float32", 3),
)
# networks of SHAPES.json are traced with one image; what they are trained or served with
BATCHES = (1, 1, 2, 4, 8, 8, 16, 16, 32, 32, 64, 128)
SHORT = 2e9  # operations of a layer whose kernel takes little longer than its launch
LARGE, NARROW = 1700, 64  # pixels of an image, more of them, and channels
MOST_FLOPS, MOST_ELEMENTS = 5e11, 3e8


SIDES = (7, 7, 8, 10, 12, 14, 14, 16, 17, 20, 24, 28, 28, 32, 35, 40, 48, 56, 56, 64, 80, 96, 112, 128, 160)
# of networks whose images, or crops, are no multiple of 32
ODD_SIDES = (9, 13, 15, 19, 21, 25, 27, 33, 37, 38, 46, 50, 55, 65, 71, 73, 74, 75, 95, 97, 129, 147, 150, 190)


def listed(file: Path, r: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """The layers of `file`, each with the batch of its set or another."""
    found = {}
    for layer in json.loads(file.read_text()):
        if layer["op"] not in ("conv2d", "conv2d_fwd") or layer["groups"] != 1:
            continue
        words = {name: layer[name] for name in ("h", "w", "ci", "co", "kh", "kw")}
        words |= {name: tuple(layer[name]) for name in ("stride", "pad", "dilation")}
        for n in {layer["n"], r.choice(BATCHES)} if layer["n"] == 1 else {layer["n"]}:
            found[json.dumps([n, words])] = layer["set"], {"n": n, **words}
    return list(found.values())


def drawn(r: random.Random) -> tuple[str, dict[str, Any]]:
    """A layer as networks have them, named after the family that it is like."""
    side = r.choice(ODD_SIDES if r.random() < 0.3 else SIDES)
    few = r.choice((1, 3, 3, 3, 4, 6, 9, 12))
    wide = r.choice((16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 120, 128, 144, 160, 192, 224, 240, 256, 288, 320, 384))
    wider = wide * r.choice((1, 1, 1, 2, 2, 3, 4, 4, 6))
    often = {"first": 2, "pointwise": 3, "square": 3, "strided": 1, "patches": 1, "squeeze": 1, "bottleneck": 1}
    often |= dict.fromkeys(
        ("dense", "line", "dilated", "odd", "unet", "few", "detection", "segmentation", "even", "row"), 1
    )
    family = r.choice([name for name, times in often.items() for _ in range(times)])
    words: dict[str, Any] = {"h": side, "w": side, "stride": (1, 1), "dilation": (1, 1)}
    k, ci, co = 3, wide, wider
    if family == "first":
        k, s = r.choice(((3, 2), (3, 1), (5, 2), (7, 2), (7, 2), (11, 4), (4, 4), (5, 1), (9, 1), (16, 16), (14, 14)))
        whole = 1 if s < 14 else s
        size = r.choice((96, 112, 128, 192, 224, 224, 256, 299, 320, 384)) // whole * whole
        words |= {"h": size, "w": size, "stride": (s, s)}
        ci, co = few, r.choice((16, 24, 32, 32, 40, 48, 64, 64, 96, 128) if s < 14 else (192, 384, 768, 1024))
        pad = r.choice((0, k // 2)) if s < 4 or k == 11 else 0
        return family, {**words, "ci": ci, "co": co, "kh": k, "kw": k, "pad": (pad, pad)}
    if family in ("pointwise", "bottleneck"):
        k = 1
        if family == "bottleneck":
            ci, co = r.choice((256, 512, 1024, 2048)), r.choice((64, 128, 256, 512))
            words |= {"stride": (r.choice((1, 1, 2)),) * 2}
        if r.random() < 0.5:
            ci, co = co, ci
    elif family == "patches":
        k = r.choice((2, 2, 4))
        words |= {"stride": (k, k), "h": max(side, k), "w": max(side, k)}
    elif family == "squeeze":
        k, ci, co = 1, wider, max(4, wide // r.choice((4, 8, 16)))
        words |= {"h": 1, "w": 1}
        if r.random() < 0.5:
            ci, co = co, ci
    elif family == "strided":
        k = r.choice((3, 3, 3, 5, 1))
        words |= {"stride": (2, 2)}
    elif family == "dense":
        k = r.choice((1, 3))
        ci, co = (32 * r.randint(2, 32), 128) if k == 1 else (128, 32)
    elif family == "line":
        k = r.choice((3, 5, 7))
        words |= {"kh": 1, "kw": k} if r.random() < 0.5 else {"kh": k, "kw": 1}
    elif family == "dilated":
        d = r.choice((2, 2, 4, 6, 12))
        words |= {"dilation": (d, d)}
    elif family == "odd":
        k, ci, co = r.choice((1, 3, 3, 5)), r.randint(8, 300), r.randint(8, 300)
        words |= {"h": r.randint(5, 80), "w": r.randint(5, 80)}
    elif family == "unet":
        ci, co = 32 * r.choice((4, 5, 8, 10, 15, 20, 30, 40, 60)), 32 * r.choice((4, 5, 8, 10, 20, 40))
        words |= dict.fromkeys("hw", r.choice((8, 16, 32, 64)))
        k = r.choice((1, 3, 3))
    elif family == "detection":  # images of any sides, and what a pyramid makes of them
        words |= {"h": r.randint(10, 210), "w": r.randint(10, 310)}
        ci, co = r.choice(
            ((256, 256), (256, 256), (128, 128), (512, 256), (1024, 256), (2048, 256), (512, 512), (256, 24))
        )
        k = r.choice((1, 3, 3))
    elif family == "segmentation":
        words |= dict.fromkeys("hw", r.choice((25, 33, 41, 49, 65, 73, 97, 129)))
        ci, co = r.choice((256, 512, 1024, 2048)), r.choice((256, 256, 512, 19))
        k, d = r.choice((1, 3, 3)), r.choice((1, 2, 4, 6, 12))
        words |= {"dilation": (d, d)} if k > 1 else {}
    elif family == "even":
        words |= {"stride": (r.choice((1, 2, 2)),) * 2}
        k = 4
    elif family == "row":
        words |= {"h": 1, "w": r.randint(250, 8200), "kh": 1, "kw": r.choice((1, 3, 3, 5, 7, 11))}
        words |= {"stride": (1, r.choice((1, 1, 2))), "dilation": (1, r.choice((1, 1, 3, 5)))}
    elif family == "few":
        co = r.choice((1, 2, 3, 4, 6, 8, 12, 18, 21, 27, 36))
        k = r.choice((1, 3, 3))
    elif family == "square" and r.random() < 0.15:
        k = r.choice((5, 7))
    if side >= 100:
        ci, co = min(ci, 128), min(co, 128)
    kh, kw = words.get("kh", k), words.get("kw", k)
    down, across = words["dilation"]
    pad = (0, 0) if family == "patches" or r.random() < 0.05 else ((kh - 1) // 2 * down, (kw - 1) // 2 * across)
    return family, {**words, "ci": ci, "co": co, "kh": kh, "kw": kw, "pad": pad}


def finish(dtype: str, r: random.Random) -> dict[str, Any]:
    """Fields of what networks do with the sums of a layer: nothing, or a bias with batch norm in it, a residual in
    each block's last layer, an activation; of int8 scales that come at run time."""
    if r.random() < 0.4:
        return {}
    found = {"bias": True, "residual": r.random() < 0.4, "activation": r.choice(("relu", "relu", "none", "silu"))}
    if dtype == "int8":
        found |= {"alpha": "channel", "beta": "alpha", "activation": found["activation"].replace("silu", "relu")}
        found |= {"gamma": "tensor"} if found["residual"] else {}
    return found


def words_of(problem: Any) -> set[str]:
    """What sort of layer it is: few (channels), flat (1x1, every pixel for itself) or other; short, ragged (runs of
    images or of pixels of a row that are no whole eights), large (planes), narrow or uneven (channels), residual,
    strided, its dtype and layout."""
    flat = (problem.kh, problem.kw, problem.stride) == (1, 1, (1, 1))
    run = problem.n if problem.output_axes[-1] == "n" else problem.out_w
    found = {"few" if problem.ci <= 16 else "flat" if flat else "other"}
    found |= {problem.dtype, operator_of(problem).name.removeprefix("conv2d_")}
    added = bool(problem.epilogue.of_axis("element"))
    more = {"short": problem.flops < SHORT, "ragged": run % 8 > 0, "residual": added}
    more |= {"large": problem.h * problem.w > LARGE, "narrow": problem.ci <= NARROW, "uneven": problem.ci % 8 > 0}
    more["strided"] = max(problem.stride) > 1
    return found | {word for word, holds in more.items() if holds}


def problems(file: Path | None, seed: int, sorts: Sequence[str]) -> Any:
    """(set, problem) without end: operators by MIX, half of them layers of the list while it lasts; of `sorts`, each
    words that are joined by "+"."""
    asked = [set(sort.split("+")) for sort in sorts]
    r = random.Random(seed)
    known = listed(file, r) if file else []
    seen: set[tuple[str, str]] = set()
    queues: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for op, dtype, _ in MIX:
        queues[op, dtype] = r.sample(known, len(known))
    while True:
        op, dtype, _ = r.choices(MIX, [often for *_, often in MIX])[0]
        name, words = queues[op, dtype].pop() if queues[op, dtype] and r.random() < 0.55 else drawn(r)
        n = words.get("n") or r.choice(BATCHES)
        if op == "conv2d_hwcn":
            n = r.choice((8, 16, 32, 64, 64, 96, 100, 128, 130, 256))
        try:
            problem = operator(op).problem(**{**words, "n": n}, dtype=dtype, **finish(dtype, r))
        except (SchedulesError, TypeError):
            continue
        if (
            problem.flops > MOST_FLOPS / (8 if dtype == "float32" else 1)
            or max(map(math.prod, problem.shapes())) > MOST_ELEMENTS
        ):
            continue
        if (op, str(problem)) not in seen and any(words_of(problem) >= sort for sort in asked):
            seen.add((op, str(problem)))
            yield name, problem


def given(file: Path) -> Any:
    """(set, problem) of each line of `file`: a set, an operator and the problem's fields."""
    for line in file.read_text().splitlines():
        name, op, fields = line.split(maxsplit=2)
        yield name, problem_of(operator(op), fields)
