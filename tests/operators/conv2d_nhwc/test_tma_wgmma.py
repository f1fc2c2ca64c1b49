"""NHWC convolution by TMA and wgmma: what it is made of, what it refuses, and on a device whether it is right."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import Built, build
from schedules.build.inspect import view
from schedules.bundle.bundle import write_bundle
from schedules.check.verify import verify
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError, UsageError
from schedules.core.registry import operator
from tests.conftest import problem_of
from tests.hopper_kernels import assert_builds_or_says_why, assert_correct_on, assert_emulated, assert_well_made

WORK: dict[str, Any] = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1, dtype="float16")
SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=4, h=8, w=8, ci=64, co=128, kh=3, kw=3, pad=1, dtype="float16"),
    "ragged, stride 2": dict(
        n=3, h=7, w=6, ci=24, co=40, kh=3, kw=2, pad=1, stride=2, bias=True, dtype="bfloat16"
    ),
    "asymmetric, stride 3, dilated": dict(
        n=1, h=9, w=6, ci=72, co=8, kh=5, kw=3, pad="2,0", stride="3,1", dilation="1,2", activation="relu",
        dtype="float16",
    ),
    "kernel in the padding": dict(n=2, h=1, w=1, ci=40, co=16, kh=3, kw=3, pad=2, dtype="float16"),
    "1x1": dict(n=3, h=5, w=7, ci=72, co=200, kh=1, kw=1, bias=True, activation="relu", dtype="float16"),
    "1x1, stride 2": dict(n=2, h=9, w=7, ci=8, co=520, kh=1, kw=1, stride=2, dtype="bfloat16"),
    "few channels": dict(n=2, h=16, w=16, ci=40, co=27, kh=3, kw=3, pad=1, bias=True, activation="relu",
                         dtype="float16"),
    "four channels": dict(n=2, h=16, w=16, ci=40, co=4, kh=3, kw=3, pad=1, dtype="float16"),
    "one channel, ragged": dict(n=3, h=7, w=5, ci=16, co=1, kh=3, kw=3, pad=1, bias=True, dtype="bfloat16"),
    "one channel": dict(n=2, h=10, w=10, ci=80, co=1, kh=3, kw=3, pad=1, dtype="float16"),
    "odd channels, ragged": dict(n=3, h=9, w=13, ci=8, co=33, kh=3, kw=1, pad=1, stride=2, bias=True, dtype="float16"),
    "many odd channels": dict(n=2, h=5, w=3, ci=24, co=331, kh=1, kw=1, bias=True, activation="relu",
                              dtype="float16"),
    "1x1, few channels": dict(n=3, h=5, w=7, ci=72, co=3, kh=1, kw=1, dtype="bfloat16"),
    "patches of three channels": dict(n=3, h=48, w=80, ci=3, co=40, kh=16, kw=16, stride=16, bias=True,
                                      dtype="float16"),
    "patches, a line left": dict(n=2, h=15, w=18, ci=40, co=72, kh=2, kw=2, stride=2, dtype="float16"),
    "patches": dict(n=2, h=14, w=18, ci=40, co=72, kh=2, kw=2, stride=2, dtype="float16"),
    "patches of a row": dict(n=2, h=7, w=24, ci=4, co=16, kh=3, kw=4, stride="1,4", pad="1,0", dilation="2,1",
                             activation="relu", dtype="bfloat16"),
    "taller than wide": dict(
        n=2, h=17, w=13, ci=40, co=72, kh=3, kw=2, pad=1, stride="1,2", dilation="2,1", bias=True, dtype="float16"
    ),
    "many tiles": dict(n=64, h=14, w=14, ci=64, co=512, kh=3, kw=3, pad=1, bias=True, dtype="float16"),
}  # fmt: skip
# what a config says of none of its own, whatever the default for the problem
PLAIN = dict(
    block_k=64, cluster_m=2, cluster_n=1, grid=132, blocks_sm=1, split_k=1, ping_pong=False, stationary=False,
    halo=False,
)  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    dict(),
    *(
        PLAIN | words
        for words in [
            dict(block_m=128, block_n=256, consumers=2, num_stages=4),
            dict(block_m=256, block_n=128, consumers=2, num_stages=3, cluster_m=1, cluster_n=2),
            dict(block_m=192, block_n=128, consumers=3, num_stages=4, cluster_m=1),
            dict(block_m=64, block_n=256, consumers=1, block_k=128, num_stages=2, cluster_m=4, grid=120),
            dict(block_m=128, block_n=96, consumers=2, block_k=32, num_stages=6, cluster_m=2, cluster_n=2, grid=120),
            dict(block_m=128, block_n=48, consumers=2, block_k=16, num_stages=5, cluster_m=1, grid=0),
            dict(block_m=64, block_n=128, consumers=1, num_stages=3, blocks_sm=2, grid=264),
            dict(block_m=128, block_n=128, consumers=2, num_stages=2, cluster_m=2, grid=2),
            dict(block_m=128, block_n=160, consumers=2, num_stages=4, cluster_m=1, split_k=2),
            dict(block_m=128, block_n=64, consumers=2, num_stages=3, block_k=16, cluster_m=2, split_k=2, grid=4),
            dict(
                block_m=192,
                block_n=32,
                consumers=3,
                num_stages=3,
                block_k=16,
                cluster_m=1,
                cluster_n=2,
                split_k=2,
                grid=4,
            ),
            dict(block_m=64, block_n=32, consumers=1, num_stages=4, block_k=16, cluster_m=1, split_k=4, grid=4),
        ]
    ),
]


# filters that stay, in two columns for as many blocks, and an odd number of tiles for three consumers
IN_TURN = PLAIN | dict(
    block_m=64, block_n=32, block_k=16, num_stages=3, consumers=3, cluster_m=1, grid=2, ping_pong=True, stationary=True
)

# kernel rows that look at the pixels of one stage: parts of a stage, blocks that share a tile, filters that stay, runs
HALO: list[dict[str, Any]] = [
    dict(block_m=128, block_n=64, block_k=32, consumers=2, num_stages=3, cluster_m=1, cluster_n=2, grid=4),
    dict(block_m=128, block_n=48, consumers=2, num_stages=2, cluster_m=1, split_k=2),
    dict(block_m=64, block_n=32, block_k=16, consumers=3, num_stages=2, cluster_m=1, grid=6, ping_pong=True,
         stationary=True),
    dict(block_m=64, block_n=16, block_k=128, consumers=1, num_stages=2),
]  # fmt: skip


@pytest.fixture(scope="module")
def work(cuda_compiler: None) -> Built:
    tile = dict(block_m=128, block_n=256, cluster_m=2, cluster_n=1)
    return build(problem_of("conv2d_nhwc", **WORK), parse_arch("sm_90a"), "tma_wgmma", tile)


def test_what_it_is_made_of(work: Built) -> None:
    found, source = assert_well_made(work, "HGMMA"), str(work.sources["cu"])
    assert work.launch and work.launch.grid[0] == 132 and work.launch.cluster == 2
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16" in source
    assert "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster" in source
    assert "float sums_ptr[128]" in source and not found["LDG"] and not found["STG"]
    assert "bias" not in source


@pytest.mark.parametrize(
    ("co", "width", "store"),
    [(27, 64, "STG.E.128"), (4, 64, "STG.E.128"), (27, 4, "STG.E.64"), (27, 7, "STG.E.U16"), (330, 8, "STG.E")],
)
def test_stores_are_as_wide_as_the_pixels_allow(
    cuda_compiler: None, sm_90a: Arch, co: int, width: int, store: str
) -> None:
    problem = problem_of("conv2d_nhwc", n=4, h=16, w=width, ci=64, co=co, kh=3, kw=3, pad=1, dtype="float16")
    built = build(problem, sm_90a, "tma_wgmma", PLAIN | dict(block_m=128, block_n=32, num_stages=4, consumers=2))
    assert_well_made(built, "HGMMA", stored_by_tma=False)
    found = set(re.findall(r"STG\.E[.\w]* ", view(built, "sass")))
    assert {name.replace(".desc", "") for name in found} == {store + " "}


@settings(max_examples=5)
@given(
    n=st.integers(1, 40), h=st.integers(1, 40), ci=st.integers(1, 20), co=st.integers(1, 300), k=st.integers(1, 4),
    stride=st.integers(1, 9), dilation=st.integers(1, 3), words=st.sampled_from(CONFIGS), ragged=st.booleans(),
)  # fmt: skip
def test_check_and_build_agree(
    cuda_compiler: None, n: int, h: int, ci: int, co: int, k: int, stride: int, dilation: int, words: dict[str, Any],
    ragged: bool,
) -> None:  # fmt: skip
    reach = dilation * (k - 1) + 1
    fields = dict(n=n, h=h + reach, w=h + 2, ci=8 * ci + ragged, co=co, kh=k, kw=1, pad=k // 2, stride=stride)
    built = assert_builds_or_says_why("conv2d_nhwc", fields | dict(dilation=dilation, dtype="float16"), words)
    assert not (ragged and built)


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec = operator("conv2d_nhwc").schedule("tma_wgmma")
    for words, reason in {
        "block_m=100": "block_m=100 gives each of 2 consumers no multiple of 64 rows",
        "block_n=100": "block_n=100 is not a multiple of 16 up to 256",
        "block_n=272": "block_n=272 is not a multiple of 16 up to 256",
        "block_k=48": "block_k=48 is not 16, 32, 64 or 128",
        "num_stages=1": "num_stages=1 must be at least 2",
        "num_stages=5": "num_stages=5 needs 278608 bytes of shared memory, cuda:sm_90a has 232448",
        "consumers=4": "consumers=4 and blocks_sm=1 are not 1 and 1, 1 and 2, 2 and 1",
        "cluster_m=3": "cluster_m=3 x cluster_n=1 x split_k=1 is not 1, 2, 4 or 8 blocks",
        "split_k=3": "cluster_m=2 x cluster_n=1 x split_k=3 is not 1, 2, 4 or 8 blocks",
        "split_k=2": "num_stages=4 needs 295008 bytes of shared memory, cuda:sm_90a has 232448",
        "grid=1": "grid=1 is less than a cluster of 2",
        "grid=-1": "grid=-1 must be at least 0",
        "block_m=256": "block_m=256 x block_n=256 needs about 304 registers, there are 232",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            given = spec.config().to_json() | dict([words.split("=")])
            spec.config_for(problem_of("conv2d_nhwc", **WORK), sm_90a, given)
    for fields, reason in (
        (dict(ci=12), "ci=12 is not a multiple of 8"),
        (dict(n=2**16, co=331, kh=1, kw=1), "output has 2\\*\\*31 elements or more, which 32-bit indices do not reach"),
        (dict(dtype="float32"), "dtype=float32 is not float16 or bfloat16"),
        (dict(stride=9), "data is read at every element in 9, TMA reaches 8"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nhwc", **WORK | fields), sm_90a)
    for fields, words, reason in (
        (dict(kh=1), dict(), "halo=true is for kernels of several rows at stride 1, not of 1 at 1"),
        (dict(stride=2), dict(), "halo=true is for kernels of several rows at stride 1, not of 3 at 2"),
        (
            dict(kh=4), dict(block_m=64, block_n=64, cluster_m=1, cluster_n=2, consumers=1),
            "cluster_n=2 does not divide the 11 lines of a stage",
        ),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nhwc", **WORK | fields), sm_90a, words | dict(halo=True))
    small = problem_of("conv2d_nhwc", **WORK | dict(ci=16, co=64, kh=1, kw=1))
    with pytest.raises(ConfigError, match="split_k=2 blocks share a tile of 1 stages; lower split_k or block_k"):
        spec.config_for(small, sm_90a, dict(block_n=64, cluster_m=1, split_k=2))
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem_of("conv2d_nhwc", **WORK), parse_arch("sm_80"))


def test_the_space_holds_the_default(sm_90a: Arch) -> None:
    problem, spec = problem_of("conv2d_nhwc", **WORK), operator("conv2d_nhwc").schedule("tma_wgmma")
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)


@pytest.mark.parametrize(
    ("fields", "serves"),
    [(dict(), True), (dict(co=27), True), (dict(ci=36), False), (dict(stride=9), False)],
)
def test_what_it_serves(sm_90a: Arch, fields: dict[str, Any], serves: bool) -> None:
    problem, spec = problem_of("conv2d_nhwc", **WORK | fields), operator("conv2d_nhwc").schedule("tma_wgmma")
    assert spec.serves(problem, sm_90a) == serves


def test_serial_verification_says_why_not(sm_90a: Arch) -> None:
    with pytest.raises(UsageError, match="tma_wgmma has no route serial: a program in TIRx is made of threads"):
        verify(problem_of("conv2d_nhwc", **WORK), sm_90a, "tma_wgmma", routes=["serial"])


def test_a_bundle_and_its_views(work: Built, tmp_path: Any) -> None:
    bundle = write_bundle(work, tmp_path / "kernel")
    assert bundle.launch == work.launch
    assert "wgmma" in view(bundle, "lowered") and "device_entry" in view(bundle, "scheduled")
    assert "HGMMA" in view(bundle, "sass")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        *((shape, {}) for shape in SHAPES),
        *(("ragged, stride 2", words) for words in CONFIGS[1::2]),  # the others by those of other layouts
        *(("whole tiles", words) for words in CONFIGS[1:] if words["split_k"] > 1),
        ("few channels", PLAIN | dict(block_m=64, block_n=32, consumers=1, num_stages=3, cluster_m=1, split_k=2)),
        ("one channel", PLAIN | dict(block_m=64, block_n=16, consumers=1, num_stages=2)),
        ("odd channels, ragged", IN_TURN),
        *(("taller than wide", PLAIN | words | dict(halo=True)) for words in HALO),
    ],
)
def test_right_and_well_made(emulation: None, cuda_compiler: None, shape: str, words: dict[str, Any]) -> None:
    built = assert_emulated("conv2d_nhwc", SHAPES[shape], words, compiled=True)
    found = assert_well_made(built, "HGMMA", stored_by_tma=SHAPES[shape]["co"] % 8 == 0)
    assert bool(found["LDG"]) == SHAPES[shape].get("bias", False)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [*CONFIGS, *(PLAIN | words | dict(halo=True) for words in HALO)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_device(gpu: Arch, shape: str, words: dict[str, Any]) -> None:
    assert_correct_on(gpu, "conv2d_nhwc", SHAPES[shape], words)
