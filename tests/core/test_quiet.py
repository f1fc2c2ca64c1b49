from __future__ import annotations

import os

import pytest

from schedules.core.arch import parse_arch
from schedules.core.quiet import without_lines


def test_only_known_lines_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with without_lines(["nothing to see"]):
        os.write(2, b"[1] warning: nothing to see here\n")
        os.write(2, b"[2] warning: fire\n")
    assert capfd.readouterr().err == "[2] warning: fire\n"


def test_lines_survive_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), without_lines(["known"]):
        os.write(2, b"why it failed\n")
        raise ValueError
    assert "why it failed" in capfd.readouterr().err


def test_amd_targets_are_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    parse_arch("gfx90a").target()
    assert capfd.readouterr().err == ""
