"""The command line in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schedules.cli import main


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Run:
    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.capfd = capfd

    def __call__(self, *words: str | Path) -> Result:
        self.capfd.readouterr()
        code = main([str(word) for word in words])
        out, err = self.capfd.readouterr()
        return Result(code, out, err)


def one_line(result: Result, code: int = 2) -> str:
    """The error, after checking that it is all there is."""
    assert result.code == code, (result.out, result.err)
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("schedules: error: "), result.err
    assert result.out == ""
    return lines[0].removeprefix("schedules: error: ")
