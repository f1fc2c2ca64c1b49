"""Winograd's tiles along rows of bfloat16 addends: right in every layout, as exact as sums in float32."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.check.verify import MODES, emulated_runs, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.arithmetic import BF16X3, FLOAT32
from schedules.core.errors import ConfigError
from schedules.core.operator import Array
from schedules.core.registry import operator
from schedules.hopper.winograd import RowTiles
from schedules.predict.estimate import LAUNCH
from schedules.predict.rank import predicted_us, ranked
from tests.conftest import assert_mutants_caught, problem_of
from tests.hopper.works import PLAIN
from tests.hopper_kernels import assert_correct_on, assert_emulated, opcodes, to_be_waited_for

NAMES = ("winograd_bf16x3", "winograd_bf16x6")
LAYOUTS = ("conv2d_hwcn", "conv2d_nchw", "conv2d_nhwc")
WORK: dict[str, Any] = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1, dtype="float32")
SHAPES: dict[str, dict[str, Any]] = {
    "ragged, fused": dict(n=36, h=5, w=7, ci=13, co=44, kh=3, kw=3, pad=1, bias=True, activation="relu", residual=True),
    "whole tiles": dict(n=8, h=4, w=8, ci=40, co=8, kh=3, kw=3, pad=1, residual=True),
    "narrow": dict(n=4, h=6, w=3, ci=24, co=36, kh=5, kw=3, pad="2,1", dilation="2,1"),
    "five taps": dict(n=4, h=3, w=9, ci=24, co=12, kh=1, kw=5, pad="0,2"),
}
SMALL: list[dict[str, Any]] = [
    PLAIN | words
    for words in [
        dict(block_m=64, block_n=32, block_k=16, consumers=1, num_stages=3, cluster_m=2, grid=2, tile_w=4, together=2),
        dict(block_m=128, block_n=64, block_k=32, cluster_n=2, grid=4, tile_w=3),
        dict(block_m=64, block_n=64, block_k=16, tile_w=2, ping_pong=True, grid=2),
    ]
]


@pytest.mark.parametrize("size", [4, 3, 2])
@pytest.mark.parametrize("out", [2, 3, 8, 13])
@pytest.mark.parametrize("ragged", [True, False])
def test_rows_are_cut_into_tiles(size: int, out: int, ragged: bool) -> None:
    """What the tiles make of a row, in fractions, is its convolution."""
    tiles, taps = RowTiles(size, 3, out, ragged), [Fraction(2), Fraction(-3), Fraction(5)]
    row = [Fraction(i * i - 7 * i) for i in range(tiles.count * size + 2)]
    filters = [sum(a * b for a, b in zip(line, taps, strict=True)) for line in tiles.filter]
    assert len(filters) == tiles.distinct and len(tiles.factors) == size * tiles.distinct
    points = []
    for number in range(tiles.count):
        made = tiles.transforms[-1 if number >= tiles.full else 0]
        inputs = row[number * size :][: len(made.data[0])]
        points += [sum(a * b for a, b in zip(line, inputs, strict=True)) for line in made.data]
    assert len(points) == tiles.stored
    for number in range(tiles.count):
        whole = number < tiles.full
        window = range(tiles.reach) if whole else range(tiles.reach, tiles.distinct)
        first = number * tiles.reach - (0 if whole else tiles.reach)
        for output in range(size if whole else tiles.rest):
            factors = (Fraction(tiles.factors[point * size + output]) for point in window)
            got = sum(
                factor * points[first + point] * filters[point] for factor, point in zip(factors, window, strict=True)
            )
            x = number * size + output
            assert got == sum(tap * row[x + i] for i, tap in enumerate(taps))


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_default_is_correct(emulation: None, layout: str, schedule: str) -> None:
    assert_emulated(layout, SHAPES["ragged, fused"] | dict(dtype="float32"), {}, schedule)


@pytest.mark.parametrize(("shape", "words"), list(zip(list(SHAPES)[1:], SMALL, strict=True)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_configs_are_correct(emulation: None, layout: str, shape: str, words: dict[str, Any]) -> None:
    assert_emulated(layout, SHAPES[shape] | dict(dtype="float32"), words, "winograd_bf16x6")


@pytest.mark.parametrize(
    ("layout", "fields", "words"),
    [
        ("conv2d_hwcn", dict(stride="2,1"), dict(skip_padding=False, tile_w=4)),
        ("conv2d_nhwc", dict(), dict(halo=True, tile_w=4)),
        ("conv2d_nchw", dict(filter_layout="hwoi"), dict(lines_outside=False, tile_w=4)),
        ("conv2d_nchw", dict(n=1), dict(lines_outside=True, tile_w=4)),
    ],
)
def test_other_ways_are_correct(emulation: None, layout: str, fields: dict[str, Any], words: dict[str, Any]) -> None:
    problem = dict(n=4, h=6, w=9, ci=24, co=36, kh=3, kw=3, pad=1, dtype="float32") | fields
    plain = dict(block_m=64, block_n=32, block_k=16, consumers=1)
    assert_emulated(layout, problem, PLAIN | plain | words, "winograd_bf16x6")


# ---- errors


def numbers(kind: str, shape: tuple[int, ...], r: np.random.Generator) -> Array:
    """Of the channels, which come first, the second half nearly cancels the first with "cancelling"."""
    x = r.standard_normal(shape, dtype="float32")
    if kind == "wide":  # of the channels: a wide range within a pixel, whose neighbours' is the same
        x = x * np.exp2(r.integers(-20, 21, (shape[0], 1, 1, 1))).astype("float32")
    if kind == "cancelling":
        half = shape[0] // 2
        x[half:] = -x[:half] * (1 + 2.0**-14 * r.standard_normal(x[half:].shape))
    return np.abs(x) if kind == "positive" else x


@pytest.mark.parametrize(("tile_w", "ci"), [(4, 256), (3, 128), (2, 64)])
@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "cancelling"])
def test_errors_are_those_of_sums_in_float32(emulation: None, sm_90a: Arch, kind: str, tile_w: int, ci: int) -> None:
    """In units of the sum of the absolute products at most those of one chain in float32; with two addends within what
    they are said to be."""
    co, h, w, r = 16, 6, 12, np.random.default_rng(0)
    problem = problem_of("conv2d_nhwc", n=1, h=h, w=w, ci=ci, co=co, kh=3, kw=3, dtype="float32")
    data, weight = numbers(kind, (ci, h, w, 1), r), numbers(kind, (ci, 3, 3, co), r)
    if kind == "cancelling":  # the products cancel, not the factors' signs
        weight[ci // 2 :] = weight[: ci // 2]
    chain = np.zeros((h - 2, w - 2, co), "float32")
    exact, magnitude = chain.astype("float64"), chain.astype("float64")
    for y in range(3):
        for x in range(3):
            for c in range(ci):
                a, b = data[c, y : y + h - 2, x : x + w - 2], weight[c, y, x]
                chain = chain + a * b
                exact += a.astype("float64") * b
                magnitude += np.abs(a.astype("float64") * b)
    arrays = [np.ascontiguousarray(data.transpose(3, 1, 2, 0)), np.ascontiguousarray(weight.transpose(3, 1, 2, 0))]
    words = PLAIN | dict(block_m=64, block_n=32, block_k=32, consumers=1, tile_w=tile_w, together=1, halo=False)
    errors = {"chain": np.abs(chain - exact) / magnitude}
    for name in NAMES:
        built = build(problem, sm_90a, name, words, device_code=False)
        assert built.config.arithmetic_of(problem) == {"winograd_bf16x3": BF16X3, "winograd_bf16x6": FLOAT32}[name]
        assert built.config.as_exact(problem)
        ((_, run),) = emulated_runs(built, str(built.sources["cu"]), MODES[:1])
        errors[name] = np.abs(run([*arrays, *poisoned(problem)])[0][0] - exact) / magnitude
    if kind == "wide":  # few products are all of a sum, and errors are in proportion to the tile's largest
        largest = [magnitude[:, x : x + tile_w].max(axis=1, keepdims=True) for x in range(0, w - 2, tile_w)]
        of_tile = np.concatenate(largest, axis=1).repeat(tile_w, axis=1)[:, : w - 2]
        errors = {name: each * magnitude / of_tile for name, each in errors.items()}
    six = errors["winograd_bf16x6"]
    assert six.max() <= errors["chain"].max() and six.mean() <= errors["chain"].mean()
    assert errors["winograd_bf16x3"].max() < BF16X3.error


def test_broken_kernels_are_caught(emulation: None, sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", n=8, h=4, w=7, ci=40, co=32, kh=3, kw=3, pad=1, dtype="float32")
    words = PLAIN | dict(block_m=64, block_n=32, block_k=16, consumers=1, tile_w=4, together=2)
    built = build(problem, sm_90a, "winograd_bf16x6", words, device_code=False)
    assert_mutants_caught(
        built,
        {
            "a stage alone": (r"(sums_ptr\[\d+\]) = \(\1 \+ (\(factor\w* \* sums_of_stage.*\))\);", r"\1 = \2;"),
            "stages not anew": (r"\(\(int\)\(0 < .* % 2\)\)\)\);", "1);"),
            "never the last stage": (r" \|\| \(\(step % 3\) == 2\)", ""),
            "another point's factors": (r"return hopper_factor_table\[at\]", "return hopper_factor_table[at ^ 4]"),
            "a column too far": (r"first \+ line < width", "first + line <= width"),
            "padding": (r"first \+ line >= 0", "first + line >= -1"),
            "not waited for": (r"\w*wgmma_wait_group\w*_0\(\);", ";"),
        },
        within="",
    )


# ---- what it is made of, and where it is used


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch, layout: str) -> None:
    words = dict(block_m=128, block_n=64, block_k=32, num_stages=5, consumers=2, cluster_m=1, cluster_n=2, tile_w=4)
    built = build(problem_of(layout, **WORK), sm_90a, "winograd_bf16x6", words | dict(grid=132))
    found = opcodes(built)
    assert found["HGMMA"] == 6 * 2
    assert all(kernel.spill_stores == kernel.spill_loads == kernel.stack == 0 for kernel in built.resources)
    assert len(built.resources) == 2 and "C75" not in built.log
    to_be_waited_for(built)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", NAMES)
def test_it_is_used_unasked_if_as_exact_as_float32(sm_90a: Arch, layout: str, schedule: str) -> None:
    problem, op = problem_of(layout, **WORK), operator(layout)
    spec = op.schedule(schedule)
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)
    assert spec.opt_in == (spec not in op.offered(sm_90a)) == (schedule == "winograd_bf16x3")
    found = [each for each in ranked(problem, sm_90a) if each.schedule == schedule]
    assert bool(found) == (schedule == "winograd_bf16x6")
    for each in found:
        assert each.config.arithmetic_of(problem) == FLOAT32
        assert each.us == predicted_us(problem, schedule, each.config, sm_90a) > LAUNCH


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_channels_are_not_worth_their_transforms(sm_90a: Arch, layout: str) -> None:
    few = problem_of(layout, **WORK | dict(h=56, w=56, ci=16, co=16))
    assert not ranked(few, sm_90a)[0].schedule.startswith("winograd_bf16")


def test_what_is_refused(sm_90a: Arch) -> None:
    base = dict(block_m=128, block_n=64, block_k=32, num_stages=2, consumers=2, cluster_m=1, cluster_n=1, tile_w=4)
    for layout, fields, words, reason in (
        ("conv2d_nhwc", dict(stride="1,2"), {}, "along a row both have to be 1"),
        ("conv2d_nhwc", dict(dilation="1,2"), {}, "along a row both have to be 1"),
        ("conv2d_nchw", dict(stride="2,1"), {}, "rows of a stride lie in planes"),
        ("conv2d_nhwc", dict(), dict(tile_w=5), "tile_w=5 is not 4, 3, 2"),
        ("conv2d_nhwc", dict(kw=9), {}, "tile_w=4 outputs of kw=9 taps are no tile"),
        ("conv2d_nhwc", dict(kw=1, pad="1,0"), {}, "tile_w=4 outputs of kw=1 taps are no tile"),
        ("conv2d_nhwc", dict(pad=2), {}, "shows more border than a window's half"),
        ("conv2d_nhwc", dict(ci=4), {}, "ci=4: sums of so few products"),
        ("conv2d_nhwc", {}, dict(split_k=2), "split_k=2 has no way to add sums of several outputs"),
        ("conv2d_nhwc", {}, dict(block_n=128), "needs about 368 registers, there are 232"),
        ("conv2d_hwcn", dict(n=6), {}, "n=6 is not a multiple of 4, which TMA needs"),
        ("conv2d_nchw", dict(dtype="float16"), {}, "dtype=float16 is not float32"),
    ):
        with pytest.raises(ConfigError, match=re.escape(reason)):
            problem = problem_of(layout, **WORK | fields)
            operator(layout).schedule("winograd_bf16x6").config_for(problem, sm_90a, base | words)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec = operator("conv2d_nhwc").schedule("winograd_bf16x6")
        spec.config_for(problem_of("conv2d_nhwc", **WORK), parse_arch("sm_80"))


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, *SMALL], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", NAMES)
def test_on_a_device(gpu: Arch, schedule: str, layout: str, shape: str, words: dict[str, Any]) -> None:
    assert_correct_on(gpu, layout, SHAPES[shape] | dict(dtype="float32"), words, schedule)
