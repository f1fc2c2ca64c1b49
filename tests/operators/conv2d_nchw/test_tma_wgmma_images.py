"""NCHW convolution of whole images as they lie: what it is made of, what it refuses, and whether it is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.check.verify import emulated_runs, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from tests.conftest import caught, problem_of
from tests.hopper_kernels import (
    assert_correct_on,
    assert_emulated,
    assert_producer_fits,
    assert_well_made,
)

NAME = "tma_wgmma_images"
WORK: dict[str, Any] = dict(n=8, h=14, w=14, ci=128, co=128, kh=1, kw=1)
SHAPES: dict[str, dict[str, Any]] = {
    "neighbours share words": dict(n=5, h=6, w=7, ci=64, co=48, bias=True),
    "odd images": dict(n=3, h=7, w=7, ci=32, co=72, bias=True, residual=True),
    "part of a chunk, words": dict(n=3, h=6, w=7, ci=40, co=48),
    "part of a chunk, odd": dict(n=3, h=5, w=7, ci=56, co=24, activation="relu"),
    "pixels left out": dict(n=2, h=14, w=14, ci=32, co=48, stride=2, activation="relu"),
    "rows far apart": dict(n=5, h=6, w=6, ci=40, co=48, bias=True, residual=True),
    "odd channels first, words": dict(n=3, h=4, w=12, ci=40, co=24, residual=True),
    "odd channels first, pixels left out": dict(n=2, h=12, w=12, ci=32, co=24, stride=2),
    "odd strides": dict(n=3, h=11, w=10, ci=16, co=24, stride="2,3", residual=True),
    "an image that fills a tile": dict(n=3, h=8, w=16, ci=40, co=40, residual=True),
    "more images than a tile has copies": dict(n=40, h=2, w=2, ci=32, co=32),
    "packed": dict(n=2, h=9, w=8, ci=16, co=24, filter_layout="hwoi"),
    "bfloat16": dict(n=3, h=5, w=9, ci=16, co=24, dtype="bfloat16", bias=True, residual=True),
}
SMALL = dict(
    block_m=128, block_n=32, block_k=32, num_stages=2, consumers=2, cluster_m=1, cluster_n=1, grid=2, blocks_sm=1,
    split_k=1, ping_pong=False, stationary=False,
)  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    SMALL | dict(block_m=256, cluster_m=2, grid=4),
    SMALL | dict(block_m=64, block_n=48, block_k=64, consumers=1),
    SMALL | dict(block_m=64, consumers=1, split_k=2, grid=4),
    SMALL | dict(block_m=64, ping_pong=True, num_stages=3),
    SMALL | dict(block_m=64, block_n=64, consumers=1, blocks_sm=2, grid=4, stationary=True),
    SMALL | dict(block_m=384, block_n=16, consumers=3),
    SMALL | dict(cluster_n=2, cluster_m=2, grid=8),
    SMALL | dict(cluster_n=4, block_n=16, grid=8),
]
ODD = dict(n=9, h=7, w=5, ci=40, co=88, bias=True)


@pytest.fixture(params=SHAPES)
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(dtype="float16", kh=1, kw=1) | SHAPES[request.param]


def test_emulated(emulation: None, fields: dict[str, Any]) -> None:
    assert_emulated("conv2d_nchw", fields, SMALL, NAME)


@pytest.mark.parametrize("words", CONFIGS, ids=str)
def test_configs_emulated(emulation: None, words: dict[str, Any]) -> None:
    assert_emulated("conv2d_nchw", dict(dtype="float16", kh=1, kw=1) | ODD, words, NAME)


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    words = SMALL | dict(block_m=256, block_n=64, num_stages=4, grid=0)
    built = build(problem_of("conv2d_nchw", **WORK, dtype="float16"), sm_90a, NAME, words)
    found = assert_well_made(built, "HGMMA")
    assert_producer_fits(built)
    # images come and go by bulk copies, pixels are read as they lie, two of them in a word
    assert len(built.resources) == 1 and built.resources[0].stack == 0
    assert found["UBLKCP"] and found["UBLKST"] and "ld.shared.b32" in str(built.sources["cu"])
    assert "ld.shared.u16" not in str(built.sources["cu"])


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec, problem = operator("conv2d_nchw").schedule(NAME), problem_of("conv2d_nchw", **WORK, dtype="float16")
    for words, reason in (
        (dict(block_m=256, block_n=48, cluster_m=4, grid=4), "block_n=48 is not 4 times a multiple of 8 rows"),
        (dict(), "block_m=128 is less than the 196 pixels of an output image"),
        (dict(block_m=256, cluster_n=8, grid=8), "block_k=32 is not 8 blocks times a multiple of 8"),
        (dict(block_m=256, split_k=2, grid=2), "split_k=2 parts; give consumers=1"),
        (dict(block_m=256, block_k=16), "block_k=16 is not 32, 64 or 128"),
        (dict(block_m=256, num_stages=40), "num_stages=40 needs"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem, sm_90a, SMALL | words)
    for words, reason in (
        (dict(ci=20), "ci=20 is not a multiple of 8, after which images begin at 16 bytes"),
        (dict(co=20), "co=20 is not a multiple of 8, whose results are whole 16 bytes"),
        (dict(h=20, w=20), "an output image has 400 pixels, a tile 384 at most"),
        (dict(kh=3, pad="1,0"), "a kernel of 3x1, pad=\\(1, 0\\) looks at more than a pixel"),
        (dict(dtype="float32"), "dtype=float32 is not float16 or bfloat16"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nchw", **dict(dtype="float16") | WORK | words), sm_90a)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem, parse_arch("sm_80"))


def test_results_wait_in_what_memory_stages_leave(sm_90a: Arch) -> None:
    """All columns at once where there is room, else in passes of a part of them."""
    spec = operator("conv2d_nchw").schedule(NAME)
    problem = problem_of("conv2d_nchw", **WORK | dict(h=19, w=19), dtype="float16")
    widths = []
    for stages in (2, 6):
        words = SMALL | dict(block_m=384, block_n=96, consumers=3, num_stages=stages)
        widths.append(spec.config_for(problem, sm_90a, words).work(problem).output.staging.width)
    assert widths == [96, 48]


def test_what_the_choice_is_told_is_what_tiles_have(sm_90a: Arch) -> None:
    spec = operator("conv2d_nchw").schedule(NAME)
    problem = problem_of("conv2d_nchw", **WORK | dict(n=9, h=9, w=9), dtype="float16")
    for words in (SMALL, SMALL | dict(block_m=256, block_k=64), SMALL | dict(block_m=64, cluster_m=2)):
        if words["block_m"] < 81:
            assert spec.boxes(problem, words["block_m"], 2, False) is None
            continue
        work = spec.config_for(problem, sm_90a, words).work(problem)
        assert spec.stage_bytes(problem, words["block_m"], words["block_k"]) == work.a.nbytes
        assert spec.boxes(problem, words["block_m"], words["cluster_m"], False) * work.columns == work.clusters


@pytest.mark.parametrize("fields", [dict(), dict(h=7, w=7), dict(h=19, w=19), dict(h=13, w=9, stride=2)], ids=str)
def test_the_space_holds_the_default(sm_90a: Arch, fields: dict[str, Any]) -> None:
    problem, spec = problem_of("conv2d_nchw", dtype="float16", **WORK | fields), operator("conv2d_nchw").schedule(NAME)
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, *CONFIGS], ids=str)
def test_on_a_device(gpu: Arch, fields: dict[str, Any], words: dict[str, Any]) -> None:
    assert_correct_on(gpu, "conv2d_nchw", fields, words, NAME)


@pytest.fixture(scope="module")
def built(emulation: None) -> Built:
    return build(
        problem_of("conv2d_nchw", dtype="float16", kh=1, kw=1, **ODD),
        parse_arch("sm_90a"),
        NAME,
        SMALL,
        device_code=False,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(left * 210) + 2048", "(left * 210) + 1024"),  # multiplied before all has come
        ('"=r"(u0) : "r"(upper)', '"=r"(u0) : "r"(lower)'),  # another row's pixel
        ("__byte_perm(u8, u9, upper_order_8)", "__byte_perm(u8, u9, upper_order)"),
        ("* 3080)) + (channel", "* 3082)) + (channel"),  # the next image's results lie elsewhere
        # loaded into what is still read
        ("tvm_builtin_cuda_mbarrier_wait((&(((uint64_t*)pool_buf_ptr)[(stage_ptr[0] + 3146)]))", "(void)(0"),
        ("  tvm_builtin_ptx_cp_async_bulk_wait_group_async_bulk_wait_group_read_0();\n", "\n"),  # written over
    ],
)
def test_mutants_are_caught(built: Built, old: str, new: str) -> None:
    source, arrays = str(built.sources["cu"]), built.operator.inputs(built.problem, np.random.default_rng(0))
    assert old in source and caught(built, source.replace(old, new), arrays)


ORDERED = {"apart": dict(h=7, w=7), "in words": dict(h=4, w=12), "spread": dict(h=6, w=6)}


@pytest.fixture(scope="module")
def ordered(emulation: None) -> dict[str, Built]:
    """Whose threads read in an order with few bank conflicts."""
    arch, shared = parse_arch("sm_90a"), dict(dtype="float16", kh=1, kw=1, n=3, ci=40, co=24)
    problems = {name: problem_of("conv2d_nchw", **shared, **words) for name, words in ORDERED.items()}
    return {name: build(problem, arch, NAME, SMALL, device_code=False) for name, problem in problems.items()}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("apart", '"r"(upper + second)', '"r"(upper)'),  # a channel twice
        ("apart", "(uint)4180", "(uint)21520"),  # channels exchanged
        ("in words", '"r"(rows + second)', '"r"(rows)'),
        ("in words", "w0, w1, even_rows", "w0, w1, 0x5410"),
        ("spread", "/ 16) * 24)) + ((warp_id_in_cta & 3) * 8)", "/ 16) * 24)) + ((warp_id_in_cta & 3) * 16)"),
    ],
)
def test_mutants_of_orders_are_caught(ordered: dict[str, Built], name: str, old: str, new: str) -> None:
    built = ordered[name]
    source, arrays = str(built.sources["cu"]), built.operator.inputs(built.problem, np.random.default_rng(0))
    assert old in source and caught(built, source.replace(old, new), arrays)


@pytest.mark.parametrize("mutated", [False, True])
def test_channels_beyond_the_last_are_zeros(emulation: None, mutated: bool) -> None:
    """And not what other images left in a stage: filters are zeros there, but infinity times zero is no number."""
    problem: Any = problem_of("conv2d_nchw", dtype="float16", kh=1, kw=1, **ODD)
    built = build(problem, parse_arch("sm_90a"), NAME, SMALL | dict(num_stages=3), device_code=False)
    data, *others = built.operator.inputs(problem, np.random.default_rng(0))
    expected = built.operator.reference(problem, [data, *others])[0].values[3:]
    data[:3] = np.inf  # the images of a tile
    source = str(built.sources["cu"])
    assert "(uint)12850" in source  # takes zeros of a word
    if mutated:
        source = source.replace("(uint)12850", "(uint)21520")
    found = [run([data, *others, *poisoned(problem)])[0][3:] for _, run in emulated_runs(built, source)]
    right = [bool(np.allclose(each.astype("float64"), expected, atol=0.02)) for each in found]
    assert all(right) != mutated
