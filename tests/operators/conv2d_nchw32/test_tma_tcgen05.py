"""int8 NCHW32 convolution by TMA and tcgen05: what it is made of, and whether the emulator gets it right."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.core.arch import parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.predict.start import started
from tests.conftest import assert_correct, problem_of
from tests.hopper_kernels import assert_emulated, assert_producer_fits, opcodes
from tests.operators.conv2d_nchw32.shapes import EPILOGUE_SHAPE, EPILOGUES, SHAPES

WORK: dict[str, Any] = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1)
PLAIN: dict[str, Any] = dict(
    block_m=128, block_n=64, block_k=64, num_stages=3, consumers=1, cluster_m=1, cluster_n=1, grid=2, blocks_sm=1,
    split_k=1, ping_pong=False, stationary=False, row_pixels=1, tall=False, skip_padding=False, cta_group=1,
)  # fmt: skip
PAIR: dict[str, Any] = dict(cluster_m=2, cta_group=2)
RAGGED = SHAPES["ragged everything, stride 2"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a block": (RAGGED, {}),
    "two blocks": (RAGGED, PAIR),
    "two blocks of folded pixels": (SHAPES["whole tiles"], PAIR | dict(row_pixels=4, block_k=32)),
    "two blocks of two consumers": (
        dict(n=9, h=9, w=8, ci=70, co=130, kh=3, kw=3, pad=1),
        PAIR | dict(block_m=256, consumers=2, row_pixels=2, tall=True, num_stages=2),
    ),
    "dilated": (SHAPES["asymmetric, stride 3, dilated"], dict(block_n=128, block_k=32)),
    "a cluster that shares loads": (SHAPES["1x1, many channels"], dict(cluster_m=2, cluster_n=2, grid=4)),
    "padding left out": (
        dict(n=256, h=2, w=2, ci=33, co=40, kh=3, kw=3, pad=1), PAIR | dict(skip_padding=True, block_k=32),
    ),
    "filters that stay": (SHAPES["7x7"], dict(stationary=True, block_n=32, num_stages=2, grid=1)),
}  # fmt: skip


@pytest.mark.parametrize("fields", [{}, EPILOGUES["scales of channels"]], ids=["plain", "scales"])
def test_what_it_is_made_of(cuda_compiler: None, fields: dict[str, Any]) -> None:
    built = build(problem_of("conv2d_nchw32", **WORK | fields), parse_arch("sm_100a"))
    source, found = str(built.sources["cu"]), opcodes(built)
    assert built.schedule.name == "tma_tcgen05"
    assert "kind::i8" in source and not any(found[name] for name in ("IGMMA", "IMMA"))
    assert found["UTMALDG"] and found["UTMASTG"]
    assert all(each.spill_stores == each.stack == 0 for each in built.resources)
    assert_producer_fits(built)


@pytest.mark.parametrize("name", CASES)
def test_right(emulation: None, name: str) -> None:
    fields, words = CASES[name]
    assert_emulated("conv2d_nchw32", fields, PLAIN | words, "tma_tcgen05", target="sm_100a")


def test_images_at_run_time(emulation: None) -> None:
    problem = problem_of("conv2d_nchw32", n=4, n_from=3, h=9, w=7, ci=40, co=72, kh=2, kw=3, residual=True)
    assert_correct(problem, parse_arch("sm_100a"), "tma_tcgen05", PLAIN | PAIR | dict(tall=True), routes=["emulated"])


@pytest.mark.parametrize("name", ["scales of channels", "float32", "bias in the sum, float16", "int32 sums"])
def test_epilogues(emulation: None, name: str) -> None:
    words = PLAIN | PAIR | dict(row_pixels=4, block_n=128)
    assert_emulated("conv2d_nchw32", EPILOGUE_SHAPE | EPILOGUES[name], words, "tma_tcgen05", target="sm_100a")


def test_targets_without_int8_in_tensor_memory_say_so() -> None:
    problem, spec = problem_of("conv2d_nchw32", **WORK), operator("conv2d_nchw32").schedule("tma_tcgen05")
    with pytest.raises(ConfigError, match="cuda:sm_103a has no tcgen05.mma of int8; choose another --schedule"):
        spec.config_for(problem, parse_arch("sm_103a"))
    names = {name: started(problem, parse_arch(name))[0].name for name in ("sm_100a", "sm_103a", "sm_110a")}
    assert names == {"sm_100a": "tma_tcgen05", "sm_103a": "mma", "sm_110a": "tma_tcgen05"}
