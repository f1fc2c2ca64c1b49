"""The script's own part: arguments, and a run with a layer that is a fake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import bench, layer_case
from benchmarks.peers.layer_case import Layer, Prebuilt, Served, served
from benchmarks.peers.layers import read_layers
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import DeviceError, UsageError
from schedules.operators.conv2d_nhwc.cpu import CpuConfig
from tests.benchmarks.peers import fake_torch


@pytest.fixture(scope="module")
def compare_layers() -> ModuleType:
    return import_module("benchmarks.compare_layers")


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    file = tmp_path / "sets.json"
    texts = [f"{n}x5x5 4->8 3x3" for n in range(1, 6)]
    file.write_text(json.dumps({"runs": {"conv2d_nhwc float32": 1, "conv2d_nchw float32": 2}, "sets": {"net": texts}}))
    return file


@pytest.mark.parametrize(
    "words, message",
    [
        ("--step 0", "--step, --jobs and --every must be at least 1"),
        ("--every 0", "--step, --jobs and --every must be at least 1"),
        ("--each 0", "over 0"),
        ("none.json", "cannot read .*none.json"),
        ("--add none.json", "cannot read none.json"),
        ("--picture some.png --log nowhere", r"nowhere has no \*/layers.json"),
    ],
)
def test_mistakes_are_one_line(
    compare_layers: ModuleType, monkeypatch: pytest.MonkeyPatch, host: Arch, words: str, message: str
) -> None:
    monkeypatch.setattr(compare_layers, "local_gpu", lambda: host)
    monkeypatch.setattr(bench, "versions_here", lambda arch: {})
    with pytest.raises(UsageError, match=message) as raised:
        compare_layers.main(words.split())
    assert "\n" not in str(raised.value)


def test_which_layers(compare_layers: ModuleType, sets: Path) -> None:
    def batches(*words: str) -> list[int]:
        return [
            layer.problem.n for layer in compare_layers.chosen_layers(compare_layers.arguments([str(sets), *words]))
        ]

    assert sorted(batches()) == [1, 1, 2, 3, 3, 4, 5, 5]
    assert batches("--only", "conv2d_nhwc *") == [1, 3, 5, 2, 4]  # the first of them are from everywhere
    assert batches("--only", "conv2d_nchw *") == [1, 5, 3] and batches("--only", "* float16") == []
    assert batches("--every", "4") == [1, 1, 5, 5]
    assert sorted(batches("--step", "2") + batches("--step", "2", "--start", "1")) == sorted(batches())
    assert batches("--runs", "conv2d_hwcn float32", "--every", "3") == [1, 4]
    assert len(compare_layers.chosen_layers(compare_layers.arguments([]))) > 300  # those that are here


BUILT_AHEAD = import_module("benchmarks.compare_layers").built_ahead
MADE = Prebuilt(Path("layer.so"), "cpu", {}, (), 0.5)


class Device:
    """What is set for a batch is raised by its layer; `batches` are those that were run."""

    def __init__(self) -> None:
        self.faults: dict[int, Exception] = {}
        self.batches: list[int] = []


@pytest.fixture
def device(compare_layers: ModuleType, monkeypatch: pytest.MonkeyPatch, host: Arch) -> Device:
    """This CPU in place of a GPU; nothing is built, and a batch of 5 cannot be."""
    found = Device()

    def run_layer(layer: Layer, arch: Arch, made: Prebuilt, *_: Any) -> dict[str, Any]:
        if fault := found.faults.pop(layer.problem.n, None):
            raise fault
        found.batches.append(layer.problem.n)
        return {**layer.to_json(), "us": 1.0, "cudnn": 2.0, "schedule": made.schedule, "first_s": made.seconds}

    def built_ahead(
        layers: list[Layer], arch: Arch, jobs: int, schedule: str | None
    ) -> Iterator[tuple[Layer, Any, str]]:
        for layer in layers:
            yield layer, *((None, "BuildError: no") if layer.problem.n == 5 else (MADE, ""))

    monkeypatch.setattr(compare_layers, "local_gpu", lambda: host)
    monkeypatch.setattr(compare_layers, "built_ahead", built_ahead)
    monkeypatch.setattr(compare_layers, "device_name", lambda arch: "Some GPU")
    monkeypatch.setattr(compare_layers, "CudaTimer", nullcontext)
    monkeypatch.setattr(compare_layers, "torch_module", lambda: fake_torch.module)
    monkeypatch.setattr(layer_case, "run_layer", run_layer)
    monkeypatch.setattr(bench, "versions_here", lambda arch: {"torch": "2"})
    return found


def test_layers_are_built_by_other_processes(compare_layers: ModuleType, host: Arch, sets: Path) -> None:
    (layer, made, why), *_ = compare_layers.built_ahead(compare_layers.layers_of(sets)[:1], host, 1)
    assert layer.problem.n == 1 and made.schedule == "cpu" and made.seconds > 0 and not why


def test_a_schedule_by_name_has_the_layers_that_it_takes(
    compare_layers: ModuleType, device: Device, tmp_path: Path
) -> None:
    sets = tmp_path / "sets.json"
    texts = ["1x5x5 24->8 3x3", "2x5x5 24->8 1x1", "3x5x5 24->8 3x3 stride 2", "4x5x5 24->8 3x3 dilation 2"]
    sets.write_text(json.dumps({"runs": {"conv2d_nhwc float32": 1}, "sets": {"net": texts}}))
    words = [str(sets), "--log", str(tmp_path), "--schedule", "winograd_cpu"]
    assert compare_layers.main(words) == 0
    assert sorted(device.batches) == [1, 3, 4]
    assert len(read_layers(tmp_path / "some-gpu" / "layers_winograd_cpu.json")["layers"]) == 3
    (layer, *_) = compare_layers.layers_of(sets)
    ((_, made, why),) = BUILT_AHEAD([layer], parse_arch("llvm"), 1, "winograd_cpu")
    assert made.schedule == "winograd_cpu" and not why


def test_what_the_benchmark_mode_serves_is_kept_apart(
    compare_layers: ModuleType, device: Device, sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers at once; one that has no kernel is told, and the others go on."""
    together: list[int] = []

    def serve(layers: list[Layer]) -> list[tuple[Served | None, str]]:
        together.append(len(layers))
        made = SimpleNamespace(made=f"cpu {CpuConfig(block_x=3)} for llvm")
        return [(None, "no") if layer.problem.n == 5 else (served(layer, made, 0.5), "") for layer in layers]

    monkeypatch.setattr(layer_case, "served_in_benchmark_mode", serve)
    monkeypatch.setattr(compare_layers, "TOGETHER", 3)
    words = [str(sets), "--only", "conv2d_nhwc *", "--log", str(tmp_path), "--benchmark"]
    assert compare_layers.main(words) == 0
    assert together == [3, 2] and sorted(device.batches) == [1, 2, 3, 4]
    rows = read_layers(tmp_path / "some-gpu" / "layers_benchmark.json")["layers"]
    assert {row.get("schedule") for row in rows} == {"cpu", None} and len(rows) == 5
    assert not (tmp_path / "some-gpu" / "layers.json").exists()


def test_a_schedule_is_not_what_the_mode_serves(compare_layers: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_layers.arguments(["--benchmark", "--schedule", "winograd"])
    assert "not allowed with argument --benchmark" in capsys.readouterr().err


def test_a_served_kernel_tells_its_config(sets: Path) -> None:
    (layer, *_) = import_module("benchmarks.compare_layers").layers_of(sets)
    made = served(layer, SimpleNamespace(made=f"cpu {CpuConfig(block_x=3)} for llvm"), 0.5)
    assert made.schedule == "cpu" and made.config == CpuConfig(block_x=3).to_json() and made.seconds == 0.5


def test_a_run_that_the_device_ends_goes_on_where_it_was(
    compare_layers: ModuleType, device: Device, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(sets), "--only", "conv2d_nhwc *", "--log", str(tmp_path)]
    device.faults = {2: fake_torch.OutOfMemoryError("no room"), 3: RuntimeError("illegal address")}
    with pytest.raises(DeviceError, match="illegal address; the same command goes on"):
        compare_layers.main(words)
    assert compare_layers.main(words) == 0
    assert sorted(device.batches) == [1, 4]
    found = read_layers(tmp_path / "some-gpu" / "layers.json")
    told = [row.get("failed", row.get("us")) for row in sorted(found["layers"], key=lambda row: row["layer"])]
    assert told == [1.0, "OutOfMemoryError: no room", "RuntimeError: illegal address", 1.0, "BuildError: no"]
    assert "mean 2.00  least 2.00  ahead 100%" in capsys.readouterr().out
    assert compare_layers.main([*words, "--seconds", "1e-9", "--fresh"]) == 0
    assert sorted(device.batches) == [1, 4] and "out of time; 5 layers are left" in capsys.readouterr().out


def test_shares_are_added_and_drawn(
    compare_layers: ModuleType, device: Device, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    parts = [tmp_path / f"part-{start}.json" for start in (0, 1)]
    for start, part in enumerate(parts):
        words = ["--step", "2", "--start", str(start), "--out", str(part)]
        compare_layers.main([str(sets), "--only", "conv2d_nchw *", *words])
    assert compare_layers.main(["--add", *map(str, parts), "--log", str(tmp_path / "log")]) == 0
    assert "3 in" in capsys.readouterr().out and sorted(device.batches) == [1, 3]
    image = tmp_path / "layers.png"
    assert compare_layers.main(["--picture", str(image), "--log", str(tmp_path / "log")]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
