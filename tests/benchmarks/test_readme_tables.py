from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.peers.comparison import Results, Times
from benchmarks.peers.convolution_case import case_result
from benchmarks.peers.layers import Layers
from schedules.core.errors import UsageError
from tests.conftest import problem_of

FIELDS: dict[str, Any] = dict(n=2, h=8, w=8, ci=16, co=8, kh=3, kw=3, pad=1)
BEGIN, END = "<!-- table gpu/conv operator=conv2d_nhwc -->", "<!-- end -->"


@pytest.fixture(scope="module")
def readme_tables() -> ModuleType:
    return import_module("benchmarks.readme_tables")


def keep(folder: Path, us: float, operator: str = "conv2d_nhwc") -> None:
    results = Results(folder / "gpu" / "conv.json", "Some GPU", {"torch": "2"}, kind="convolution")
    results.put(case_result(problem_of(operator, **FIELDS), {"ours": (Times(us, us, us, 9), {"schedule": "simt"})}))


def test_tables_are_written_between_the_markers(
    readme_tables: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, 4.0)
    keep(tmp_path, 5.0, "conv2d_nchw")
    file = tmp_path / "README.md"
    other = "<!-- table gpu/conv -->"
    file.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nbetween\n{other}\n{END}\nafter\n")
    words = ["--file", str(file), "--log", str(tmp_path)]
    assert readme_tables.main([*words, "--check"]) == 1
    found = capsys.readouterr().out
    assert found.splitlines() == [
        "README.md line 3, gpu/conv operator=conv2d_nhwc: is out of date",
        "README.md line 8, gpu/conv: is out of date",
    ]
    assert "old" in file.read_text()
    assert readme_tables.main(words) == 0
    text = file.read_text()
    first, second = text.split("between")
    assert first.startswith(f"before\n\n{BEGIN}\n`conv2d_nhwc`, float32\n") and "conv2d_nchw" not in first
    assert "| 2x8x8 16->8 3x3 | 4.0 |" in first and "old" not in text and "conv2d_nchw" in second
    assert text.endswith(f"\n{END}\nafter\n") and text.count(END) == 2
    capsys.readouterr()
    for more in ([], ["--check"]):  # nothing is left to do
        assert readme_tables.main([*words, *more]) == 0 and capsys.readouterr().out == ""
        assert file.read_text() == text
    keep(tmp_path, 3.0)
    assert readme_tables.main([*words, "--check"]) == 1


def test_one_table_of_whichever_devices(readme_tables: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text(f"<!-- table */torch_overhead -->\n{END}\n")
    for devices in (["cpu"], ["cpu", "gpu"]):
        for device in devices:
            (tmp_path / device).mkdir(exist_ok=True)
            calls = [{"operator": "softmax", "mode": "kernel", "ours": {"median_us": 4.5}}]
            kept = {"kind": "torch_overhead", "device": device, "date": "2026", "versions": {}, "calls": calls}
            (tmp_path / device / "torch_overhead.json").write_text(json.dumps(kept))
        assert readme_tables.main(["--file", str(file), "--log", str(tmp_path), "--check"]) == 1
        assert readme_tables.main(["--file", str(file), "--log", str(tmp_path)]) == 0
        assert f"| softmax | kernel alone {'| 4.5 |  ' * len(devices)}|" in file.read_text()


def test_summaries_and_schedules_are_tables_too(readme_tables: ModuleType, tmp_path: Path) -> None:
    keep(tmp_path, 4.0)
    file = tmp_path / "README.md"
    markers = ["summary gpu/conv", "schedules", "schedules operator=softmax", "options operator=softmax"]
    file.write_text("\n".join(f"<!-- table {marker} -->\n{END}" for marker in markers))
    words = ["--file", str(file), "--log", str(tmp_path)]
    assert readme_tables.main(words) == 0 and readme_tables.main([*words, "--check"]) == 0
    summary, matrix, details, options = file.read_text().split(END)[:4]
    assert "| geometric mean |" in summary and "Some GPU, " in summary
    assert "| `conv2d_nchw32` | int8 |" in matrix and "| `frames` |" in details and "conv2d" not in details
    assert "| `mask` | none | none, full, cols, lengths, causal |" in options


def test_the_parts_of_the_layers(readme_tables: ModuleType, tmp_path: Path) -> None:
    row = {"set": "net", "operator": "conv2d_nhwc", "dtype": "float16", "layer": "1x8x8 8->8 3x3", "schedule": "mma"}
    for device in ("one", "two"):
        Layers(tmp_path / device / "layers.json", device, {}).put({**row, "us": 2.0, "cudnn": 3.0, "first_s": 0.5})
    file = tmp_path / "README.md"
    file.write_text("\n".join(f"<!-- table layers {part} -->\n{END}" for part in ("summary", "sets", "worst")))
    words = ["--file", str(file), "--log", str(tmp_path)]
    assert readme_tables.main(words) == 0 and readme_tables.main([*words, "--check"]) == 0
    summary, sets, worst, _ = file.read_text().split(END)
    assert "| one | `conv2d_nhwc` | float16 | 1 | 1.50 |" in summary and "| two |" in summary
    assert sets.count("| net | 1: 1.50, 1.50, 100% |") == 2
    assert worst.count("| 1x8x8 8->8 3x3 | 2.0 | 3.0 | `mma` | 1.50 |") == 2


def test_documents_in_docs_are_kept_current() -> None:
    from benchmarks.readme_tables import FILES, ROOT

    assert {ROOT / "README.md", ROOT / "RESULTS.md", *(ROOT / "docs").glob("*.md")} == set(FILES)
    texts = {file.name: file.read_text() for file in FILES}
    assert "<!-- table layers summary -->" in texts["README.md"] and "<!-- table summary" in texts["RESULTS.md"]
    assert all(f"<!-- table layers {part} -->" in texts["RESULTS.md"] for part in ("sets", "worst"))
    assert "<!-- table schedules -->" in texts["README.md"]
    assert "<!-- table schedules operator=" in texts["operators.md"]


@pytest.mark.parametrize(
    "text, message",
    [
        (f"{BEGIN}\n", "line 1: the table has no <!-- end -->; add it"),
        (f"{BEGIN}\n{BEGIN}\n{END}", "line 1: the table has no <!-- end --> before line 2"),
        (f"\n{END}\n", "line 2: <!-- end --> ends no table"),
        (f"<!-- table gpu/other -->\n{END}\n", "line 1, gpu/other: cannot read"),
        (f"<!-- table gpu/conv dtype=int4 -->\n{END}\n", "line 1, gpu/conv dtype=int4: no case has dtype=int4"),
        (
            f"<!-- table */torch_overhead -->\n{END}\n",
            r"line 1, .*has no \*/torch_overhead.json; run python -m benchmarks.torch_overhead",
        ),
        (
            f"<!-- table */other -->\n{END}\n",
            "no table of every device's other, only of torch_overhead, compare_networks, few_trials",
        ),
        (f"<!-- table */torch_overhead mode=eager -->\n{END}\n", "mode chooses nothing in a table of every device"),
        (f"<!-- table summary -->\n{END}\n", "line 1, summary: a summary of no files; name some"),
        (f"<!-- table summary gpu/other -->\n{END}\n", "line 1, summary gpu/other: cannot read"),
        (f"<!-- table schedules dtype=int8 -->\n{END}\n", "dtype chooses nothing in a table of schedules"),
        (f"<!-- table schedules operator=softmux -->\n{END}\n", "operator 'softmux'; did you mean 'softmax'"),
        (f"<!-- table layers all -->\n{END}\n", "layers all is no part; name one of summary, sets, worst"),
        (f"<!-- table layers -->\n{END}\n", "is no part; name one of"),
        (f"<!-- table layers sets -->\n{END}\n", r"has no \*/layers.json; run python -m benchmarks.compare_layers"),
        (f"<!-- table gpu/conv int4 -->\n{END}\n", "line 1, gpu/conv int4: int4 is not FIELD=VALUE"),
    ],
)
def test_mistakes_name_the_line(readme_tables: ModuleType, tmp_path: Path, text: str, message: str) -> None:
    keep(tmp_path, 4.0)
    file = tmp_path / "README.md"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        readme_tables.main(["--file", str(file), "--log", str(tmp_path)])
    assert file.read_text() == text


def test_a_text_without_markers_is_left_alone(readme_tables: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("| a | b |\n<!-- a comment -->\r\n")
    assert readme_tables.main(["--file", str(file), "--check"]) == 0
    with pytest.raises(UsageError, match="cannot read"):
        readme_tables.main(["--file", str(tmp_path / "none.md")])


def test_the_readme_is_current(readme_tables: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert readme_tables.main(["--check"]) == 0, f"{capsys.readouterr().out}; run python -m benchmarks.readme_tables"


def test_the_documents_are_covered(readme_tables: ModuleType) -> None:
    assert {"README.md", "RESULTS.md", "tirx.md"} <= {file.name for file in readme_tables.FILES}
