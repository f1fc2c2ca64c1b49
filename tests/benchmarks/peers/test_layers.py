from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.layers import (
    FOLDER,
    UNSEEN,
    Layers,
    by_set,
    copies,
    dated,
    layers_of,
    lines,
    measured_on,
    picture,
    read_layers,
    summary,
    worst,
)
from schedules.core.errors import UsageError

VERSIONS = {"torch": "2"}


def row(name: str, us: float, cudnn: float, **more: Any) -> dict[str, Any]:
    words = {"set": "net", "operator": "conv2d_nhwc", "dtype": "float16", "layer": name, "schedule": "mma"}
    return {**words, "us": us, "cudnn": cudnn, "first_s": 0.5, **more}


ROWS = [
    row("a", 1.0, 4.0),
    row("b", 1.0, 1.0),
    row("c", 2.0, 1.0, set="other"),
    row("d", 10.0, 5.0, operator="conv2d_nchw"),
    row("e", 10.0, 5.0, dtype="float32", direct=20.0),
    {"set": "net", "operator": "conv2d_nhwc", "dtype": "float16", "layer": "f", "failed": "wrong: 7 times"},
]


def test_a_row_keeps_its_day_when_others_are_added(tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    old = {"kind": "layers", "device": "Some GPU", "versions": VERSIONS, "date": "2020-01-02T03:04:05+00:00"}
    file.write_text(json.dumps({**old, "layers": ROWS[:2]}))
    Layers(file, "Some GPU", VERSIONS).put(ROWS[2], {**ROWS[1], "date": "2020-05-06"})
    days = {row["layer"]: row["date"] for row in read_layers(file)["layers"]}
    today = read_layers(file)["date"][:10]
    assert days == {ROWS[0]["layer"]: "2020-01-02", ROWS[1]["layer"]: "2020-05-06", ROWS[2]["layer"]: today}
    assert f"Some GPU, 2020-01-02 to {today}; " in measured_on([read_layers(file)])[0]


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Any]:
    results = Layers(tmp_path / "gpu" / "layers.json", "Some GPU", VERSIONS)
    results.put(*ROWS)
    return read_layers(results.file)


def test_a_file_is_kept_a_line_for_each_layer(tmp_path: Path) -> None:
    file = tmp_path / "gpu" / "layers.json"
    for rows in (ROWS[:2], ROWS[2:], [row("a", 2.0, 5.0)]):  # the last in place of the first
        Layers(file, "Some GPU", VERSIONS).put(*rows)
    kept = Layers(file, "Some GPU", VERSIONS)
    written = [*ROWS[1:], row("a", 2.0, 5.0)]
    assert kept.rows == dated({"layers": written, "date": read_layers(file)["date"]})
    assert len([line for line in file.read_text().splitlines() if '"layer":' in line]) == len(ROWS)
    assert read_layers(file)["versions"] == VERSIONS
    assert not Layers(file, "Some GPU", {"torch": "3"}).rows and not Layers(file, "Another", VERSIONS).rows
    with pytest.raises(UsageError, match="cannot write"):
        Layers(file / "below", "Some GPU", VERSIONS).put(ROWS[0])


def test_the_distribution(found: dict[str, Any]) -> None:
    table = summary([found]).splitlines()
    assert table[2:5] == [
        "| Some GPU | `conv2d_nchw` | float16 | 1 | 0.50 | 0.50 | 0% |",
        "| Some GPU | `conv2d_nhwc` | float16 | 3 and 1 failed | 1.26 | 0.50 | 67% |",
        "| Some GPU | `conv2d_nhwc` | float32 | 1 | 0.50 | 0.50 | 0% |",
    ]
    assert table[-1].startswith("Some GPU, 20") and table[-1].endswith("; torch 2")
    sets = by_set([found])
    assert "| set | `conv2d_nchw` | `conv2d_nhwc` |" in sets
    assert "| net | 1: 0.50, 0.50, 0% | 2: 2.00, 1.00, 100% |" in sets and "| other |  | 1: 0.50, 0.50, 0% |" in sets
    assert "Beside cuDNN's implicit GEMM alone, 1 layers: 2.00, 2.00, 100%." in sets


def test_sets_that_nothing_is_learned_from_stand_apart(found: dict[str, Any]) -> None:
    name = next(iter(json.loads(UNSEEN.read_text())["sets"]))
    apart = [dict(row, set=name) if row["layer"] in ("a", "f") else row for row in found["layers"]]
    table = summary([{**found, "layers": apart}]).splitlines()
    rows = [line for line in table if "`conv2d_nhwc` | float16" in line]
    assert "| float16 | 2 |" in rows[0] and "| float16, unseen | 1 and 1 failed |" in rows[1] and len(rows) == 2


def test_the_worst_come_first_and_what_failed_before_them(found: dict[str, Any]) -> None:
    names = [line.split(" | ")[2] for line in worst([found]).splitlines()[2:]]
    assert names == ["f", "c", "d", "e", "b", "a"]
    assert "wrong: 7 times" in worst([found])
    told = list(lines(ROWS))
    assert "ALL" in told[2] and "mean 1.26" in told[2] and told[-1].split()[3] == "a"
    assert "direct 20.00" in next(line for line in told if " e " in line)


def test_layers_beside_a_copy(found: dict[str, Any], tmp_path: Path) -> None:
    assert copies([found]) == ""
    results = Layers(tmp_path / "gpu" / "layers.json", "Some GPU", VERSIONS)
    results.put(row("b", 2.0, 1.0, copy=1.5), row("a", 1.0, 2.0, copy=0.5))
    told = copies([read_layers(results.file)]).splitlines()
    assert told[0] == "Some GPU, net, `conv2d_nhwc` float16; 2 layers: 1.00, 0.50, 50%"
    assert told[-2:] == [
        "| b | `mma` | 2.0 | 1.0 | 1.5 | 0.50 | 75% |",
        "| a | `mma` | 1.0 | 2.0 | 0.5 | 2.00 | 50% |",
    ]


def test_the_picture(found: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    assert picture([found]).startswith(b"\x89PNG") and picture([found, found]).startswith(b"\x89PNG")


def test_files_of_sets(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    runs = {"conv2d_nhwc float16": 2, "conv2d_hwcn float32": 1}
    texts = [f"{n}x8x8 8->8 3x3" for n in (1, 2, 3)]
    file.write_text(json.dumps({"runs": runs, "sets": {"a": texts[:2], "b": texts[2:]}}))
    found = [(layer.set, type(layer.problem).__name__, layer.problem.n) for layer in layers_of(file)]
    assert found[:2] == [("a", "NhwcProblem", 1), ("b", "NhwcProblem", 3)] and len(found) == 5
    assert len(layers_of(file, lambda operator, dtype: dtype == "float32", 3)) == 1
    for content in ("[]", "{", '{"runs": {}}', '{"runs": {"conv2d_nhwc": 1}, "sets": {"a": ["1x8x8 8->8 3x3"]}}'):
        file.write_text(content)
        with pytest.raises(UsageError, match="is no file of layers"):
            layers_of(file)
    with pytest.raises(UsageError, match="cannot read"):
        layers_of(tmp_path / "none.json")


@pytest.mark.parametrize(
    "file", sorted([*FOLDER.glob("*.json"), *FOLDER.glob("whole/*.json")]), ids=lambda file: file.stem
)
def test_the_sets_that_are_here(file: Path) -> None:
    every = layers_of(file, every=1)
    assert len(every) == len(set(every)) and len(layers_of(file)) <= len(every)
