from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.inspect import summary
from schedules.core.arch import Arch, parse_arch
from schedules.operators.pool2d.direct import default
from tests.amd import assert_fits
from tests.conftest import CUDA_ARCHES, ROCM_ARCHES, assert_correct, assert_mutants_caught, problem_of
from tests.operators.pool2d.shapes import SHAPES


@pytest.mark.parametrize("shape", SHAPES)
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str) -> None:
    assert_correct(problem_of("pool2d", **SHAPES[shape]), sm_90a, "direct", routes=["emulated"])


@pytest.mark.parametrize("config", [dict(lanes=16, threads=64), dict(lanes=8, threads=96)], ids=str)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    """Borders of wider vectors, whose constants TVM writes otherwise."""
    for shape in ("maximum 3x3, stride 2", "asymmetric, dilated, activated"):
        assert_correct(problem_of("pool2d", **SHAPES[shape]), sm_90a, "direct", config, ["emulated"])


@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *ROCM_ARCHES], ids=str)
def test_the_default_is_legal(arch: Arch) -> None:
    for n in (1, 128):
        problem: Any = problem_of("pool2d", n=n, h=112, w=112, ci=64, kh=3, kw=3, stride=2, pad=1)
        assert default(problem, arch).check(problem, arch) is None


@pytest.mark.parametrize("kind", ["max", "average"])
def test_broken_kernels_are_noticed(emulation: None, sm_90a: Arch, kind: str) -> None:
    problem = problem_of("pool2d", n=1, h=5, w=6, ci=4, kh=3, kw=3, stride=2, pad=1, kind=kind)
    built = build(problem, sm_90a, "direct", device_code=False)
    mutants = {"no upper border": (r"\(1 <= ", "(-1 <= "), "a tap too few": (r"rx < 3", "rx < 2")}
    assert_mutants_caught(built, mutants)


def test_a_window_is_read_by_vectors(cuda_compiler: None, sm_90a: Arch) -> None:
    problem = problem_of("pool2d", n=128, h=112, w=112, ci=64, kh=3, kw=3, stride=2, pad=1)
    kernel = summary(build(problem, sm_90a, "direct"))
    assert kernel.spills == kernel.shared == 0
    assert kernel.counts["global load 128-bit"] == 9 and kernel.counts["global store 128-bit"] == 1


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100"])
def test_amd_code_objects(amd_linker: None, arch: str) -> None:
    for kind in ("max", "average"):
        problem = problem_of("pool2d", n=8, h=14, w=14, ci=40, kh=3, kw=3, stride=2, pad=1, kind=kind)
        assert_fits(build(problem, parse_arch(arch), "direct"))
