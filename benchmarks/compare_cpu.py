"""Our CPU convolutions and softmax beside PyTorch's, in turn on the same cores in one run.

    python -m benchmarks.compare_cpu  # convolutions, batch 1 and 16, and softmax
    python -m benchmarks.compare_cpu --operators conv2d_nchw --batches 4      # add these to the same file
    python -m benchmarks.compare_cpu --search 60  # search each case first; the best are records
    python -m benchmarks.compare_cpu --layers cpu/3x3.json --default --missing# the layers of a file of sets

Both sides run on PyTorch's --threads threads, alone and right after an operator of PyTorch's.  PyTorch convolves NCHW
and channels-last copies; its faster one is the peer.  Every result is compared with the float64 reference before it is
timed.  A result is written after every case; --missing goes on where a run was cut off, or --until ended it.  Layers
of files are kept apart from the other cases, in ``cpu_layers.json``.  python -m benchmarks.results_table prints either
as tables.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import cpu_case
from benchmarks.peers.comparison import Results
from benchmarks.peers.cpu_case import BATCHES, KIND, OPERATORS, case_result, cases, line_of, name_of
from benchmarks.peers.cudnn import torch_module
from benchmarks.peers.layers import FOLDER, layers_of
from benchmarks.peers.runs import Comparison, add_arguments, check_arguments, run_cases, search_of
from schedules.build.present import device_name
from schedules.cli.script import run_script
from schedules.core.arch import Arch, parse_arch, physical_cores
from schedules.core.device import slug
from schedules.core.errors import UsageError
from schedules.core.problem import Problem
from schedules.measure.choice import Choice, choose, default_choice
from schedules.measure.timer import CpuTimer

NAME, NAME_LAYERS = "cpu_compare", "cpu_layers"  # of the results


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is compared")
    what.add_argument("--operators", nargs="+", default=list(OPERATORS), metavar="NAME", help=", ".join(OPERATORS))
    what.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), metavar="N", help="of convolutions")
    what.add_argument(
        "--layers", nargs="+", metavar="FILE", help=f"in their place: sets of {FOLDER.name}/ or any folder"
    )
    what.add_argument("--until", type=float, default=math.inf, metavar="S", help="begin no case after so many seconds")
    what.add_argument("--threads", type=int, default=physical_cores(), help="of each side (default: one for each core)")
    add_arguments(parser, 2.0, f"{NAME}.json, with --layers {NAME_LAYERS}.json")
    args = parser.parse_args(words)
    check_arguments(args)
    if not 1 <= args.threads <= physical_cores():
        raise UsageError(f"--threads {args.threads} is not between 1 and {physical_cores()}, the cores there are")
    return args


def chosen(problem: Problem, arch: Arch, args: argparse.Namespace) -> Choice:
    return default_choice(problem, arch) if args.default else choose(problem, arch, folders=[args.log])


def run_all(problems: Sequence[Problem], args: argparse.Namespace) -> None:
    arch = parse_arch("llvm")
    torch_module().set_num_threads(args.threads)  # of our kernels too
    cpu_case.keep_freed_memory()
    device = str(device_name(arch))
    out = args.out or args.log / slug(device) / f"{NAME_LAYERS if args.layers else NAME}.json"
    results = Results(out, device, cpu_case.versions_here(arch, args.threads), kind=KIND, fresh=args.fresh)
    left = [problem for problem in problems if not (args.missing and problem in results)]
    end = time.monotonic() + args.until
    in_time = itertools.takewhile(lambda _: time.monotonic() < end, left)
    with CpuTimer(evict=False) as timer:

        def run(problem: Problem, choice: Choice) -> dict[str, Any]:
            return cpu_case.run_case(problem, arch, choice, timer, args.seconds, seed=args.seed)

        comparison = Comparison(lambda problem: chosen(problem, arch, args), run, case_result, name_of, line_of)
        run_cases(comparison, in_time, arch, results, search_of(args))
    print(f"{len(results.cases)} cases in {out}")


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    if args.layers:
        files = (Path(name) if Path(name).exists() else FOLDER / name for name in args.layers)
        run_all([layer.problem for file in files for layer in layers_of(file)], args)
    else:
        run_all(cases(args.operators, args.batches), args)
    return 0


if __name__ == "__main__":
    run_script(main, "stopped; the cases that were finished are kept, --missing goes on")
