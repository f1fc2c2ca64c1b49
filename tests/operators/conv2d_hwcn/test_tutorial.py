"""The tutorial's schedule: correct by every route, made of what the tutorial describes, and fully configurable."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.build.inspect import material, summary
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.operators.conv2d_hwcn.tutorial import TutorialConfig, space
from tests.conftest import EMULATED_ARCHES, ROCM_ARCHES, assert_changes_the_source, assert_correct, caught, problem_of

TUTORIAL: dict[str, Any] = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1)
SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=64, h=4, w=4, ci=16, co=64, kh=3, kw=3, pad=1),
    "ragged, stride 2": dict(n=100, h=5, w=7, ci=13, co=30, kh=3, kw=2, pad=1, stride=2),
    "one of everything": dict(n=1, h=1, w=1, ci=1, co=1, kh=1, kw=1),
    "asymmetric, stride 3, dilated": dict(
        n=3, h=9, w=6, ci=5, co=7, kh=5, kw=3, pad="2,0", stride="3,1", dilation="1,2"
    ),
    "kernel in the padding": dict(n=2, h=1, w=1, ci=2, co=3, kh=3, kw=3, pad=2),
    "1x1": dict(n=66, h=2, w=3, ci=9, co=65, kh=1, kw=1),
}


@pytest.mark.parametrize(
    ("arch", "shape"), [(ROCM_ARCHES[i % len(ROCM_ARCHES)], shape) for i, shape in enumerate(SHAPES)], ids=str
)
def test_schedule_is_correct(arch: Arch, shape: str) -> None:
    assert_correct(problem_of("conv2d_hwcn", **SHAPES[shape]), arch, "tutorial", routes=["serial"])


@pytest.mark.parametrize("shape", SHAPES)
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str) -> None:
    assert_correct(problem_of("conv2d_hwcn", **SHAPES[shape]), sm_90a, "tutorial", routes=["emulated"])


@pytest.mark.parametrize("arch", EMULATED_ARCHES[:2], ids=str)
@pytest.mark.parametrize("shape", ["whole tiles", "ragged, stride 2"])
def test_every_cuda_arch(emulation: None, arch: Arch, shape: str) -> None:
    assert_correct(problem_of("conv2d_hwcn", **SHAPES[shape]), arch, "tutorial", routes=["emulated"])


@pytest.mark.parametrize(
    "config",
    [
        dict(tile="4x8", num_thread="16x8"),
        dict(tile="8x4", vthread="1x4", step=3),
        dict(vector=1, store=4, unroll=64),
        dict(tile=2, num_thread="3x5", vthread=1, step=5, vector=2),
    ],
    ids=str,
)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_hwcn", **SHAPES["ragged, stride 2"])
    assert_correct(problem, sm_90a, "tutorial", config, ["serial", "emulated"])


@settings(max_examples=8)
@given(
    n=st.integers(1, 70), h=st.integers(1, 5), ci=st.integers(1, 18), co=st.integers(1, 70), k=st.integers(1, 3),
    stride=st.integers(1, 3),
)  # fmt: skip
def test_any_shape_is_correct(sm_90a: Arch, n: int, h: int, ci: int, co: int, k: int, stride: int) -> None:
    problem = problem_of("conv2d_hwcn", n=n, h=h, w=h + 1, ci=ci, co=co, kh=k, kw=k, pad=k // 2, stride=stride)
    assert_correct(problem, sm_90a, "tutorial", routes=["serial"])


def test_source_is_the_tutorials(sm_90a: Arch) -> None:
    built = build(problem_of("conv2d_hwcn", **TUTORIAL), sm_90a, "tutorial", TutorialConfig(), device_code=False)
    source = str(built.sources["cu"])
    assert built.launch and built.launch.block == (8, 8, 1) and built.launch.grid == (4, 8, 196)
    assert sorted(re.findall(r"__shared__ .*?float (\w+)\[(\d+)\]", source)) == [
        ("filter_shared_ptr", "512"),
        ("padded_shared_ptr", "512"),
    ]
    assert re.search(r"float conv_local_ptr\[64\]", source)
    assert len(re.findall(r"float \w+_shared_local_ptr\[8\]", source)) == 2
    # 128-bit loads of both operands; the border is tested where the data is fetched
    assert len(re.findall(r"= \*\(float4\*\)\((?:data|filter)_ptr", source)) == 2
    assert "make_float4(0x0p+0f" in source
    assert source.count("__syncthreads()") == 2


def test_resources_of_the_tutorial(cuda_compiler: None, sm_90a: Arch) -> None:
    built = build(problem_of("conv2d_hwcn", **TUTORIAL), sm_90a, "tutorial", TutorialConfig())
    (kernel,) = built.resources
    assert kernel.shared == 4096
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0
    found = summary(material(built))
    assert found.threads == 64
    assert found.counts["global load 128-bit"] >= 4
    wide = summary(material(build(problem_of("conv2d_hwcn", **TUTORIAL), sm_90a, "tutorial", TutorialConfig(store=4))))
    assert wide.counts["global store 128-bit"] == 16


def _changes() -> list[tuple[str, Any]]:
    return [
        ("tile", (4, 8)),
        ("num_thread", (8, 16)),
        ("vthread", (1, 2)),
        ("step", 4),
        ("vector", 2),
        ("store", 4),
        ("unroll", 64),
    ]


def test_every_field_is_listed() -> None:
    assert {name for name, _ in _changes()} == set(TutorialConfig().to_json())


@pytest.mark.parametrize(("field", "value"), _changes())
def test_every_field_changes_the_source(sm_90a: Arch, field: str, value: Any) -> None:
    problem = problem_of("conv2d_hwcn", **TUTORIAL)
    assert_changes_the_source(problem, sm_90a, "tutorial", TutorialConfig(), **{field: value})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(tile=6, vthread=4), "tile=6 is not a multiple of vthread=4"),
        (dict(num_thread=33), "num_thread=(33, 33) makes blocks of 1089, cuda:sm_90a allows 1024"),
        (dict(step=128), "step=128 needs 65536 bytes of shared memory"),
        (dict(tile=16), "tile=(16, 16) needs about 328 registers"),
        (dict(vector=3), "vector=3"),
        (dict(store=8), "store=8"),
        (dict(step=0), "step=0"),
        (dict(vthread=0), "vthread=(0, 0)"),
        (dict(unroll=-1), "unroll=-1"),
    ],
)
def test_illegal_configs_are_refused(sm_90a: Arch, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(problem_of("conv2d_hwcn", **TUTORIAL), sm_90a, "tutorial", config)


def test_amd_blocks_stay_within_1024_threads() -> None:
    with pytest.raises(ConfigError, match="allows 1024"):
        build(problem_of("conv2d_hwcn", **TUTORIAL), parse_arch("gfx90a"), "tutorial", dict(num_thread="32x64"))


@pytest.mark.parametrize("arch", ROCM_ARCHES, ids=str)
def test_amd_code_object(amd_linker: None, arch: Arch) -> None:
    built = build(problem_of("conv2d_hwcn", **TUTORIAL), arch, "tutorial", TutorialConfig())
    assembly, code = str(built.sources["s"]), built.sources["hsaco"]
    assert isinstance(code, bytes) and int.from_bytes(code[18:20], "little") == 224  # EM_AMDGPU
    assert "main_kernel" in assembly

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", assembly)[1])  # type: ignore[index]

    assert number("group_segment_fixed_size") == 4096
    assert number("private_segment_fixed_size") == 0  # no scratch
    assert number("max_flat_workgroup_size") >= 64
    assert re.search(r"global_load_(dwordx4|b128)", assembly)


def _mutants(source: str) -> dict[str, str]:
    barriers = [match.start() for match in re.finditer(r"__syncthreads\(\);", source)]
    found = {
        f"without barrier {i}": source[:at] + source[at + len("__syncthreads();") :] for i, at in enumerate(barriers)
    }
    found["accumulator index"] = source.replace("b_3) + 32)] = (conv_local", "b_3) + 33)] = (conv_local", 1)
    found["border"] = re.sub(r"\(1 <= \(", "(0 <= (", source, count=1)
    found["shared index"] = source.replace("(rc_1 * 64)", "(rc_1 * 63)", 1)
    return found


def test_broken_kernels_are_caught(emulation: None, sm_90a: Arch) -> None:
    """Each mutant of the generated CUDA must be wrong in some mode of the emulator; the kernel itself in none."""
    import numpy as np

    problem = problem_of("conv2d_hwcn", **SHAPES["whole tiles"])
    built = build(problem, sm_90a, "tutorial", TutorialConfig(), device_code=False)
    source = str(built.sources["cu"])
    inputs = built.operator.inputs(problem, np.random.default_rng(0))

    assert not caught(built, source, inputs)
    mutants = _mutants(source)
    assert len(mutants) == 5
    for name, mutant in mutants.items():
        assert mutant != source, name
        assert caught(built, mutant, inputs), name


def test_the_space_is_worth_searching(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", **TUTORIAL)
    legal = [config for config in space(problem, sm_90a) if config.check(problem, sm_90a) is None]
    assert len(legal) >= 200
