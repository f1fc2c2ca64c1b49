"""The epilogue in every Hopper schedule: each term is added once to the result that it belongs to."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.check.verify import emulated_runs, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.epilogue import Term
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.hopper.epilogue import AHEAD
from tests.conftest import assert_mutants_caught, problem_of
from tests.hopper.conftest import WorkOf, in_numbers
from tests.hopper.test_geometry import places
from tests.hopper.works import FEW, HALF, HWCN, KERNEL, NCHW, NCHW32, NHWC, PACKED, PLAIN, WORKS, Case
from tests.hopper_kernels import assert_correct_on, assert_emulated

SMALL = PLAIN | dict(block_m=64, consumers=1, block_k=16)
ODD: dict[str, Case] = {
    "NHWC": ("conv2d_nhwc", "tma_wgmma", NHWC | dict(ci=16), SMALL | dict(block_n=32)),
    "NHWC, odd channels": (
        "conv2d_nhwc", "tma_wgmma", dict(n=3, h=5, w=6, ci=16, co=27, kh=1, kw=1, dtype="bfloat16"),
        PLAIN | dict(block_m=128, block_n=32, block_k=16),
    ),
    "NHWC, TF32": ("conv2d_nhwc", "tf32", NHWC | dict(ci=12, co=20, dtype="float32"), SMALL | dict(block_n=32)),
    "NCHW": ("conv2d_nchw", "tma_wgmma", NCHW | dict(h=5, ci=16), SMALL | dict(block_n=64)),
    "NCHW, wide": (
        "conv2d_nchw", "tma_wgmma", dict(n=1, h=3, w=200, ci=8, co=40) | KERNEL | HALF, SMALL | dict(block_n=128),
    ),
    "NCHW, consumers side by side": (
        "conv2d_nchw", "tma_wgmma", dict(n=3, h=3, w=40, ci=8, co=20) | KERNEL | PACKED,
        PLAIN | dict(block_m=64, block_n=96, block_k=16, consumers_n=2, halo=True),
    ),
    "NCHW, few filters": (
        "conv2d_nchw", "tma_wgmma_few", FEW | dict(ci=8, co=13, dtype="bfloat16"),
        PLAIN | dict(block_m=128, block_k=16),
    ),
    "NCHW32": (
        "conv2d_nchw32", "tma_wgmma", NCHW32 | dict(n=3, h=5, ci=33, out_dtype="float32"),
        SMALL | dict(block_n=32, block_k=32, row_pixels=2, tall=False),
    ),
    "HWCN": (
        "conv2d_hwcn", "tma_wgmma", HWCN | dict(n=24, h=2, ci=13, co=40),
        SMALL | dict(block_n=64, window=False, turned=False, lines=1),
    ),
    "NCHW, addends": (
        "conv2d_nchw", "bf16x6", NHWC | dict(ci=9, co=20, dtype="float32"),
        SMALL | dict(block_n=32, lines_outside=True),
    ),
    "HWCN, addends": (
        "conv2d_hwcn", "bf16x3", dict(n=20, h=2, w=3, ci=5, co=44, kh=2, kw=2, dtype="float32"),
        SMALL | dict(block_n=32),
    ),
    "HWCN, TF32": (
        "conv2d_hwcn", "tf32", dict(n=36, h=2, w=3, ci=5, co=43, kh=2, kw=2, dtype="float32"),
        SMALL | dict(block_n=16),
    ),
}  # fmt: skip
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh", "hardswish", "relu6", "clamp:-1:0.5")
BOTH: dict[str, Any] = dict(bias=True, residual=True)
TERMS: list[dict[str, Any]] = [dict(bias=True), dict(residual=True), *(BOTH | dict(activation=a) for a in ACTIVATIONS)]


def of_layout(number: int) -> list[dict[str, Any]]:
    """A term alone, and both with an activation, which take turns from layout to layout."""
    return [TERMS[number % 2], TERMS[2 + number % len(ACTIVATIONS)]]


@pytest.mark.parametrize(
    ("layout", "terms"), [(layout, terms) for i, layout in enumerate(ODD) for terms in of_layout(i)], ids=str
)
def test_emulated(emulation: None, layout: str, terms: dict[str, Any]) -> None:
    name, schedule, fields, words = ODD[layout]
    assert_emulated(name, fields | terms, words, schedule)


@pytest.mark.gpu
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("layout", ODD)
def test_on_a_device(gpu: Arch, layout: str, terms: dict[str, Any]) -> None:
    name, schedule, fields, words = ODD[layout]
    assert_correct_on(gpu, name, fields | terms, words, schedule)


# of the generated source: old and new
BIAS = {
    "a bias left out": (r"(float bias\w* = ).*;", r"\1 0;"),
    "a bias twice": (r"(float bias\w* = )(.*);", r"\1 2 * (\2);"),
    "another channel's bias": (r"(bias_ptr\[)", r"\1 1 ^ "),
}
PAIRS = {
    "a pair of biases left out": (r"(bias_pair\w* = ).*;", r"\1 0;"),
    "other channels' biases": (r"(bias_ptr\[)", r"\1 2 ^ "),
}
READ = {
    "a residual left out": (r"return inside \? .* : 0;", "return 0;"),
    "a residual twice": (r"return inside \? (.*) : 0;", r"return inside ? 2 * (\1) : 0;"),
    "another element's residual": (
        r"\(const volatile ([^*]*)\*\)at", r"(const volatile \1*)((unsigned long long)at ^ sizeof(\1))",
    ),
}  # fmt: skip
STAGED = {
    "a pair of residuals left out": (r"(residual_pair\w* = ).*;", r"\1 0;"),
    "other elements' residuals": (r"(shared_pair_16\()(\(&.*)\);", r"\1(void*)((unsigned long long)\2 ^ 4));"),
    "another box's residual": (r"(\(&\(residual_map\)\)\)\), )", r"\1 8 + "),
}


@pytest.mark.parametrize(
    ("layout", "mutants"),
    [
        ("NHWC", PAIRS | STAGED),
        ("NHWC, odd channels", BIAS | READ),
        ("NCHW", BIAS | STAGED),
        ("HWCN", BIAS | STAGED),
    ],
    ids=str,
)
def test_mutants_are_caught(emulation: None, sm_90a: Arch, layout: str, mutants: dict[str, tuple[str, str]]) -> None:
    name, schedule, fields, words = ODD[layout]
    built = build(problem_of(name, **fields, **BOTH), sm_90a, schedule, words, device_code=False)
    assert_mutants_caught(built, mutants, within="")


@pytest.mark.parametrize("name", WORKS)
def test_every_element_is_of_one_row_and_column(work_of: WorkOf, name: str) -> None:
    """And its channel is that of the row or of the column."""
    from tvm.script import tirx as T

    work = work_of(*WORKS[name])
    config, staging = work.config, work.output.staging
    # the staging of few filters has the tile's columns as its rows
    rows, columns = (config.rows, work.channels) if name.startswith("few") else (staging.rows, staging.columns)
    shape = next(argument.shape for argument in work.arguments if argument.output)
    axes = work.problem.channel_axes
    count = np.zeros(int(np.prod(shape)), "int32")
    for place, part in product(places(work, range(work.clusters)), range(config.parts)):
        starts = [
            [tuple(int(in_numbers(x)) for x in start(place, part, T.int32(i))) for i in range(extent)]
            for start, extent in ((work.row_start, rows), (work.column_start, columns))
        ]
        (row, inside_m), (column, inside_n) = (np.array(start).T for start in starts)
        inside = inside_m[:, None] & inside_n[None, :] > 0
        at = row[:, None] + column[None, :]
        count[at[inside]] += 1
        channels = [
            int(in_numbers(work.channel_at(place, part, T.int32(i))))
            for i in range(rows if work.channels_along_rows else columns)
        ]
        indices = np.unravel_index(np.where(inside, at, 0), shape)
        channel = np.ravel_multi_index([indices[axis] for axis in axes], [shape[axis] for axis in axes])
        along = np.array(channels)[:, None] if work.channels_along_rows else np.array(channels)[None, :]
        assert (channel == along)[inside].all()
        assert min(channels) >= 0 and max(channels) < np.prod([shape[axis] for axis in axes])
    # tiles that overlap, or have rows beyond their images, have some elements twice, and store them once
    overlap = config.whole_images or getattr(config, "whole_sectors", False)
    assert (count == 1).all() or (overlap and (count >= 1).all())


def test_what_cannot_be_added(work_of: WorkOf, sm_90a: Arch) -> None:
    name, schedule, fields, _ = ODD["NHWC, odd channels"]  # whose residual threads read
    spec = operator(name).schedule(schedule)
    words = PLAIN | dict(block_m=512, block_n=32, block_k=16, consumers=2)
    spec.config_for(problem_of(name, **fields, bias=True), sm_90a, words)
    with pytest.raises(ConfigError, match="block_m=512 gives a consumer 256 rows, with a residual 128 at most"):
        spec.config_for(problem_of(name, **fields, residual=True), sm_90a, words)
    wide = dict(n=2**16, h=14, w=14, ci=8, co=257, kh=1, kw=1, dtype="float16", residual=True)
    with pytest.raises(ConfigError, match="residual has 2\\*\\*31 elements or more"):
        spec.config_for(problem_of(name, **wide), sm_90a, SMALL | dict(block_n=32))
    work = work_of(*ODD["NHWC"])
    work.epilogue = replace(work.epilogue, terms=(Term("mask", "pixel", "float16"),))
    assert "mask has a number for each pixel" in str(work.reason(sm_90a))


@pytest.mark.parametrize(
    ("layout", "columns"), [("NHWC, odd channels", 64), ("NHWC, odd channels", 32), ("HWCN, TF32", 16)]
)
def test_elements_come_before_others_are_stored(emulation: None, layout: str, columns: int) -> None:
    """A tile's elements come into L2 while it is multiplied, and those of the next columns are read before the present
    ones are stored."""
    name, schedule, fields, words = ODD[layout]
    problem = problem_of(name, **fields, residual=True)
    words = words | dict(block_n=columns)
    source = str(build(problem, parse_arch("sm_90a"), schedule, words, device_code=False).sources["cu"])
    main = source[source.rindex("__global__") :]
    stored = min(main.find(put) for put in ("hopper_put", "hopper_store") if put in main)
    assert main.index("hopper_warm((&(residual_ptr[0])") < main.index("hopper_wgmma_") < stored
    assert main[:stored].count("read_element_") == 8 * min(1 + AHEAD, columns // 16)


MARK = """
__device__ void mark(const void* tensor, int bytes, int element) { ((unsigned short*)tensor)[element] = 0x7fff; }
"""
WARMED: dict[str, Case] = {
    "channels": ODD["NHWC, odd channels"],
    "pixels": (
        "conv2d_nchw", "tma_wgmma_turned", dict(n=3, h=5, w=7, ci=16, co=40, kh=1, kw=1, dtype="float16"),
        SMALL | dict(block_n=32, lines_outside=False, whole_sectors=False, gathered=False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines", WARMED)
def test_a_tile_s_elements_come_by_sectors(emulation: None, lines: str) -> None:
    """Of each line of the tensor in a tile every sixteenth: here they become NaN in place of coming into L2."""
    name, schedule, fields, words = WARMED[lines]
    built = build(problem_of(name, **fields, residual=True), parse_arch("sm_90a"), schedule, words, device_code=False)
    source = str(built.sources["cu"])
    at, call = source.index("__device__ __forceinline__ void hopper_warm("), "hopper_warm((&(residual_ptr[0]))"
    marked = source[:at] + MARK + source[at:].replace(call, call.replace("hopper_warm", "mark"))
    _, run = next(iter(emulated_runs(built, marked)))
    arrays = built.operator.inputs(built.problem, np.random.default_rng(0))
    found = np.isnan(run([*arrays, *poisoned(built.problem)])[0].astype("float32"))
    if lines == "channels":  # of 27 of a pixel
        assert (found == (np.arange(27) % 16 == 0)).all()
    else:  # 105 pixels of three images, in tiles of 64
        assert (found.transpose(1, 0, 2, 3).reshape(40, -1) == (np.arange(105) % 16 == 0)).all()
