from __future__ import annotations

import importlib.util

import pytest

from benchmarks.peers import cudnn
from schedules.core.errors import ToolchainError
from tests.benchmarks.peers import fake_cudnn, fake_torch


def test_without_pytorch_the_remedy_is_named() -> None:
    if importlib.util.find_spec("torch"):
        pytest.skip("PyTorch is installed")
    with pytest.raises(ToolchainError, match="pip install 'te-schedules"):
        cudnn.torch_module()
    with pytest.raises(ToolchainError, match="pip install 'te-schedules"):
        cudnn.library()


def test_the_handle_follows_pytorchs_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch.install(monkeypatch)
    library = fake_cudnn.install(monkeypatch)
    one = cudnn.handle()
    with fake_torch.on_stream(fake_torch.Stream(5)):
        assert cudnn.handle() is one
    assert library.streams == [None, 5]  # a null pointer is the default stream
    cudnn._handle.cache_clear()


def test_a_status_is_raised_in_cudnns_words(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cudnn.install(monkeypatch)
    cudnn.ok(0)
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED"):
        cudnn.ok(fake_cudnn.NOT_SUPPORTED)
    cudnn._handle.cache_clear()
