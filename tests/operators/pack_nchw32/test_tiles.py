from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.inspect import summary
from schedules.core.arch import Arch, parse_arch
from schedules.operators.pack_nchw32.tiles import default
from tests.amd import assert_fits
from tests.conftest import CUDA_ARCHES, ROCM_ARCHES, assert_correct, assert_mutants_caught, problem_of
from tests.operators.pack_nchw32.shapes import LAYOUTS, SHAPES

DTYPES = ("float16", "float32", "bfloat16")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "dtype"), [(shape, DTYPES[i % 3]) for i, shape in enumerate(SHAPES)])
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str, dtype: str, layout: str) -> None:
    for unpack in (False, True):
        fields = dict(**SHAPES[shape], dtype=dtype, layout=layout, unpack=unpack)
        assert_correct(problem_of("pack_nchw32", **fields), sm_90a, "tiles", routes=["emulated"])


@pytest.mark.parametrize("config", [dict(lanes=4, pixels=8, threads=64), dict(lanes=16, pixels=1)], ids=str)
def test_other_configs_are_correct(sm_90a: Arch, config: dict[str, Any]) -> None:
    for layout in LAYOUTS:
        for unpack in (False, True):
            problem = problem_of("pack_nchw32", n=1, h=4, w=4, ci=44, layout=layout, unpack=unpack)
            assert_correct(problem, sm_90a, "tiles", config, ["serial"])


@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *ROCM_ARCHES], ids=str)
def test_the_default_is_legal(arch: Arch) -> None:
    for dtype in DTYPES:
        for layout in LAYOUTS:
            for ci in (3, 64, 2048):
                problem: Any = problem_of("pack_nchw32", n=32, h=56, w=56, ci=ci, dtype=dtype, layout=layout)
                assert default(problem, arch).check(problem, arch) is None


@pytest.mark.parametrize("unpack", [False, True])
def test_bfloat16_without_instructions_of_its_own(cuda_compiler: None, emulation: None, unpack: bool) -> None:
    """TVM moves it as float32 there, of which CUDA has no vector of eight."""
    problem = problem_of("pack_nchw32", n=2, h=4, w=4, ci=8, dtype="bfloat16", layout="nhwc", unpack=unpack)
    build(problem, parse_arch("sm_75"))
    assert_correct(problem, parse_arch("sm_75"), routes=["emulated"])


def test_broken_kernels_are_noticed(emulation: None, sm_90a: Arch) -> None:
    built = build(problem_of("pack_nchw32", n=5, h=2, w=3, ci=21), sm_90a, "tiles", device_code=False)
    mutants = {
        "rounded to halves": (r"0x1\.8p\+23f", "0x1.8p+22f"),
        "no end of the channels": (r"< 21\)", "< 22)"),
        "saturated early": (r"0x1\.fcp\+6f", "0x1.f8p+6f"),
    }
    assert_mutants_caught(built, mutants)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_moved_by_vectors_and_nothing_spills(cuda_compiler: None, sm_90a: Arch, layout: str) -> None:
    """A load or store for each 8 bytes of the wider tensor at least, where its rows are aligned."""
    for unpack in (False, True):
        problem = problem_of("pack_nchw32", n=32, h=56, w=56, ci=64, dtype="float16", layout=layout, unpack=unpack)
        kernel, config = summary(build(problem, sm_90a, "tiles")), default(problem, sm_90a)  # type: ignore[arg-type]
        moves = sum(count for name, count in kernel.counts.items() if "global" in name)
        elements = config.lanes * config.pixels
        assert kernel.spills == kernel.shared == 0
        assert moves <= elements * 2 // 8 + max(elements // 16, config.pixels) + 1


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100"])
def test_amd_code_objects(amd_linker: None, arch: str) -> None:
    for unpack in (False, True):
        problem = problem_of("pack_nchw32", n=8, h=14, w=14, ci=40, dtype="float16", unpack=unpack)
        assert_fits(build(problem, parse_arch(arch), "tiles"))
