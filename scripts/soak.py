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
import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where `scripts` and `tests` are

from schedules.build.builder import compiler_of
from schedules.build.present import device_name
from schedules.cli.script import run_script
from schedules.core.arch import parse_arch
from schedules.core.errors import UsageError
from schedules.core.interrupts import INTERRUPTED
from schedules.core.registry import EXTRA
from schedules.measure.records import environment, now
from scripts.soaking.checks import MOMENT, after_run, at_end, misread
from scripts.soaking.episode import FAULTY, Episode, entry
from scripts.soaking.faults import FAULTS, MOUNTS, Strike
from scripts.soaking.scene import Scene

LIMIT = 480.0  # seconds that a run may take, a pause of 300 s included, on a machine that is busy with other things too
PATIENCE = 20.0  # seconds that a run is given to end by itself once a fault that stays has struck
CLONE_NEWNS = 0x20000  # of unshare on Linux: a view of its own of what is mounted
RUNS = 3  # after the first, to come to the total: each may meet what the one before left behind


def play(episode: Episode, scene: Scene) -> None:
    """Run an episode; what is wrong is in `scene.wrong`."""
    if episode.plan:
        (scene.folder / "plan.toml").write_text("".join(map(entry, episode.searches())))
    for strike in episode.strikes:
        strike.fault.prepare(scene)
    for number in range(1 + RUNS):
        scene.start(episode.words(scene, number == 0))
        done = _run(episode, scene, episode.strikes if number == 0 else [])
        after_run(scene, episode)
        scene.more.pop("SOAK_CLOCK", None)
        if scene.wrong or done:
            break
    else:
        scene.wrong.append(f"{RUNS} more runs did not come to the end")
    episode.records = len(scene.records())
    if not scene.wrong:
        at_end(scene, episode)


def _run(episode: Episode, scene: Scene, strikes: Sequence[Strike]) -> bool:
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
    episode.codes.append(code)
    allowed = {0, *([INTERRUPTED] if asked else [])}.union(*(s.fault.codes for s in strikes if s.struck))
    if code not in allowed and not scene.wrong:
        scene.wrong.append(f"exit {code}, allowed are {sorted(allowed)}: {last_line(scene)}")
    return code == 0


def last_line(scene: Scene) -> str:
    lines = scene.text("stderr").strip().splitlines()
    return lines[-1] if lines else "no word"


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
        play(episode, scene)
    finally:
        for strike in episode.strikes:
            strike.heal(scene)
        scene.close()
        if not scene.wrong:
            shutil.rmtree(folder)
    episode.seconds = time.monotonic() - began
    wrong = [line.replace(f"{folder}/", "") for line in scene.wrong]
    tally.add(episode, wrong, again)
    print(f"{episode.number:4}  {episode}{'' if scene.wrong else '; right'}", flush=True)
    for line in wrong:
        print(f"        WRONG: {line}", flush=True)
    if wrong:
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
