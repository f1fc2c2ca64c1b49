"""Loads of AMD GPUs that give zero out of range."""

from __future__ import annotations

import re

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.build.matrix_cores import loops
from schedules.check.verify import device_source
from schedules.core.arch import parse_arch
from tests.conftest import caught, problem_of

FIELDS = dict(n=2, h=5, w=7, ci=40, co=24, kh=3, kw=3, pad=1)
# (operator, its fields, the instruction of CDNA that loads in the padding)
LOADS = {
    "16 bytes": ("conv2d_nhwc", dict(dtype="float16"), "buffer_load_dwordx4"),
    "8 bytes": ("conv2d_nhwc", dict(dtype="bfloat16", ci=36), "buffer_load_dwordx2"),
    "4 bytes, apart": ("conv2d_hwcn", dict(dtype="float32"), "buffer_load_dword"),
    "2 bytes": ("conv2d_nchw", dict(dtype="float16"), "buffer_load_ushort"),
    "of int8": ("conv2d_nchw32", {}, "buffer_load_dwordx4"),
}


@pytest.mark.parametrize("case", LOADS)
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_padding_is_out_of_range(emulation: None, case: str, arch: str) -> None:
    operator, fields, instruction = LOADS[case]
    built = build(problem_of(operator, **{**FIELDS, **fields}), parse_arch(arch), device_code=False)
    arrays = list(built.operator.inputs(built.problem, np.random.default_rng(0)))
    assert not caught(built, device_source(built), arrays)
    if arch == "gfx942":
        assert re.search(rf"\s{instruction}\s", str(built.sources["s"]))


def test_the_main_loop_has_no_branches_around_loads(amd_linker: None) -> None:
    problem = problem_of("conv2d_nhwc", **{**FIELDS, "ci": 256, "dtype": "float16"})
    assembly = str(build(problem, parse_arch("gfx942"), "mma").sources["s"])
    main = max(loops(assembly), key=lambda loop: loop.count("v_mfma"))
    assert "buffer_load" in main and "execz" not in main


def test_a_lane_that_is_not_sent_out_of_range_is_noticed(emulation: None) -> None:
    problem = problem_of("conv2d_nhwc", **{**FIELDS, "dtype": "float16"})
    built = build(problem, parse_arch("gfx942"), "mma", device_code=False)
    source = device_source(built)
    arrays = list(built.operator.inputs(problem, np.random.default_rng(0)))
    assert not caught(built, source, arrays)
    changed, count = re.subn(r"(select i1 %\S+, i32 %\S+, i32) -2147483648", r"\1 0", source)
    assert count and caught(built, changed, arrays)


def test_buffers_of_2_gib_keep_their_branches() -> None:
    """An offset in bytes may then be any number of 32 bits."""
    large, small = (
        problem_of("conv2d_nhwc", **{**FIELDS, "n": n, "h": 256, "w": 256, "ci": 256, "dtype": "float16"})
        for n in (64, 63)
    )
    arch = parse_arch("gfx942")
    assert "schedules_load_16" not in build(large, arch, "mma", device_code=False).lowered
    assert "schedules_load_16" in build(small, arch, "mma", device_code=False).lowered
