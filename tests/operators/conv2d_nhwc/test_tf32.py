"""NHWC convolution of float32 in TF32: the kernel of `tma_wgmma`, whose operands are rounded as they are loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.check.verify import MODES, emulated_runs, judge, poisoned
from schedules.core.arch import Arch
from schedules.core.arithmetic import FLOAT32
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from tests.conftest import problem_of
from tests.hopper_kernels import assert_correct_on, assert_well_made, to_tf32

WORK: dict[str, Any] = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1, dtype="float32")
SHAPES: dict[str, dict[str, Any]] = {
    "ragged, stride 2": dict(
        n=3, h=7, w=6, ci=20, co=44, kh=3, kw=2, pad=1, stride=2, dilation="1,2", bias=True, activation="relu"
    ),
    "whole tiles": dict(n=4, h=8, w=8, ci=64, co=128, kh=3, kw=3, pad=1),
}


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    words = dict(block_m=128, block_n=256, block_k=32, num_stages=4, consumers=2, cluster_m=2, grid=132)
    built = build(problem_of("conv2d_nhwc", **WORK), sm_90a, "tf32", words)
    assert_well_made(built, "HGMMA")
    source = str(built.sources["cu"])
    assert "wgmma.mma_async.sync.aligned.m64n256k8.f32.tf32.tf32" in source and ", p, 1, 1;" in source
    assert len(built.resources) == 1


def test_rounding_is_all_that_is_lost(emulation: None, sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nhwc", **SHAPES["ragged, stride 2"])
    built = build(problem, sm_90a, "tf32", device_code=False)
    data, weight, bias = built.operator.inputs(problem, np.random.default_rng(0))
    for _, run in emulated_runs(built, str(built.sources["cu"]), MODES):
        outputs = run([data, weight, bias, *poisoned(problem)])
        rounded = judge(problem, [to_tf32(data), to_tf32(weight), bias], outputs, arithmetic=FLOAT32)
        assert rounded.passed, rounded
    assert not judge(problem, [data, weight, bias], outputs, arithmetic=FLOAT32).passed


def test_what_it_refuses(sm_90a: Arch) -> None:
    op = operator("conv2d_nhwc")
    spec = op.schedule("tf32")
    assert spec.opt_in and op.choose(problem_of("conv2d_nhwc", **WORK), sm_90a) == "winograd"
    for fields, reason in (
        (dict(ci=6), "ci=6 is not a multiple of 4, which TMA needs"),
        (dict(co=6), "co=6 is not a multiple of 4, which TMA needs"),
        (dict(dtype="float16"), "dtype=float16 is not float32"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nhwc", **WORK | fields), sm_90a)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_device(gpu: Arch, shape: str) -> None:
    assert_correct_on(gpu, "conv2d_nhwc", SHAPES[shape], {}, "tf32")
