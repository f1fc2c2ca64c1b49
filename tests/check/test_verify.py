from __future__ import annotations

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.check.verify import EMULATED_FLOPS, poisoned, reduced, verify, verify_function
from schedules.core.arch import Arch
from schedules.core.errors import ConfigError, UnknownNameError, UsageError
from schedules.core.registry import operator
from schedules.operators.conv2d_hwcn.tutorial import TutorialConfig
from tests.conftest import problem_of

SMALL = dict(n=4, h=4, w=4, ci=3, co=6, kh=3, kw=3, pad=1)
TUTORIAL = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1)


def test_every_seed_is_checked(host: Arch) -> None:
    checks = verify(problem_of("conv2d_hwcn", **SMALL), host, seeds=(0, 1, 2))
    assert [check.seed for check in checks] == [0, 1, 2]
    assert all(check.passed and check.route == "device" for check in checks)
    assert len({check.error for check in checks}) == 3


def test_without_a_gpu_the_other_routes_are_taken(emulation: None, sm_90a: Arch) -> None:
    from schedules.build.present import device_name

    if device_name(sm_90a):
        pytest.skip("there is an sm_90a GPU here")
    routes = [check.route for check in verify(problem_of("conv2d_hwcn", **SMALL), sm_90a)]
    assert routes[0] == "serial"
    assert {"emulated late forward", "emulated early reverse"} <= set(routes)
    with pytest.raises(UsageError, match="no device for cuda:sm_90a"):
        verify(problem_of("conv2d_hwcn", **SMALL), sm_90a, routes=["device"])


def test_routes_that_do_not_exist(host: Arch) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'serial'"):
        verify(problem_of("conv2d_hwcn", **SMALL), host, routes=["serail"])
    with pytest.raises(UsageError, match="emulator runs GPU code, not llvm"):
        verify(problem_of("conv2d_hwcn", **SMALL), host, routes=["emulated"])


def test_a_large_problem_is_verified_on_a_smaller_one(emulation: None, sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", **TUTORIAL)
    config = operator("conv2d_hwcn").schedule("simt").default(problem, sm_90a)
    smaller = reduced(problem, sm_90a, config, "emulated")
    assert smaller.flops <= EMULATED_FLOPS
    assert (smaller.kh, smaller.kw, smaller.pad) == (3, 3, (1, 1))
    assert smaller.n > 64 and smaller.co > 64  # a whole tile and a ragged one
    assert reduced(problem_of("conv2d_hwcn", **SMALL), sm_90a, config, "serial").n == SMALL["n"]


def test_a_wrong_function_is_found(host: Arch) -> None:
    problem = problem_of("conv2d_hwcn", **SMALL)
    built = build(problem, host)

    def off_by_one(*tensors: object) -> None:
        built(*tensors)
        out = tensors[-1]
        array = out.numpy()  # type: ignore[attr-defined]
        array[1, 2, 3, 0] += 0.01
        out.copyfrom(array)  # type: ignore[attr-defined]

    (check,) = verify_function(problem, host, off_by_one)
    assert not check.passed
    assert "wrong at (1, 2, 3, 0)" in check.detail


def test_an_unwritten_element_is_found(host: Arch) -> None:
    problem = problem_of("softmax", rows=4, cols=8)

    def nothing(*tensors: object) -> None:
        pass

    (check,) = verify_function(problem, host, nothing)
    assert not check.passed
    assert "got nan" in check.detail


def test_outputs_are_poisoned() -> None:
    outputs = poisoned(problem_of("softmax", rows=4, cols=8, keep=0.5))
    assert len(outputs) == 2
    assert all(np.all(np.isnan(output)) for output in outputs)


def test_an_illegal_config_is_refused_on_every_route(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", **SMALL)
    with pytest.raises(ConfigError, match="vthread"):
        verify(problem, sm_90a, "tutorial", {**TutorialConfig().to_json(), "tile": 3}, routes=["serial"])
    with pytest.raises(ConfigError, match="step=0"):
        verify(problem, sm_90a, "tutorial", TutorialConfig(step=0), routes=["serial"])


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["warp", "block_registers", "block_streaming", "split", "frames"])
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "softmax_grad", "log_softmax_grad"])
@pytest.mark.parametrize("cols", [1, 100, 257, 1000, 1024])
def test_softmax_on_the_gpu(gpu: Arch, schedule: str, function: str, cols: int) -> None:
    for fields in ({}, {"dtype": "float32"}, {"keep": 0.8, "scale": 0.5}):
        problem = problem_of("softmax", rows=1003, cols=cols, function=function, **fields)
        for check in verify(problem, gpu, schedule, routes=["device"], seeds=(0, 1)):
            assert check.passed, check.detail


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [4096, 16384, 50257, 100000])
def test_long_rows_on_the_gpu(gpu: Arch, cols: int) -> None:
    for function in ("softmax", "log_softmax_grad"):
        (check,) = verify(problem_of("softmax", rows=300, cols=cols, function=function), gpu, routes=["device"])
        assert check.passed, check.detail


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 132])
@pytest.mark.parametrize("cols", [50257, 2**20])
def test_few_long_rows_on_the_gpu(gpu: Arch, rows: int, cols: int) -> None:
    for function in ("softmax", "log_softmax_grad"):
        problem = problem_of("softmax", rows=rows, cols=cols, function=function)
        for check in verify(problem, gpu, "split", routes=["device"], seeds=(0, 1)):
            assert check.passed, check.detail


@pytest.mark.gpu
def test_split_rows_of_more_than_two_to_the_16_on_the_gpu(gpu: Arch) -> None:
    (check,) = verify(problem_of("softmax", rows=70000, cols=3000), gpu, "split", routes=["device"])
    assert check.passed, check.detail


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements_on_the_gpu(gpu: Arch) -> None:
    (check,) = verify(problem_of("softmax", rows=49152, cols=50257), gpu, routes=["device"])
    assert check.passed, check.detail


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fields", [SMALL, dict(n=100, h=5, w=7, ci=13, co=30, kh=3, kw=2, pad=1, stride=2), TUTORIAL], ids=str
)
def test_convolution_on_the_gpu(gpu: Arch, fields: dict) -> None:
    (check,) = verify(problem_of("conv2d_hwcn", **fields), gpu, routes=["device"])
    assert check.passed, check.detail
