"""``schedules tune``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from schedules.cli.arguments import add_json, split_words, subject
from schedules.cli.output import emit_json, table
from schedules.cli.searching import (
    STOPPED,
    TRIALS,
    add_crew,
    add_limits,
    add_log,
    check_log,
    crew_options,
    limits,
    search,
    view,
)
from schedules.core.arch import parse_arch
from schedules.core.errors import UsageError
from schedules.core.presets import operator_named, resolve
from schedules.tune.session import Work, stopping_signals
from schedules.tune.tuner import Limits

if TYPE_CHECKING:
    from schedules.tune.plan import Plan

MINUTES = 60.0  # of a model
SEARCHES = ("template", "random", "auto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="NAME [field=value ...]", help="an operator or a preset")
    parser.add_argument("--target", default="llvm", help="llvm, cuda:sm_90a, ... (default: llvm)")
    parser.add_argument(
        "--schedule", action="append", default=[], metavar="NAME", help="search only this one; may be repeated"
    )
    parser.add_argument(
        "--search",
        default="template",
        choices=SEARCHES,
        help="template: configs chosen by a cost model (default); random: at random; auto: MetaSchedule's spaces",
    )
    parser.add_argument("--space", default="", metavar="NAME", help="of --search auto (default: the one that fits)")
    add_limits(parser, f" (default: {TRIALS}, if there is no other limit)")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the search (default: 0)")
    add_log(parser)
    parser.add_argument("--fresh", action="store_true", help="start over; earlier trials stay in the journal")
    add_crew(parser)
    parser.add_argument("--plan", metavar="FILE", help="search every problem of a plan; `--out` is for its results")
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="search the layers of a PyTorch model, for --minutes in all: the function returns it and its inputs",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="of a plan or a model: bundles and report (default: as the plan says)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.plan or args.model:
        return _plan(args)
    if args.out:
        raise UsageError(
            "--out is for a --plan or a --model; `schedules export` writes the best of a problem into a folder"
        )
    name = subject(args)
    operator_named(name)  # an unknown operator is named first, whatever else is wrong
    operator, problem = resolve(name, split_words(args.words[1:]))
    if (fixed := problem.representative()) != problem:
        raise UsageError(f"a search measures fixed extents, and serves the ranges around them; search {fixed}")
    arch = parse_arch(args.target)
    chosen = [operator.schedule(name) for name in args.schedule]
    for spec in chosen:
        spec.require_kind(arch)
    if args.seed < 0:
        raise UsageError(f"--seed {args.seed} must not be negative")
    if args.space and args.search != "auto":
        raise UsageError("--space chooses among the auto-scheduler's; give --search auto with it")
    if args.schedule and args.search == "auto":
        raise UsageError("--schedule narrows a template search; leave it out with --search auto")
    check_log(args)
    options, bounds = crew_options(args), limits(args)
    if bounds == Limits():
        bounds = Limits(trials=TRIALS)
    work = Work(problem, arch, bounds, args.search, tuple(spec.name for spec in chosen), args.seed, args.space)
    return search(work, options, args, again(args, bounds.trials))


def again(args: argparse.Namespace, trials: int | None) -> list[str]:
    """The words that go on with the search of `args`."""
    words = ["tune", *args.words, "--target", args.target, "--search", args.search]
    words += [word for name in args.schedule for word in ("--schedule", name)]
    given = {"trials": trials, "minutes": args.minutes, "patience": args.patience, "seed": args.seed or None}
    given |= {"journal": args.journal, "log": args.log, "space": args.space or None}
    given |= {"builders": args.builders, "gpus": args.gpus, "ray": args.ray, "timeout": args.timeout}
    return words + [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]


def _plan(args: argparse.Namespace) -> int:
    """Search every entry of a plan, or the layers of a model."""
    single = [
        "words",
        "schedule",
        "trials",
        "patience",
        "space",
        "journal",
        *(["minutes", "model"] if args.plan else []),
    ]
    if given := [name for name in single if getattr(args, name)]:
        name = args.words[0] if given[0] == "words" else f"--{given[0]}"
        where = "write it into the plan, or leave out --plan" if args.plan else "leave it or --model out"
        raise UsageError(f"{name} is for a single search; {where}")
    check_log(args)
    options = crew_options(args)
    from schedules.tune import summary
    from schedules.tune.plan import read_plan
    from schedules.tune.plan_run import exit_code, run_plan

    plan = read_plan(args.plan) if args.plan else _plan_of_model(args)
    out = Path(args.out or plan.out)
    with view(args.json) as watcher, stopping_signals(watcher.urgent) as stop:
        outcomes = run_plan(
            plan,
            watcher,
            folder=args.log,
            out=out,
            open_crew=lambda arch: options.open(arch, watcher.note),
            fresh=args.fresh,
            stop=stop,
        )
    code = exit_code(outcomes)
    if args.json:
        emit_json({"report": str(out / "report.md"), "entries": [outcome.to_json() for outcome in outcomes]})
        return code
    table(summary.HEADERS, [summary.row(outcome) for outcome in outcomes])
    for outcome in outcomes:
        if outcome.note:
            print(f"{outcome.name}: {outcome.note}")
    report = f"report in {out / 'report.md'}" if all(outcome.reported for outcome in outcomes) else "no report"
    print(f"{report}, journals under {args.log}")
    if code == STOPPED:
        print("stopped; nothing is lost.  The same command goes on" + (", without --fresh" if args.fresh else ""))
    return code


def _plan_of_model(args: argparse.Namespace) -> Plan:
    """For the layers of the model that --model names.  Raises UsageError."""
    name, _, function = args.model.partition(":")
    sys.path.insert(0, os.getcwd())  # as python -m has it
    try:
        make = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--model {args.model}: {error}; give MODULE:FUNCTION, as in models:resnet") from None
    finally:
        sys.path.pop(0)
    try:
        from schedules.torch.work import plan
    except ImportError as error:
        raise UsageError(f"--model needs PyTorch: {error}; pip install 'te-schedules[torch]'") from None
    made = make()
    if not isinstance(made, tuple) or len(made) != 2:
        raise UsageError(f"--model {args.model}: {function}() returns a {type(made).__name__}, not (model, inputs)")
    out = args.out or Path("out") / f"{name}-{function}"
    return plan(*made, args.minutes or MINUTES, target=args.target, out=out)
