from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedules.core.registry import EXTRA
from tests.tune.nights import Night


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Night]:
    monkeypatch.setenv(EXTRA, "faulty=tests.tune.faulty")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    night = Night(tmp_path / "journal.jsonl", temporary)
    yield night
    for pid in night.processes():
        os.kill(pid, signal.SIGKILL)
