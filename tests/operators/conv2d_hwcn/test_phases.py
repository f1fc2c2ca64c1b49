"""Rows of images that begin anywhere: which are multiplied together, and what TMA reads of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from schedules.core.arch import Arch
from schedules.core.registry import operator
from schedules.hopper.geometry import Shifts
from schedules.operators.conv2d_hwcn import phases
from schedules.operators.conv2d_hwcn.tma_wgmma import HwcnWork, TmaWgmmaConfig
from tests.conftest import problem_of
from tests.hopper_kernels import assert_emulated, assert_well_made

ODD = [n for n in range(9, 256) if n % 8]
PLAIN: dict[str, Any] = dict(
    num_stages=4, consumers=2, cluster_m=1, cluster_n=1, grid=132, blocks_sm=1, split_k=1, ping_pong=False,
    stationary=False, skip_padding=True, window=False, turned=False, lines=1,
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "two phases, two pixels": dict(n=36, h=4, w=5, ci=32, co=72, kh=3, kw=3, pad=1, dtype="float16"),
    "two phases, two runs": dict(n=100, h=2, w=3, ci=32, co=64, kh=1, kw=3, pad="0,1", dtype="float16"),
    "four, stride 2, residual": dict(
        n=26, h=5, w=6, ci=64, co=61, kh=3, kw=3, pad=1, stride=2, residual=True, bias=True, dtype="bfloat16"
    ),
    "eight": dict(n=13, h=3, w=6, ci=128, co=64, kh=3, kw=2, pad=1, dtype="float16"),
    "1x1": dict(n=39, h=2, w=3, ci=256, co=128, kh=1, kw=1, dtype="float16"),
}


def problem(n: int, **words: Any) -> Any:
    return problem_of("conv2d_hwcn", **dict(n=n, h=3, w=3, ci=128, co=64, kh=3, kw=3, pad=1, dtype="float16") | words)


@pytest.mark.parametrize("n", ODD)
def test_rows_of_a_phase_are_equally_late(n: int) -> None:
    p = problem(n)
    count, step = phases.phases(p), math.gcd(n, 8)
    first = [int(phases.channel(p, phase)) for phase in range(count)]
    assert sorted(first) == list(range(count))
    for phase, of_group in enumerate(first):
        late = {channel * n % 8 for channel in range(of_group, p.ci, count)}
        assert late == {(count - 1 - phase) * step}  # and so 0 in the last one
        assert n + max(late) <= phases.columns(p)


@pytest.mark.parametrize("n", [n for n in ODD if n < 80])
def test_what_is_read_is_the_row_and_little_more(n: int) -> None:
    """Of each channel from the 16 bytes that it begins in, and nothing behind the tensor."""
    p = problem(n)
    source = phases.data_map(p, p.arguments()[0], (64, 16, 1, 1), 128)
    count, elements = phases.phases(p), math.prod(p.arguments()[0].shape)
    strides = [stride // 2 for stride in source.strides]
    assert all(stride % 16 == 0 for stride in source.strides)
    behind = [(size - 1) * stride for size, stride in zip(source.sizes, [1, *strides], strict=True)]
    assert sum(behind) < elements
    for channel in range(p.ci):
        group, of_group = divmod(channel, count)
        late = int(phases.late(p, of_group))
        begin = late + of_group * strides[0] + group * strides[1]
        assert begin == channel * n // 8 * 8 and late % 8 == 0
        assert late + channel * n % 8 + n <= source.sizes[0]


def test_sums_come_from_the_next_columns_of_their_pixel() -> None:
    """Runs of the pixels of a tile lie side by side; the last columns of a pixel get what nothing stores."""
    two_pixels = TmaWgmmaConfig(**PLAIN | dict(block_m=64, block_n=96, block_k=32, consumers=1))
    work = HwcnWork(problem(36), two_pixels)
    assert work.tiles.box == (48, 2, 1) and work.tiles.run == 16
    # runs of 16: pixel 0, pixel 1, pixel 0, ...
    assert work.shifts == Shifts(2, 4, (1, 4, 3, 6, 5, 8, 7, 10, 9, None, 11, None))
    one = HwcnWork(problem(130), TmaWgmmaConfig(**PLAIN | dict(block_m=128, block_n=144, block_k=32)))
    assert one.tiles.run == 64 and one.b.tile.rows == 192
    assert one.shifts == Shifts(4, 2, (*range(1, 18), None)) and one.chunks == 4 and not one.workspace


def test_where_they_do_not_serve_data_are_copied(sm_90a: Arch) -> None:
    spec, words = operator("conv2d_hwcn").schedule("tma_wgmma"), PLAIN | dict(block_m=128, block_n=128, block_k=32)
    for made, copied in (
        (problem(100), False),
        (problem(100, ci=48), True),  # no whole steps of a phase
        (problem(260), True),  # more columns than a wgmma has
        (problem(7), True),
        (problem(96), False),
    ):
        config: Any = spec.config.parse(words)
        assert config.check(made, sm_90a) is None
        assert bool(HwcnWork(made, config).workspace) == copied, str(made)
    config = spec.config.parse(words | dict(split_k=2))
    assert "split_k=2 deals stages out" in str(config.check(problem(100), sm_90a))
    assert "block_n=64 is not" in str(spec.config.parse(words | dict(block_n=64)).check(problem(100), sm_90a))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("two phases, two pixels", dict(block_m=128, block_n=96, block_k=16, cluster_n=2)),
        ("two phases, two runs", dict(block_m=64, block_n=112, block_k=16, consumers=1, grid=2)),
        ("four, stride 2, residual", dict(block_m=128, block_n=64, block_k=32, cluster_m=2)),
        ("four, stride 2, residual", dict(block_m=128, block_n=96, block_k=16, ping_pong=True, skip_padding=False)),
        ("eight", dict(block_m=256, block_n=96, block_k=16, num_stages=3)),
        ("1x1", dict(block_m=128, block_n=96, block_k=32)),
    ],
)
def test_right_and_well_made(emulation: None, cuda_compiler: None, shape: str, words: dict[str, Any]) -> None:
    built = assert_emulated("conv2d_hwcn", SHAPES[shape], PLAIN | words, compiled=True)
    assert built.problem.n == SHAPES[shape]["n"]
    if len(built.resources) == 1:  # filters whose rows are no whole 16 bytes are copied
        assert assert_well_made(built, "HGMMA", stored_by_tma=False)["SHFL"]
