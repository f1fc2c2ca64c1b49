"""Searches in real processes, and what each must leave behind.

After each the same command reaches the same total, no record is lost or there twice, no process and no file is left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from schedules.core.child import WORKER
from schedules.core.registry import EXTRA
from schedules.measure.journal import read_journal
from schedules.measure.records import Record

ROOT = Path(__file__).parents[2]
TOTAL = 14
LONG = 240.0  # seconds after which a test that waits has failed


@dataclass
class Searches:
    """Runs searches whose processes all carry a mark in their environment."""

    journal: Path
    temporary: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, trials: int = TOTAL, faults: str = "none") -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            EXTRA: "faulty=tests.tune.faulty",
            "SEARCH_MARK": self.mark,
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": str(ROOT),
            WORKER: "1",  # TVM by itself
        }
        command = [sys.executable, "-m", "tests.tune.search_process", str(self.journal), str(trials), faults]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, trials: int = TOTAL, faults: str = "none") -> str:
        process = self.start(trials, faults)
        out, _ = process.communicate(timeout=LONG)
        return out

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    marked = f"SEARCH_MARK={self.mark}".encode() in (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue  # it ended meanwhile
                if marked and state != "Z":
                    found.append(int(entry.name))
        return found

    def trials(self) -> list[Record]:
        return [record for record in read_journal(self.journal)[0] if record.stage == "trial"]

    def assert_clean(self) -> None:
        """No process and no temporary file is left; a moment is allowed for the dying to die."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and (self.processes() or list(self.temporary.iterdir())):
            time.sleep(0.05)
        assert self.processes() == []
        assert list(self.temporary.iterdir()) == []

    def assert_whole(self, total: int = TOTAL) -> None:
        """The total is reached, and nothing is there twice."""
        assert Counter(record.key for record in self.trials()).most_common(1)[0][1] == 1
        assert len(self.trials()) == total
        self.assert_clean()


def wait_for(process: subprocess.Popen[str], word: str, count: int = 1) -> None:
    """Read lines until `count` of them began with `word`."""
    assert process.stdout
    for line in process.stdout:
        count -= line.startswith(word)
        if count == 0:
            return
    raise AssertionError(f"the search ended before it said {word!r}")
