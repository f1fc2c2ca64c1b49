#!/usr/bin/env python3
"""Hundreds of random problems and configs of a schedule, built by all cores and verified.

    scripts/sweep.py conv2d_nhwc:tma_wgmma conv2d_hwcn:tma_wgmma --target cuda:sm_90a --count 300
    scripts/sweep.py softmax --count 100 --out tuning_logs/nvidia-h200/sweep.json        # each schedule of the operator

On the device if there is one for the target, else by the routes that this machine has: each process builds a case and
then verifies it, so that some build while others are on the device.  What is wrong, or fails, is printed with the
command that shows it again, and the exit code is then 1.  --out adds the counts to a JSON file after every case: a
sweep that was stopped has fewer `cases` there than `asked`, and goes on from them with --resume.
"""

from __future__ import annotations

if __name__ == "__main__":
    from schedules.core.interrupts import heed

    heed()  # while the imports below take their seconds, too

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

from schedules.build.builder import compiler_of
from schedules.build.present import device_name
from schedules.build.toolchain.devices import on_local
from schedules.check.sweep import Case, cases
from schedules.check.verify import verify
from schedules.cli.script import run_script
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import SchedulesError, UsageError
from schedules.core.operator import ScheduleSpec
from schedules.core.parallel import attempt, outcome, processes
from schedules.core.registry import operator, operator_of
from schedules.measure.records import environment, now

SECONDS = 300  # that a case may take


@dataclass
class Tally:
    """What became of the first `cases` of the `asked` ones of a schedule; `error` is the worst, in units of the
    tolerance."""

    asked: int
    cases: int = 0
    right: int = 0
    error: float = 0.0
    bad: list[dict[str, str]] = field(default_factory=list)

    def add(self, error: float, wrong: str, command: str) -> None:
        """Count a case that came to `error`, or to what is `wrong`."""
        self.cases += 1
        if wrong:
            self.bad.append({"wrong": wrong, "command": command})
        else:
            self.right, self.error = self.right + 1, max(self.error, error)


def checked(case: Case, arch: Arch, schedule: str) -> tuple[float, str]:
    """The worst error of a case by every route there is here, and what is wrong with it.

    A GPU that a kernel has made fail serves its process no more: the process says so and ends, and another takes the
    cases after it.
    """
    try:
        checks = verify(case.problem, arch, schedule, case.config)
    except SchedulesError:
        raise
    except Exception as error:
        if not arch.is_gpu or device_name(arch) is None:
            raise
        print(f"  {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        os._exit(1)
    worst = max(checks, key=lambda check: (not check.passed, check.error))
    return worst.error, "" if worst.passed else worst.detail


def command(case: Case, arch: Arch, spec: ScheduleSpec) -> str:
    """What verifies a case again."""

    def words(fields: dict[str, Any]) -> list[str]:
        def text(value: Any) -> str:
            return str(value).lower() if isinstance(value, bool) else str(value)

        return [f"{k}={','.join(map(text, v)) if isinstance(v, list | tuple) else text(v)}" for k, v in fields.items()]

    operator_name, problem = operator_of(case.problem).name, " ".join(words(case.problem.to_json()))
    config = " ".join(f"--config {word}" for word in words(case.config.to_json()))
    return f"schedules verify {operator_name} {problem} --target {arch} --schedule {spec.name} {config}"


def sweep(spec: ScheduleSpec, drawn: Iterable[Case], arch: Arch, pool: Any, tally: Tally) -> Iterator[Case]:
    """Verify all of `drawn`, the first while the next are drawn.  Gives each, in order, when `tally` has it; those that
    are not right are printed."""
    tasks = [(case, pool.schedule(attempt, args=[checked, case, arch, spec.name], timeout=SECONDS)) for case in drawn]
    for case, task in tasks:
        result, why = outcome(task)
        error, wrong = result or (0.0, why)
        again = command(case, arch, spec)
        if wrong:
            print(f"  {wrong}\n    {again}", flush=True)
        tally.add(error, wrong, again)
        yield case


def wanted(words: Sequence[str], arch: Arch) -> list[tuple[str, ScheduleSpec]]:
    """The schedules that "operator" or "operator:schedule" name.  Raises UnknownNameError, ConfigError."""
    specs = []
    for word in words:
        name, _, schedule = word.partition(":")
        op = operator(name)
        chosen = [op.schedule(schedule)] if schedule else [s for s in op.schedules if arch.kind in s.kinds]
        specs += [(name, spec) for spec in chosen]
    for _, spec in specs:
        spec.require_kind(arch)
    return specs


def conditions(arch: Arch, seed: int) -> dict[str, Any]:
    """What cases were drawn and verified with."""
    device, versions = str(device_name(arch) or "emulated"), environment(arch, compiler_of(arch))
    return {"target": str(arch), "device": device, "seed": seed, "versions": versions}


def results_in(file: Path | None) -> dict[str, Any]:
    """The results in the file by name."""
    return json.loads(file.read_text()) if file and file.exists() else {}


def add_results(file: Path, results: dict[str, Any]) -> None:
    """Add `results` by name to those of the file, which is whole whenever this is stopped."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps({**results_in(file), **results}, indent=1) + "\n")
    new.replace(file)


def started(old: dict[str, Any], about: dict[str, Any], count: int, name: str) -> Tally:
    """Where to go on with `count` cases after those of `old`.

    Raises UsageError if these were verified in other ways than `about` says.
    """
    if other := [word for word, value in about.items() if old.get(word) != value]:
        raise UsageError(f"{name}: --out has cases of another {' and '.join(other)}; leave out --resume to start over")
    known = {f.name: old[f.name] for f in fields(Tally) if f.name in old}
    return Tally(**known | {"asked": max(count, old["cases"])})


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="+", metavar="OPERATOR[:SCHEDULE]")
    parser.add_argument("--target", default="llvm", help="as of schedules build (default llvm)")
    parser.add_argument("--count", type=int, default=200, help="cases of each schedule (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases drawn")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--out", type=Path, help="a JSON file to add the counts to")
    parser.add_argument("--resume", action="store_true", help="go on after the cases that --out has")
    args = parser.parse_args(words)
    if args.count < 1 or args.workers < 1:
        raise UsageError("--count and --workers must be at least 1")
    if args.resume and not args.out:
        raise UsageError("--resume goes on with what --out has; give --out FILE")
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    arch = on_local(parse_arch(args.target))
    bad = 0
    with processes(args.workers) as pool:
        for name, spec in wanted(args.schedules, arch):
            start, key = time.monotonic(), f"{name} {spec.name}"
            about = conditions(arch, args.seed) if args.out else {}
            old = results_in(args.out).get(key) if args.resume else None
            tally = started(old, about, args.count, key) if old else Tally(args.count)
            drawn = islice(cases(operator(name), spec, arch, args.seed), tally.cases, tally.asked)
            for _ in sweep(spec, drawn, arch, pool, tally):
                if args.out:
                    add_results(args.out, {key: {**asdict(tally), **about, "date": now()}})
            bad += len(tally.bad)
            print(
                f"{key}: {tally.right} of {tally.cases} right, worst error {tally.error:.3f} of the tolerance, "
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    run_script(main, "stopped; --out has the cases that were verified, and --resume goes on after them")
