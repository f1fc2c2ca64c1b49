"""The examples of docs/pytorch.md, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

import schedules.torch as kernels  # noqa: E402
from tests.documents import ROOT, blocks  # noqa: E402

COMPLETE = [
    block.text
    for block in blocks((ROOT / "docs/pytorch.md").read_text())
    if block.language == "python" and "import torch\n" in block.text
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    kernels.use_bundles()
    torch._dynamo.reset()


def test_there_is_one_of_each_kind() -> None:
    text = "".join(COMPLETE)
    assert all(name in text for name in ("kernels.optimize", "kernels.backend", "kernels.export", "kernels.plan"))


@pytest.mark.parametrize("number", range(len(COMPLETE)))
def test_an_example_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, object] = {}
    exec(COMPLETE[number], found)
    if "kernels.optimize" in COMPLETE[number]:
        report = found["optimized"].report  # type: ignore[attr-defined]
        assert report.replaced and not report.notes
