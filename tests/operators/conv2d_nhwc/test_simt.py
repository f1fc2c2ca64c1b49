from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.inspect import summary
from schedules.core.arch import Arch, parse_arch
from schedules.operators.conv2d_nhwc.simt import default
from tests.amd import assert_fits
from tests.conftest import CUDA_ARCHES, ROCM_ARCHES, assert_correct, problem_of
from tests.operators.conv2d_nhwc.shapes import K100, SHAPES


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str, dtype: str) -> None:
    problem = problem_of("conv2d_nhwc", **SHAPES[shape], dtype=dtype)
    assert_correct(problem, sm_90a, "simt", routes=["emulated"])


@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *ROCM_ARCHES], ids=str)
def test_schedule_is_correct(arch: Arch) -> None:
    assert_correct(problem_of("conv2d_nhwc", **SHAPES["ragged, stride 2"]), arch, "simt", routes=["serial"])


@pytest.mark.parametrize(
    "config",
    [
        dict(tile="4x1", num_thread="8x16", vthread=1),
        dict(tile="8x4", step=4, vector=1),
        dict(tile=4, vthread=1),
        dict(tile="1x4", num_thread="2x64", vthread=1, step=4, stages=2),
    ],
    ids=str,
)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_nhwc", **SHAPES["1x1"])
    assert_correct(problem, sm_90a, "simt", config, ["serial", "emulated"])


@pytest.mark.parametrize("config", [dict(stages=1), dict(stages=2), dict(stages=2, ahead=True)], ids=str)
@pytest.mark.parametrize("ci", [3, 16, 20])  # a step is values of (ci, kh, kw), channels, channels but for the last
def test_every_way_through_the_reduction_is_correct(
    emulation: None, sm_90a: Arch, config: dict[str, Any], ci: int
) -> None:
    problem = problem_of("conv2d_nhwc", n=2, h=6, w=5, ci=ci, co=20, kh=3, kw=2, pad=1, stride=2)
    assert default(problem, sm_90a).by_taps(problem) == (ci != 3)
    assert_correct(problem, sm_90a, "simt", {"tile": 4, "vthread": 1, "num_thread": 8, **config}, ["emulated"])


@pytest.mark.parametrize(
    ("ci", "parts"), [(3, 2), (40, 2), (50, 3)]
)  # parts of (ci, kh, kw), of channels, unequal ones
def test_parts_of_the_reduction_are_added_up(emulation: None, sm_90a: Arch, ci: int, parts: int) -> None:
    fields = dict(n=2, h=6, w=5, ci=ci, co=20, kh=3, kw=2, pad=1, stride=2, bias=True, activation="relu")
    config = dict(tile=4, vthread=1, num_thread=8, step=8, stages=2, split_k=parts)
    assert_correct(problem_of("conv2d_nhwc", **fields), sm_90a, "simt", config, ["serial", "emulated"])


def test_few_tiles_share_long_reductions(sm_90a: Arch) -> None:
    few = problem_of("conv2d_nhwc", n=1, h=7, w=7, ci=512, co=512, kh=3, kw=3, pad=1)
    assert default(few, sm_90a).split_k > 1
    for fields in (dict(n=64, h=56, w=56), dict(ci=4, kh=1, kw=1, pad=0), dict(n=4, n_from=1)):
        assert default(replace(few, **fields), sm_90a).split_k == 1


def test_the_default_keeps_the_device_busy(sm_90a: Arch) -> None:
    for size in (7, 14, 28, 56):
        problem = problem_of("conv2d_nhwc", n=1, h=size, w=size, ci=256, co=256, kh=3, kw=3, pad=1)
        config = default(problem, sm_90a)
        rows, columns = config.block
        blocks = -(-problem.pixels // rows) * -(-problem.co // columns) * config.split_k
        assert config.check(problem, sm_90a) is None
        assert blocks >= sm_90a.device.multiprocessors * 0.6 or config.block == (32, 32), (size, config)


def test_loads_and_stores_are_wide(cuda_compiler: None, sm_90a: Arch) -> None:
    kernel = summary(build(problem_of("conv2d_nhwc", **{**K100[2], "dtype": "float32"}), sm_90a, "simt"))
    assert kernel.counts["global load 128-bit"] and "global load" not in kernel.counts
    assert kernel.counts["global store 128-bit"] and "global store" not in kernel.counts
    assert kernel.spills == 0


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100"])
def test_amd_code_objects(amd_linker: None, arch: str) -> None:
    assert_fits(build(problem_of("conv2d_nhwc", **K100[2]), parse_arch(arch), "simt"))
