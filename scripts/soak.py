#!/usr/bin/env python3
"""Searches of every operator while faults befall them, and what must be true after each.

    scripts/soak.py --minutes 20 --seed 0 --out tuning_logs/soak.json
    scripts/soak.py --seed 0 --episode 7                      # one of them again
    scripts/soak.py --fault full-temporary --minutes 5        # one kind of fault

An episode is one search (or plan) on this machine's CPU.  A first run meets one to three faults, drawn from the seed
and the episode's number: killed, interrupted, workers stopped or killed, folders full, the journal removed, replaced or
damaged, clock steps, little memory, a busy neighbour.  Later runs of the same command, or of `resume`, have to come to
the total.  After each: every record that was once in the journal is still there, and none twice; the best is the best,
reckoned from the journal's lines; what is exported verifies; exit codes and errors are as promised, in one line; no
candidate is blamed for what the machine did; no process and no file is left.  An episode is a line; what is wrong is
printed with the command that does the episode again, its folder is kept, and the exit code is then 1.
"""

from __future__ import annotations

if __name__ == "__main__":
    from schedules.core.interrupts import heed

    heed()  # while the imports below take their seconds, too

import argparse
import contextlib
import ctypes
import errno
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from schedules.build.builder import compiler_of
from schedules.build.present import device_name
from schedules.cli import main as command_line
from schedules.cli.script import run_script
from schedules.core.arch import parse_arch
from schedules.core.errors import UsageError
from schedules.core.registry import EXTRA
from schedules.measure.records import Record, environment, now

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 480.0  # seconds that a run may take, a pause of 300 s included, on a machine that is busy with other things too
PATIENCE = 20.0  # seconds that a run is given to end by itself once a fault that stays has struck
MOMENT = 30.0  # seconds in which what is left of a run has to go
TIMES = ("median_us", "p10_us")  # of a record: what is said of it is one of these
INTERRUPTED = 130  # exit code
CLONE_NEWNS = 0x20000  # of unshare on Linux: a view of its own of what is mounted
RUNS = 3  # after the first, to come to the total: each may meet what the one before left behind
FAULTY = "faulty"  # the operator of tests/tune/faulty.py, whose candidates are wrong on purpose
BROKEN = {"wrong": "correctness", "refused": "compile", "crash": "compile", "segfault": "runtime", "exit": "runtime"}
PROBLEMS = {
    "conv2d_hwcn": "n=16 h=7 w=7 ci=16 co=16 kh=3 kw=3",
    "conv2d_nchw": "n=1 ci=16 h=12 w=12 co=16 kh=3 kw=3 pad=1",
    "conv2d_nchw32": "n=1 ci=32 h=8 w=8 co=32 kh=3 kw=3",
    "conv2d_nhwc": "n=2 h=8 w=8 ci=16 co=16 kh=3 kw=3",
    "softmax": "rows=64 cols=100 dtype=float32",
    FAULTY: f"n=1000 faults={'+'.join(BROKEN)} good=7",
}
# read by every Python process of an episode whose clock steps: time.time() and what is dated go by this offset
CLOCK = """
import datetime, os, time

def offset():
    try:
        with open(os.environ["SOAK_CLOCK"]) as file:
            return float(file.read() or 0)
    except OSError:
        return 0.0

class Stepped(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return real_now(tz) + datetime.timedelta(seconds=offset())

real, real_ns, real_now = time.time, time.time_ns, datetime.datetime.now
time.time = lambda: real() + offset()
time.time_ns = lambda: real_ns() + int(offset() * 1e9)
datetime.datetime = Stepped
"""


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


class Fault:
    """Something that befalls a run: made ready before it starts, struck while it runs, healed after `seconds` (None: it
    stays until the run has ended).  `codes` are the exit codes that a run may have for it, beside 0."""

    codes: tuple[int, ...] = ()
    for_plan = False  # strikes only what a plan writes
    at_once = False  # from the run's start
    seconds: float | None = None
    stays = False  # a run that waits for its end may be stopped
    ends = False  # the run, soon

    def prepare(self, scene: Scene) -> None: ...

    def ready(self, scene: Scene) -> bool:
        """Whether it can strike now."""
        return True

    def strike(self, scene: Scene) -> str:
        """Do it; what was done, in a few words."""
        raise NotImplementedError

    def heal(self, scene: Scene) -> None: ...


class Signals(Fault):
    """The search is sent one signal, or two: it alone, or all its processes as by a terminal."""

    codes = (INTERRUPTED,)
    ends = True

    def __init__(self, dice: Random, numbers: Sequence[signal.Signals], twice: bool = False) -> None:
        self.number, self.all = dice.choice(numbers), dice.random() < 0.5
        self.gap = dice.uniform(0, 1.5) if twice else None

    def ready(self, scene: Scene) -> bool:
        # no process of Python minds SIGTERM before it is told to
        assert scene.command
        with contextlib.suppress(OSError):
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{scene.command.pid}/status").read_text())
            return bool(caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
        return False

    def strike(self, scene: Scene) -> str:
        assert scene.command
        send = os.killpg if self.all else os.kill
        send(scene.command.pid, self.number)
        if self.gap is not None:
            scene.abrupt = True
            time.sleep(self.gap)
            if scene.command.poll() is None:
                send(scene.command.pid, self.number)
        return f"{self.number.name}{'' if self.gap is None else f' twice in {self.gap:.1f} s'}{' to all' * self.all}"


class Killed(Fault):
    """The search is killed; its workers must go with it."""

    codes = (-signal.SIGKILL,)

    def __init__(self, dice: Random) -> None: ...

    def strike(self, scene: Scene) -> str:
        assert scene.command
        scene.abrupt = True
        scene.command.kill()
        return "SIGKILL"


class Suspended(Fault):
    """Every process stands still for a while, as when a lid is closed."""

    def __init__(self, dice: Random) -> None:
        self.seconds = dice.uniform(1, 5)

    def strike(self, scene: Scene) -> str:
        scene.signal(signal.SIGSTOP)
        return f"all stopped for {self.seconds:.1f} s"

    def heal(self, scene: Scene) -> None:
        scene.signal(signal.SIGCONT)


class Worker(Fault):
    """A worker process is sent a signal by somebody."""

    def __init__(self, dice: Random, number: signal.Signals, goes_on: bool = False) -> None:
        self.number, self.seconds = number, dice.uniform(1, 5) if goes_on else None
        self.chosen, self.pid = dice.random(), 0

    def ready(self, scene: Scene) -> bool:
        return bool(scene.workers())

    def strike(self, scene: Scene) -> str:
        workers = scene.workers()
        self.pid = workers[int(self.chosen * len(workers))] if workers else 0
        self._send(self.number)
        return f"a worker {self.number.name}" + (f" for {self.seconds:.1f} s" if self.seconds else "")

    def heal(self, scene: Scene) -> None:
        if self.seconds:
            self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.pid:
                os.kill(self.pid, number)


class Full(Fault):
    """A folder has no byte left, for some seconds or until the run has ended."""

    codes = (1,)

    def __init__(self, dice: Random, name: str, size: int) -> None:
        self.name, self.size, self.for_plan = name, size, name == "out"
        self.seconds = dice.choice([None, dice.uniform(2, 12)])
        self.stays = self.seconds is None and name != "out"  # a plan goes on without its exports

    def prepare(self, scene: Scene) -> None:
        scene.mount(getattr(scene, self.name), self.size)

    def strike(self, scene: Scene) -> str:
        with open(self._filler(scene), "wb", buffering=0) as filler:
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while filler.write(bytes(size)) == size:
                        pass
        return f"{self.name} full" + (f" for {self.seconds:.1f} s" if self.seconds else "")

    def heal(self, scene: Scene) -> None:
        self._filler(scene).unlink(missing_ok=True)

    def _filler(self, scene: Scene) -> Path:
        folder: Path = getattr(scene, self.name)
        return folder / "filler"


class Swept(Fault):
    """Somebody empties the folder for temporary files."""

    codes = (1,)

    def __init__(self, dice: Random) -> None: ...

    def ready(self, scene: Scene) -> bool:
        return any(scene.temporary.iterdir())

    def strike(self, scene: Scene) -> str:
        for path in scene.temporary.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        return "temporary emptied"


class Damage(Fault):
    """The journal is changed by another hand while the search has it open."""

    codes = (1,)

    def __init__(self, dice: Random, how: str) -> None:
        self.how, self.share = how, dice.random()
        self.kind = dice.choice(["garbage", "newer", "twice", "unknown target", "wrong type", "negative", "nested"])

    def ready(self, scene: Scene) -> bool:
        return any(file.stat().st_size for file in scene.journals())

    def strike(self, scene: Scene) -> str:
        scene.watch()
        file = next(file for file in scene.journals() if file.stat().st_size)
        lines = file.read_bytes().split(b"\n")[:-1]
        if self.how == "removed":
            file.unlink()
        elif self.how == "replaced":
            # by an earlier copy of itself, as a synchronised folder does
            copy = file.with_name("copy")
            copy.write_bytes(b"".join(line + b"\n" for line in lines[: int(self.share * len(lines))]))
            copy.replace(file)
        elif self.how == "truncated":
            size = int(self.share * file.stat().st_size)
            os.truncate(file, size)
            kept = set(file.read_bytes().split(b"\n")[:-1])
            scene.excuse([line for line in lines if line not in kept])
        else:
            line = self._line(lines[int(self.share * len(lines))])
            if line not in lines:
                scene.strange.add(line)
            with open(file, "ab", buffering=0) as journal:
                journal.write(line + b"\n")
            return f"a line of the journal: {self.kind}"
        return f"journal {self.how}"

    def _line(self, line: bytes) -> bytes:
        if self.kind == "garbage":
            return b"\x00\xff{garbage"
        if self.kind == "twice":
            return line
        if self.kind == "nested":
            return b"[" * 20_000 + b"]" * 20_000
        other = {
            "newer": {"schema": 2},
            "unknown target": {"target": "cuda:sm_999"},
            "wrong type": {"median_us": "fast", "config": None},
            "negative": {"median_us": -1.0},
        }
        return json.dumps({**json.loads(line), **other[self.kind]}).encode()


class Clock(Fault):
    """The wall clock steps by an hour, and back."""

    def __init__(self, dice: Random) -> None:
        self.step, self.seconds = dice.choice([-3600, 3600]), dice.choice([None, dice.uniform(1, 8)])

    def prepare(self, scene: Scene) -> None:
        folder = scene.folder / "clock"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(CLOCK)
        scene.more["SOAK_CLOCK"] = str(folder / "offset")

    def strike(self, scene: Scene) -> str:
        self._set(scene, self.step)
        return f"clock {self.step:+} s" + (f" for {self.seconds:.1f} s" if self.seconds else "")

    def heal(self, scene: Scene) -> None:
        self._set(scene, 0)

    def _set(self, scene: Scene, step: int) -> None:
        new = Path(scene.more["SOAK_CLOCK"] + ".new")
        new.write_text(str(step))
        new.rename(scene.more["SOAK_CLOCK"])


class Limited(Fault):
    """The run may have only so much address space, so many open files, or files of such a size."""

    codes = (1,)
    at_once = True

    def __init__(self, dice: Random) -> None:
        self.limit, self.value, self.words = dice.choice(
            [(resource.RLIMIT_AS, size << 20, f"{size} MiB of address space") for size in (256, 1024, 2048, 4096)]
            + [(resource.RLIMIT_NOFILE, count, f"{count} open files") for count in (16, 40, 64)]
            + [(resource.RLIMIT_FSIZE, size << 10, f"files of {size} KiB") for size in (4, 16, 256)]
        )

    def prepare(self, scene: Scene) -> None:
        scene.limits[self.limit] = self.value

    def strike(self, scene: Scene) -> str:
        return self.words

    def heal(self, scene: Scene) -> None:
        scene.limits.clear()


class Neighbour(Fault):
    """Others keep every core busy."""

    def __init__(self, dice: Random) -> None:
        self.busy: list[subprocess.Popen[bytes]] = []

    def strike(self, scene: Scene) -> str:
        count = os.cpu_count() or 1
        spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
        self.busy = [subprocess.Popen([sys.executable, "-c", spin], start_new_session=True) for _ in range(count)]
        return f"{count} busy neighbours"

    def heal(self, scene: Scene) -> None:
        for process in self.busy:
            process.kill()
            process.wait()


FAULTS: dict[str, Callable[[Random], Fault]] = {
    "killed": Killed,
    "interrupted": lambda dice: Signals(dice, [signal.SIGINT]),
    "ended": lambda dice: Signals(dice, [signal.SIGTERM, signal.SIGHUP]),
    "aborted": lambda dice: Signals(dice, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], twice=True),
    "suspended": Suspended,
    "worker-paused": lambda dice: Worker(dice, signal.SIGSTOP, goes_on=True),
    "worker-stopped": lambda dice: Worker(dice, signal.SIGSTOP),
    "worker-killed": lambda dice: Worker(dice, dice.choice([signal.SIGKILL, signal.SIGTERM])),
    "worker-crashed": lambda dice: Worker(dice, signal.SIGSEGV),
    "swept-temporary": Swept,
    "full-temporary": lambda dice: Full(dice, "temporary", 24 << 10),
    "full-logs": lambda dice: Full(dice, "logs", 1 << 10),
    "full-export": lambda dice: Full(dice, "out", 1 << 10),
    "journal-removed": lambda dice: Damage(dice, "removed"),
    "journal-replaced": lambda dice: Damage(dice, "replaced"),
    "journal-truncated": lambda dice: Damage(dice, "truncated"),
    "journal-line": lambda dice: Damage(dice, "line"),
    "clock": Clock,
    "limited": Limited,
    "neighbour": Neighbour,
}
MOUNTS = {name for name in FAULTS if name.startswith("full-")}


@dataclass
class Strike:
    """A fault, and when it strikes: `delay` seconds after the run began, or after it wrote `records` more."""

    name: str
    fault: Fault
    records: int
    delay: float
    due: float | None = None  # by the monotonic clock
    struck: float | None = None
    healed: bool = False
    said: str = ""

    @classmethod
    def draw(cls, name: str, dice: Random, trials: int) -> Strike:
        fault = FAULTS[name](dice)
        records = dice.randrange(trials - 2) if dice.random() < 0.8 else 0
        return cls(name, fault, 0, 0.0) if fault.at_once else cls(name, fault, records, dice.uniform(0, 1.5))

    def step(self, scene: Scene, written: int) -> bool:
        """Strike if it is time, heal if it is time; whether it struck."""
        current = time.monotonic()
        if self.struck is not None:
            if self.fault.seconds is not None and current >= self.struck + self.fault.seconds:
                self.heal(scene)
            return False
        if self.due is None and written >= self.records:
            self.due = current + self.delay
        if self.due is None or current < self.due or not self.fault.ready(scene):
            return False
        self.said, self.struck = self.fault.strike(scene), current
        return True

    def heal(self, scene: Scene) -> None:
        if self.struck is not None and not self.healed:
            self.fault.heal(scene)
            self.healed = True


@dataclass
class Episode:
    """One search or plan and what befalls its first run: all drawn from the seed and the number."""

    seed: int
    number: int
    operator: str
    search: str
    trials: int
    plan: bool
    resumes: bool
    strikes: list[Strike]
    dice: Random
    codes: list[int] = field(default_factory=list)
    records: int = 0
    bundles: int = 0
    seconds: float = 0.0

    @classmethod
    def draw(cls, seed: int, number: int, faults: Sequence[str]) -> Episode:
        dice = Random(f"{seed} {number}")
        # each in its turn, so that a short soak has seen them all
        first = Random(seed).sample(list(faults), len(faults))[number % len(faults)]
        operator = Random(seed).sample(list(PROBLEMS), len(PROBLEMS))[number % len(PROBLEMS)]
        trials = dice.randint(6, 10)
        names = [first, *(dice.sample(list(faults), len(faults))[: dice.choice([0, 0, 0, 1, 1, 2])])]
        strikes = [Strike.draw(name, dice, trials) for name in dict.fromkeys(names)]
        plan = any(strike.fault.for_plan for strike in strikes) or dice.random() < 0.2
        search = "random" if operator == FAULTY else dice.choice(["template", "random", "auto"])
        return cls(seed, number, operator, search, trials, plan, not plan and dice.random() < 0.5, strikes, dice)

    def __str__(self) -> str:
        faults = "; ".join(strike.said or f"({strike.name} came too late)" for strike in self.strikes)
        what = f"{'plan' if self.plan else 'tune'} {self.operator} {self.search}"
        ends = ", ".join(map(str, self.codes))
        return f"{what}: {faults}: exit {ends}; {self.records} records, {self.bundles} bundles, {self.seconds:.0f} s"

    def searches(self) -> list[tuple[str, str, str, int]]:
        """Name, operator, kind of search and trials of each of its searches."""
        found = [("first", self.operator, self.search, self.trials)]
        other = "conv2d_nchw32" if self.operator == "softmax" else "softmax"
        return [*found, ("second", other, "random", 4)] if self.plan else found

    def words(self, scene: Scene, first: bool) -> list[str]:
        """The command."""
        common = ["--log", str(scene.logs), "--builders", "1", "--timeout", "60", "--json"]
        if self.plan:
            return ["tune", "--plan", str(scene.folder / "plan.toml"), "--out", str(scene.out), *common]
        if self.resumes and not first and scene.records():
            return ["resume", *common]
        limits = ["--search", self.search, "--trials", str(self.trials)]
        return ["tune", self.operator, *PROBLEMS[self.operator].split(), *limits, *common]

    def play(self, scene: Scene) -> None:
        """Run it; what is wrong is in `scene.wrong`."""
        if self.plan:
            (scene.folder / "plan.toml").write_text("".join(map(entry, self.searches())))
        for strike in self.strikes:
            strike.fault.prepare(scene)
        for number in range(1 + RUNS):
            scene.start(self.words(scene, number == 0))
            done = self._run(scene, self.strikes if number == 0 else [])
            after_run(scene, self)
            scene.more.pop("SOAK_CLOCK", None)
            if scene.wrong or done:
                break
        else:
            scene.wrong.append(f"{RUNS} more runs did not come to the end")
        self.records = len(scene.records())
        if not scene.wrong:
            at_end(scene, self)

    def _run(self, scene: Scene, strikes: Sequence[Strike]) -> bool:
        """Wait for the run's end with what befalls it meanwhile; whether it came to its end."""
        assert scene.command
        began, before = time.monotonic(), len(scene.seen)
        asked: list[float] = []  # when it was asked to end
        while scene.command.poll() is None:
            scene.watch()
            for strike in strikes:
                if scene.command.poll() is None and strike.step(scene, len(scene.seen) - before):
                    scene.wrong += misread(scene)
                    asked += [time.monotonic()] if strike.fault.ends else []
            current = time.monotonic()
            stays = [strike.struck for strike in strikes if strike.struck and strike.fault.stays]
            if stays and not asked and current > max(stays) + PATIENCE:
                asked.append(current)
                scene.command.send_signal(signal.SIGINT)
            if current > min([began + LIMIT, *(at + MOMENT for at in asked)]):
                what = f"{MOMENT:.0f} s after it was asked to" if asked else f"{LIMIT:.0f} s"
                scene.wrong.append(f"did not end in {what}")
                scene.close()
            time.sleep(0.05)
        for strike in strikes:
            strike.heal(scene)
        scene.watch()
        code = scene.command.returncode
        self.codes.append(code)
        allowed = {0, *([INTERRUPTED] if asked else [])}.union(*(s.fault.codes for s in strikes if s.struck))
        if code not in allowed and not scene.wrong:
            scene.wrong.append(f"exit {code}, allowed are {sorted(allowed)}: {last_line(scene)}")
        return code == 0


def entry(search: tuple[str, str, str, int]) -> str:
    """A search as a plan has it."""
    name, operator, kind, trials = search
    fields = [word.split("=") for word in PROBLEMS[operator].split()]
    values = ", ".join(f"{field} = {value if value.isdigit() else json.dumps(value)}" for field, value in fields)
    return (
        f'[[work]]\nname = "{name}"\nproblem = "{operator}"\nset = {{ {values} }}\ntargets = ["llvm"]\n'
        f'search = "{kind}"\ntrials = {trials}\n\n'
    )


def last_line(scene: Scene) -> str:
    lines = scene.text("stderr").strip().splitlines()
    return lines[-1] if lines else "no word"


def after_run(scene: Scene, episode: Episode) -> None:
    """What must be true after a run, however it ended."""
    said, code, wrong = scene.text("stderr"), episode.codes[-1], scene.wrong
    for word in ("Traceback", "internal:", "Exception ignored", "leaked", "terminate called", "LLVM ERROR"):
        # what Python's own helper process says when it outlives one that was killed is not ours
        if word not in said or (word == "leaked" and code == -signal.SIGKILL):
            continue
        wrong.append(f"said {word!r}: {next(line for line in said.splitlines() if word in line)}")
    errors = [line for line in said.splitlines() if line.startswith("schedules: error:")]
    if len(errors) > 1 or (errors and code == 0) or (code in (1, 2) and not episode.plan and not errors):
        wrong.append(f"exit {code} with {len(errors)} errors: {errors[:2]}")
    # a search that ended because of its journal has said what it could not keep
    told = code == 1 and any(".jsonl" in line for line in errors)
    present = set(scene.lines())
    lost = [line for line in scene.seen if line not in present]
    if lost and not told:
        wrong.append(f"{len(lost)} of {len(scene.seen)} records are gone: {lost[0][:200].decode(errors='replace')}")
    scene.excuse(lost if told else [])
    records = scene.records()
    wrong += [*doubled(records), *announced(said, [*records, *map(json.loads, scene.excused)]), *blamed(records)]
    left: list[Any] = []
    deadline = time.monotonic() + MOMENT
    while (left := scene.processes() + list(scene.temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        wrong.append(f"left behind: {', '.join(map(str, left[:3]))}")
    if not scene.abrupt:
        wrong += [f"left behind: {path}" for path in (*scene.logs.rglob("*"), *scene.out.rglob("*")) if is_litter(path)]
    if said.count("paused: ") > len(episode.strikes):
        wrong.append(f"said {said.count('paused: ')} times that it paused")
    wrong += misread(scene)


def misread(scene: Scene) -> Iterator[str]:
    """What `status` gets wrong of the journals: it must serve what is good, and say in a line what it does not use."""
    if not scene.journals():
        return
    code, _, error = cli("status", "--logs", str(scene.logs), "--json")
    lines = [line for file in scene.journals() for line in file.read_bytes().split(b"\n") if line.strip()]
    unused = len(lines) - len({line for line in lines if line not in scene.strange and is_record(line)})
    if code or (error.count("\n"), ".jsonl line " in error) != (unused > 0, unused > 0):
        yield f"status: exit {code}, with {unused} lines that are no records: {error or 'no word'}"


def is_litter(path: Path) -> bool:
    """Whether a file or folder is one that should have got another name, or none."""
    return path.name.startswith(".") or path.suffix in (".new", ".tmp") or "tmp" in path.name


def is_trial(record: dict[str, Any]) -> bool:
    return record.get("stage") == "trial"


def tried(record: dict[str, Any]) -> str:
    """The candidate of a record."""
    return json.dumps([record[name] for name in ("operator", "problem", "target", "schedule", "config")])


def doubled(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The candidates that one campaign has tried twice."""
    count = Counter((tried(r), r["search"]["strategy"], r["search"]["campaign"]) for r in records if is_trial(r))
    for (candidate, *_), times in count.items():
        if times > 1:
            yield f"tried {times} times: {candidate[:300]}"


def announced(said: str, records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The times that were said of a new best and that are in no record."""
    times = {f"{record.get(name, 0.0):{form}}" for record in records for name in TIMES for form in (".1f", ".2f")}
    for trial, us in re.findall(r"  trial (\d+): ([\d.]+) us", said):
        if us not in times:
            yield f"trial {trial} of {us} us is in no journal"


def blamed(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The candidates that failed and are right, or failed in another way than they must."""
    for record in records:
        fault = record["config"].get("fault", "none")
        if record["outcome"] != BROKEN.get(fault, "correct"):
            yield f"{record['outcome']} ({record.get('reason')}): {tried(record)[:300]}"


def at_end(scene: Scene, episode: Episode) -> None:
    """What must be true once every search came to its end."""
    said = json.loads(scene.text("stdout"))
    for index, (name, operator, kind, trials) in enumerate(episode.searches()):
        records = [record for record in scene.records() if record["operator"] == operator]
        count = len(
            [r for r in records if is_trial(r) and r["search"]["strategy"] == kind and r["operator"] == operator]
        )
        told = said["entries"][index]["trials"] if episode.plan else said["trials"]
        if not count == told == min(trials, len(BROKEN) + 7 if operator == FAULTY else trials):
            scene.wrong.append(f"{name}: {count} trials in the journal, {told} told, {trials} asked for")
        best = best_of(records)
        found = cli(
            "best", operator, *PROBLEMS[operator].split(), "--target", "llvm", "--logs", str(scene.logs), "--json"
        )
        chosen = json.loads(found[1])["record"] if found[0] == 0 else None
        if chosen != best:
            scene.wrong.append(f"the best is {best}, `best` says {chosen or found[2]}")
        bundle = scene.out / "exported"
        if episode.plan:
            bundle = Path(said["entries"][index]["bundle"] or "none")
        else:
            export = ["export", operator, *PROBLEMS[operator].split(), "--logs", str(scene.logs), "--out", str(bundle)]
            if (found := cli(*export))[0]:
                scene.wrong.append(f"export: exit {found[0]}: {found[2]}")
                continue
        if (found := cli("verify", str(bundle)))[0]:
            scene.wrong.append(f"verify {bundle}: exit {found[0]}: {found[2] or found[1]}")
        elif best and json.loads((bundle / "kernel.json").read_text())["config"] != best["config"]:
            scene.wrong.append(f"{bundle} is not of the best")
        episode.bundles += 1


def best_of(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The winner of the last finals, unless a later trial was faster; each config by its latest time."""
    right = [record for record in records if record["outcome"] == "correct"]
    won = max((at for at, record in enumerate(right) if record.get("winner")), default=-1)
    # who else was in the finals has lost them, however fast
    rivals = right if won < 0 else [right[won], *(record for record in right[won + 1 :] if is_trial(record))]
    latest = {tried(record): record for record in rivals}
    return min(latest.values(), default=None, key=judged)


def judged(record: dict[str, Any]) -> float:
    """The microseconds that a record is judged by: no matter of this script."""
    return Record.from_json(record).us


def cli(*words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line(words)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code, out.getvalue(), err.getvalue()


def own_mounts() -> None:
    """Have what is mounted from now on seen by this process and its children alone, and gone with them."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def usable(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The faults that can be made here, and why the others cannot."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        tried = subprocess.run(mount, capture_output=True, text=True, check=False) if shutil.which("mount") else None
        if tried and tried.returncode == 0:
            subprocess.run(["umount", folder], check=True)
            return list(names), {}
    why = "no small file system can be mounted here: " + (tried.stderr.strip() if tried else os.strerror(errno.ENOENT))
    return [name for name in names if name not in MOUNTS], {name: why for name in names if name in MOUNTS}


@dataclass
class Tally:
    """What a soak came to; `faults` counts how often each struck, `wrong` is what was not as it must be."""

    seed: int
    episodes: int = 0
    records: int = 0
    bundles: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def add(self, episode: Episode, wrong: Sequence[str], again: str) -> None:
        self.episodes += 1
        self.records += episode.records
        self.bundles += episode.bundles
        self.faults.update(strike.name for strike in episode.strikes if strike.struck)
        self.codes.update(map(str, episode.codes))
        if wrong:
            self.wrong.append({"episode": str(episode), "wrong": list(wrong), "command": again})

    def to_json(self) -> dict[str, Any]:
        arch = parse_arch("llvm")
        about = {"date": now(), "device": device_name(arch), "versions": environment(arch, compiler_of(arch))}
        return {**vars(self), **about}


def soak(episode: Episode, folder: Path, tally: Tally, again: str = "") -> None:
    """Play an episode in `folder`, which is removed if nothing was wrong."""
    began = time.monotonic()
    folder.mkdir()
    scene = Scene(folder, episode.dice)
    try:
        episode.play(scene)
    finally:
        for strike in episode.strikes:
            strike.heal(scene)
        scene.close()
        if not scene.wrong:
            shutil.rmtree(folder)
    episode.seconds = time.monotonic() - began
    tally.add(episode, scene.wrong, again)
    print(f"{episode.number:4}  {episode}{'' if scene.wrong else '; right'}", flush=True)
    for line in scene.wrong:
        print(f"        WRONG: {line}", flush=True)
    if scene.wrong:
        print(f"        again: {again}; its folder: {folder}", flush=True)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="no episode starts after (default 20)")
    parser.add_argument("--episodes", type=int, help="at most so many")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    parser.add_argument("--episode", type=int, metavar="N", help="only this one")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, help="a JSON file for what was counted")
    args = parser.parse_args(words)
    if not args.minutes > 0 or (args.episodes is not None and args.episodes < 1):
        raise UsageError("--minutes and --episodes must be over 0")
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    os.environ[EXTRA] = f"{FAULTY}=tests.tune.faulty"
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    own_mounts()
    faults, skipped = usable(args.fault or list(FAULTS))
    for name, why in skipped.items():
        print(f"skipped {name}: {why}", flush=True)
    if not faults:
        raise UsageError("none of these faults can be made on this machine")
    tally = Tally(args.seed, skipped=skipped)
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    only = "".join(f" --fault {name}" for name in args.fault or ())
    deadline = time.monotonic() + 60 * args.minutes
    number = args.episode or 0
    try:
        while time.monotonic() < deadline and tally.episodes < (
            1 if args.episode is not None else args.episodes or 1 << 62
        ):
            again = f"scripts/soak.py --seed {args.seed} --episode {number}{only}"
            soak(Episode.draw(args.seed, number, faults), root / str(number), tally, again)
            number += 1
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(tally.to_json(), indent=1) + "\n")
    finally:
        if not any(root.iterdir()):
            root.rmdir()
    print(
        f"{tally.episodes} episodes, {sum(tally.faults.values())} faults, {tally.records} records, "
        f"{tally.bundles} bundles; {len(tally.wrong)} episodes wrong"
    )
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    run_script(main, "stopped; nothing is left running")
