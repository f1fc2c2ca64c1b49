"""float32 on CUDA cores: correct by every route, no work in the padding, and wide accesses around the multiply-adds."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.build.inspect import summary
from schedules.check.verify import emulated_runs, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.operators.conv2d_hwcn.simt import SHAPES as DEFAULTS
from schedules.operators.conv2d_hwcn.simt import SimtConfig, default, space
from tests.conftest import assert_correct, caught, problem_of
from tests.operators.conv2d_hwcn.test_tutorial import SHAPES as COMMON
from tests.operators.conv2d_hwcn.test_tutorial import TUTORIAL

SHAPES: dict[str, dict[str, Any]] = {
    **COMMON,
    "odd everything, dilated": dict(n=37, h=7, w=5, ci=11, co=23, kh=3, kw=3, pad=2, dilation=2),
    "5x5 with more padding than it needs": dict(n=8, h=3, w=4, ci=6, co=12, kh=5, kw=5, pad=4),
    "pixels that see only padding": dict(n=4, h=2, w=2, ci=8, co=8, kh=1, kw=1, pad=2, stride=2),
    "padding on one axis": dict(n=12, h=5, w=5, ci=20, co=16, kh=1, kw=3, pad="0,1", stride="2,1"),
}
CONFIGS: list[dict[str, Any]] = [
    dict(block="64,128", stages=3),
    dict(block=64, tile="8,4", ahead=True, step=8, interleave=2),
    dict(block=128, lanes="8,4", stages=2, vector=2, min_blocks=1, lead=3),
    dict(block="128,64", tile="16,8", lanes="4,8", ahead=True, stages=5),
    dict(block="64,32", tile=4, step=5, ahead=False, skip_padding=False),
    dict(block="32,64", tile=4, ahead=True, step=32, stages=2, skip_padding=False, vector=1),
    dict(block="96,6", tile="3,1", lanes="16,2"),
]
WINNERS: list[dict[str, Any]] = [
    dict(),
    dict(block=(64, 128)),
    dict(block=(128, 128), ahead=True, skip_padding=False),
    dict(block=(128, 128), tile=(8, 16)),
    dict(block=(256, 64), interleave=2),
    dict(block=(64, 64), step=32, stages=2),
    dict(block=(128, 64), step=32, stages=3, ahead=True),
    dict(block=(128, 128), tile=(8, 16), step=32, stages=2, ahead=True, lead=132),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_schedule_is_correct(emulation: None, sm_90a: Arch, shape: str) -> None:
    assert_correct(problem_of("conv2d_hwcn", **SHAPES[shape]), sm_90a, "simt", routes=["emulated"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_other_architectures(emulation: None, arch: str) -> None:
    problem = problem_of("conv2d_hwcn", **SHAPES["ragged, stride 2"])
    assert_correct(problem, parse_arch(arch), "simt", routes=["emulated"])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_hwcn", **SHAPES["ragged, stride 2"])
    assert_correct(problem, sm_90a, "simt", config, ["serial", "emulated"])


@pytest.mark.parametrize("shape", DEFAULTS, ids=str)
def test_every_default_shape_is_correct(sm_90a: Arch, shape: Any) -> None:
    problem = problem_of("conv2d_hwcn", n=3, h=2, w=2, ci=3, co=5, kh=2, kw=2, pad=1)
    assert_correct(problem, sm_90a, "simt", SimtConfig(*shape, step=4), ["serial"])


@settings(max_examples=6)
@given(
    n=st.integers(1, 70), h=st.integers(1, 4), ci=st.integers(1, 40), co=st.integers(1, 70), k=st.integers(1, 3),
    pad=st.integers(0, 3), stride=st.integers(1, 3), dilation=st.integers(1, 2), ahead=st.booleans(),
)  # fmt: skip
def test_any_shape_is_correct(
    emulation: None, sm_90a: Arch, n: int, h: int, ci: int, co: int, k: int, pad: int, stride: int, dilation: int,
    ahead: bool,
) -> None:  # fmt: skip
    h += dilation * (k - 1)
    problem = problem_of(
        "conv2d_hwcn", n=n, h=h, w=h + 1, ci=ci, co=co, kh=k, kw=k, pad=pad, stride=stride, dilation=dilation
    )
    assert_correct(problem, sm_90a, "simt", dict(ahead=ahead), routes=["emulated"])


@pytest.mark.parametrize("skip", [True, False])
def test_taps_in_the_padding_are_left_out(emulation: None, sm_90a: Arch, skip: bool) -> None:
    """Filters are NaN wherever no pixel lies under them: only work that is done can show it."""
    problem = problem_of("conv2d_hwcn", n=8, h=2, w=1, ci=20, co=8, kh=3, kw=3, pad=1)
    built = build(problem, sm_90a, "simt", dict(skip_padding=skip), device_code=False)
    data, weight = built.operator.inputs(problem, np.random.default_rng(0))
    weight = np.array(weight)
    weight[:, [0, 2]] = np.nan
    for _, run in emulated_runs(built, str(built.sources["cu"])):
        (output,) = run([data, weight, *poisoned(problem)])
        assert np.isfinite(output).all() == skip


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    built = build(problem_of("conv2d_hwcn", **TUTORIAL), sm_90a, "simt", SimtConfig())
    kernel, source = summary(built), str(built.sources["cu"])
    assert kernel.spills == 0 and not any("spill" in name for name in kernel.counts)
    assert (kernel.threads, kernel.shared, kernel.blocks_sm) == (128, 4 * 16 * (128 + 64) * 4, 4)
    # sixteen channels of two 8-vectors and 64 products; only 128-bit accesses
    assert kernel.counts["fp32 multiply-add"] == 16 * 64
    assert kernel.counts["shared load 128-bit"] == 16 * 4
    assert kernel.counts["global store 128-bit"] % 16 == 0 and "global store" not in kernel.counts
    assert "global load" not in kernel.counts and "shared store" not in kernel.counts
    # the border bounds the loops: no copy is tested for it
    assert len(re.findall(r"cp_async_16\(.*, \(bool\)1\)", source)) == len(re.findall(r"cp_async_16\(\(", source)) == 8
    loop = source[source.index("for (int tile") : source.index("cp_async_wait_0();", source.index("for (int tile"))]
    assert loop.count("__syncthreads") == 1 and "/" not in loop and "%" not in loop


@pytest.mark.parametrize("config", WINNERS[1::2], ids=str)
def test_good_configs_do_not_spill(cuda_compiler: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    built = build(problem_of("conv2d_hwcn", **TUTORIAL), sm_90a, "simt", config)
    (kernel,) = built.resources
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0


def _mutants(source: str) -> dict[str, str]:
    main = source.index("for (int tile")
    barrier = source.index("__syncthreads();", main)
    return {
        "without the wait": source.replace("cp.async.wait_group 2;", "cp.async.wait_group 3;"),
        "without the barrier": source[:barrier] + source[barrier + len("__syncthreads();") :],
        "one tile too few": re.sub(r"tile < at_ptr\[(\d)\]", r"tile < at_ptr[\1] - 1", source),
        "the padding's bound": re.sub(r"at_ptr\[(\d)\] = \((ry|rx)(\w*) \+ 1\)", r"at_ptr[\1] = \2\3", source, count=1),
        "stages out of turn": source.replace("condval = 0", "condval = 1"),
    }


def test_broken_kernels_are_caught(emulation: None, sm_90a: Arch) -> None:
    """Each mutant of the generated CUDA must be wrong in some mode of the emulator; the kernel itself in none."""
    problem = problem_of("conv2d_hwcn", n=64, h=3, w=3, ci=40, co=128, kh=3, kw=3, pad=1)
    built = build(problem, sm_90a, "simt", SimtConfig(), device_code=False)
    source = str(built.sources["cu"])
    inputs = built.operator.inputs(problem, np.random.default_rng(0))
    assert not caught(built, source, inputs)
    for name, mutant in _mutants(source).items():
        assert mutant != source, name
        assert caught(built, mutant, inputs), name


CHANGES: list[tuple[str, Any]] = [
    ("block", (128, 128)),
    ("tile", (16, 8)),
    ("lanes", (8, 4)),
    ("interleave", 2),
    ("step", 8),
    ("stages", 3),
    ("ahead", True),
    ("skip_padding", False),
    ("inside_first", False),
    ("lead", 132),
    ("vector", 2),
    ("min_blocks", 3),
]


def test_every_field_changes_the_source(sm_90a: Arch) -> None:
    problem, base = problem_of("conv2d_hwcn", **TUTORIAL), SimtConfig()
    assert [name for name, _ in CHANGES] == list(base.to_json())
    configs = [base, *(replace(base, **{name: value}) for name, value in CHANGES)]
    sources = [str(build(problem, sm_90a, "simt", config, device_code=False).sources["cu"]) for config in configs]
    assert len(set(sources)) == len(configs)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(block="100,64"), "block=100 is not a multiple of tile x lanes=32"),
        (dict(lanes="8,8"), "lanes=(8, 8) are not the 32 threads of a warp"),
        (dict(interleave=3), "interleave=3 does not divide the 4 lanes"),
        (dict(tile=0), "tile=(0, 0) must be at least 1"),
        (dict(step=0), "step=0 must be at least 1"),
        (dict(step=5, ahead=True), "step=5 must be even"),
        (dict(stages=1), "stages=1 must be at least 2"),
        (dict(stages=20, block="128,64"), "stages=20 needs 245760 bytes of shared memory, cuda:sm_90a has 232448"),
        (dict(vector=8), "vector=8"),
        (dict(block=512), "block=(512, 512) has 4096 threads"),
        (dict(tile=16, block=128), "tile=(16, 16) needs about 320 registers"),
        (dict(min_blocks=-1), "min_blocks=-1"),
        (dict(lead=-1), "lead=-1"),
        (dict(min_blocks=8, block="128,64"), "min_blocks=8 of 128 threads leave too few registers"),
        (dict(min_blocks=4, stages=5, block="128,64"), "min_blocks=4 need more shared memory"),
    ],
)
def test_illegal_configs_are_refused(sm_90a: Arch, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(problem_of("conv2d_hwcn", **TUTORIAL), sm_90a, "simt", {**SimtConfig().to_json(), **config})


@pytest.mark.parametrize(
    ("arch", "dtype", "words"),
    [("sm_75", "float32", "has no cp.async"), ("sm_80", "float16", "dtype=float16"), ("gfx90a", "float32", "on cuda")],
)
def test_what_it_is_not_for(arch: str, dtype: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(problem_of("conv2d_hwcn", **{**TUTORIAL, "dtype": dtype}), parse_arch(arch), "simt")


def test_the_space_is_worth_searching(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", **TUTORIAL)
    legal = [config for config in space(problem, sm_90a) if config.check(problem, sm_90a) is None]
    assert 500 <= len(legal) == len(set(legal)) <= 5000
    assert {default(problem, sm_90a), *(SimtConfig(**winner) for winner in WINNERS)} <= set(legal)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("n", [1, 3, 8, 24, 64, 1000])
@pytest.mark.parametrize("co", [1, 10, 48, 512])
def test_the_default_is_legal(arch: str, n: int, co: int) -> None:
    problem = problem_of("conv2d_hwcn", n=n, h=9, w=9, ci=5, co=co, kh=3, kw=3, pad=1)
    config = default(problem, parse_arch(arch))
    assert config.check(problem, parse_arch(arch)) is None
