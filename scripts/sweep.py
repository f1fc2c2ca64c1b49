#!/usr/bin/env python3
"""Hundreds of random problems and configs of a schedule, built by all cores and verified.

    scripts/sweep.py conv2d_nhwc:tma_wgmma conv2d_hwcn:tma_wgmma --target cuda:sm_90a --count 300
    scripts/sweep.py softmax --count 100 --out tuning_logs/nvidia-h200/sweep.json        # each schedule of the operator

On the device if there is one for the target, else by the routes that this machine has.  What is wrong, or fails, is
printed with the command that shows it again, and the exit code is then 1.  --out adds the counts to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from schedules.arch import Arch, parse_arch
from schedules.build import compiler_of
from schedules.errors import SchedulesError, UsageError
from schedules.measure import device_name
from schedules.operator import ScheduleSpec
from schedules.parallel import attempt, outcome, processes
from schedules.records import environment, now
from schedules.registry import operator, operator_of
from schedules.sweep import Case, cases
from schedules.verify import verify

SECONDS = 300  # that a case may take


@dataclass
class Tally:
    """What became of the cases of one schedule; `error` is the worst, in units of the tolerance."""

    cases: int = 0
    right: int = 0
    error: float = 0.0
    bad: list[dict[str, str]] = field(default_factory=list)


def checked(case: Case, arch: Arch, schedule: str) -> tuple[float, str]:
    """The worst error of a case by every route there is here, and what is wrong with it."""
    checks = verify(case.problem, arch, schedule, case.config)
    worst = max(checks, key=lambda check: (not check.passed, check.error))
    return worst.error, "" if worst.passed else worst.detail


def command(case: Case, arch: Arch, spec: ScheduleSpec) -> str:
    """What verifies a case again."""

    def words(fields: dict[str, Any]) -> list[str]:
        def text(value: Any) -> str:
            return str(value).lower() if isinstance(value, bool) else str(value)

        return [f"{k}={','.join(map(text, v)) if isinstance(v, list | tuple) else text(v)}" for k, v in fields.items()]

    operator_name, problem = operator_of(case.problem).name, " ".join(words(case.problem.words()))
    config = " ".join(f"--config {word}" for word in words(case.config.words()))
    return f"schedules verify {operator_name} {problem} --target {arch} --schedule {spec.name} {config}"


def sweep(spec: ScheduleSpec, found: Iterable[Case], arch: Arch, pool: Any) -> Tally:
    """Verify all of `found`, the first while the next are drawn; a line for each that is not right."""
    tasks = [(case, pool.schedule(attempt, args=[checked, case, arch, spec.name], timeout=SECONDS)) for case in found]
    tally = Tally(len(tasks))
    for case, task in tasks:
        result, why = outcome(task, SECONDS)
        error, wrong = result or (0.0, why)
        if wrong:
            tally.bad.append({"wrong": wrong, "command": command(case, arch, spec)})
            print(f"  {wrong}\n    {tally.bad[-1]['command']}", flush=True)
        else:
            tally.right, tally.error = tally.right + 1, max(tally.error, error)
    return tally


def wanted(words: Sequence[str], arch: Arch) -> list[tuple[str, ScheduleSpec]]:
    """The schedules that "operator" or "operator:schedule" name.  Raises UnknownNameError, ConfigError."""
    found = []
    for word in words:
        name, _, schedule = word.partition(":")
        op = operator(name)
        specs = [op.schedule(schedule)] if schedule else [s for s in op.schedules if arch.kind in s.kinds]
        found += [(name, spec) for spec in specs]
    for _, spec in found:
        spec.require_kind(arch)
    return found


def keep(file: Path, results: dict[str, Any]) -> None:
    """Add `results` by name to those of the file."""
    old = json.loads(file.read_text()) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**old, **results}, indent=1) + "\n")


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="+", metavar="OPERATOR[:SCHEDULE]")
    parser.add_argument("--target", default="llvm", help="as of schedules build (default llvm)")
    parser.add_argument("--count", type=int, default=200, help="cases of each schedule (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases drawn")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--out", type=Path, help="a JSON file to add the counts to")
    args = parser.parse_args(words)
    if args.count < 1 or args.workers < 1:
        raise UsageError("--count and --workers must be at least 1")
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    arch = parse_arch(args.target)
    bad = 0
    with processes(args.workers) as pool:
        for name, spec in wanted(args.schedules, arch):
            start = time.monotonic()
            found = islice(cases(operator(name), spec, arch, args.seed), args.count)
            tally = sweep(spec, found, arch, pool)
            bad += len(tally.bad)
            print(
                f"{name} {spec.name}: {tally.right} of {tally.cases} right, worst error {tally.error:.3f} of the "
                f"tolerance, {time.monotonic() - start:.0f} s",
                flush=True,
            )
            if args.out:
                about = {"target": str(arch), "device": str(device_name(arch) or "emulated"), "date": now()}
                told = {**asdict(tally), **about, "seed": args.seed, "versions": environment(arch, compiler_of(arch))}
                keep(args.out, {f"{name} {spec.name}": told})
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SchedulesError as error:
        sys.exit(f"error: {error}")
