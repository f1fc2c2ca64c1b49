"""NHWC convolution by TMA and tcgen05: what it is made of, what it refuses, whether the emulator gets it right."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.predict.start import started
from tests.conftest import assert_correct, problem_of
from tests.hopper_kernels import assert_emulated, assert_producer_fits, opcodes

WORK: dict[str, Any] = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1, dtype="float16")
PLAIN: dict[str, Any] = dict(
    block_m=128, block_n=32, block_k=32, num_stages=3, consumers=1, cluster_m=1, cluster_n=1, grid=2, blocks_sm=1,
    split_k=1, ping_pong=False, stationary=False, halo=False, cta_group=1,
)  # fmt: skip
PAIR: dict[str, Any] = dict(cluster_m=2, cta_group=2)
RAGGED: dict[str, Any] = dict(n=3, h=7, w=6, ci=40, co=72, kh=3, kw=3, pad=1, dtype="float16")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a block": (RAGGED | dict(bias=True), dict(block_n=64)),
    "two blocks": (RAGGED | dict(bias=True, activation="relu"), PAIR),
    "two blocks of two consumers": (
        RAGGED | dict(h=16, w=16, co=160), PAIR | dict(block_m=256, block_n=96, consumers=2),
    ),
    "sums in one buffer": (RAGGED | dict(h=16, co=264), dict(block_m=256, block_n=256, consumers=2, num_stages=2)),
    "strided, dilated": (RAGGED | dict(h=13, w=11, stride="2,1", dilation="1,2", kw=2, residual=True), PAIR),
    "runs of odd channels": (RAGGED | dict(dtype="bfloat16", co=27, stride=2, bias=True), dict(block_k=16)),
    "rows that share pixels": (RAGGED | dict(h=13, w=12, kh=5, dtype="bfloat16"), PAIR | dict(halo=True)),
    "a cluster that shares loads": (RAGGED | dict(h=12, co=130), dict(cluster_m=2, cluster_n=2, grid=4)),
    "filters that stay": (RAGGED | dict(h=12), dict(stationary=True, grid=3)),
    "filters that stay, two blocks on a multiprocessor": (RAGGED, dict(blocks_sm=2, num_stages=2, grid=4)),
}  # fmt: skip


@pytest.fixture(scope="module")
def sm_100a() -> Arch:
    return parse_arch("sm_100a")


@pytest.mark.parametrize("fields", [{}, dict(dtype="bfloat16", bias=True, residual=True, activation="relu")], ids=str)
def test_what_it_is_made_of(cuda_compiler: None, sm_100a: Arch, fields: dict[str, Any]) -> None:
    built = build(problem_of("conv2d_nhwc", **WORK | fields), sm_100a)
    config, source, found = built.config, str(built.sources["cu"]), opcodes(built)
    assert built.schedule.name == "tma_tcgen05" and config.cta_group == 2
    assert "tcgen05.mma.cta_group::2.kind::f16" in source and not any(found[name] for name in ("HGMMA", "HMMA"))
    assert found["UTMALDG"] and found["UTMASTG"] and not found["STG"]
    assert all(each.spill_stores == each.stack == 0 for each in built.resources)
    assert_producer_fits(built)


@pytest.mark.parametrize("name", CASES)
def test_right(emulation: None, name: str) -> None:
    fields, words = CASES[name]
    assert_emulated("conv2d_nhwc", fields, PLAIN | words, "tma_tcgen05", target="sm_100a")


@pytest.mark.parametrize(
    "fields",
    [
        dict(kh=1, kw=1),
        dict(kh=3, kw=3, pad=1, co=27, residual=True),
        dict(h=8, w=16, ci=4, kh=4, kw=4, stride=4),
        dict(h=8, w=16, kh=1, kw=4, stride="1,4"),
    ],
    ids=str,
)
def test_images_at_run_time(emulation: None, sm_100a: Arch, fields: dict[str, Any]) -> None:
    problem = problem_of("conv2d_nhwc", **dict(n=8, n_from=5, h=7, w=7, ci=32, co=40, dtype="float16") | fields)
    assert_correct(problem, sm_100a, "tma_tcgen05", PLAIN | PAIR | dict(grid=4), routes=["emulated"])


def test_illegal_configs_say_why(sm_100a: Arch) -> None:
    problem, spec = problem_of("conv2d_nhwc", **WORK), operator("conv2d_nhwc").schedule("tma_tcgen05")
    for words, reason in {
        "block_m=64": "block_m=64 gives each of 1 consumers 64 rows, not 128",
        "cta_group=2": "cta_group=2 is for clusters of two blocks along m, not cluster_m=1 and cluster_n=1; give",
        "cta_group=2 cluster_m=2 block_n=48": "block_n=48 is not a multiple of 32",
        "cta_group=4": "cta_group=4 is not 1 or 2",
        "ping_pong=true consumers=2 block_m=128": "ping_pong=true is for consumers that multiply",
        "split_k=2": "split_k=2 would exchange sums of tensor memory",
        "consumers=3 block_m=384": "consumers=3 and blocks_sm=1 are not 1 and 1, 1 and 2, 2 and 1",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem, sm_100a, PLAIN | dict(word.split("=") for word in words.split()))
    with pytest.raises(ConfigError, match="cuda:sm_90a has no tcgen05; choose another --schedule"):
        spec.config_for(problem, parse_arch("sm_90a"))


def test_it_is_the_default_where_there_is_tensor_memory(sm_100a: Arch) -> None:
    for fields in (WORK, WORK | dict(n=1, dtype="bfloat16"), WORK | dict(kh=1, kw=1, pad=0, co=63)):
        for name in ("sm_100a", "sm_103a", "sm_110a"):
            assert started(problem_of("conv2d_nhwc", **fields), parse_arch(name))[0].name == "tma_tcgen05"
    for fields in (WORK | dict(ci=20), WORK | dict(dtype="float32")):
        assert started(problem_of("conv2d_nhwc", **fields), sm_100a)[0].name != "tma_tcgen05"
    assert started(problem_of("conv2d_nhwc", **WORK), parse_arch("sm_120a"))[0].name == "mma"


def test_the_space_holds_the_default(sm_100a: Arch) -> None:
    problem, spec = problem_of("conv2d_nhwc", **WORK), operator("conv2d_nhwc").schedule("tma_tcgen05")
    assert spec.default(problem, sm_100a) in spec.space(problem, sm_100a)
