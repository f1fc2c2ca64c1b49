"""Where an episode plays: its folder, the processes in it, and what was seen of the journals."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Scene:
    """One episode's folder, what runs in it, and what was seen there.

    `seen` are the lines that the searches wrote into journals, `excused` those of them that a fault took; `strange` are
    the lines that a fault wrote; `wrong` is what is not as it must be.
    """

    def __init__(self, folder: Path, dice: Random) -> None:
        self.folder, self.dice, self.mark = folder, dice, uuid.uuid4().hex
        self.temporary, self.logs, self.out = folder / "tmp", folder / "logs", folder / "out"
        for each in (self.temporary, self.logs, self.out):
            each.mkdir()
        self.seen: dict[bytes, None] = {}
        self.excused: list[bytes] = []
        self.strange: set[bytes] = set()
        self.wrong: list[str] = []
        self.mounted: list[Path] = []
        self.limits: dict[int, int] = {}
        self.more: dict[str, str] = {}  # variables of the environment
        self.command: subprocess.Popen[bytes] | None = None
        self.abrupt = False  # something was killed as it wrote

    def start(self, words: Sequence[str]) -> None:
        """Run ``schedules`` in the folder."""
        paths = [*([str(self.folder / "clock")] if self.more else []), str(ROOT), os.environ.get("PYTHONPATH", "")]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": str(self.temporary),
            "TVM_NUM_THREADS": "1",
            "SOAK_MARK": self.mark,
            **self.more,
        }

        def limit() -> None:
            for name, value in self.limits.items():
                resource.setrlimit(name, (value, value))

        with open(self.folder / "stdout", "wb") as out, open(self.folder / "stderr", "wb") as err:
            self.command = subprocess.Popen(
                [sys.executable, "-m", "schedules", *words],
                cwd=self.folder,
                env=variables,
                stdout=out,
                stderr=err,
                preexec_fn=limit,
                start_new_session=True,
            )

    def text(self, name: str) -> str:
        """What the last run printed."""
        return (self.folder / name).read_text(errors="replace")

    def journals(self) -> list[Path]:
        return sorted(self.logs.glob("*/*.jsonl"))

    def lines(self) -> list[bytes]:
        """The whole lines of all journals; what is there twice byte by byte, once."""
        found: dict[bytes, None] = {}
        for file in self.journals():
            with contextlib.suppress(FileNotFoundError):
                found |= dict.fromkeys(file.read_bytes().split(b"\n")[:-1])
        return list(found)

    def watch(self) -> None:
        """Remember the records that are there: from now on they are promised."""
        self.seen |= dict.fromkeys(line for line in self.lines() if line not in self.strange and is_record(line))

    def records(self) -> list[dict[str, Any]]:
        """What the searches wrote, in its order, without what faults did."""
        return [json.loads(line) for line in self.lines() if line not in self.strange and is_record(line)]

    def processes(self) -> list[int]:
        """The processes of this episode that are not dead."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and f"SOAK_MARK={self.mark}".encode() in (entry / "environ").read_bytes():
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [int(entry.name)] if state != "Z" else []
        return found

    def workers(self) -> list[int]:
        """The processes that build and measure: what the search started to work for it."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                working = b"SCHEDULES_WORKER=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
                found += [pid] if working and self.command and parent == self.command.pid else []
        return sorted(found)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def mount(self, folder: Path, size: int) -> None:
        """Give `folder` a file system of `size` KiB."""
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)], check=True)
        self.mounted.append(folder)

    def excuse(self, lines: Sequence[bytes]) -> None:
        """Ask no more for these lines: what took them was nobody's to prevent, or the search has said it."""
        for line in lines:
            if line in self.seen:
                del self.seen[line]
                self.excused.append(line)

    def close(self) -> None:
        """End what is left, whatever it is."""
        self.signal(signal.SIGKILL)
        if self.command:
            self.command.wait()
        while self.mounted:
            folder = self.mounted.pop()
            if self.wrong:
                shutil.copytree(folder, folder.with_name(f"{folder.name}-kept"))
            subprocess.run(["umount", "-l", str(folder)], check=True)


def is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
