from __future__ import annotations

import importlib.util

import pytest

from schedules.arch import Arch
from schedules.errors import ToolchainError
from schedules.measure import time_cuda
from schedules.peers import cudnn
from tests.conftest import problem_of

FIELDS = dict(n=8, h=14, w=14, ci=64, co=64, kh=3, kw=3, pad=1)


def test_without_pytorch_the_remedy_is_named() -> None:
    if importlib.util.find_spec("torch"):
        pytest.skip("PyTorch is installed")
    with pytest.raises(ToolchainError, match="pip install 'te-schedules"):
        cudnn.convolution(problem_of("conv2d_hwcn", **FIELDS), channels_last=True)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [True, False])
def test_convolution_runs(gpu: Arch, channels_last: bool) -> None:
    call = cudnn.convolution(problem_of("conv2d_hwcn", **FIELDS), channels_last)
    assert all(us > 0 for us in time_cuda(lambda: call() and None, 0.02))


@pytest.mark.gpu
def test_int8_runs(gpu: Arch) -> None:
    calls = cudnn.int8_convolutions(problem_of("conv2d_hwcn", **FIELDS))
    assert calls and all(us > 0 for us in time_cuda(lambda: calls[0]() and None, 0.02))
