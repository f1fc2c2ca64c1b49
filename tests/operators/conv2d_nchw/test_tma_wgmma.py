"""NCHW convolution by TMA and wgmma: what it is made of, what it refuses, and on a device whether it is right."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.hopper.geometry import Shifts
from schedules.hopper.shared import TensorMap
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.tma_wgmma import COLUMNS, NchwWork, TmaWgmmaConfig, looked_at, phase_widths, pitch
from tests.conftest import assert_correct, problem_of
from tests.hopper_kernels import assert_builds_or_says_why, assert_correct_on, assert_emulated, assert_well_made

PACKED: dict[str, Any] = dict(dtype="float16", filter_layout="hwoi")
WORK: dict[str, Any] = dict(n=16, h=32, w=32, ci=256, co=256, kh=3, kw=3, pad=1, **PACKED)
SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=2, h=8, w=32, ci=64, co=128, kh=3, kw=3, pad=1),
    "ragged, stride 2 down": dict(n=3, h=9, w=24, ci=24, co=70, kh=3, kw=3, pad=1, stride="2,1", bias=True),
    "asymmetric, stride 3 down, dilated": dict(
        n=1, h=15, w=40, ci=72, co=9, kh=5, kw=3, pad="2,2", stride="3,1", dilation="1,2", activation="relu"
    ),
    "narrow images": dict(n=5, h=3, w=8, ci=16, co=33, kh=3, kw=3, pad=1, bias=True, activation="relu"),
    "shifts to the right only": dict(n=2, h=5, w=16, ci=8, co=20, kh=2, kw=9, pad=0),
    "wider output": dict(n=2, h=4, w=8, ci=8, co=20, kh=1, kw=1, pad="0,4", bias=True),
    "far to both sides": dict(n=2, h=4, w=64, ci=8, co=20, kh=1, kw=3, pad="0,5", dilation="1,5"),
    "wider than a tile": dict(n=2, h=3, w=200, ci=24, co=40, kh=3, kw=3, pad=1, bias=True),
    "one long row to the right": dict(n=1, h=1, w=304, ci=16, co=64, kh=1, kw=9),
    "1x1": dict(n=3, h=5, w=8, ci=72, co=200, kh=1, kw=1, bias=True, activation="relu"),
    "1x1, rows of no whole vectors": dict(n=2, h=8, w=7, ci=40, co=24, kh=1, kw=1),
    "every other pixel": dict(n=2, h=8, w=16, ci=40, co=72, kh=1, kw=1, stride=2, bias=True),
    "every other pixel, of lines that TMA stores": dict(
        n=1, h=9, w=64, ci=16, co=40, kh=1, kw=1, stride="1,2", residual=True, activation="relu"
    ),
    "every other row, whole 16 bytes apart": dict(n=3, h=14, w=28, ci=40, co=24, kh=1, kw=1, stride=2, residual=True),
    "every third row, every pixel": dict(n=2, h=8, w=24, ci=24, co=24, kh=1, kw=1, stride="3,1", bias=True),
    "every other pixel, wider than a tile": dict(n=1, h=3, w=400, ci=24, co=40, kh=1, kw=1, stride=2),
    "output rows of no whole 16 bytes": dict(n=2, h=7, w=24, ci=24, co=40, kh=3, kw=3, residual=True),
    "bfloat16": dict(n=2, h=6, w=48, ci=40, co=30, kh=3, kw=3, pad=1, bias=True, dtype="bfloat16"),
    "many tiles": dict(n=24, h=32, w=32, ci=16, co=200, kh=3, kw=3, pad=1),
}
CONFIGS: list[dict[str, Any]] = [
    dict(block_m=128, block_n=128, consumers=2, consumers_n=1, num_stages=3, cluster_m=1, cluster_n=2),
    dict(block_m=64, block_n=256, consumers=2, consumers_n=2, num_stages=3, cluster_m=2, cluster_n=1),
    dict(block_m=128, block_n=96, consumers=2, consumers_n=1, num_stages=3, cluster_m=1, cluster_n=4, grid=120),
    dict(block_m=128, block_n=64, consumers=2, consumers_n=1, num_stages=2, cluster_m=2, cluster_n=2, grid=120),
    dict(block_m=128, block_n=128, consumers=2, consumers_n=2, num_stages=2, cluster_m=4, cluster_n=1, grid=0),
    dict(block_m=192, block_n=64, consumers=3, consumers_n=1, block_k=32, num_stages=4, cluster_m=1, cluster_n=1),
    dict(block_m=64, block_n=192, consumers=3, consumers_n=3, block_k=16, num_stages=5, cluster_m=1, cluster_n=1),
    dict(block_m=64, block_n=128, consumers=1, consumers_n=1, num_stages=2, cluster_m=1, cluster_n=2, blocks_sm=2),
    dict(block_m=64, block_n=32, consumers=1, consumers_n=1, block_k=128, num_stages=2, cluster_m=1, cluster_n=1,
         grid=2),
    dict(block_m=64, block_n=256, consumers=2, consumers_n=2, block_k=32, num_stages=3, cluster_m=1, cluster_n=2,
         halo=True),
    dict(block_m=128, block_n=128, consumers=2, consumers_n=1, block_k=16, num_stages=4, cluster_m=2, cluster_n=2,
         grid=120, halo=True),
    dict(block_m=64, block_n=192, consumers=2, consumers_n=2, block_k=32, num_stages=2, cluster_m=1, cluster_n=4,
         grid=120, halo=True),
    dict(block_m=128, block_n=64, consumers=2, consumers_n=1, block_k=16, num_stages=3, cluster_m=2, cluster_n=1,
         halo=True),
    dict(block_m=64, block_n=128, consumers=2, consumers_n=2, block_k=16, num_stages=3, cluster_m=1, cluster_n=2,
         split_k=2, grid=4),
    dict(block_m=64, block_n=32, consumers=1, consumers_n=1, block_k=16, num_stages=2, cluster_m=1, cluster_n=1,
         split_k=2, grid=4, halo=True),
    dict(block_m=64, block_n=64, consumers=2, consumers_n=1, block_k=16, num_stages=3, cluster_m=1, cluster_n=2,
         grid=2, halo=True, ping_pong=True),
]  # fmt: skip
CONFIGS = [dict(block_k=64, split_k=1, halo=False, phases=False) | words for words in CONFIGS]
ODD = "ragged, stride 2 down"
# (problem, config) of taps along a row that are phases
TAPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole rows of no whole lines": (
        dict(n=1, h=9, w=56, ci=40, co=70, bias=True), dict(block_m=128, block_n=224)
    ),
    "several images": (
        dict(n=5, h=3, w=8, ci=40, co=33, activation="relu"), dict(block_m=64, block_n=96, consumers=1, cluster_m=2)
    ),
    "all kernel rows, side by side": (
        dict(n=2, h=9, w=32, ci=40, co=70, dtype="bfloat16"),
        dict(block_m=64, block_n=256, consumers_n=2, halo=True, block_k=16, cluster_n=2),
    ),
    "parts of a row": (dict(n=1, h=3, w=304, ci=24, co=140), dict(block_m=256, block_n=128, cluster_n=2)),
    "far to both sides": (
        dict(n=1, h=7, w=24, ci=24, co=40, kh=5, kw=5, pad=2, dilation="2,1", bias=True),
        dict(block_m=128, block_n=96),
    ),
    "in turn, with a residual": (
        dict(n=2, h=8, w=16, ci=72, co=72, residual=True, activation="relu"),
        dict(block_m=64, block_n=128, ping_pong=True, grid=2),
    ),
    "rows of 8 alignments": (
        dict(n=5, h=7, w=7, ci=144, co=70, kh=1, kw=1, pad=0, bias=True), dict(block_m=128, block_n=128, cluster_m=2)
    ),
    "rows of 2 alignments, parts of them": (
        dict(n=2, h=14, w=14, ci=72, co=70, kh=1, kw=1, pad=0), dict(block_m=64, block_n=128, ping_pong=True, grid=2)
    ),
    "rows of 8 alignments, parts of the reduction": (
        dict(n=2, h=17, w=9, ci=256, co=200, kh=1, kw=1, pad=0, residual=True, filter_layout="oihw"),
        dict(block_m=128, block_n=160, block_k=16, split_k=2, cluster_n=2),
    ),
    "parts of the reduction": (
        dict(n=2, h=8, w=8, ci=64, co=70, kw=5, pad="1,2"),
        dict(block_m=64, block_n=64, consumers=1, split_k=4, block_k=16),
    ),
}  # fmt: skip


@pytest.fixture(params=SHAPES)
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PACKED | SHAPES[request.param]


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    words = CONFIGS[0]
    built = build(problem_of("conv2d_nchw", **WORK), sm_90a, "tma_wgmma", words)
    found, source = assert_well_made(built, "HGMMA"), str(built.sources["cu"])
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16" in source and ", p, 1, 1, 0, 1;" in source
    assert "float sums_ptr[192]" in source and not found["LDG"] and not found["STG"]
    # for each of 64 outputs of a thread one sum comes from the left and one from the right, each of every second
    assert found["SHFL"] >= 64 and source.count("= hopper_sum_") <= 64
    assert found["HGMMA"] % (4 * 3) == 0  # steps of 16 channels, taps along a row


@settings(max_examples=5)
@given(
    n=st.integers(1, 20), h=st.integers(1, 20), w=st.integers(1, 20), ci=st.integers(1, 20), co=st.integers(1, 300),
    kh=st.integers(1, 3), kw=st.integers(1, 9), stride=st.integers(1, 9), dilation=st.integers(1, 3),
    left=st.integers(0, 9), words=st.sampled_from([{}, *CONFIGS]),
)  # fmt: skip
def test_check_and_build_agree(
    cuda_compiler: None, n: int, h: int, w: int, ci: int, co: int, kh: int, kw: int, stride: int, dilation: int,
    left: int, words: dict[str, Any],
) -> None:  # fmt: skip
    h, w = h + dilation * kh, 8 * w + dilation * (kw - 1) // 8 * 8
    fields = dict(n=n, h=h, w=w, ci=8 * ci, co=co, kh=kh, kw=kw, pad=(kh // 2, left), stride=(stride, 1))
    assert_builds_or_says_why("conv2d_nchw", PACKED | fields | dict(dilation=dilation, bias=True), words)


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec = operator("conv2d_nchw").schedule("tma_wgmma")
    for words, reason in {
        "block_n=112": "block_n=112 for consumers_n=1 holds no whole number of rows of 32 pixels",
        "consumers_n=3": "consumers_n=3 does not divide consumers=2",
        "block_n=100": "block_n=100 is not a multiple of 16 up to 256",
        "block_n=160": "block_m=128 x block_n=160 needs about 280 registers, there are 232",
        "cluster_n=4 block_m=64 consumers=1 grid=2": "grid=2 is less than a cluster of 4",
        "num_stages=4": "num_stages=4 needs",
        "halo=true": "num_stages=3 needs",
    }.items():
        given = CONFIGS[0] | dict(word.split("=") for word in words.split())
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nchw", **WORK), sm_90a, given)
    with pytest.raises(ConfigError, match="halo=True at stride=.2, 1. would load rows that no tap looks at"):
        spec.config_for(problem_of("conv2d_nchw", **WORK | dict(stride="2,1")), sm_90a, dict(halo=True))
    for fields, reason in (
        (dict(ci=12), "ci=12 is not a multiple of 8"),
        (dict(w=36), "rows that are looked at are 36 pixels apart, TMA needs a multiple of 8"),
        (dict(kh=1, kw=1, pad=0, w=30, stride=2), "are 60 pixels apart"),
        (dict(stride=2), "moves 2 pixels along a row"),
        (dict(kh=1, kw=1, pad=0, stride=3), "moves 3 pixels along a row"),
        (dict(pad=9, kw=11), "pad=9, dilation=1 reach over 9 pixels, sums shift by 8 at most"),
        (dict(kw=11), "reach over 9 pixels"),
        (dict(dtype="float32"), "dtype=float32 is not float16 or bfloat16"),
        (dict(stride="9,1"), "data is read at every element in 9, TMA reaches 8"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nchw", **WORK | fields), sm_90a)
    for fields, reason in (
        (dict(kw=1, pad="1,0"), "phases=True is for several taps along a row, .* not for kw=1, stride=.1, 1., pad=0"),
        (dict(stride="2,1"), "not for kw=3, stride=.2, 1."),
        (dict(dilation=2, pad=2), "pad=2, dilation=2"),
        (dict(w=256), "split_k=8 deals stages out, and phases of them, up to 12, are not equal parts"),
    ):
        given = CONFIGS[0] | dict(phases=True, cluster_n=1, split_k=8 if "w" in fields else 1)
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nchw", **WORK | fields), sm_90a, given)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem_of("conv2d_nchw", **WORK), parse_arch("sm_80"))


@pytest.mark.parametrize(
    "fields", [dict(), dict(w=128, h=9, ci=64, co=64), dict(n=2, w=64, h=64), dict(kw=1, kh=1, pad=0)]
)
def test_the_space_holds_the_default(sm_90a: Arch, fields: dict[str, Any]) -> None:
    problem, spec = problem_of("conv2d_nchw", **WORK | fields), operator("conv2d_nchw").schedule("tma_wgmma")
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)


@pytest.mark.parametrize("fields", [dict(h=56, w=56), dict(w=520), dict(h=9, w=48), dict(h=7, w=7, kh=1, kw=1, pad=0)])
def test_the_space_has_the_tiles_that_there_are(sm_90a: Arch, fields: dict[str, Any]) -> None:
    """And no others, but for halos, which some of them cannot have."""
    problem: Any = problem_of("conv2d_nchw", **WORK | dict(ci=128, co=256) | fields)
    spec, tiles = operator("conv2d_nchw").schedule("tma_wgmma"), set()
    for config in spec.numbered_space(problem, sm_90a):
        assert isinstance(config, TmaWgmmaConfig)
        tiles.add((config.columns, config.consumers_n, config.phases))
    widths = {columns for columns, _, phases in tiles if phases}
    for columns, beside, phases in product({*COLUMNS, *widths}, (1, 2, 3), (False, True)):
        words = dict(block_n=columns * beside, consumers_n=beside, phases=phases)
        given = [TmaWgmmaConfig(halo=halo, consumers=beside, **words) for halo in (False, True)]  # type: ignore[arg-type]
        there = any(config.rows_of(problem) for config in given) and columns in (widths if phases else COLUMNS)
        whole = phases or pitch(problem) % 8 == 0
        assert ((columns, beside, phases) in tiles) == (there and whole)


@pytest.mark.parametrize("shape", [shape for shape, fields in SHAPES.items() if "stride" not in fields])
def test_halo_emulated(emulation: None, shape: str) -> None:
    """The widest tile that each shape has with all kernel rows in a stage."""
    problem, spec = problem_of("conv2d_nchw", **PACKED | SHAPES[shape]), operator("conv2d_nchw").schedule("tma_wgmma")
    arch = parse_arch("sm_90a")
    halos = (config for config in spec.space(problem, arch) if config.to_json()["halo"])
    config = next((config for config in halos if config.check(problem, arch) is None), None)
    assert (config is None) == (SHAPES[shape]["kh"] == 1)
    if config:
        assert_correct(problem, arch, "tma_wgmma", config, ["emulated"])


def test_consumers_may_take_tiles_in_turn(emulation: None, sm_90a: Arch) -> None:
    """Of 1x1 kernels too, whose tiles are the widest; and one consumer may have twice the rows."""
    one = dict(kh=1, kw=1, pad=0)
    turning = dict(block_m=128, block_n=128, consumers=2, cluster_m=2, cluster_n=1, num_stages=6, ping_pong=True)
    alone = dict(block_m=128, block_n=128, consumers=1, cluster_m=1, cluster_n=1, num_stages=3, blocks_sm=2, grid=264)
    problem, spec = problem_of("conv2d_nchw", **WORK | one), operator("conv2d_nchw").schedule("tma_wgmma")
    for words in (turning, alone):
        config = spec.config_for(problem, sm_90a, CONFIGS[0] | dict(grid=132) | words)
        assert config in spec.space(problem, sm_90a)
    turns = dict(block_m=64, block_n=128, block_k=32, num_stages=3, grid=2, cluster_m=1, cluster_n=1, consumers=2)
    fields = PACKED | one | dict(n=3, h=8, w=24, ci=40, co=200, bias=True)
    assert_emulated("conv2d_nchw", fields, CONFIGS[0] | turns | dict(ping_pong=True))
    assert_emulated("conv2d_nchw", fields, CONFIGS[0] | turns | dict(block_m=128, consumers=1))


@pytest.mark.parametrize("stride, promotion", [("1,1", 2), ("2,1", 1), ("2,2", 1)])
def test_rows_between_do_not_come_into_l2_too(sm_90a: Arch, stride: str, promotion: int) -> None:
    problem: Any = problem_of("conv2d_nchw", **WORK | dict(h=28, w=56, kh=1, kw=1, pad=0, stride=stride))
    config = operator("conv2d_nchw").schedule("tma_wgmma").default(problem, sm_90a)
    work: NchwWork | None = config.work(problem)
    assert work and work.b.tensor_map and work.b.tensor_map.promotion == promotion


def test_widths_of_phases() -> None:
    def widths(**fields: Any) -> tuple[int, ...]:
        problem = problem_of("conv2d_nchw", **WORK | fields)
        assert isinstance(problem, NchwProblem)
        return phase_widths(problem)

    assert (
        widths(w=56) == (256, 224, 192, 128, 112, 64)
        and widths(w=16) == (256, 192, 128, 64)
        and widths(w=256) == (256,)
    )
    assert widths(w=416) == (224, 160, 128, 112) and not widths(kw=1, pad="1,0")


@pytest.mark.parametrize("name", TAPS)
def test_phases_emulated(emulation: None, name: str) -> None:
    fields, words = TAPS[name]
    more = dict(phases=True, num_stages=3, grid=4, cluster_m=1, cluster_n=1, consumers=2, block_k=32)
    assert_emulated("conv2d_nchw", PACKED | dict(kh=3, kw=3, pad=1) | fields, CONFIGS[0] | more | words)


def test_moves_of_sums(sm_90a: Arch) -> None:
    """By a column between taps, within rows, and back to where results lie; the first of whole rows wait."""
    spec = operator("conv2d_nchw").schedule("tma_wgmma")

    def work(width: int, columns: int, **fields: Any) -> NchwWork:
        problem = problem_of("conv2d_nchw", **WORK | dict(w=width) | fields)
        words = dict(phases=True, block_n=columns, num_stages=2)
        config = spec.config_for(problem, sm_90a, CONFIGS[0] | words)
        assert isinstance(problem, NchwProblem) and isinstance(config, TmaWgmmaConfig)
        rows = config.rows_of(problem)
        assert rows
        return NchwWork(problem, config, rows)

    found = work(16, 64)
    assert found.shifts == Shifts(3, 1, (1, None, 3, None, 5, None, 7, None), 1, (0, 2, 4, 6))
    assert (found.kernel, found.chunks, found.chunks_of_phase, found.sums, found.margin) == ((3, 1), 12, 4, 1, 0)
    found = work(256, 64)
    assert found.shifts == Shifts(3, 1, (*range(1, 8), None), 1) and found.margin == 8


def test_the_search_tries_few_columns_for_wide_kernels(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nchw", **WORK | dict(kw=5, pad="1,2"))
    assert isinstance(problem, NchwProblem)
    config = operator("conv2d_nchw").schedule("tma_wgmma").config_for(problem, sm_90a)
    assert isinstance(config, TmaWgmmaConfig) and 5 * config.accumulators <= 192


def test_shapes(emulation: None, cuda_compiler: None, fields: dict[str, Any]) -> None:
    """Results leave by TMA where rows of the output are whole 16 bytes, and a tile's lines too."""
    built = assert_emulated("conv2d_nchw", fields, {}, compiled=True)
    problem, config = problem_of("conv2d_nchw", **fields), built.config
    assert isinstance(problem, NchwProblem) and isinstance(config, TmaWgmmaConfig)
    rows = config.rows_of(problem)
    assert rows
    by_tma = isinstance(NchwWork(problem, config, rows).output.target, TensorMap)
    assert by_tma == (looked_at(problem).out_w % 8 == 0 and rows.run // rows.step >= 16)
    found = assert_well_made(built, "HGMMA", by_tma)
    assert bool(found["LDG"]) == fields.get("bias", False)


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(h=8, w=32, kh=3, pad="1,0", stride="1,2"), dict(block_n=128, halo=True)),
        (dict(h=9, w=24, kh=3, stride=2, bias=True), dict(block_n=96)),
        (dict(h=4, w=300, kh=1, stride=2, residual=True), dict(block_n=48)),
    ],
    ids=("a halo", "rows of several taps", "parts of rows that begin late"),
)
def test_strides_along_rows_emulated(emulation: None, fields: dict[str, Any], words: dict[str, Any]) -> None:
    small = dict(block_m=64, block_k=16, consumers=1, num_stages=2, cluster_m=1, cluster_n=1, grid=2)
    assert_emulated("conv2d_nchw", PACKED | dict(n=2, ci=40, co=72, kw=1) | fields, small | words)


@pytest.mark.parametrize("words", CONFIGS[1::2], ids=str)  # the others by those of other layouts
def test_configs(emulation: None, cuda_compiler: None, words: dict[str, Any]) -> None:
    width = dict(w=64 if words["block_n"] // words["consumers_n"] % 64 == 0 else 32)
    stride = dict(stride=1) if words.get("halo") else {}
    built = assert_emulated("conv2d_nchw", PACKED | SHAPES[ODD] | width | stride, words, compiled=True)
    assert_well_made(built, "HGMMA")


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, *CONFIGS], ids=str)
def test_on_a_device(gpu: Arch, fields: dict[str, Any], words: dict[str, Any]) -> None:
    assert_correct_on(gpu, "conv2d_nchw", fields, words)
