"""A run of a comparison over many cases: what its scripts share.

Each case may be searched first; it is kept as soon as it is done, and a run that ended goes on with what is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from benchmarks.peers.comparison import P, Results, Times, compare_all, reason
from benchmarks.peers.cudnn import torch_module
from schedules.core.arch import Arch
from schedules.core.errors import BuildError, ConfigError, DeviceError, SchedulesError, TuningError, UsageError
from schedules.measure.choice import Choice
from schedules.measure.journal import DEFAULT_FOLDER

Found = Mapping[str, tuple[Times | None, dict[str, Any]]]


@dataclass(frozen=True)
class Comparison(Generic[P]):
    """What an operator's comparison consists of: our choice for a problem, the case run, the result of one that was not
    timed, and its name and line for people."""

    chosen: Callable[[P], Choice]
    run: Callable[[P, Choice], dict[str, Any]]
    result: Callable[[P, Found], dict[str, Any]]
    name: Callable[[P], str]
    line: Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Search:
    """A search of each case before it is compared, with its trials in the journals of `folder`."""

    trials: int
    minutes: float | None = None
    schedules: tuple[str, ...] = ()
    folder: Path = DEFAULT_FOLDER
    measure_timeout: float = 300.0  # seconds of a trial: the first makes gigabytes and computes their reference


def run_cases(
    comparison: Comparison[P], problems: Iterable[P], arch: Arch, results: Results, search: Search | None = None
) -> None:
    """Search if asked to, compare, and keep each of `problems`; a line of each is printed.

    A case that the schedule does not take, that is not built, or that finds no room on the device, is kept as failed.
    Raises SchedulesError, DeviceError for what else goes wrong.
    """
    from schedules.tune.crew import LocalCrew
    from schedules.tune.session import Work, tune
    from schedules.tune.tuner import Limits

    torch = torch_module()
    crew = LocalCrew(arch, measure_timeout=search.measure_timeout) if search else None

    def searched(problem: P) -> dict[str, Any]:
        if not search or not crew:
            return {}
        limits = Limits(trials=search.trials, minutes=search.minutes)
        try:
            found = tune(Work(problem, arch, limits, schedules=search.schedules), crew, folder=search.folder)
        except TuningError as error:
            return {"search": {"failed": str(error)}}
        return {"search": {"trials": found.status.done, "outcomes": dict(found.status.outcomes)}}

    def run(problem: P) -> dict[str, Any]:
        # gives the memory of the last case back: a case's tensors seldom fit into the last one's blocks
        torch.cuda.empty_cache()
        more = searched(problem)
        try:
            case = comparison.run(problem, comparison.chosen(problem))
        except (torch.OutOfMemoryError, ConfigError, BuildError) as fault:
            case = comparison.result(problem, {"ours": (None, {"failed": reason(fault)})})
        except SchedulesError:
            raise
        except Exception as fault:  # TVM's and PyTorch's many types: the device is not to be trusted after them
            raise DeviceError(f"{comparison.name(problem)}: {reason(fault)}; --missing goes on") from fault
        return {**case, **more}

    try:
        compare_all(problems, run, results, lambda case: print(comparison.line(case), flush=True))
    finally:
        if crew:
            crew.close()


def add_arguments(parser: argparse.ArgumentParser, seconds: float, file: str) -> argparse._ArgumentGroup:
    """The arguments that every comparison takes; returns the group about ours."""
    ours = parser.add_argument_group("ours")
    ours.add_argument("--search", type=int, default=0, metavar="N", help="try up to N configs of each case first")
    ours.add_argument("--search-minutes", type=float, metavar="M", help="of the search of one case, at most")
    ours.add_argument("--schedule", metavar="NAME", help="this schedule: its best record, else its default config")
    ours.add_argument("--default", action="store_true", help="default configs, whatever was measured")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"of timing for each case, about (default {seconds})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random data")
    parser.add_argument("--log", type=Path, default=DEFAULT_FOLDER, help="folder of the journals and of the result")
    parser.add_argument("--out", type=Path, help=f"the result (default LOG/<device>/{file})")
    parser.add_argument("--missing", action="store_true", help="only cases that the result has no time of ours for")
    parser.add_argument("--fresh", action="store_true", help="replace the result rather than add to it")
    return ours


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UsageError for arguments of `add_arguments` that make no sense."""
    if args.seconds <= 0 or args.search < 0:
        raise UsageError("--seconds must be over 0 and --search not negative")
    if args.search and args.default:
        raise UsageError("--search measures and keeps records; leave out --default")
    if args.search_minutes is not None and (args.search_minutes <= 0 or not args.search):
        raise UsageError("--search-minutes is over 0 and limits --search; give that too")
    if args.missing and args.fresh:
        raise UsageError("--missing adds to the result and --fresh replaces it; give one of them")


def search_of(args: argparse.Namespace) -> Search | None:
    """The search that `args` ask for."""
    schedules = (args.schedule,) if args.schedule else ()
    return Search(args.search, args.search_minutes, schedules, args.log) if args.search else None
