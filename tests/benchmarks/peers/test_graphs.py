from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tvm_ffi

from benchmarks.peers.graphs import WARM_UP, captured, tvm_stream
from schedules.core.errors import DeviceError
from tests.benchmarks.peers import fake_torch
from tests.benchmarks.peers.fake_torch import Machine, Tensor, tensor


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return fake_torch.install(monkeypatch)


class Work:
    """A call that writes sevens, and takes down the streams that it was launched on."""

    def __init__(self, machine: Machine, dtype: Any = np.float16) -> None:
        self.machine, self.output = machine, tensor(np.zeros(4, dtype))
        self.streams: list[tuple[int, int]] = []

    def __call__(self) -> Sequence[Tensor]:
        tvms = tvm_ffi.get_raw_stream(tvm_ffi.device("cuda:0"))
        self.streams.append((self.machine.stream.cuda_stream, tvms))
        self.machine.launch(self._write)
        return [self.output]

    def _write(self) -> None:
        self.output[...] = 7


@pytest.mark.parametrize("dtype", [np.float16, np.int8])
def test_a_replay_does_what_was_captured(machine: Machine, dtype: Any) -> None:
    work = Work(machine, dtype)
    replay = captured(work)
    assert work.streams == [(77, 77)] * (WARM_UP + 1)  # PyTorch's and TVM's, which is the captured one
    work.output[...] = 0
    (output,) = replay()
    assert output is work.output and (output == 7).all()
    assert len(work.streams) == WARM_UP + 1  # a replay calls nothing


@pytest.mark.parametrize("dtype", [np.float16, np.int8])
def test_a_graph_that_lacks_the_call_is_refused(machine: Machine, dtype: Any) -> None:
    machine.launches_elsewhere = True
    with pytest.raises(DeviceError, match="launched on another stream"):
        captured(Work(machine, dtype))


def test_a_call_that_cannot_be_captured_says_why_and_leaves_the_streams(machine: Machine) -> None:
    work = Work(machine)

    def call() -> Sequence[Tensor]:
        if machine.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\na trace")
        return work()

    def broken(graph: Any) -> None:
        machine.capturing = None
        raise RuntimeError("a capture that was broken says so again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_torch.CUDAGraph, "capture_end", broken)
        with pytest.raises(
            DeviceError, match="not captured in a CUDA graph: RuntimeError: operation not permitted"
        ) as e:
            captured(call)
    assert "\n" not in str(e.value)
    assert machine.stream.cuda_stream == 0 and tvm_ffi.get_raw_stream(tvm_ffi.device("cuda:0")) == 0
    assert captured(work)()  # the next one can be


def test_tvms_stream_is_that_of_the_block_alone() -> None:
    device = tvm_ffi.device("cuda:0")
    with pytest.raises(ValueError), tvm_stream(1234):
        assert tvm_ffi.get_raw_stream(device) == 1234
        raise ValueError
    assert tvm_ffi.get_raw_stream(device) == 0
