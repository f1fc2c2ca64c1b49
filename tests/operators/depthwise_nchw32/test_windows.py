from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.inspect import summary
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.operators.depthwise_conv2d.windows import WindowsConfig, default
from tests.amd import assert_fits
from tests.conftest import CUDA_ARCHES, ROCM_ARCHES, assert_correct, assert_mutants_caught, problem_of
from tests.operators.depthwise_nchw32.shapes import SHAPES

LAYER: dict[str, Any] = dict(n=32, h=56, w=56, ci=144, kh=3, kw=3, pad=1, **{
    name: SHAPES["a layer"][name] for name in ("bias", "alpha", "beta", "activation")
})  # fmt: skip # of MobileNetV2


@pytest.mark.parametrize("shape", SHAPES)
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str) -> None:
    assert_correct(problem_of("depthwise_nchw32", **SHAPES[shape]), sm_90a, "windows", routes=["emulated"])


@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *ROCM_ARCHES], ids=str)
def test_schedule_is_correct(arch: Arch) -> None:
    problem = problem_of("depthwise_nchw32", **SHAPES["ragged, stride 2"])
    assert_correct(problem, arch, "windows", routes=["serial"])


@pytest.mark.parametrize(
    "config",
    [
        dict(tile="1x4", vector=8, steps=2, threads=64),  # two outputs of the same words
        dict(tile="2x3", vector=4, threads=96),
        dict(tile="2x4", vector=8, steps=2, by_rows=True),
        dict(tile="7x2", vector=4, steps=3, min_blocks=2),
    ],
    ids=str,
)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    for shape in ("a layer", "5x5, stride 2"):
        assert_correct(problem_of("depthwise_nchw32", **SHAPES[shape]), sm_90a, "windows", config, ["emulated"])


def test_a_thread_has_the_channels_of_a_word(sm_90a: Arch) -> None:
    problem: Any = problem_of("depthwise_nchw32", **SHAPES["a layer"])
    with pytest.raises(ConfigError, match="vector=2 is less than the 4 channels"):
        WindowsConfig(vector=2).require(problem, sm_90a)


def test_broken_kernels_are_noticed(emulation: None, sm_90a: Arch) -> None:
    problem = problem_of("depthwise_nchw32", n=1, h=5, w=6, ci=4, kh=3, kw=3, pad=1, bias=True, beta="alpha")
    built = build(problem, sm_90a, "windows", dict(tile=2, vector=4), device_code=False)
    mutants = {
        "no upper border": (r"\(1 <= ", "(-1 <= "),
        "a tap too few": (r"ry < 3", "ry < 2"),
        "pixels of another channel": (r"\(uint\)30258", "(uint)21520"),
        "no filter is shifted": (r"x_1 \* 48", "0 * 48"),
    }
    assert_mutants_caught(built, mutants)


def test_an_output_takes_few_instructions(cuda_compiler: None, sm_90a: Arch) -> None:
    """What a device's memory can feed: three dp4a of nine products, and no conversion of floats."""
    built = build(problem_of("depthwise_nchw32", **LAYER), sm_90a, "windows", dict(tile=4, vector=4, threads=128))
    kernel = summary(built)
    assert kernel.spills == kernel.shared == 0
    assert kernel.counts["dot product"] == 3 * 64 and kernel.counts["global store"] == 16
    assert sum(count for name, count in kernel.counts.items() if name.startswith("global load")) <= 36 + 3 + 8
    text = built.sources["cu"]
    assert "nearbyintf" not in text and kernel.counts["fp32 multiply-add"] == 64


@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *ROCM_ARCHES], ids=str)
def test_the_default_is_legal(arch: Arch) -> None:
    for fields in (LAYER, {**LAYER, "n": 1}, {**LAYER, "kh": 7, "kw": 7, "pad": 3, "stride": 2}):
        problem: Any = problem_of("depthwise_nchw32", **fields)
        assert default(problem, arch).check(problem, arch) is None


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100"])
def test_amd_code_objects(amd_linker: None, arch: str) -> None:
    assert_fits(build(problem_of("depthwise_nchw32", **{**LAYER, "n": 8}), parse_arch(arch), "windows"))
