"""How scripts end: with what their main function returns, or a line and a code."""

from __future__ import annotations

from typing import NoReturn

import pytest

from schedules.cli.script import run_script
from schedules.core.errors import BuildError, UsageError


@pytest.mark.parametrize("code", [0, 1])
def test_what_main_returns(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: code)
    assert ended.value.code == code and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("no --count"), 2, "error: no --count\n"),
        (BuildError("two\n  lines"), 1, "error: two lines\n"),
        (KeyboardInterrupt(), 130, "stopped; --resume goes on\n"),
    ],
)
def test_what_it_raises(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> NoReturn:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_script(main, "stopped; --resume goes on")
    assert ended.value.code == code and capsys.readouterr().err == line


def test_a_fault_of_this_package_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_script(lambda: 1 // 0)
