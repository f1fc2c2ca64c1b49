from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.inspect import summary
from schedules.core.arch import Arch, parse_arch
from tests.amd import assert_fits
from tests.conftest import CUDA_ARCHES, ROCM_ARCHES, assert_correct, problem_of
from tests.operators.conv2d_nhwc.shapes import K100, SHAPES


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str, dtype: str) -> None:
    problem = problem_of("conv2d_nhwc", **SHAPES[shape], dtype=dtype)
    assert_correct(problem, sm_90a, "simt", routes=["serial", "emulated"])


@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *ROCM_ARCHES], ids=str)
def test_schedule_is_correct(arch: Arch) -> None:
    assert_correct(problem_of("conv2d_nhwc", **SHAPES["ragged, stride 2"]), arch, "simt", routes=["serial"])


@pytest.mark.parametrize(
    "config",
    [dict(tile="4x1", num_thread="8x16", vthread=1), dict(tile="8x4", step=4, vector=1), dict(tile=4, vthread=1)],
    ids=str,
)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_nhwc", **SHAPES["1x1"])
    assert_correct(problem, sm_90a, "simt", config, ["serial", "emulated"])


def test_loads_and_stores_are_wide(cuda_compiler: None, sm_90a: Arch) -> None:
    kernel = summary(build(problem_of("conv2d_nhwc", **{**K100[2], "dtype": "float32"}), sm_90a, "simt"))
    assert kernel.counts["global load 128-bit"] and "global load" not in kernel.counts
    assert kernel.counts["global store 128-bit"] and "global store" not in kernel.counts
    assert kernel.spills == 0


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100"])
def test_amd_code_objects(amd_linker: None, arch: str) -> None:
    assert_fits(build(problem_of("conv2d_nhwc", **K100[2]), parse_arch(arch), "simt"))
