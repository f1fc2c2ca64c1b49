from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers import ceilings
from benchmarks.peers.ceilings import ARITHMETICS, matmul, measure_ceilings
from schedules.core.device import DEVICES
from tests.benchmarks.peers import fake_torch
from tests.benchmarks.peers.fake_timer import FakeTimer


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake_torch.install(monkeypatch)
    monkeypatch.setattr(ceilings, "EXTENT", 4)
    return fake_torch.module


def test_products_are_timed_in_every_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = FakeTimer()
    taken = {"float16": 2.0, "int8": 1.0, "tf32": 4.0, "float32": 8.0}

    def product(arithmetic: str) -> Any:
        if arithmetic not in taken:
            raise RuntimeError("no such product\nat all")
        return timer.function(arithmetic, taken[arithmetic])

    monkeypatch.setattr(ceilings, "matmul", product)
    found = measure_ceilings(timer, 0.001)
    assert list(found) == list(ARITHMETICS)
    assert found["bfloat16"] == {"failed": "RuntimeError: no such product"}
    assert found["int8"]["us"] == 1.0 and found["int8"]["extent"] == 4
    monkeypatch.setattr(ceilings, "EXTENT", 8192)
    assert measure_ceilings(timer, 0.001)["float32"]["tflops"] == pytest.approx(2 * 8192**3 / 8e6, abs=0.1)


@pytest.mark.parametrize("arithmetic", ["float16", "int8", "tf32", "float32"])
def test_a_product(torch: Any, arithmetic: str) -> None:
    call = matmul(arithmetic)
    torch.backends.cuda.matmul.allow_tf32 = arithmetic != "tf32"
    result: Any = call()
    assert result.shape == (4, 4) and result.dtype == {"tf32": "float32"}.get(arithmetic, arithmetic)
    if arithmetic in ("tf32", "float32"):
        assert torch.backends.cuda.matmul.allow_tf32 == (arithmetic == "tf32")


def test_the_peaks_are_those_of_the_datasheet() -> None:
    for peaks in (device.peaks for device in DEVICES.values()):
        assert set(peaks) <= set(ARITHMETICS)
        assert peaks["int8"] >= peaks["float16"] >= peaks.get("tf32", 0) and peaks["float16"] > peaks["float32"]
        assert peaks.get("bfloat16") in (None, peaks["float16"])


@pytest.mark.gpu
def test_products_on_the_device(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from schedules.measure.timer import CudaTimer

    with CudaTimer() as timer:
        found = measure_ceilings(timer, 0.1)
    assert all(words.get("tflops", 0) > 1 for words in found.values()), found
