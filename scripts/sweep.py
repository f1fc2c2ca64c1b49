#!/usr/bin/env python3
"""Hundreds of random problems and configs of a schedule, built by all cores and verified.

    scripts/sweep.py conv2d_nhwc:tma_wgmma conv2d_hwcn:tma_wgmma --target cuda:sm_90a --count 300
    scripts/sweep.py softmax --count 100 --out tuning_logs/nvidia-h200/sweep.json        # each schedule of the operator
    scripts/sweep.py all --target rocm cuda --route emulated --count 40                  # each schedule for each target
    scripts/sweep.py all --build-only --target cuda:sm_80 --count 5000                   # 1000 of each operator
    scripts/sweep.py presets --build-only --target rocm cuda                             # for every GPU that there is

On the device if there is one for the target, else by the routes that this machine has: each process builds a case and
then verifies it, so that some build while others are on the device.  What is wrong, or fails, is printed with the
command that shows it again, and the exit code is then 1.  --out adds the counts to a JSON file after every case: a
sweep that was stopped has fewer `cases` there than `asked`, and goes on from them with --resume.  "all" stands for a
problem of every operator in turn, by each schedule that takes it: --count is then of all of them together.

With --build-only problems are as large as real layers and larger, nothing is run, and an operator stands for what its
rule chooses, with the default config, as `schedules build --default` builds it; OPERATOR:SCHEDULE still for that
schedule and its configs, and "all" for every operator in turn.  "presets" stands for all of them, however many.  What
is said of a kernel's waves on an AMD GPU is compared with LLVM's own remark on it.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where `scripts` is

from schedules.build.builder import build, compiler_of
from schedules.build.inspect import sums_read_early
from schedules.build.present import device_name
from schedules.build.toolchain.cuda import disassemble
from schedules.build.toolchain.devices import on_local
from schedules.check.sweep import Case, all_cases, cases, rule_cases
from schedules.check.verify import ROUTES, verify
from schedules.cli.script import run_script
from schedules.core.arch import ARCHES, Arch, parse_arch, waves_by_llvm
from schedules.core.errors import SchedulesError, UsageError
from schedules.core.parallel import attempt, outcome, processes
from schedules.core.presets import presets
from schedules.core.registry import operator, operator_of, operators
from schedules.measure.records import environment, now
from scripts.remarks import resource_remarks

SECONDS = 300  # that a case may take
Work = Callable[[Case, Arch], tuple[float, str]]  # with a case, in a process: its error, and what is wrong with it


@dataclass
class Tally:
    """What became of the first `cases` of the `asked` ones of a schedule; `error` is the worst, in units of the
    tolerance."""

    asked: int
    cases: int = 0
    right: int = 0
    error: float = 0.0
    slowest: float = 0.0  # seconds
    slowest_command: str = ""
    bad: list[dict[str, str]] = field(default_factory=list)

    def add(self, error: float, wrong: str, seconds: float, command: str) -> None:
        """Count a case that came to `error`, or to what is `wrong`, in `seconds`."""
        self.cases += 1
        if wrong:
            self.bad.append({"wrong": wrong, "command": command})
        else:
            self.right, self.error = self.right + 1, max(self.error, error)
        if seconds > self.slowest:
            self.slowest, self.slowest_command = seconds, command


@dataclass(frozen=True)
class Subject:
    """What is swept: its name in the results, and its cases without end."""

    name: str
    cases: Iterator[Case]


def compiled(case: Case, arch: Arch) -> tuple[float, str]:
    """No error, and nothing wrong: a case is built as `schedules build` does, down to its host's machine code.

    A refusal for the sake of a limit is BuildError as much as one of the compiler's: problems are legal.
    """
    built = build(case.problem, arch, case.schedule, case.config)
    built.module["main"]
    if "wgmma" in str(built.binaries.get("ptx", "")):
        early = sums_read_early(disassemble(built.binaries["cubin"]))
        return 0.0, f"reads sums of wgmma before they are there: {early[0]}" if early else ""
    if arch.kind == "rocm" and built.launch:
        threads = built.launch.threads
        for name, said in resource_remarks(str(built.sources["ll"]), arch.name, threads).items():
            held = (threads, said.vector(arch), said.shared, said.scalars)
            if (counted := waves_by_llvm(arch, *held)) != said.waves:
                return 0.0, f"{name}: {counted} waves a SIMD, {said.waves} by LLVM, of {threads} threads, {said}"
    return 0.0, ""


def verified(case: Case, arch: Arch, routes: Sequence[str] | None = None) -> tuple[float, str]:
    """The worst error of a case by `routes`, or by every route there is here, and what is wrong with it.

    A GPU that a kernel has made fail serves its process no more: the process says so and ends, and another takes the
    cases after it.
    """
    try:
        checks = verify(case.problem, arch, case.schedule, case.config, routes=routes)
    except SchedulesError:
        raise
    except Exception as error:
        if not arch.is_gpu or device_name(arch) is None:
            raise
        print(f"  {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        os._exit(1)
    worst = max(checks, key=lambda check: (not check.passed, check.error))
    return worst.error, "" if worst.passed else worst.detail


def timed(work: Work, case: Case, arch: Arch) -> tuple[float, str, float]:
    """What `work` makes of a case, and its seconds."""
    start = time.monotonic()
    return *work(case, arch), time.monotonic() - start


def command(case: Case, arch: Arch, verb: str) -> str:
    """What builds or verifies a case again."""

    def words(fields: dict[str, Any]) -> list[str]:
        def text(value: Any) -> str:
            return str(value).lower() if isinstance(value, bool) else str(value)

        return [f"{k}={','.join(map(text, v)) if isinstance(v, list | tuple) else text(v)}" for k, v in fields.items()]

    problem = [operator_of(case.problem).name, *words(case.problem.to_json()), "--target", str(arch)]
    default = ["--default"] if verb == "build" else []  # what `verify` takes anyhow
    schedule = ["--schedule", case.schedule] if case.schedule else default
    config = [f"--config {word}" for word in words(case.config.to_json())] if case.config else []
    return " ".join(["schedules", verb, *problem, *schedule, *config])


def sweep(drawn: Iterable[Case], arch: Arch, pool: Any, tally: Tally, work: Work) -> Iterator[Case]:
    """Do `work` with all of `drawn`, the first while the next are drawn.  Gives each, in order, when `tally` has it;
    those that are not right are printed."""
    verb = "build" if work is compiled else "verify"
    tasks = [(case, pool.schedule(attempt, args=[timed, work, case, arch], timeout=SECONDS)) for case in drawn]
    for case, task in tasks:
        result, why = outcome(task)
        error, wrong, seconds = result or (0.0, why, 0.0)
        again = command(case, arch, verb)
        if wrong:
            print(f"  {wrong}\n    {again}", flush=True)
        tally.add(error, wrong, seconds, again)
        yield case


def wanted(words: Sequence[str], arch: Arch, seed: int, build_only: bool) -> Iterator[Subject]:
    """What "operator", "operator:schedule" and "all" stand for.  Raises UnknownNameError, ConfigError."""
    for word in words:
        name, _, schedule = word.partition(":")
        if name == "presets" and build_only:
            whole = [preset for preset in presets().values() if preset.available]
            yield Subject(f"{name} built for {arch}", (Case(preset.problem()) for preset in whole))
            continue
        if build_only and not schedule:
            named = operators() if name == "all" else [operator(name)]
            yield Subject(f"{name} built for {arch}", rule_cases(named, seed))
            continue
        if name == "all":
            yield Subject(f"{name} verified for {arch}", all_cases(operators(), arch, seed))
            continue
        op = operator(name)
        for spec in [op.schedule(schedule)] if schedule else [s for s in op.schedules if arch.kind in s.kinds]:
            spec.require_kind(arch)
            key = f"{op.name} {spec.name}{f' built for {arch}' if build_only else ''}"
            yield Subject(key, cases(op, spec, arch, seed, large=build_only))


def conditions(arch: Arch, seed: int, routes: Sequence[str] | None) -> dict[str, Any]:
    """What cases were drawn and verified with."""
    device, versions = str(device_name(arch) or "emulated"), environment(arch, compiler_of(arch))
    about = {"target": str(arch), "device": device, "seed": seed, "versions": versions}
    return about | ({"routes": list(routes)} if routes else {})


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
    parser.add_argument("subjects", nargs="+", metavar="OPERATOR[:SCHEDULE]|all|presets")
    parser.add_argument("--build-only", action="store_true", help="build large problems and run nothing")
    parser.add_argument(
        "--target",
        nargs="+",
        default=["llvm"],
        help="as of schedules build, or cuda or rocm: all of these (default llvm)",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=200,
        help="cases of each schedule (default 200)",
    )
    parser.add_argument("--route", choices=ROUTES, nargs="+", help="to verify by (default: each that there is here)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases drawn")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--out", type=Path, help="a JSON file to add the counts to")
    parser.add_argument("--resume", action="store_true", help="go on after the cases that --out has")
    args = parser.parse_args(words)
    if args.count < 1 or args.workers < 1:
        raise UsageError("--count and --workers must be at least 1")
    args.target = [
        name for word in args.target for name in (sorted(a for a in ARCHES if a.startswith(f"{word}:")) or [word])
    ]
    if args.resume and not args.out:
        raise UsageError("--resume goes on with what --out has; give --out FILE")
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    bad = 0
    work: Work = compiled if args.build_only else partial(verified, routes=args.route)
    arches = [on_local(parse_arch(name)) for name in args.target]
    subjects = [(arch, each) for arch in arches for each in wanted(args.subjects, arch, args.seed, args.build_only)]
    with processes(args.workers) as pool:
        for arch, subject in subjects:
            start, key = time.monotonic(), subject.name
            about = conditions(arch, args.seed, args.route) if args.out else {}
            old = results_in(args.out).get(key) if args.resume else None
            tally = started(old, about, args.count, key) if old else Tally(args.count)
            drawn = islice(subject.cases, tally.cases, tally.asked)
            for _ in sweep(drawn, arch, pool, tally, work):
                if args.out:
                    add_results(args.out, {key: {**asdict(tally), **about, "date": now()}})
            bad += len(tally.bad)
            worst = "" if args.build_only else f", worst error {tally.error:.3f} of the tolerance"
            print(
                f"{key}: {tally.right} of {tally.cases} right{worst}, {time.monotonic() - start:.0f} s\n"
                f"  slowest {tally.slowest:.1f} s: {tally.slowest_command}",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    run_script(main, "stopped; --out has the cases that were verified, and --resume goes on after them")
