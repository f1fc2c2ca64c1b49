from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.__main__ import COMPARISONS, command_of, main, run
from schedules.core.errors import UnknownNameError, UsageError

NEEDS_PYTORCH = ("compare_networks", "torch_overhead")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", COMPARISONS)
def test_each_is_a_command_that_takes_its_words(
    name: str, gpu: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = command_of(COMPARISONS[name], gpu)
    if command is None:
        assert not gpu
        return
    module, *words = command[3:]
    if module.rpartition(".")[2] in NEEDS_PYTORCH:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    script = importlib.import_module(module)
    monkeypatch.setattr(sys, "argv", [module, *words, "--no-such-word"])
    with pytest.raises(SystemExit):
        script.main()
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --no-such-word\n")


def test_what_fails_or_takes_too_long_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "calls": "print('a result')",
        "packing": "raise SystemExit('error: no')",
        "networks": "import time; print('begun', flush=True); time.sleep(60)",
        "layers": None,
        "int8": "print('late')",
    }
    monkeypatch.setattr(benchmarks, "local_gpu", lambda: None)
    monkeypatch.setattr(
        benchmarks,
        "command_of",
        lambda comparison, gpu: next(
            program and [sys.executable, "-c", program]
            for name, program in programs.items()
            if COMPARISONS[name] is comparison
        ),
    )
    assert main([*programs, "--minutes", "0.05", "--out", str(tmp_path)]) == 1
    found = capsys.readouterr()
    said = [line.split(":")[0].split() for line in found.out.splitlines()]
    assert [words[:2] for words in said] == [
        ["calls", "done"],
        ["packing", "failed"],
        ["networks", "stopped"],
        ["layers", "layers"],
        ["int8", "not"],
    ]
    assert "error: no" in found.out and "needs a CUDA GPU" in found.out
    assert found.err == f"packing failed; see the logs in {tmp_path}\n"
    assert (tmp_path / "networks.log").read_text() == "begun\n"


def test_a_command_that_is_stopped_is_gone(tmp_path: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    assert run([sys.executable, "-c", program], tmp_path / "log", 1.0) is None
    pid = int((tmp_path / "log").read_text())
    with pytest.raises(OSError):
        (Path("/proc") / str(pid) / "stat").read_text()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown comparison 'layer'"):
        main(["layer"])
    with pytest.raises(UsageError, match="--minutes must be over 0"):
        main(["--minutes", "0"])
