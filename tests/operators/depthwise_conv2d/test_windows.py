from __future__ import annotations

import math
from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.inspect import summary
from schedules.core.arch import Arch, parse_arch
from schedules.operators.depthwise_conv2d.windows import WindowsConfig, default
from tests.amd import assert_fits
from tests.conftest import CUDA_ARCHES, ROCM_ARCHES, assert_correct, assert_mutants_caught, problem_of
from tests.operators.depthwise_conv2d.shapes import LAYERS, LAYOUTS, SHAPES

DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "dtype"), [(shape, DTYPES[i % 3]) for i, shape in enumerate(SHAPES)])
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str, dtype: str, layout: str) -> None:
    problem = problem_of("depthwise_conv2d", **SHAPES[shape], dtype=dtype, layout=layout)
    assert_correct(problem, sm_90a, "windows", routes=["emulated"])


@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *ROCM_ARCHES], ids=str)
def test_schedule_is_correct(arch: Arch) -> None:
    for layout in LAYOUTS:
        problem = problem_of("depthwise_conv2d", **SHAPES["ragged, stride 2"], layout=layout)
        assert_correct(problem, arch, "windows", routes=["serial"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "config",
    [
        dict(tile="1x4", vector=8, steps=2, threads=64),  # vectors of columns that begin before the image
        dict(tile=1, vector=1),
        dict(tile="2x4", vector=4, threads=96),
        dict(tile="2x4", vector=2, steps=2, by_rows=True),
        dict(tile="7x2", vector=2, steps=3, min_blocks=2),
    ],
    ids=str,
)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any], layout: str) -> None:
    problem = problem_of("depthwise_conv2d", n=2, h=11, w=16, ci=24, kh=3, kw=3, pad=1, dtype="float16", layout=layout)
    assert_correct(problem, sm_90a, "windows", config, ["emulated"])
    even = dict(n=1, h=9, w=16, ci=24, kh=2, kw=5, pad="0,2", stride="1,2", residual=True, activation="relu")
    strided = problem_of("depthwise_conv2d", **even, dtype="float16", layout=layout)
    assert_correct(strided, sm_90a, "windows", config, ["emulated"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_broken_kernels_are_noticed(emulation: None, sm_90a: Arch, layout: str) -> None:
    problem = problem_of("depthwise_conv2d", n=1, h=5, w=6, ci=4, kh=3, kw=3, pad=1, layout=layout)
    built = build(problem, sm_90a, "windows", dict(tile=2, vector=2), device_code=False)
    mutants = {
        "no upper border": (r"\(1 <= ", "(-1 <= "),
        "a tap too few": (r"ry < 3", "ry < 2"),
    }
    assert_mutants_caught(built, mutants)


@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *ROCM_ARCHES], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_is_legal_and_keeps_the_device_busy(arch: Arch, layout: str) -> None:
    for dtype in DTYPES:
        for n in (1, 32):
            for fields in LAYERS:
                problem: Any = problem_of("depthwise_conv2d", **fields, n=n, dtype=dtype, layout=layout)
                config = default(problem, arch)
                assert config.check(problem, arch) is None
                outputs = math.prod(config.tile) * config.steps * config.channels(problem)
                warps = config.all_threads(problem) / arch.wave
                assert warps >= arch.device.multiprocessors or outputs == 1 or problem.min_bytes < 2**18, (
                    problem,
                    config,
                )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_spills_and_an_output_takes_few_instructions(cuda_compiler: None, sm_90a: Arch, layout: str) -> None:
    """What a device's memory can feed: 29 instructions for each output of 4 bytes moved."""
    problem = problem_of(
        "depthwise_conv2d", n=32, h=56, w=56, ci=144, kh=3, kw=3, pad=1, dtype="float16", layout=layout
    )
    built = build(problem, sm_90a, "windows")
    kernel, config = summary(built), built.config
    assert isinstance(config, WindowsConfig)
    outputs = math.prod(config.tile) * config.channels(built.problem)  # type: ignore[arg-type]
    assert kernel.spills == 0 and kernel.shared == 0
    assert kernel.counts["fp32 multiply-add"] == 9 * outputs
    rows, vectors = config.window(built.problem)  # type: ignore[arg-type]
    loads = sum(count for name, count in kernel.counts.items() if name.startswith("global load"))
    assert loads <= rows * vectors + 9


def test_a_window_is_loaded_before_it_is_waited_for(cuda_compiler: None, sm_90a: Arch) -> None:
    """Its 36 elements are in registers at once; without a bound the compiler uses 32 registers in all."""
    problem = problem_of("depthwise_conv2d", n=32, h=7, w=7, ci=960, kh=3, kw=3, pad=1, dtype="float16")
    built = build(problem, sm_90a, "windows", dict(tile="7x2", vector=2, steps=1, threads=128, by_rows=False))
    assert built.resources[0].registers > 40 and summary(built).spills == 0


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100"])
def test_amd_code_objects(amd_linker: None, arch: str) -> None:
    for layout in LAYOUTS:
        problem = problem_of("depthwise_conv2d", **LAYERS[0], n=8, dtype="float16", layout=layout)
        assert_fits(build(problem, parse_arch(arch), "windows"))


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_the_default_for_amd_keeps_its_window_in_registers(amd_linker: None, arch: str) -> None:
    """Of a window whose loops LLVM was left to unroll, 600 bytes of a thread were in memory."""
    problem = problem_of("depthwise_conv2d", n=2, h=14, w=14, ci=384, kh=7, kw=7, pad=3, dtype="float16")
    assert summary(build(problem, parse_arch(arch), "windows", default(problem, parse_arch(arch)))).scratch == 0
