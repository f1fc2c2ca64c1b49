"""A layer from end to end on this CPU, PyTorch and cuDNN being fakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import cudnn
from benchmarks.peers.comparison import STREAM
from benchmarks.peers.layer_case import Layer, layer_named, prebuild, random_tensors, run_layer
from schedules.core.arch import Arch
from schedules.core.errors import SchedulesError
from tests.benchmarks.peers import fake_cudnn, fake_torch
from tests.benchmarks.peers.fake_device import Clock

TEXT = "3x7x6 5->9 3x2 stride 2,1 pad 1,0 dilation 1,2"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = fake_torch.install(monkeypatch)
    fake_cudnn.install(monkeypatch)
    yield found
    cudnn._handle.cache_clear()


def test_a_layer_is_written_as_it_is_read() -> None:
    for text in (TEXT, "16x56x56 64->256 3x3 stride 2", "1x4x4 1->1 1x1", "2x9x9 3->4 5x5 pad 0"):
        layer = layer_named("some", "conv2d_nhwc", "float16", text)
        assert layer.to_json() == {"set": "some", "operator": "conv2d_nhwc", "dtype": "float16", "layer": text}
    p = layer_named("some", "conv2d_nhwc", "float16", "16x56x55 64->256 3x5 stride 2").problem
    assert (p.n, p.h, p.w, p.ci, p.co, p.kh, p.kw, p.stride, p.pad) == (16, 56, 55, 64, 256, 3, 5, (2, 2), (1, 2))


@pytest.mark.parametrize("text", ["16x56 64->256 3x3", "16x56x56 64->256 3x3 strides 2", "1x2x2 8->8 5x5 pad 0", ""])
def test_what_is_no_layer(text: str) -> None:
    with pytest.raises(SchedulesError) as raised:
        layer_named("some", "conv2d_nhwc", "float16", text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "operator, dtype",
    [("conv2d_nhwc", "float16"), ("conv2d_nchw", "float32"), ("conv2d_hwcn", "float16"), ("conv2d_nchw32", "int8")],
)
def test_the_default_is_built_verified_and_timed(
    machine: Any, host: Arch, tmp_path: Path, operator: str, dtype: str
) -> None:
    layer = layer_named("some", operator, dtype, TEXT)
    made = prebuild(layer.problem, host, tmp_path / "layer.so")
    row = run_layer(layer, host, made, Clock(), 0.001, STREAM, copy=dtype == "int8")
    assert ("copy" in row) == (dtype == "int8")
    assert row.items() >= {**layer.to_json(), "schedule": "cpu", "first_s": round(made.seconds, 2)}.items()
    assert row["us"] > 0 and row["cudnn"] > 0 and ("direct" in row) == (dtype == "float32")
    assert fake_torch.module.backends.cudnn.benchmark_limit == 0
    assert not any(seen["tf32"] for seen in machine.convolutions)


def test_what_is_wrong_is_not_timed(machine: Any, host: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_named("some", "conv2d_nhwc", "float16", TEXT)
    other = replace(layer.problem, pad=(0, 1), h=layer.problem.h + 2, w=layer.problem.w - 2)  # of the same output
    assert other.arguments()[-1].shape == layer.problem.arguments()[-1].shape
    made = prebuild(layer.problem, host, tmp_path / "layer.so")
    from schedules.build import library

    right = library.load_library(made.library, host)

    def wrong(data: Any, weight: Any, output: Any) -> None:
        right(data, weight, output)
        np.from_dlpack(output)[0, 0, 0, 0] += np.float16(0.5)

    monkeypatch.setattr(library, "load_library", lambda library, arch: wrong)
    row = run_layer(layer, host, made, Clock(), 0.001, STREAM)
    assert row["failed"].startswith("wrong: ") and "us" not in row


def test_channels_that_fill_up_a_group_are_zeros(machine: Any) -> None:
    layer = layer_named("some", "conv2d_nchw32", "int8", TEXT)
    tensors = random_tensors(layer.problem)
    assert tensors["data"].any() and not tensors["data"][..., 5:].any()
    assert not tensors["filter"][..., 5:].any() and not tensors["filter"][..., 9:, :].any()
    assert tensors["filter"][..., :9, :5].all()
    assert Layer("some", layer.problem) == layer
