"""What the commands that search share: limits, workers, and one search from the crew's start to the last line."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from schedules.cli.arguments import positive
from schedules.cli.output import emit_json, fields
from schedules.core.arch import Arch
from schedules.core.errors import MachineError, UsageError
from schedules.core.problem import Config, Problem
from schedules.measure.records import Record
from schedules.tune import progress
from schedules.tune.crew import Crew
from schedules.tune.crews import CrewOptions
from schedules.tune.progress import PlainView, View, watcher_for
from schedules.tune.session import Work, stopping_signals, tune, tune_each
from schedules.tune.tuner import Limits, Result

TRIALS = 256  # of a search that is given no limit
FOLDER = "tuning_logs"
LONGEST = 1000  # letters of a config on a command line
CREW = ("builders", "gpus", "ray", "device", "timeout")  # the options of `add_crew`
STOPPED = 130  # exit code of a search that a signal ended
STOPPED_LINE = "stopped; nothing is lost.  Go on with: {}"


def add_limits(parser: argparse.ArgumentParser, default: str = "") -> None:
    """When a search ends: ``--trials``, ``--minutes``, ``--patience``."""
    parser.add_argument("--trials", type=int, metavar="N", help=f"trials in all, earlier runs counted{default}")
    parser.add_argument("--minutes", type=float, metavar="M", help="minutes in all, earlier runs counted")
    parser.add_argument("--patience", type=int, metavar="N", help="end after N trials without a new best")


def add_crew(parser: argparse.ArgumentParser) -> None:
    """Who does the work of a search: processes, GPUs, a cluster's nodes, and for how long at most."""
    parser.add_argument("--builders", type=int, metavar="N", help="processes that build (default: one for each core)")
    parser.add_argument("--gpus", metavar="0,1,...", help="the GPUs that measure (default: all)")
    parser.add_argument("--ray", metavar="ADDRESS", help="use the Ray cluster there in place of this machine")
    parser.add_argument("--device", metavar="NAME", help="of several kinds in the cluster (default: each for itself)")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="seconds for building, and for measuring, a candidate"
    )


def add_log(parser: argparse.ArgumentParser) -> None:
    """Where trials are written: ``--log``, ``--journal``."""
    parser.add_argument("--journal", metavar="FILE", help="the journal, in place of the one in --log")
    parser.add_argument(
        "--log", metavar="DIR", default=FOLDER, help=f"journals are <DIR>/<device>/<operator>.jsonl (default: {FOLDER})"
    )


def limits(args: argparse.Namespace) -> Limits:
    """The limits that were asked for.  Raises UsageError."""
    for name in ("trials", "minutes", "patience"):
        if getattr(args, name) is not None:
            positive(f"--{name}", getattr(args, name))
    return Limits(args.trials, args.minutes, args.patience)


def crew_options(args: argparse.Namespace) -> CrewOptions:
    """The workers that were asked for.  Raises UsageError."""
    try:
        gpus = tuple(int(number) for number in args.gpus.split(",")) if args.gpus else None
    except ValueError:
        raise UsageError(f"--gpus {args.gpus!r} is not a list of numbers; write 0,1") from None
    return CrewOptions(args.builders, gpus, args.ray, args.timeout, args.device)


def check_log(args: argparse.Namespace) -> None:
    """Raise UsageError if --log is a file."""
    if Path(args.log).exists() and not Path(args.log).is_dir():
        raise UsageError(f"--log {args.log} is a file; it needs a folder (or --journal)")


@contextmanager
def view(as_json: bool) -> Iterator[View]:
    """The progress view: on standard error if standard output is for JSON."""
    with watcher_for(sys.stderr if as_json else sys.stdout) as found:
        yield found


def search(work: Work, options: CrewOptions, args: argparse.Namespace, again: Sequence[str]) -> int:
    """Run one search and print what it came to; `again` are the words that go on with it.  Returns the exit code."""
    fresh = getattr(args, "fresh", False)
    go_on = shlex.join(["schedules", *again])
    with (
        _said(go_on, args.json),
        view(args.json) as watcher,
        _opened(options, work.arch, watcher) as crews,
        stopping_signals(watcher.urgent) as stop,
    ):
        if len(crews) == 1:
            options_of_one = {"journal": args.journal, "folder": args.log, "fresh": fresh}
            results = [tune(work, crews[0], **options_of_one, watcher=watcher, stop=stop)]
        elif args.journal:
            kinds = ", ".join(crew.device for crew in crews)
            raise UsageError(f"--journal is one file, and the cluster has {kinds}; choose with --device, or use --log")
        else:
            # one live view holds one search: several are told in lines
            stream = sys.stderr
            results = tune_each(
                work, crews, folder=args.log, fresh=fresh, watch=lambda crew: PlainView(stream), stop=stop
            )
    return max(report(result, args.json, go_on) for result in results)


@contextmanager
def _opened(options: CrewOptions, arch: Arch, watcher: View) -> Iterator[Sequence[Crew]]:
    crews = options.open_all(arch, watcher.note)
    try:
        yield crews
    finally:
        for crew in crews:
            crew.close()


@contextmanager
def _said(go_on: str, as_json: bool) -> Iterator[None]:
    """Say how to go on with a search that is interrupted before it can finish what it measures."""
    try:
        yield
    except KeyboardInterrupt:
        if not as_json:
            print(STOPPED_LINE.format(go_on))
        raise
    except MachineError as error:
        raise MachineError(f"{error} ({go_on})") from error


def report(result: Result, as_json: bool, again: str) -> int:
    """Print what a search came to, and how to go on.  Returns the exit code."""
    status = result.status
    if as_json:
        emit_json({**progress.as_json(result), "again": again})
    else:
        best, default = result.best, result.default or status.default
        fields(
            {
                "trials": progress.counts(status),
                "default": default and f"{progress.us_text(default.us)}  {progress.candidate_text(default)}",
                "best": best and f"{progress.comparison(best, default, status.peers)}  {progress.candidate_text(best)}",
                "finals": result.verdict or None,
                "build it": best and reproduction(best),
            }
        )
        if not result.finished:
            print(STOPPED_LINE.format(again))
    if not result.finished:
        return STOPPED
    return 0 if result.best else 1


def reproduction(record: Record) -> str:
    """The command that builds what `record` is of."""
    return build_command(record.operator, record.problem, record.target, record.schedule, record.config)


def build_command(operator: str, problem: Problem, target: str, schedule: str, config: Config) -> str:
    """``schedules build`` with everything spelled out; a config as long as a trace is left to dispatch."""
    text = config_text(config)
    more = ["--schedule", schedule, *(["--config", text] if 0 < len(text) < LONGEST else [])]
    return shlex.join(["schedules", "build", operator, *str(problem).split(" "), "--target", target, *more])


def config_text(config: Config) -> str:
    """A config as ``--config`` takes it: ``tile=8x4,step=8``."""

    def text(value: object) -> str:
        return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return ",".join(f"{name}={text(value)}" for name, value in config.to_json().items())
