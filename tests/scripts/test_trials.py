"""What the last measure tells becomes trials once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.layer_case import layer_named
from benchmarks.peers.layers import UNSEEN, layers_of
from schedules.core.arch import parse_arch
from schedules.core.registry import operator
from scripts.fit_choice import known
from scripts.trials import REVISIONS, Revision, measured, read
from tests.conftest import problem_of

LOGS = Path(__file__).parents[2] / "tuning_logs"
FOLDER = LOGS / "nvidia-h200"
UNSEEN_SETS = json.loads(UNSEEN.read_text())["sets"]


@pytest.mark.parametrize("folder", sorted({file.parents[1].name for file in LOGS.glob("*/layers/*.xz")}))
def test_the_last_measure_is_among_the_trials(folder: str) -> None:
    assert measured(LOGS / folder / "layers.json", known(LOGS / folder)[1]) == ""


def is_legal(row: dict[str, Any]) -> bool:
    """Whether what was measured is still a config of its schedule."""
    config = operator(row["operator"]).schedule(row["schedule"]).config.parse(row["config"])
    problem = layer_named(row["set"], row["operator"], row["dtype"], row["layer"]).problem
    return config.check(problem, parse_arch("cuda:sm_90a")) is None


def test_what_is_no_config_any_more_is_left_out(tmp_path: Path) -> None:
    told = json.loads((FOLDER / "layers.json").read_text())
    row = next(row for row in told["layers"] if row["schedule"] == "tma_wgmma" and row["operator"] == "conv2d_nhwc")
    file = tmp_path / "layers.json"
    for stages, count in ((row["config"]["num_stages"], 2), (1000, 0)):
        file.write_text(json.dumps({**told, "layers": [row | {"config": row["config"] | {"num_stages": stages}}]}))
        assert len(measured(file, []).splitlines()) == count


def test_nothing_is_learned_of_unseen_layers(tmp_path: Path) -> None:
    told = json.loads((FOLDER / "layers.json").read_text())
    row = next(row for row in told["layers"] if row["set"] == "ResNet-50" and row["operator"] == "conv2d_nchw")
    file = tmp_path / "layers.json"
    for name, count in (("ResNet-50", 2), (next(iter(UNSEEN_SETS)), 0)):
        file.write_text(json.dumps({**told, "layers": [row | {"set": name}]}))
        assert len(measured(file, []).splitlines()) == count


def test_no_unseen_layer_has_trials() -> None:
    unseen = {layer.problem for layer in layers_of(UNSEEN)}
    tried = {layer.problem for layer in known(FOLDER)[1]}
    assert len(unseen) > 200 and not unseen & tried


def test_what_was_measured_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "new.jsonl"
    file.write_text(measured(FOLDER / "layers.json", []))
    header, layers = read(file)
    rows: dict[Any, list[float]] = {}  # the times of a layer, which may be of several sets
    for row in json.loads((FOLDER / "layers.json").read_text())["layers"]:
        if "us" in row and is_legal(row) and row["set"] not in UNSEEN_SETS:
            rows.setdefault((row["operator"], row["dtype"], row["layer"]), []).append(row["us"])
    assert header["device"] == "NVIDIA H200" and len(layers) == len(rows)
    assert {layer.best for layer in layers} <= {us for times in rows.values() for us in times}
    alone = [times[0] for times in rows.values() if len(times) == 1]
    assert len(alone) > 400 and {*alone} <= {layer.best for layer in layers}
    assert not measured(FOLDER / "layers.json", layers)


def kept(file: Path, cudnn: dict[int, float], us: dict[int, float]) -> Path:
    """A file of trials of 1x1 layers with so many channels: cuDNN's time of each, and ours."""
    config = {"block_m": 64, "block_n": 64, "block_k": 64, "warps_m": 2, "warps_n": 2, "stages": 3, "min_blocks": 0}
    header = {"target": "cuda:sm_90a", "device": "A GPU", "fields": {"conv2d_nhwc.mma": list(config)}}
    lines = [json.dumps(header)]
    for ci, time in us.items():
        p = f"n=8 h=14 w=14 ci={ci} co=64 kh=1 kw=1 dtype=float16"
        trial = ["mma", list(config.values()), time]
        lines.append(json.dumps({"op": "conv2d_nhwc", "p": p, "set": "made up", "cudnn": cudnn.get(ci), "t": [trial]}))
    file.write_text("\n".join([*lines, ""]))
    return file


def test_times_are_brought_to_the_first_files_host(tmp_path: Path) -> None:
    """By what cuDNN's short layers differ; long ones tell nothing of a launch."""
    shared = range(64, 64 + 64 * 5, 64)
    slow = kept(tmp_path / "a.jsonl", {ci: 8.0 for ci in shared} | {640: 90.0}, {ci: 9.0 for ci in [*shared, 640]})
    here = {ci: 6.5 for ci in shared} | {640: 50.0, 704: 5.0}
    fast = kept(tmp_path / "b.jsonl", here, {704: 7.0, 640: 60.0, **{ci: 7.25 for ci in shared}})
    layers = {layer.problem.to_json()["ci"]: layer for layer in read(slow, fast)[1]}
    assert (layers[704].best, layers[704].cudnn) == (8.5, 6.5)
    assert {layers[ci].best for ci in shared} == {8.75} and layers[640].best == 61.5
    # of too few of cuDNN's, our own kernels tell too
    few = {ci: time for ci, time in here.items() if ci not in (64, 128)}
    apart = kept(tmp_path / "c.jsonl", few, {ci: 7.0 for ci in here})
    assert {layer.problem.to_json()["ci"]: layer.best for layer in read(slow, apart)[1]}[704] == 9.0


def test_a_file_waits_for_those_that_it_shares_enough_with(tmp_path: Path) -> None:
    """In whatever order they stand; one that shares with none is of the host of the file before it."""
    one, two, three = (range(start, start + 64 * 5, 64) for start in (64, 1088, 2112))
    cudnn = {
        "a": dict.fromkeys(one, 8.0),
        "b": dict.fromkeys(three, 5.0),
        "c": dict.fromkeys(two, 6.0),
        "d": dict.fromkeys((*one, *two), 7.0),
        "e": {4096: 5.0},
    }
    files = [kept(tmp_path / f"{name}.jsonl", each, dict.fromkeys(each, 9.0)) for name, each in cudnn.items()]
    layers = {layer.problem.to_json()["ci"]: layer for layer in read(*files)[1]}
    # d is a us faster than a, and c one faster than d
    told = {ci: layers[ci].cudnn for ci in (64, 2112, 1088, 4096)}
    assert told == {64: 8.0, 2112: 5.0, 1088: 8.0, 4096: 6.0}
    assert [layers[ci].best for ci in (64, 2112, 1088, 4096)] == [10.0, 9.0, 10.0, 10.0]


def test_a_host_is_of_its_device(tmp_path: Path) -> None:
    """A file that shares nothing follows the one of its device before it, not another device's that is nearer."""
    shared = range(64, 64 + 64 * 5, 64)
    cudnn = {"a": {4096: 5.0}, "b": dict.fromkeys(shared, 8.0), "c": dict.fromkeys(shared, 7.0), "d": {2048: 5.0}}
    files = [kept(tmp_path / f"{name}.jsonl", each, dict.fromkeys(each, 9.0)) for name, each in cudnn.items()]
    for file, device in zip(files, ("H200", "H100 80GB HBM3", "H100 80GB HBM3", "H200"), strict=True):
        file.write_text(file.read_text().replace("A GPU", f"NVIDIA {device}"))
    best = {layer.problem.to_json()["ci"]: layer.best for layer in read(*files)[1]}
    assert best == {4096: 9.0, 2048: 9.0, **dict.fromkeys(shared, 10.0)}


def test_a_layer_of_two_devices_is_two(tmp_path: Path) -> None:
    """Each with its own device's rates; a launch there tells nothing of one here."""
    files = []
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        file = kept(tmp_path / f"{len(files)}.jsonl", {64: 8.0 + len(files)}, {64: 9.0})
        file.write_text(file.read_text().replace("A GPU", name))
        files.append(file)
    layers = read(*files)[1]
    assert [layer.arch.device.name for layer in layers] == ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]
    assert [layer.best for layer in layers] == [9.0, 9.0]


@pytest.mark.parametrize(
    "revision, concerned, other",
    [
        (REVISIONS[0], dict(h=15, w=15), dict(h=14, w=14)),
        (REVISIONS[1], dict(h=16, w=16, stride="2"), dict(h=16, w=16)),
        (REVISIONS[2], dict(h=14, w=14, stride="2"), dict(h=14, w=14)),
        (REVISIONS[3], dict(h=16, w=16, kh=3, kw=3, stride="2"), dict(h=16, w=16, kh=3, kw=3)),
        (REVISIONS[4], dict(h=7, w=7), dict(h=13, w=13)),
        (REVISIONS[4], dict(h=14, w=14), dict(h=16, w=16)),
        (REVISIONS[5], dict(h=14, w=14, residual=True), dict(h=16, w=16, residual=True)),
        (REVISIONS[6], dict(h=16, w=16, residual=True), dict(h=16, w=16)),
    ],
    ids=lambda each: getattr(each, "schedule", str(each)),
)
def test_a_kernel_that_changed_has_its_trials_of_before_revised(
    tmp_path: Path, revision: Revision, concerned: dict[str, Any], other: dict[str, Any]
) -> None:
    """Those of the problems that it concerns, in files of before."""
    spec = operator(revision.operator).schedule(revision.schedule)
    words: dict[str, Any] = dict(block_m=64, block_n=64, block_k=32, num_stages=2, consumers=1, cluster_m=1)
    if revision.schedule == "tma_wgmma_boxes":
        words["row"] = False
    if revision.schedule == "tma_wgmma_images":  # which tiles hold
        words |= dict(block_m=384, block_n=32, consumers=3)
    config = spec.config(**words).to_json(True)
    header = {"target": "cuda:sm_90a", "device": "A GPU", "fields": {f"{revision.operator}.{spec.name}": list(config)}}
    lines = [json.dumps(header)]
    for fields in (concerned, other):
        p = " ".join(f"{name}={value}" for name, value in {**dict(n=8, ci=64, co=64, kh=1, kw=1), **fields}.items())
        trial = [spec.name, list(config.values()), 10.0]
        line = {"op": revision.operator, "p": f"{p} dtype=float16", "set": "made up", "cudnn": None, "t": [trial]}
        lines.append(json.dumps(line))
    for name, revised in (("2026-11-29-a.jsonl", True), (f"{revision.before}-carried.jsonl", False)):
        file = tmp_path / name
        file.write_text("\n".join([*lines, ""]))
        changed, same = (layer.best for layer in read(file)[1])
        assert same == 10.0 and changed == (10.0 * revision.factor if revised else 10.0)


@pytest.mark.parametrize("ci, factor", [(15, 0.961), (16, 0.755)])
def test_windows_of_long_filters_became_faster_by_more(ci: int, factor: float) -> None:
    problem = problem_of("conv2d_nhwc", n=8, h=16, w=16, ci=ci, co=64, kh=5, kw=5, dtype="float16")
    own = [each for each in REVISIONS if (each.operator, each.schedule) == ("conv2d_nhwc", "mma_windows")]
    assert [each.factor for each in own if each.concerns(problem)] == [factor]
