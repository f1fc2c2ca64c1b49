#!/usr/bin/env python3
"""Our softmax beside PyTorch, torch.compile, cuDNN, Triton and a device copy, in one run on this GPU.

    scripts/compare_softmax.py                                      # 13 widths, 49152 rows, four functions, float16
    scripts/compare_softmax.py --sets odd few fused --missing       # add these to the same file
    scripts/compare_softmax.py --search 40                          # search each case first; the best are records
    scripts/compare_softmax.py --build-only out/softmax             # anywhere: build ours for a run with --builds

The result is written after every case; --missing goes on where a run was cut off.  scripts/results_table.py prints it
as tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schedules.arch import Arch, parse_arch
from schedules.dispatch import Choice, choose, default_choice
from schedules.errors import DeviceError, SchedulesError, TuningError, UnknownNameError, UsageError
from schedules.measure import CudaTimer, device_name, local_gpu
from schedules.peers.comparison import (
    ROWS,
    SETS,
    WIDTHS,
    Results,
    case_result,
    cases,
    compare_all,
    line_of,
    name_of,
    reason,
)
from schedules.peers.softmax import DEFAULT_PEERS, PEERS
from schedules.records import slug
from schedules.softmax.definition import FUNCTIONS, SoftmaxProblem
from schedules.tune.journal import DEFAULT_FOLDER

DTYPES = ("float16", "bfloat16", "float32")
MEASURE_TIMEOUT = 120.0  # seconds of one trial: gigabytes are made and brought to the GPU for the first


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is compared")
    what.add_argument("--sets", nargs="+", default=["widths"], metavar="SET", help=f"of {', '.join(SETS)}")
    what.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), metavar="COLS")
    what.add_argument("--rows", type=int, default=ROWS, help=f"of every set but few (default {ROWS})")
    what.add_argument("--functions", nargs="+", default=list(FUNCTIONS), metavar="NAME", help=", ".join(FUNCTIONS))
    what.add_argument("--dtype", nargs="+", default=["float16"], metavar="DTYPE", help=", ".join(DTYPES))
    what.add_argument("--peers", nargs="*", default=list(DEFAULT_PEERS), metavar="PEER", help=", ".join(PEERS))
    ours = parser.add_argument_group("ours")
    ours.add_argument("--search", type=int, default=0, metavar="N", help="try up to N configs of each case first")
    ours.add_argument("--search-minutes", type=float, metavar="M", help="of the search of one case, at most")
    ours.add_argument("--default", action="store_true", help="default configs, whatever was measured")
    ours.add_argument("--builds", type=Path, metavar="FOLDER", help="take ours from the bundles that are here")
    ours.add_argument("--build-only", type=Path, metavar="FOLDER", help="write those bundles and end; needs no GPU")
    ours.add_argument("--target", default="cuda:sm_90a", help="of --build-only (default cuda:sm_90a)")
    ours.add_argument("--device", help="whose records --build-only uses")
    parser.add_argument("--seconds", type=float, default=0.6, help="of timing for each case, about (default 0.6)")
    parser.add_argument("--seed", type=int, default=0, help="of the random data")
    parser.add_argument("--log", type=Path, default=DEFAULT_FOLDER, help="folder of the journals and of the result")
    parser.add_argument("--out", type=Path, help="the result (default LOG/<device>/softmax_compare.json)")
    parser.add_argument("--missing", action="store_true", help="only cases that the result has no time of ours for")
    parser.add_argument("--fresh", action="store_true", help="replace the result rather than add to it")
    args = parser.parse_args(words)
    for name, given, known in (("peer", args.peers, PEERS), ("dtype", args.dtype, DTYPES)):
        if wrong := [word for word in given if word not in known]:
            raise UnknownNameError(name, wrong[0], known)
    if args.seconds <= 0 or args.search < 0:
        raise UsageError("--seconds must be over 0 and --search not negative")
    if args.search and (args.build_only or args.default):
        raise UsageError("--search measures and keeps records; leave out --build-only and --default")
    if args.search_minutes is not None and (args.search_minutes <= 0 or not args.search):
        raise UsageError("--search-minutes is over 0 and limits --search; give that too")
    if args.missing and args.fresh:
        raise UsageError("--missing adds to the result and --fresh replaces it; give one of them")
    if args.builds and not args.builds.is_dir():
        raise UsageError(f"{args.builds} is not a folder; make it with --build-only")
    return args


def chosen(problem: SoftmaxProblem, arch: Arch, args: argparse.Namespace) -> Choice:
    if args.default:
        return default_choice(problem, arch)
    return choose(problem, arch, folders=[args.log], device=args.device)


def build_all(problems: Sequence[SoftmaxProblem], args: argparse.Namespace) -> None:
    from schedules.peers.bench import write_build

    arch = parse_arch(args.target)
    for problem in problems:
        choice = chosen(problem, arch, args)
        bundle = write_build(choice, arch, args.build_only)
        print(f"{name_of(problem):44} {choice.schedule} {choice.config} ({choice.source}) {bundle.path}", flush=True)


def run_all(problems: Sequence[SoftmaxProblem], args: argparse.Namespace) -> None:
    arch = local_gpu()
    if arch is None:
        raise UsageError("no CUDA GPU here to compare on; --build-only needs none")
    from schedules.peers.bench import run_case, versions_here
    from schedules.peers.cudnn import torch_module
    from schedules.tune.crew import LocalCrew
    from schedules.tune.session import Work, tune
    from schedules.tune.tuner import Limits

    torch, device = torch_module(), str(device_name(arch))
    out = args.out or args.log / slug(device) / "softmax_compare.json"
    results = Results(out, device, versions_here(arch), fresh=args.fresh)
    left = [problem for problem in problems if not (args.missing and problem in results)]
    limits = Limits(trials=args.search, minutes=args.search_minutes)
    crew = LocalCrew(arch, measure_timeout=MEASURE_TIMEOUT) if args.search and left else None

    def run(problem: SoftmaxProblem) -> dict[str, Any]:
        # gives the memory of the last case back: a width's tensors seldom fit into the last one's blocks
        torch.cuda.empty_cache()
        search = {}
        if crew:
            try:
                searched = tune(Work(problem, arch, limits), crew, folder=args.log)
                search = {"trials": searched.status.done, "outcomes": dict(searched.status.outcomes)}
            except TuningError as error:
                search = {"failed": str(error)}
        choice = chosen(problem, arch, args)
        try:
            case = run_case(problem, arch, choice, args.peers, timer, args.seconds, seed=args.seed, builds=args.builds)
        except torch.OutOfMemoryError as fault:
            case = case_result(problem, {"ours": (None, {"failed": reason(fault)})})
        except SchedulesError:
            raise
        except Exception as fault:  # TVM's and PyTorch's many types: the device is not to be trusted after them
            raise DeviceError(f"{name_of(problem)}: {reason(fault)}; --missing goes on") from fault
        return {**case, **({"search": search} if search else {})}

    try:
        with CudaTimer() as timer:
            compare_all(left, run, results, lambda case: print(line_of(case), flush=True))
    finally:
        if crew:
            crew.close()
    print(f"{len(left)} cases compared, {len(results.cases)} in {out}")


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    problems = [p for dtype in args.dtype for p in cases(args.sets, args.widths, args.functions, dtype, args.rows)]
    if args.build_only:
        build_all(problems, args)
    else:
        run_all(problems, args)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SchedulesError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("stopped; the cases that were finished are kept, --missing goes on", file=sys.stderr)
        sys.exit(130)
