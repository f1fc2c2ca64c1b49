"""How a search speeds up with the GPUs of this machine, and whether measuring on all of them disturbs the times.

    python -m benchmarks.scaling tutorial --schedule tutorial --gpus 1,2,4 --out tuning_logs/nvidia-h200/scaling.json

The same candidates (a random search with one seed) are tried on one GPU, then on more.  For each count: trials a second
in the middle eight tenths of the trials, the speed beside one GPU, and how the time of each candidate differs from what
it was on one GPU (median and 10th to 90th percentile of the ratio); `busy` is the part of that time that a GPU's
process spent on candidates: loading, verifying, timing.  Where it is low, the cores do not build fast enough.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from schedules.build.present import local_gpu
from schedules.cli.script import run_script
from schedules.core.errors import UsageError
from schedules.core.presets import preset
from schedules.measure.records import Record, now
from schedules.tune.crew import LocalCrew
from schedules.tune.session import Work, tune
from schedules.tune.tuner import Limits, Silent, Status


class Clock(Silent):
    """Remembers when each trial ended."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.us: dict[tuple[str, str], float] = {}
        self.build_s: list[float] = []
        self.run_s: list[float] = []
        self._started = time.monotonic()

    @property
    def count(self) -> int:
        return len(self.times)

    def phase(self, name: str) -> None:
        print(f"  {time.monotonic() - self._started:6.1f} s  {name}", file=sys.stderr, flush=True)

    def trial(self, record: Record, status: Status) -> None:
        self.times.append(time.monotonic())
        if self.count in (1, 20):
            self.phase(f"trial {self.count}")
        if "build_s" in record.more:
            self.build_s.append(record.more["build_s"])
        self.run_s.append(record.more.get("run_s", 0.0))
        if record.correct:
            self.us[record.key] = record.us

    @property
    def middle(self) -> slice:
        """The trials that count: before them references are computed, after them the last builds are waited for."""
        return slice(len(self.times) // 10, len(self.times) * 9 // 10)

    @property
    def rate(self) -> float:
        times = self.times[self.middle]
        return (len(times) - 1) / (times[-1] - times[0])

    def busy(self, gpus: int) -> float:
        return self.rate * float(np.mean(self.run_s[self.middle])) / gpus


def searched(name: str, schedule: str | None, gpus: int, trials: int, builders: int | None) -> tuple[Clock, LocalCrew]:
    arch = local_gpu()
    if arch is None:
        raise UsageError("no CUDA GPU here to search on")
    clock = Clock()
    schedules = (schedule,) if schedule else ()
    crew = LocalCrew(arch, devices=range(gpus), builders=builders)
    clock.phase("workers started")
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = Work(preset(name).problem(), arch, Limits(trials=trials), search="random", schedules=schedules)
            # finals, on one GPU, are no part of this
            tune(work, crew, journal=Path(folder) / "scaling.jsonl", watcher=clock, stop=lambda: clock.count >= trials)
        clock.phase("searched")
    finally:
        crew.close()
    clock.phase("workers ended")
    return clock, crew


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--schedule", help="search only this schedule")
    parser.add_argument("--gpus", default="1,2", help="counts to try, one GPU first")
    parser.add_argument("--trials", type=int, default=200, help="for each GPU")
    parser.add_argument("--builders", type=int, help="processes that build (default: one for each core)")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    counts = [int(text) for text in args.gpus.split(",")]
    found: list[dict[str, Any]] = []
    alone: Clock | None = None
    for count in counts:
        clock, crew = searched(args.preset, args.schedule, count, count * args.trials, args.builders)
        alone = alone or clock
        ratios = [us / alone.us[key] for key, us in clock.us.items() if key in alone.us]
        p10, median, p90 = (float(value) for value in np.percentile(ratios, (10, 50, 90)))
        entry = {
            "gpus": count,
            "trials": len(clock.times),
            "trials_per_s": clock.rate,
            "speedup": clock.rate / alone.rate,
            "time_ratio": {"median": median, "p10": p10, "p90": p90, "candidates": len(ratios)},
            "builders": crew.builders,
            "build_s": float(np.median(clock.build_s)),
            "run_s": float(np.median(clock.run_s)),
            "busy": clock.busy(count),
        }
        found.append(entry)
        spread = f"times {median:.4f} of one GPU's ({p10:.4f} to {p90:.4f}, {len(ratios)} candidates)"
        busy = f"each busy {entry['busy']:.0%} of the time"
        print(f"{count} GPUs: {clock.rate:6.2f} trials/s, {entry['speedup']:.2f}x; {busy}; {spread}", flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "preset": args.preset,
            "schedule": args.schedule,
            "date": now(),
            "device": crew.device,
            "versions": crew.versions,
            "counts": found,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    run_script(main)
