"""Four-byte dot products: exact on every GPU, and without a spill."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.inspect import amdgcn_resources, count_ptx
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.presets import preset
from schedules.core.registry import operator_of
from schedules.operators.conv2d_nchw32.simt import SimtConfig, space
from tests.conftest import ROCM_ARCHES, assert_correct, problem_of
from tests.operators.conv2d_nchw32.shapes import EPILOGUE_SHAPE, EPILOGUES, SHAPES


@pytest.mark.parametrize("shape", SHAPES)
def test_schedule_is_exact(emulation: None, shape: str) -> None:
    assert_correct(problem_of("conv2d_nchw32", **SHAPES[shape]), parse_arch("sm_75"), "simt", routes=["emulated"])


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogue_is_exact(emulation: None, epilogue: str) -> None:
    problem = problem_of("conv2d_nchw32", **{**EPILOGUE_SHAPE, **EPILOGUES[epilogue]})
    assert_correct(problem, parse_arch("sm_86"), "simt", routes=["emulated"])


@pytest.mark.parametrize("arch", ROCM_ARCHES, ids=str)
def test_schedule_is_exact_for_amd(arch: Arch) -> None:
    assert_correct(
        problem_of("conv2d_nchw32", **SHAPES["ragged everything, stride 2"]), arch, "simt", routes=["serial"]
    )


@pytest.mark.parametrize("config", [dict(tile_m=3, tile_n=16), dict(tile_m=1, warps_m=4, warps_n=1)], ids=str)
def test_other_configs_are_exact(emulation: None, config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_nchw32", n=1, h=5, w=4, ci=35, co=70, kh=2, kw=3, pad=1, bias=True)
    assert_correct(problem, parse_arch("sm_80"), "simt", config, ["serial", "emulated"])


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_data_of_few_lanes_are_its_by_the_rule(emulation: None, target: str, lanes: int) -> None:
    problem = problem_of("conv2d_nchw32", n=2, h=9, w=7, ci=3, co=40, kh=3, kw=2, dilation=2, lanes=lanes, bias=True)
    assert operator_of(problem).choose(problem, parse_arch(target)) == "simt" or target == "sm_80"
    assert_correct(problem, parse_arch(target), "simt", routes=["emulated"])


def test_cuda_multiplies_four_bytes_at_once(cuda_compiler: None) -> None:
    built = build(preset("resnet50-28-128-128-3x3").problem(), parse_arch("sm_80"), "simt")
    counts = count_ptx(str(built.sources["ptx"]))
    # 8 pixels by 8 channels by 4 words
    assert counts["dot product"] == 256
    assert counts["shared load 128-bit"] == 16
    assert counts["global load 128-bit"] >= 3
    assert built.resources[0].spill_loads == built.resources[0].stack == 0


@pytest.mark.parametrize("arch", ROCM_ARCHES, ids=str)
@pytest.mark.parametrize("preset_name", ["resnet50-28-128-128-3x3", "resnet50-7-512-512-3x3"])
def test_code_object_fits_the_machine(amd_linker: None, arch: Arch, preset_name: str) -> None:
    built = build(preset(preset_name).problem({"residual": True}), arch, "simt")
    assembly = str(built.sources["s"])
    (resources,) = amdgcn_resources(assembly, arch)
    assert resources.shared <= 64 * 1024
    assert resources.stack == resources.spill_loads == 0
    assert re.search(r"v_dot4\w*_i32_i\w*8", assembly)
    assert built.launch is not None and built.launch.threads <= 256
    assert re.search(r"^main_kernel:", assembly, re.M)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(tile_m=0), "tile_m=0 must be at least 1"),
        (dict(tile_n=12), "tile_n=12 is not a multiple of 8"),
        (dict(warps_m=8, warps_n=8), "2048 threads"),
        (dict(tile_m=16, tile_n=16), "registers"),
    ],
)
def test_illegal_config_says_why(sm_90a: Arch, config: dict[str, Any], message: str) -> None:
    problem = problem_of("conv2d_nchw32", **SHAPES["whole tiles"])
    with pytest.raises(ConfigError, match=message):
        SimtConfig(**config).require(problem, sm_90a)


def test_space_is_mostly_legal(sm_90a: Arch) -> None:
    problem = preset("resnet50-28-128-128-3x3").problem()
    assert sum(config.check(problem, sm_90a) is None for config in space(problem, sm_90a)) > 30
