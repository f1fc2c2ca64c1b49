"""int8 NCHW32 convolution by TMA and wgmma: what it is made of, what it refuses, whether a device gets it right."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from tests.conftest import generated, problem_of
from tests.hopper_kernels import assert_builds_or_says_why, assert_correct_on, assert_emulated, assert_well_made
from tests.operators.conv2d_nchw32.shapes import EPILOGUE_SHAPE, EPILOGUES
from tests.operators.conv2d_nchw32.shapes import SHAPES as ALL_SHAPES

WORK: dict[str, Any] = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1)
SHAPES: dict[str, dict[str, Any]] = ALL_SHAPES | {
    "1x1, several images": dict(n=3, h=5, w=7, ci=70, co=130, kh=1, kw=1),
    "1x1, stride 2": dict(n=3, h=5, w=7, ci=70, co=130, kh=1, kw=1, stride=2),
}
PLAIN: dict[str, Any] = dict(
    block_m=128, block_n=256, block_k=128, num_stages=4, consumers=2, cluster_m=2, cluster_n=1, grid=132, blocks_sm=1,
    split_k=1, ping_pong=False, stationary=False, row_pixels=1, tall=False, skip_padding=False,
)  # fmt: skip
_CONFIGS: list[dict[str, Any]] = [
    dict(block_m=128, block_n=256, block_k=128, consumers=2, num_stages=4),
    dict(block_m=256, block_n=128, block_k=64, consumers=2, num_stages=3, cluster_m=1, cluster_n=2),
    dict(block_m=192, block_n=128, block_k=128, consumers=3, num_stages=4, cluster_m=1),
    dict(block_m=64, block_n=256, block_k=32, consumers=1, num_stages=4, cluster_m=4, grid=120),
    dict(block_m=128, block_n=96, block_k=256, consumers=2, num_stages=2, cluster_m=2, cluster_n=2, grid=120),
    dict(block_m=128, block_n=32, block_k=32, consumers=2, num_stages=5, cluster_m=1, grid=0),
    dict(block_m=64, block_n=128, consumers=1, num_stages=3, blocks_sm=2, grid=264),
    dict(block_m=128, block_n=128, consumers=2, num_stages=2, cluster_m=2, grid=2),
    dict(block_m=128, block_n=64, block_k=64, consumers=2, num_stages=4, row_pixels=4),
    dict(block_m=64, block_n=96, block_k=32, consumers=1, num_stages=4, row_pixels=2, cluster_m=2, cluster_n=2, grid=0),
    dict(block_m=256, block_n=128, block_k=128, consumers=2, num_stages=3, row_pixels=4, cluster_m=1, cluster_n=2),
    dict(block_m=128, block_n=64, block_k=64, consumers=2, num_stages=2, row_pixels=4, tall=True),
    dict(block_m=256, block_n=64, block_k=64, num_stages=2, row_pixels=2, cluster_m=2, cluster_n=2, tall=True, grid=0),
    dict(block_m=192, block_n=32, block_k=32, consumers=3, num_stages=3, cluster_m=1, tall=True),
    dict(block_m=64, block_n=32, block_k=64, consumers=1, num_stages=4, skip_padding=True),
    dict(block_m=64, block_n=64, block_k=64, consumers=1, num_stages=4, cluster_m=1, skip_padding=True, row_pixels=2),
    dict(block_m=512, block_n=64, block_k=64, num_stages=2, row_pixels=4, tall=True),
]
_SPLIT: list[dict[str, Any]] = [
    dict(block_m=128, block_n=64, block_k=32, consumers=2, num_stages=4, cluster_m=2, row_pixels=2, split_k=2, grid=4),
    dict(block_m=128, block_n=64, block_k=64, num_stages=2, cluster_m=1, row_pixels=4, tall=True, split_k=2, grid=4),
    dict(block_m=64, block_n=32, block_k=32, consumers=1, num_stages=4, cluster_m=1, split_k=4, grid=4),
]
# a layer whose filters fit, and tiles in turn for it
LAYER: dict[str, Any] = dict(n=256, h=28, w=28, ci=128, co=128, kh=3, kw=3, pad=1)
_TURNS: list[dict[str, Any]] = [
    dict(block_m=128, block_n=128, block_k=64, num_stages=4, row_pixels=4, tall=True, ping_pong=True, stationary=True),
    dict(block_m=128, block_n=128, block_k=64, num_stages=4, cluster_m=2, cluster_n=1, ping_pong=True),
    dict(block_m=64, block_n=64, block_k=64, num_stages=3, consumers=3, cluster_n=2, ping_pong=True, stationary=True),
]
TURNS = [PLAIN | dict(cluster_m=1) | words for words in _TURNS]
CONFIGS = [{}, *(PLAIN | words for words in _CONFIGS)]
SPLIT = [PLAIN | words for words in _SPLIT]
ROWS: list[dict[str, Any]] = [dict(words, row_pixels=row) for words in CONFIGS[9:11] for row in (2, 4)]
TALL: dict[str, dict[str, Any]] = {
    "tall, many images": dict(n=9, h=9, w=7, ci=70, co=72, kh=3, kw=3, pad=1),
    "tall, dilated": dict(
        n=3, h=9, w=7, ci=40, co=72, kh=5, kw=2, pad="2,1", dilation="2,1", out_dtype="int32", alpha=1.0
    ),
    "tall, stride 2": dict(n=5, h=13, w=9, ci=70, co=33, kh=3, kw=3, pad=1, stride=2),
    "tall, stride 3, dilated": dict(n=2, h=19, w=7, ci=40, co=40, kh=5, kw=2, pad="3,0", stride="3,1", dilation="2,1"),
    "tall, stride along w": dict(n=2, h=9, w=7, ci=33, co=40, kh=2, kw=3, stride="1,2", residual=True),
}

EPILOGUE_SHAPES = (
    EPILOGUE_SHAPE,
    EPILOGUE_SHAPE | dict(kh=1, kw=1, pad=0),
    EPILOGUE_SHAPE | dict(kh=2, w=9, stride=2),
)
PADDED: dict[str, dict[str, Any]] = {
    "padded, a place a tile": dict(n=120, h=2, w=3, ci=40, co=33, kh=3, kw=3, pad=1),
    "padded, dilated and strided": dict(
        n=128, h=3, w=2, ci=8, co=40, kh=4, kw=2, pad="2,3", dilation="1,2", stride="2,3", residual=True
    ),
    "padded, taps all outside": dict(n=128, h=1, w=1, ci=33, co=3, kh=3, kw=2, pad=3, dilation=3),
}
# tiles in turn on few blocks, of which some compute more tiles than others, or with consumers to spare
_IN_TURN: list[tuple[str, dict[str, Any]]] = [
    ("tall, many images", dict(_TURNS[0], block_m=64, block_n=32, num_stages=3, cluster_n=2, grid=4)),
    ("ragged everything, stride 2", dict(_TURNS[2], grid=10, block_n=32)),
    ("ragged everything, stride 2", dict(_TURNS[1], grid=2, block_m=64, block_n=32, block_k=32)),
    ("padded, a place a tile", dict(block_m=64, block_n=32, num_stages=3, ping_pong=True, skip_padding=True, grid=2)),
    ("1x1, several images", dict(block_m=64, block_n=64, block_k=32, stationary=True, split_k=2, consumers=1, grid=6)),
]
IN_TURN = [(shape, PLAIN | dict(cluster_m=1) | words) for shape, words in _IN_TURN]
CASES: list[tuple[str, dict[str, Any]]] = [
    *IN_TURN,
    *((shape, {}) for shape in SHAPES),
    *(("ragged everything, stride 2", words) for words in CONFIGS[1:12]),
    *(("ragged everything, stride 2", words) for words in SPLIT if not words["tall"]),
    *((shape, words) for shape in list(TALL)[::2] for words in SPLIT if words["tall"]),
    *((shape, words) for shape in PADDED for words in CONFIGS[15:17]),
]
# by the emulator each shape with one of the first configs, the ragged one with all, and with one of the tall ones
IN_ROWS = [(i, shape, j, words) for i, shape in enumerate(SHAPES) for j, words in enumerate(ROWS[:3])]
IN_TALL = [(i, shape, j, words) for i, shape in enumerate(TALL) for j, words in enumerate(CONFIGS[12:15])]


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    built = build(problem_of("conv2d_nchw32", **WORK), sm_90a, "tma_wgmma")
    found, source = assert_well_made(built, "IGMMA"), str(built.sources["cu"])
    rows, columns = built.config.rows, built.config.columns
    assert f"wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.s8.s8" in source
    assert f"int sums_ptr[{rows * columns // 128}]" in source
    assert "cp.async.bulk.tensor.5d.shared::cluster.global" in source
    assert not found["LDG"] and not found["STG"] and "bias" not in source and "residual" not in source


@pytest.mark.parametrize("words", TURNS[:2], ids=str)
def test_tiles_in_turn_and_filters_that_stay(cuda_compiler: None, sm_90a: Arch, words: dict[str, Any]) -> None:
    fields = LAYER | dict(bias=True, activation="relu")
    built = build(problem_of("conv2d_nchw32", **fields), sm_90a, "tma_wgmma", words)
    assert_well_made(built, "IGMMA")
    source = str(built.sources["cu"])
    assert ("position" in source) == words["ping_pong"]


@settings(max_examples=5)
@given(
    n=st.integers(1, 40), h=st.integers(1, 40), ci=st.integers(1, 300), co=st.integers(1, 300), k=st.integers(1, 4),
    stride=st.integers(1, 9), dilation=st.integers(1, 3), words=st.sampled_from(CONFIGS), residual=st.booleans(),
)  # fmt: skip
def test_check_and_build_agree(
    cuda_compiler: None, n: int, h: int, ci: int, co: int, k: int, stride: int, dilation: int, words: dict[str, Any],
    residual: bool,
) -> None:  # fmt: skip
    reach = dilation * (k - 1) + 1
    fields = dict(n=n, h=h + reach, w=h + 2, ci=ci, co=co, kh=k, kw=1, pad=k // 2, stride=stride, dilation=dilation)
    assert_builds_or_says_why("conv2d_nchw32", fields | dict(residual=residual), words)


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    problem, spec = problem_of("conv2d_nchw32", **WORK), operator("conv2d_nchw32").schedule("tma_wgmma")
    for words, reason in {
        "block_n=48": "block_n=48 is not a multiple of 32 up to 256",
        "block_k=48": "block_k=48 is not 32, 64, 128 or 256",
        "cluster_m=4 block_k=64": "block_k=64 is not cluster_m=4 times a multiple of 32",
        "tall=true block_k=32": "tall=true deals out whole groups to a cluster, block_k=32 is but one",
        "tall=true num_stages=3": "num_stages=3 needs",
        "row_pixels=3": "row_pixels=3 is not 1, 2 or 4",
        "row_pixels=4 block_k=32 block_m=64 consumers=1 cluster_n=4 cluster_m=1": (
            "block_m=64 is not cluster_n=4 times a multiple of 32 rows, as row_pixels=4 needs"
        ),
        "num_stages=5": "num_stages=5 needs 278608 bytes of shared memory",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem, sm_90a, PLAIN | dict(word.split("=") for word in words.split()))
    for fields in (dict(kh=1, pad="0,1"), dict(stride=3), dict(kh=2, stride=2)):
        with pytest.raises(ConfigError, match="tall=true is for kernels whose rows share pixels, not"):
            spec.config_for(problem_of("conv2d_nchw32", **WORK | fields), sm_90a, PLAIN | dict(tall="true"))
    with pytest.raises(ConfigError, match="block_m=512 gives a consumer 256 rows, with a residual 128 at most"):
        high = PLAIN | dict(block_m="512", block_n="64", block_k="64", split_k="2", cluster_m="1")
        spec.config_for(problem_of("conv2d_nchw32", **WORK, residual=True), sm_90a, high)
    for fields, reason in (
        (dict(pad=0), "skip_padding=true is for kernels that reach into the padding"),
        (dict(n=3), "needs tiles of images in 2s \\(cluster_m\\), not 3"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nchw32", **WORK | fields), sm_90a, PLAIN | dict(skip_padding="true"))
    with pytest.raises(ConfigError, match="split_k=2 blocks share a tile of 1 stages"):
        words = PLAIN | dict(split_k="2", block_n="64", block_k="256", skip_padding="true")
        spec.config_for(problem, sm_90a, words)
    for words, reason in {
        "ping_pong=true consumers=1 block_m=64": "ping_pong=true is for consumers that take turns, consumers=1 has",
        "ping_pong=true": "block_m=128 x block_n=256 needs about 304 registers, there are 232",
        "ping_pong=true block_n=128 split_k=2": "ping_pong=true has no way to add sums of other blocks, split_k=2",
        "stationary=true": "num_stages=4 needs",
        "stationary=true skip_padding=true": "stationary=true loads filters with the first tile, and skip_padding",
        "stationary=true block_n=96 grid=110": "one of 6 columns of filters, with grid=110 .* give 6 times a multiple",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem, sm_90a, PLAIN | dict(word.split("=") for word in words.split()))
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem, parse_arch("sm_80"))


def test_the_space_holds_the_default(sm_90a: Arch) -> None:
    problem, spec = problem_of("conv2d_nchw32", **WORK), operator("conv2d_nchw32").schedule("tma_wgmma")
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        *CASES,
        *((shape, words) for i, shape, j, words in IN_ROWS if i % 3 == j or shape == "ragged everything, stride 2"),
        *((shape, words) for i, shape, j, words in IN_TALL if i % 3 == j),
    ],
)
def test_right_and_well_made(emulation: None, cuda_compiler: None, shape: str, words: dict[str, Any]) -> None:
    fields = (SHAPES | TALL | PADDED)[shape]
    assert_well_made(assert_emulated("conv2d_nchw32", fields, words, compiled=True), "IGMMA")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        *CASES,
        *((shape, words) for _, shape, _, words in (*IN_ROWS, *IN_TALL)),
        *(("1x1, several images", words) for words in CONFIGS[1:12]),
        *((shape, CONFIGS[-1]) for shape in TALL),
    ],
)
def test_on_a_device(gpu: Arch, shape: str, words: dict[str, Any]) -> None:
    assert_correct_on(gpu, "conv2d_nchw32", (SHAPES | TALL | PADDED)[shape], words)


# every epilogue by the default config at one shape, and some by each config at each shape
@pytest.mark.parametrize(
    ("epilogue", "fields", "words"),
    [
        (epilogue, fields, words)
        for i, epilogue in enumerate(EPILOGUES)
        for j, fields in enumerate(EPILOGUE_SHAPES)
        for k, words in enumerate([{}, *ROWS[:2]])
        if j == k == 0 or (i + 2 * j + k) % 8 == 0
    ],
)
def test_epilogues(
    emulation: None, cuda_compiler: None, epilogue: str, fields: dict[str, Any], words: dict[str, Any]
) -> None:
    usual = fields is EPILOGUE_SHAPE and not words
    built = assert_emulated("conv2d_nchw32", fields | EPILOGUES[epilogue], words, compiled=usual)
    source = str(built.sources["cu"])
    assert ("read_element" in source or "residual_map" in source) == EPILOGUES[epilogue].get("residual", False)
    if usual:
        assert_well_made(built, "IGMMA")


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, *ROWS[:2]], ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues_on_a_device(gpu: Arch, epilogue: str, words: dict[str, Any]) -> None:
    for fields in EPILOGUE_SHAPES:
        assert_correct_on(gpu, "conv2d_nchw32", fields | EPILOGUES[epilogue], words)


def test_a_lone_tile_has_no_more_stages_than_it_fills(sm_90a: Arch) -> None:
    """What shared memory is left, blocks of the next kernel set themselves up in."""
    problem = problem_of("conv2d_nchw32", n=1, h=16, w=16, ci=256, co=64, kh=1, kw=1)  # eight tiles of four stages
    spec = operator("conv2d_nchw32").schedule("tma_wgmma")

    def source(**words: int) -> str:
        few = PLAIN | dict(block_m=64, block_n=32, block_k=64, consumers=1, cluster_m=1, grid=8) | words
        return generated(problem, sm_90a, "tma_wgmma", spec.config_for(problem, sm_90a, few))

    assert source(num_stages=8) == source() != source(num_stages=3)
    assert source(num_stages=8, grid=4) != source(grid=4)  # the next tile's come ahead
