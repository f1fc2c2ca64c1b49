"""Our programs in TIRx beside our TE schedules for the same problems, in one run on this GPU.

    python -m benchmarks.compare_languages                      # every problem that has a program in TIRx
    python -m benchmarks.compare_languages --missing            # what a run that was cut off left
    python -m benchmarks.compare_languages --operators softmax --schedule frames
    python -m benchmarks.compare_languages --build-only out/languages     # anywhere: build for a run with --builds

Each side has its best record, else its default config.  All are built first, in as many processes as there are cores,
verified on the device, and timed in turn from CUDA graphs.  The result is written after every case;
readme_tables.py makes the table of docs/tirx.md of it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import bench, language_case
from benchmarks.peers.comparison import GRAPH, STREAM, Results
from benchmarks.peers.language_case import KIND, bundle_of, case_result, line_of, name_of
from benchmarks.peers.runs import Comparison, Found, add_arguments, check_arguments, run_cases, search_of
from schedules.build.present import device_name, local_gpu
from schedules.cli.script import run_script
from schedules.core.arch import Arch, parse_arch
from schedules.core.device import slug
from schedules.core.errors import ConfigError, UnknownNameError, UsageError
from schedules.core.operator import ScheduleSpec
from schedules.core.parallel import attempt, outcome, processes
from schedules.core.problem import Problem
from schedules.core.registry import operator_modules
from schedules.measure.choice import Choice, choose, default_choice
from schedules.measure.timer import CudaTimer

BUILD_SECONDS = 300.0  # of one kernel, at most


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is compared")
    what.add_argument("--operators", nargs="+", default=list(operator_modules()), metavar="NAME", help="by default all")
    what.add_argument("--stream", action="store_true", help="launch call by call, not from CUDA graphs")
    ours = add_arguments(parser, 0.3, "language_compare.json")
    ours.add_argument("--builds", type=Path, metavar="FOLDER", help="take kernels from the bundles that are here")
    ours.add_argument("--build-only", type=Path, metavar="FOLDER", help="write those bundles and end; needs no GPU")
    ours.add_argument("--target", default="cuda:sm_90a", help="of --build-only (default cuda:sm_90a)")
    ours.add_argument("--device", help="whose records --build-only uses")
    ours.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes that build")
    args = parser.parse_args(words)
    check_arguments(args)
    if wrong := [name for name in args.operators if name not in operator_modules()]:
        raise UnknownNameError("operator", wrong[0], operator_modules())
    if args.search and args.build_only:
        raise UsageError("--search measures on this machine; leave out --build-only")
    if args.workers < 1:
        raise UsageError("--workers must be at least 1")
    if args.builds and not args.builds.is_dir():
        raise UsageError(f"{args.builds} is not a folder; make it with --build-only")
    return args


def wanted(arch: Arch, args: argparse.Namespace) -> dict[Problem, ScheduleSpec]:
    """The cases that `args` ask for.  Raises UsageError if there are none."""
    found = {
        problem: program
        for problem, program in language_case.cases(arch, args.operators).items()
        if args.schedule in (None, program.name)
    }
    if not found:
        raise UsageError(f"no problem has such a program in TIRx on {arch}; `schedules list` shows them")
    return found


def chosen(problem: Problem, arch: Arch, schedule: str, args: argparse.Namespace) -> Choice:
    if args.default:
        return default_choice(problem, arch, schedule)
    return choose(problem, arch, schedule, folders=[args.log], device=args.device)


def siblings(problem: Problem, arch: Arch, program: ScheduleSpec, args: argparse.Namespace) -> list[Choice]:
    """The choices of those siblings that take the problem."""
    found = []
    for name in program.tirx.siblings if program.tirx else ():
        try:
            found.append(chosen(problem, arch, name, args))
        except ConfigError:
            continue
    return found


def build_all(cases: Mapping[Problem, ScheduleSpec], arch: Arch, args: argparse.Namespace, folder: Path) -> None:
    """Write the bundles of every case below `folder`, in worker processes; a line for what does not build."""
    choices = [
        choice
        for problem, program in cases.items()
        for choice in (chosen(problem, arch, program.name, args), *siblings(problem, arch, program, args))
    ]
    with processes(args.workers) as pool:
        tasks = [
            pool.schedule(attempt, args=[_write, choice, arch, folder], timeout=BUILD_SECONDS) for choice in choices
        ]
        for choice, task in zip(choices, tasks, strict=True):
            _, why = outcome(task)
            if why:
                print(f"{name_of(choice.problem)} {choice.schedule}: {why}", flush=True)
    print(f"{len(choices)} kernels of {len(cases)} cases built", flush=True)


def _write(choice: Choice, arch: Arch, folder: Path) -> None:
    bench.write_build(choice, arch, bundle_of(folder, choice.problem, choice.schedule))


def run_all(args: argparse.Namespace) -> None:
    arch = local_gpu()
    if arch is None:
        raise UsageError("no CUDA GPU here to compare on; --build-only needs none")
    programs = wanted(arch, args)
    device, launch = str(device_name(arch)), STREAM if args.stream else GRAPH
    out = args.out or args.log / slug(device) / "language_compare.json"
    results = Results(out, device, bench.versions_here(arch), kind=KIND, launch=launch, fresh=args.fresh)
    left = {
        problem: program
        for problem, program in programs.items()
        if not (args.missing and results.has(problem, program.arithmetic))
    }
    with tempfile.TemporaryDirectory() as made, CudaTimer() as timer:
        builds = args.builds or Path(made)
        if not args.builds and not args.search:  # a search finds configs that are not known yet
            build_all(left, arch, args, builds)

        def run(problem: Problem, choice: Choice) -> dict[str, Any]:
            others = siblings(problem, arch, programs[problem], args)
            how = dict(seed=args.seed, builds=builds, launch=launch)
            return language_case.run_case(problem, arch, choice, others, timer, args.seconds, **how)

        def choice_of(problem: Problem) -> Choice:
            return chosen(problem, arch, programs[problem].name, args)

        def result(problem: Problem, found: Found) -> dict[str, Any]:
            return case_result(problem, found, launch, programs[problem].arithmetic)

        comparison = Comparison(choice_of, run, result, name_of, line_of)
        run_cases(comparison, list(left), arch, results, search_of(args))
    print(f"{len(left)} cases compared, {len(results.cases)} in {out}")


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    if args.build_only:
        arch = parse_arch(args.target)
        build_all(wanted(arch, args), arch, args, args.build_only)
    else:
        run_all(args)
    return 0


if __name__ == "__main__":
    run_script(main, "stopped; the cases that were finished are kept, --missing goes on")
