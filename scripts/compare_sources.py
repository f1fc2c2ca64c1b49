#!/usr/bin/env python3
"""What a change of the code changes in the kernels: the generated source of default kernels, before and after.

    scripts/compare_sources.py main                          # this tree beside the revision main, in a worktree
    scripts/compare_sources.py main --target cuda:sm_90a --every-schedule
    scripts/compare_sources.py before/ --write               # keep this tree's sources in a folder ..
    scripts/compare_sources.py before/                       # .. and compare with them later

Each preset is built for each target with the schedule and config that the rule chooses, with --every-schedule also with
every other schedule's default config, records left aside.  Compared are the config and the text of the generated code:
CUDA C++, LLVM IR.  No GPU is used.  Prints a line for each kernel that is not the same, the first line of it that
differs, and the counts; the exit code is 1 if any is not the same.

The script speaks to the package by its public face alone, `schedules.load`, so that it runs on old revisions too.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":  # while the imports below take their time, too; an old revision's package has no help
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(2, b"stopped\n") and os._exit(130))

import argparse
import contextlib
import ctypes
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGETS = (
    "llvm:x86-64-v3",
    "cuda:sm_80",
    "cuda:sm_86",
    "cuda:sm_90a",
    "rocm:gfx90a",
    "rocm:gfx942",
    "rocm:gfx1100",
)
TEXT = {"llvm": "ll", "cuda": "cu", "rocm": "ll"}  # the ending of what is compared, by the target's kind
KEPT = "sources.json"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ADDRESS = re.compile(r'!"0x[0-9a-f]+')
Task = tuple[str, str, str | None]  # preset, target, schedule (None: what the rule chooses)


def source_of(task: Task) -> tuple[str, str]:
    """The name of a kernel, and its schedule, config and source, or why there is none."""
    import schedules

    preset, target, schedule = task
    name = f"{preset} {target} {schedule or 'default'}"
    try:
        kernel = schedules.load(preset, None, target, schedule=schedule, logs=[])
    except Exception as error:  # what an old revision raises is compared as text, like all else
        return name, f"{type(error).__name__}: {error}"
    built = kernel.built
    text = str(built.sources[TEXT[target.partition(":")[0]]])
    return name, f"{built.schedule.name}: {built.config}\n{text}"


def without_addresses(source: str) -> str:
    """The source with the addresses of TVM's objects, by which it names buffers to LLVM, as their numbers."""
    numbers: dict[str, str] = {}
    return ADDRESS.sub(lambda match: numbers.setdefault(match[0], f'!"object {len(numbers)}'), source)


def tasks(targets: Sequence[str], presets: str, every: bool) -> list[Task]:
    """What is built, as the package that Python finds lists its presets and schedules."""
    done = subprocess.run(
        [sys.executable, "-m", "schedules", "list", "--json"], capture_output=True, text=True, check=True
    )
    listed = json.loads(done.stdout)
    schedules = {operator["name"]: operator["schedules"] for operator in listed["operators"]}
    found: list[Task] = []
    for target, preset in itertools.product(targets, listed["presets"]):
        if fnmatch(preset["name"], presets):
            kind = target.partition(":")[0]
            served = [spec["name"] for spec in schedules[preset["operator"]] if kind in spec["kinds"]]
            found += [(preset["name"], target, schedule) for schedule in (None, *(served if every else ()))]
    return found


def end_with_parent() -> None:
    """What becomes of a process of the pool is the starting one's to say."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def write(folder: Path, wanted: Sequence[Task], jobs: int) -> None:
    """Keep the sources of the package that Python finds in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, initializer=end_with_parent) as pool:
        found = dict(pool.map(source_of, wanted, chunksize=8))
    (folder / KEPT).write_text(json.dumps(found, indent=0) + "\n")


@contextlib.contextmanager
def revision(name: str) -> Iterator[Path]:
    """A checkout of the revision in a worktree of its own."""
    folder = Path(tempfile.mkdtemp(prefix="sources-"))
    try:
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(folder / "tree"), name], cwd=ROOT, check=True)
        yield folder / "tree"
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder / "tree")], cwd=ROOT, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def sources(tree: Path, options: Sequence[str], kept: Path) -> dict[str, str]:
    """The sources of the package in `tree`, by way of the folder `kept`."""
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), str(kept), "--write", *options]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        writing = subprocess.Popen(command, cwd=tree, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        if code := writing.wait():
            raise subprocess.CalledProcessError(code, command)
    finally:
        writing.kill()
        writing.wait()
    return read(kept)


def read(folder: Path) -> dict[str, str]:
    """The sources that `write` kept."""
    texts: dict[str, str] = json.loads((folder / KEPT).read_text())
    return {name: without_addresses(text) for name, text in texts.items()}


def of_tasks(kept: dict[str, str], args: argparse.Namespace) -> dict[str, str]:
    """Those of the kept sources that the options ask for, by their targets, presets and schedules."""

    def asked(name: str) -> bool:
        preset, target, schedule = name.split()
        every = args.every_schedule or schedule == "default"
        return every and target in (args.target or TARGETS) and fnmatch(preset, args.presets)

    return {name: source for name, source in kept.items() if asked(name)}


def difference(before: str, after: str) -> str:
    """The first line that is not the same, as it was and as it is."""
    pairs = itertools.zip_longest(before.splitlines(), after.splitlines(), fillvalue="(nothing)")
    old, new = next(pair for pair in pairs if pair[0] != pair[1])
    return f"    - {old.strip()[:160]}\n    + {new.strip()[:160]}"


def compare(before: dict[str, str], after: dict[str, str]) -> bool:
    """Print what is not the same; whether all is."""
    counts: Counter[str] = Counter()
    for name in sorted({**before, **after}):
        if before.get(name) == after.get(name):
            counts["same"] += 1
        elif name not in before or name not in after:
            state = "gone" if name in before else "new"
            counts[state] += 1
            print(f"{state}: {name}")
        else:
            counts["changed"] += 1
            print(f"changed: {name}\n{difference(before[name], after[name])}")
    print(", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "nothing to compare")
    return set(counts) <= {"same"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a git revision, or a folder that --write has filled")
    parser.add_argument("--write", action="store_true", help="keep this tree's sources in the folder; compare nothing")
    parser.add_argument("--target", action="append", help=f"default: {' '.join(TARGETS)}")
    parser.add_argument("--presets", default="*", help="those whose names match, as a shell's pattern")
    parser.add_argument("--every-schedule", action="store_true", help="each schedule's default, not only the rule's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    targets, kept = args.target or TARGETS, Path(args.before)
    if args.write:
        write(kept, tasks(targets, args.presets, args.every_schedule), args.jobs)
        return 0
    options = [*(word for target in targets for word in ("--target", target)), "--jobs", str(args.jobs)]
    options += ["--presets", args.presets]
    options += ["--every-schedule"] if args.every_schedule else []
    with tempfile.TemporaryDirectory() as folder:
        if (kept / KEPT).exists():
            before = of_tasks(read(kept), args)
        else:
            with revision(args.before) as tree:
                before = sources(tree, options, Path(folder) / "before")
        return 0 if compare(before, sources(ROOT, options, Path(folder) / "after")) else 1


if __name__ == "__main__":
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
