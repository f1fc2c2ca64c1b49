"""This project's search and TVM's own `tune_tir` on one problem, on the same machine, each for the same wall time.

    python -m benchmarks.compare_search tutorial --target cuda:sm_90a --minutes 5 --out compare_search.json

Prints for both the trials, trials a second, and the best time; the best of `tune_tir` is verified and timed again by
the clock that times ours.  The wall time of each begins before its processes start.  Needs psutil and cloudpickle, for
TVM's tuner.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from schedules.cli.script import run_script
from schedules.core.arch import parse_arch
from schedules.core.errors import TuningError
from schedules.core.presets import resolve
from schedules.core.process import child
from schedules.measure.records import Record, now
from schedules.tune.crew import LocalCrew
from schedules.tune.session import Work, tune
from schedules.tune.tuner import Limits, Silent, Status

STOCK = Path(__file__).with_name("stock_metaschedule.py")


class Curve(Silent):
    """The best so far over the wall time: (seconds, trials, microseconds)."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.points: list[tuple[float, int, float]] = []

    def trial(self, record: Record, status: Status) -> None:
        if status.best is record:
            point = (round(time.monotonic() - self._started, 1), status.done, round(record.us, 2))
            self.points.append(point)
            print(
                f"  {point[0]:6.1f} s  trial {point[1]}: {point[2]} us  {record.schedule}: {record.config}", flush=True
            )


def ours(words: list[str], target: str, minutes: float, seed: int, journal: Path) -> dict[str, Any]:
    """Our template search from cold."""
    _, problem = resolve(words[0], dict(word.split("=", 1) for word in words[1:]))
    arch, curve, start = parse_arch(target), Curve(), time.monotonic()
    crew = LocalCrew(arch)
    try:
        # what the processes took to start, and the finals, are within the time
        left = minutes - (time.monotonic() - start + 10) / 60
        result = tune(Work(problem, arch, Limits(minutes=left), seed=seed), crew, journal=journal, watcher=curve)
    finally:
        crew.close()
    if result.best is None:
        raise TuningError("nothing that was tried is correct")
    seconds = time.monotonic() - start
    return {
        "search": f"template, {crew.builders} builders",
        "seconds": round(seconds, 1),
        "trials": result.status.done,
        "trials_per_s": round(result.status.done / seconds, 3),
        "outcomes": dict(result.status.outcomes),
        "best_us": result.best.us,
        "schedule": result.best.schedule,
        "config": result.best.config.to_json(),
        "curve": curve.points,
        "device": crew.device,
        "versions": crew.versions,
    }


def stock(words: list[str], target: str, minutes: float, fast_build: bool) -> dict[str, Any]:
    """TVM's `tune_tir`, in a process of its own."""
    command = [sys.executable, str(STOCK), *words, "--target", target, "--minutes", str(minutes)]
    events: list[dict[str, Any]] = []
    command += ["--fast-build"] if fast_build else []
    with child(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        assert run.stdout
        for line in run.stdout:
            if line.startswith("{"):
                events.append(json.loads(line))
                print(f"  {line.strip()[:160]}", flush=True)
            else:
                print(line, end="", file=sys.stderr)
        run.wait()
    by_name = {event["event"]: event for event in events}
    if "tuned" not in by_name:
        raise TuningError(f"tune_tir ended with exit code {run.returncode} before its time; see above")
    tuned, best = by_name["tuned"], by_name.get("best", {})
    return {
        "search": "tune_tir" + (", builders without TVM's import of intrinsics" if fast_build else ""),
        "seconds": tuned["seconds"],
        "trials": tuned["trials"],
        "trials_per_s": tuned["trials_per_s"],
        "failed": tuned["failed"],
        "best_us_by_its_clock": tuned["best_us"],
        "best_us": best.get("median_us"),
        "curve": [(e["seconds"], e["trials"], e["best_us"]) for e in events if e["event"] == "batch"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="NAME [field=value ...]", help="an operator or a preset")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("ours", "stock"), help="one half now; the other is added to --out later")
    parser.add_argument("--slow-build", action="store_true", help="leave TVM's builder as it is")
    parser.add_argument("--journal", type=Path, help="keep our trials here")
    parser.add_argument("--out", type=Path, help="the result as JSON")
    args = parser.parse_args()
    found: dict[str, Any] = {"problem": args.words, "target": args.target, "minutes": args.minutes, "date": now()}
    if args.out and args.out.exists():
        found = {**json.loads(args.out.read_text()), **found}
    with tempfile.TemporaryDirectory() as folder:
        if args.only != "stock":
            journal = args.journal or Path(folder) / "ours.jsonl"
            found["ours"] = ours(args.words, args.target, args.minutes, args.seed, journal)
        if args.only != "ours":
            found["stock"] = stock(args.words, args.target, args.minutes, not args.slow_build)
    for name in ("ours", "stock"):
        if half := found.get(name):
            rate = f"{half['trials']} trials in {half['seconds']} s, {half['trials_per_s']:.2f} trials/s"
            print(f"{name:6} {rate}, best {half['best_us'] or float('nan'):.2f} us")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_script(main)
