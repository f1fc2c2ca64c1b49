"""The commands of README and docs/, run as they are written, and README's Python."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from schedules.core.arch import Arch
from tests.command import Run
from tests.documents import ROOT, blocks

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = {
    file.relative_to(ROOT).as_posix(): [
        shlex.join(words)
        for block in blocks(file.read_text())
        if block.language == ""
        for words in block.commands()
        if words[0] != "problem"  # the picture of the data's way
    ]
    for file in DOCUMENTS
}
COMMANDS = sorted({command for commands in SHOWN.values() for command in commands})
ON_A_GPU = ("schedules bench", "schedules replay")
LONG = {
    "make": "makes an environment, and runs this suite in it",
    "schedules tune": "searches until its trials are done",
    "schedules resume": "goes on with such a search",
    "schedules report": "builds every kernel that has a record",
    "scripts/export_all.py": "builds every preset",
    "scripts/sweep.py": "builds and verifies hundreds of kernels",
    "python -m benchmarks.": "compares with other libraries on the device",
    "python -m te_kernels_cuda_sm_90a": "asks what scripts/export_all.py wrote",
}  # with a reason not to run them with every change
ASKED = "SCHEDULES_LONG_COMMANDS"


def reason(command: str) -> str | None:
    return next((why for begin, why in LONG.items() if command.startswith(begin)), None)


HERE = {
    name: here
    for name, commands in SHOWN.items()
    if (here := [command for command in commands if not command.startswith((*ON_A_GPU, *LONG))])
}


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and the records that come with the package."""
    monkeypatch.delenv("SCHEDULES_LOGS")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_are_found() -> None:
    every = [command for commands in HERE.values() for command in commands]
    assert len(every) >= 20
    assert {command.split()[1] for command in every} >= {"build", "verify", "explain", "top", "diff", "export"}
    assert all(any(command.startswith(begin) for command in COMMANDS) for begin in (*ON_A_GPU, *LONG))


@pytest.mark.parametrize("name", HERE)
def test_they_run_one_after_the_other(
    name: str, newcomer: Path, run: Run, cuda_compiler: None, emulation: None
) -> None:
    for command in HERE[name]:
        program, *words = shlex.split(command)
        assert program == "schedules", f"{command}: give a reason in LONG not to run it"
        result = run(*words)
        assert result.code == 0 and result.out, (command, result.err)
        if "--out" in words:
            assert list((newcomer / words[words.index("--out") + 1]).glob("**/kernel.json")), command


def test_the_first_lines_of_python_run(newcomer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = next(block for block in blocks((ROOT / "README.md").read_text()) if block.language == "python")
    assert 5 <= len(first.text.splitlines()) <= 10
    names: dict[str, object] = {}
    exec(compile(first.text, "README.md", "exec"), names)
    np.testing.assert_allclose(np.asarray(names["y"]).sum(axis=1), 1, rtol=1e-5)
    assert capsys.readouterr().out.startswith("softmax ")


@pytest.mark.gpu
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith(ON_A_GPU)])
def test_those_for_a_gpu_run_on_one(command: str, newcomer: Path, run: Run, gpu: Arch) -> None:
    if gpu.name not in command and "--target" in command:
        pytest.skip(f"{command} is for another GPU than {gpu}")
    result = run(*shlex.split(command)[1:])
    assert result.code == 0, result.err


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if reason(command)])
def test_long_ones_run_when_asked(command: str, newcomer: Path) -> None:
    program, *words = shlex.split(command)
    if program in ("make", "python"):
        pytest.skip(f"it {reason(command)}")
    if not os.environ.get(ASKED):
        pytest.skip(f"it {reason(command)}; set {ASKED}=1 to run it")
    begin = ["-m", program] if program == "schedules" else [str(ROOT / program)]
    subprocess.run([sys.executable, *begin, *words], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
