"""The CPU's schedule is exact."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build, build_scheduled
from schedules.check.verify import judge, on_device, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw32.cpu import SCHEDULE
from schedules.operators.conv2d_nchw32.definition import inputs
from schedules.steps.intrinsics import as_described
from tests.conftest import assert_correct, problem_of
from tests.operators.conv2d_nchw32.shapes import EPILOGUE_SHAPE, EPILOGUES, FEW_LANES, SHAPES


@pytest.mark.parametrize("shape", SHAPES | FEW_LANES)
def test_schedule_is_exact(host: Arch, shape: str) -> None:
    assert_correct(problem_of("conv2d_nchw32", **(SHAPES | FEW_LANES)[shape]), host, routes=["device"])


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogue_is_exact(host: Arch, epilogue: str) -> None:
    problem = problem_of("conv2d_nchw32", **{**EPILOGUE_SHAPE, **EPILOGUES[epilogue]})
    assert_correct(problem, host, routes=["device"])


@pytest.mark.parametrize(
    "config",
    [
        dict(block_lanes=1, block_x=1),
        dict(block_x=3, tiles_x=2, tiles_y=2, chunk=1),
        dict(block_x=7, tiles_x=3, tiles_y=9, tiles_n=2),
    ],
    ids=str,
)
def test_other_configs_are_exact(host: Arch, config: dict[str, Any]) -> None:
    for kernel in (dict(), dict(kh=1, kw=1, pad=0)):  # rows, and all pixels as one row
        problem = problem_of("conv2d_nchw32", **EPILOGUE_SHAPE | dict(w=9) | kernel, alpha="channel")
        assert_correct(problem, host, "cpu", config, routes=["device"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(vector=5), "vector=5 is not a power of two"),
        (dict(block_x=0), "block_x=0 must be at least 1"),
        (dict(block_lanes=3), "no part of 32"),
    ],
)
def test_illegal_config_says_why(host: Arch, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SCHEDULE.config_for(problem_of("conv2d_nchw32", **SHAPES["whole tiles"]), host, config)


def test_a_vector_is_what_an_instruction_sums() -> None:
    problem = problem_of("conv2d_nchw32", **SHAPES["whole tiles"])
    with pytest.raises(ConfigError, match="vector=8 is not the 16 sums that vpdpbusd makes at once"):
        SCHEDULE.config_for(problem, parse_arch("llvm:cascadelake"), dict(vector=8))


@pytest.mark.parametrize(
    ("cpu", "instruction"),
    [
        ("cascadelake", r"vpdpbusd.*%zmm"),
        ("alderlake", r"vpdpbusd.*%ymm"),
        ("skylake-avx512", r"vpmaddwd.*%zmm"),
        ("znver3", r"vpmaddwd.*%ymm"),
        ("x86-64", r"\spmaddwd.*%xmm"),
    ],
)
def test_the_widest_products_that_a_cpu_has(cpu: str, instruction: str) -> None:
    """Eight sums and more stay in registers: the loops with products store nothing."""
    problem = problem_of("conv2d_nchw32", **SHAPES["whole tiles"], alpha="channel")
    text = str(build(problem, parse_arch(f"llvm:{cpu}"), "cpu").sources["s"])
    blocks = [block for block in re.split(r"^\.LBB.*:", text, flags=re.MULTILINE) if re.search(instruction, block)]
    loops = [block for block in blocks if len(re.findall(instruction, block)) >= 8]
    assert loops and not any(re.search(r"mov\w+\s+%[xyz]mm\d+, \S*\(", loop.split("\tj")[0]) for loop in loops)


@pytest.mark.parametrize("cpu", ["cascadelake", "alderlake", "generic"])
@pytest.mark.parametrize("shape", ["ragged everything, stride 2", "asymmetric, stride 3, dilated", "7x7"])
def test_sums_of_shifted_data_are_exact(host: Arch, cpu: str, shape: str) -> None:
    """What other CPUs' instructions stand for, by loops that this one has."""
    problem, arch = problem_of("conv2d_nchw32", **SHAPES[shape], bias=True, beta="alpha"), parse_arch(f"llvm:{cpu}")
    config = SCHEDULE.config_for(problem, arch)
    with as_described():
        made = build_scheduled(
            operator("conv2d_nchw32"), problem, SCHEDULE, config, host, SCHEDULE.apply(problem, config, arch)
        )
    for seed in range(2):
        arrays = inputs(problem, np.random.default_rng(seed))
        assert judge(problem, arrays, on_device(made, problem, host)([*arrays, *poisoned(problem)])).passed
