"""Results on their way through staging memory: no step can be left out."""

from __future__ import annotations

import re

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch
from tests.conftest import caught, problem_of
from tests.hopper.test_exchange import PROBLEM, WORDS


@pytest.mark.parametrize("call", ["tvm_builtin_ptx_bar_sync_count_sync", "hopper_copy_16"])
def test_a_missing_step_is_noticed(emulation: None, sm_90a: Arch, call: str) -> None:
    words = WORDS | dict(split_k=1, grid=132)
    built = build(problem_of("conv2d_nhwc", **PROBLEM), sm_90a, "tma_wgmma", words, device_code=False)
    source, arrays = str(built.sources["cu"]), built.operator.inputs(built.problem, np.random.default_rng(0))
    without, count = re.subn(rf"^ +{call}\(.*;$", "", source, flags=re.M)
    assert count and not caught(built, source, arrays) and caught(built, without, arrays)
