"""What befalls a run: signals, full folders, damaged journals, clock steps, limits; and when each strikes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from schedules.core.interrupts import INTERRUPTED
from scripts.soaking.scene import Scene

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
