"""CONTRIBUTING.md's operator and schedule: the files as they stand there, and the commands, in order."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schedules.core import registry
from scripts import sweep
from tests.command import Run
from tests.documents import ROOT, Block, blocks, section

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
NAME = "row_sum"


def forget() -> None:
    """Files may have changed since they were imported."""
    for module in [module for module in sys.modules if module.split(".")[0] in (NAME, f"test_{NAME}")]:
        del sys.modules[module]
    importlib.invalidate_caches()
    registry.operator.cache_clear()


@pytest.fixture
def follow(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, str]]]:
    """Does what a section says; returns what each command printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions of a file may be of one second

    def export(words: list[str]) -> None:
        for word in words:
            name, _, value = word.partition("=")
            if name == "PYTHONPATH":
                assert value == "$PWD"
                monkeypatch.syspath_prepend(str(tmp_path))
            else:
                monkeypatch.setenv(name, value)

    def swept(words: list[str]) -> str:
        run.capfd.readouterr()
        code = sweep.main(words)
        out, err = run.capfd.readouterr()
        assert code == 0, (words, out, err)
        return out

    def act(block: Block) -> Iterator[tuple[str, str]]:
        if block.language == "python":
            file = tmp_path / block.name
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
            return
        assert block.language == "sh"
        forget()
        for command, *words in block.commands():
            if command == "export":
                export(words)
                continue
            if command == "scripts/sweep.py":
                yield f"sweep {' '.join(words)}", swept(words)
                continue
            assert command == "schedules"
            done = run(*words)
            assert done.code == 0, (words, done.out, done.err)
            yield " ".join(words), done.out

    yield lambda heading: {words: out for block in blocks(section(TEXT, heading)) for words, out in act(block)}
    forget()


def test_the_example_works(
    follow: Callable[[str], dict[str, str]], tmp_path: Path, emulation: None, cuda_compiler: None
) -> None:
    said = follow("How to add an operator")
    assert NAME in said["list"] and "rows in parallel" in said["list"]
    fields = f"{NAME} rows=37 cols=1000"
    assert "passed" in said[f"verify {fields}"] and "us (" in said[f"bench {fields} --seconds 0.05"]
    assert f"{NAME} cpu: 5 of 5 right" in said[f"sweep {NAME} --count 5"]
    assert json.loads((tmp_path / "out" / NAME / "kernel.json").read_text())["operator"] == NAME

    said = follow("How to add a schedule")
    assert "emulated late" in said[f"verify {fields} --target cuda:sm_90a"] or "device" in said
    assert "A row to a block" in said[f"explain {fields} --target cuda:sm_90a"]
    manifest = json.loads((tmp_path / "out" / f"{NAME}-cuda" / "kernel.json").read_text())
    assert (manifest["schedule"], manifest["config"]) == ("block", {"threads": 64})

    forget()
    tests = importlib.import_module(f"test_{NAME}")
    ran = [name for name in vars(tests) if name.startswith("test_")]
    assert len(ran) == 2
    for name in ran:
        getattr(tests, name)()


def test_files_are_named_once_or_amended() -> None:
    """A file that stands there twice is the first with what the second section adds."""
    files: dict[str, list[str]] = {}
    for heading in ("How to add an operator", "How to add a schedule"):
        for block in blocks(section(TEXT, heading)):
            if block.language == "python":
                files.setdefault(block.name, []).append(block.text)
    assert {name for name, texts in files.items() if len(texts) > 1} == {f"{NAME}/__init__.py"}
    first, second = files[f"{NAME}/__init__.py"]
    assert "block" not in first.replace("sblock", "") and "block.SCHEDULE, cpu.SCHEDULE" in second
    changed = set(first.splitlines()) ^ set(second.splitlines())
    assert len(changed) <= 8
