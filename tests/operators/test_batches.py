"""Convolutions that take their images at run time: one build, compared at the ends of its range and between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ArgumentError, BuildError, ConfigError
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Conv2dProblem
from schedules.core.registry import operator
from tests.conftest import assert_correct, problem_of

LAYERS: dict[str, dict[str, Any]] = {
    "3x3": dict(n=4, n_from=3, h=9, w=8, ci=16, co=24, kh=3, kw=3, pad=1, bias=True, residual=True),
    "1x1": dict(n=8, n_from=5, h=7, w=7, ci=32, co=16, kh=1, kw=1),
    "stride": dict(n=4, n_from=1, h=12, w=16, ci=8, co=8, kh=3, kw=3, stride=2, pad=1),
    "ragged": dict(n=4, n_from=1, h=6, w=5, ci=16, co=9, kh=3, kw=3, pad=1, bias=True, residual=True),
    "stem": dict(n=4, n_from=1, h=16, w=16, ci=3, co=16, kh=7, kw=7, stride=2, pad=3),
    "slabs": dict(n=7, n_from=2, h=8, w=9, ci=32, co=48, kh=1, kw=1, bias=True),
    "int8": dict(n=4, n_from=3, h=6, w=7, ci=32, co=40, kh=3, kw=3, pad=1, bias=True, residual=True),
}


@pytest.mark.parametrize(
    ("name", "layer", "dtype", "schedule", "config"),
    [
        ("conv2d_nhwc", "3x3", "float16", "tma_wgmma", {"grid": 8}),
        ("conv2d_nhwc", "1x1", "float16", "tma_wgmma", {}),  # all pixels are one row
        ("conv2d_nhwc", "ragged", "bfloat16", "tma_wgmma", {}),  # pixels are stored as runs
        ("conv2d_nhwc", "stride", "float32", "tf32", {}),
        ("conv2d_nhwc", "stem", "float16", "mma_windows", {"grid": 3}),
        ("conv2d_nhwc", "3x3", "float16", "mma", {}),
        ("conv2d_nhwc", "stride", "float32", "simt", {}),
        ("conv2d_nchw", "3x3", "float16", "tma_wgmma", {}),
        ("conv2d_nchw", "3x3", "float16", "tma_wgmma_few", {}),
        ("conv2d_nchw", "slabs", "float16", "tma_wgmma_slabs", {"grid": 3}),
        ("conv2d_nchw", "stem", "float16", "mma_windows", {}),
        ("conv2d_nchw", "stride", "float16", "mma_channels_last", {}),  # has a workspace of as many images
        ("conv2d_nchw", "stride", "float32", "direct", {}),
        ("conv2d_nchw32", "int8", "int8", "tma_wgmma", {}),
        ("conv2d_nchw32", "int8", "int8", "mma", {}),
    ],
)
@pytest.mark.usefixtures("emulation")
def test_one_build_for_gpus(
    sm_90a: Arch, name: str, layer: str, dtype: str, schedule: str, config: dict[str, Any]
) -> None:
    problem = problem_of(name, **LAYERS[layer], dtype=dtype)
    checks = assert_correct(problem, sm_90a, schedule, config, routes=["emulated"])
    assert {problem.n_from, problem.n} <= {check.problem.n for check in checks}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["conv2d_nhwc", "conv2d_nchw"])
@pytest.mark.parametrize("layer", ["1x1", "ragged", "stem"])
def test_one_build_for_the_cpu(host: Arch, name: str, layer: str) -> None:
    assert_correct(problem_of(name, **LAYERS[layer]), host)


def test_one_build_for_the_cpu_in_int8(host: Arch) -> None:
    assert_correct(problem_of("conv2d_nchw32", **LAYERS["int8"]), host)


def test_loops_of_a_gpu_one_by_one() -> None:
    assert_correct(problem_of("conv2d_nhwc", **LAYERS["3x3"], dtype="float16"), parse_arch("cuda:sm_80"), "mma")


def test_amd_takes_a_range_too(amd_linker: None) -> None:
    built = build(problem_of("conv2d_nhwc", **LAYERS["1x1"], dtype="float16"), parse_arch("rocm:gfx942"), "mma")
    assert built.launch and any("n" in str(extent) for extent in built.launch.grid)


def test_the_function_refuses_other_batches(host: Arch) -> None:
    problem = problem_of("conv2d_nchw", n=4, n_from=3, h=5, w=5, ci=3, co=4, kh=1, kw=1)
    built = build(problem, host)

    def tensors(n: int) -> list[np.ndarray]:
        return [np.ones((n, 3, 5, 5), "float32"), np.ones((4, 3, 1, 1), "float32"), np.zeros((n, 4, 5, 5), "float32")]

    for n in (3, 4):
        given = tensors(n)
        built(*given)
        assert (given[-1] == 3).all()
    for n in (2, 5):
        given = tensors(n)
        with pytest.raises(ArgumentError, match="needed 3 to 4 along axis 0"):
            built(*given)
        with pytest.raises(ValueError, match=r"^data.shape\[0\] must be 3 to 4, the range that this kernel"):
            built.module["main"](*given)
        assert not given[-1].any()


def test_a_fixed_batch_has_the_source_of_before(sm_90a: Arch) -> None:
    """Nothing of a range is in a kernel without one; a range's has the number of images as an argument."""
    fields = dict(n=8, h=7, w=7, ci=32, co=16, kh=1, kw=1, dtype="float16")
    fixed, ranged = (
        str(build(problem_of("conv2d_nhwc", **fields, **more), sm_90a, "tma_wgmma", device_code=False).sources["cu"])
        for more in ({}, {"n_from": 5})
    )
    assert "int n)" in ranged
    assert "int n)" not in fixed


@pytest.mark.parametrize(
    "spec", [spec for spec in operator("conv2d_nchw").schedules if "cuda" in spec.kinds and not spec.ranges]
)
def test_what_takes_one_batch_says_so(sm_90a: Arch, spec: ScheduleSpec) -> None:
    problem = problem_of("conv2d_nchw", n=4, n_from=3, h=8, w=8, ci=16, co=16, kh=3, kw=3, pad=1, dtype="float16")
    with pytest.raises(ConfigError, match="is built for one shape"):
        build(problem, sm_90a, spec.name)
    assert not spec.serves(problem, sm_90a)


def test_a_schedule_that_ignores_the_range_is_found_out(host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range that a schedule does not heed would be a function for its greatest number alone."""
    monkeypatch.setattr("schedules.operators.conv2d_nchw.cpu.at_run_time", Conv2dProblem.representative)
    monkeypatch.setattr("schedules.definitions.implicit.at_run_time", Conv2dProblem.representative)
    problem = problem_of("conv2d_nchw", n=4, n_from=3, h=5, w=5, ci=3, co=4, kh=1, kw=1)
    with pytest.raises(BuildError, match="built for one shape, not for 3 to 4"):
        build(problem, host)
