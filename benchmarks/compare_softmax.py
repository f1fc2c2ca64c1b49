"""Our softmax beside PyTorch, torch.compile, cuDNN, Triton and a device copy, in one run on this GPU.

    python -m benchmarks.compare_softmax  # 13 widths, 49152 rows, four functions, float16
    python -m benchmarks.compare_softmax --sets odd few fused --missing       # add these to the same file
    python -m benchmarks.compare_softmax --sets quack flashinfer sglang liger --dtype bfloat16 float32 --graph --default
    python -m benchmarks.compare_softmax --sets losses --dtype bfloat16 --graph          # cross-entropy of vocabularies
    python -m benchmarks.compare_softmax --sets map --functions softmax --peers --graph     # rows by columns
    python -m benchmarks.compare_softmax --graph  # no time of the host's, whatever a launch takes it
    python -m benchmarks.compare_softmax --search 40  # search each case first; the best are records
    python -m benchmarks.compare_softmax --build-only out/softmax  # anywhere: build ours for a run with --builds

Ours are built ahead by processes of their own, unless each case is searched first.  The result is written after every
case; --missing goes on where a run was cut off.  results_table.py prints it as tables, `schedules report` draws it.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import bench, softmax_case
from benchmarks.peers.comparison import GRAPH, STREAM, Results
from benchmarks.peers.runs import Comparison, Found, add_arguments, check_arguments, run_cases, search_of
from benchmarks.peers.softmax import DEFAULT_PEERS, PEERS
from benchmarks.peers.softmax_case import KIND, ROWS, SETS, WIDTHS, case_result, cases, file_of, line_of, name_of
from schedules.build.present import device_name, local_gpu
from schedules.cli.script import run_script
from schedules.core.arch import Arch, parse_arch
from schedules.core.device import slug
from schedules.core.errors import BuildError, UnknownNameError, UsageError
from schedules.core.parallel import attempt, outcome, processes
from schedules.core.registry import operator
from schedules.core.threads import cores
from schedules.measure.choice import Choice, choose, default_choice, for_device
from schedules.measure.timer import CudaTimer
from schedules.operators.softmax.definition import SoftmaxProblem

DTYPES = ("float16", "bfloat16", "float32")
BUILD_SECONDS = 120.0  # of one case at most


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what, functions = parser.add_argument_group("what is compared"), SoftmaxProblem.functions
    what.add_argument("--sets", nargs="+", default=["widths"], metavar="SET", help=f"of {', '.join(SETS)}")
    what.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), metavar="COLS")
    what.add_argument("--rows", type=int, default=ROWS, help=f"of every set but few (default {ROWS})")
    what.add_argument("--functions", nargs="+", default=list(functions), metavar="NAME", help=", ".join(functions))
    what.add_argument("--dtype", nargs="+", default=["float16"], metavar="DTYPE", help=", ".join(DTYPES))
    what.add_argument("--peers", nargs="*", default=list(DEFAULT_PEERS), metavar="PEER", help=", ".join(PEERS))
    what.add_argument("--graph", action="store_true", help="launch ours, the copies and the peers from CUDA graphs")
    ours = add_arguments(parser, 0.6, "softmax_*.json")
    ours.add_argument("--builds", type=Path, metavar="FOLDER", help="take ours from the bundles that are here")
    ours.add_argument("--build-only", type=Path, metavar="FOLDER", help="write those bundles and end; needs no GPU")
    ours.add_argument(
        "--jobs", type=int, default=max(1, (cores() or 2) - 1), help="processes that build (default cores - 1)"
    )
    ours.add_argument("--target", default="cuda:sm_90a", help="of --build-only (default cuda:sm_90a)")
    ours.add_argument("--device", help="whose records --build-only uses")
    args = parser.parse_args(words)
    for name, given, known in (("peer", args.peers, PEERS), ("dtype", args.dtype, DTYPES)):
        if wrong := [word for word in given if word not in known]:
            raise UnknownNameError(name, wrong[0], known)
    check_arguments(args)
    if args.jobs < 1:
        raise UsageError("--jobs must be at least 1")
    if args.search and args.build_only:
        raise UsageError("--search measures on this machine; leave out --build-only")
    if args.schedule:
        operator("softmax").schedule(args.schedule)
    if args.builds and not args.builds.is_dir():
        raise UsageError(f"{args.builds} is not a folder; make it with --build-only")
    return args


def chosen(problem: SoftmaxProblem, arch: Arch, args: argparse.Namespace) -> Choice:
    if args.default:
        return default_choice(problem, arch, args.schedule)
    return choose(problem, arch, args.schedule, folders=[args.log], device=args.device)


def build_case(problem: SoftmaxProblem, arch: Arch, args: argparse.Namespace, folder: Path) -> str:
    """Build ours into the case's folder below `folder`; a line that says what it is."""
    choice = chosen(problem, arch, args)
    bundle = bench.write_build(choice, arch, folder / name_of(problem))
    return f"{name_of(problem):44} {choice.schedule} {choice.config} ({choice.source}) {bundle.path}"


@contextlib.contextmanager
def builds_of(
    problems: Sequence[SoftmaxProblem], arch: Arch, args: argparse.Namespace, folder: Path
) -> Iterator[Callable[[SoftmaxProblem], str]]:
    """All are built by processes; what is yielded waits for one and returns its line, or raises BuildError."""
    with processes(min(args.jobs, max(1, len(problems)))) as pool:
        tasks = {p: pool.schedule(attempt, (build_case, p, arch, args, folder), BUILD_SECONDS) for p in problems}

        def finished(problem: SoftmaxProblem) -> str:
            line, why = outcome(tasks[problem])
            if line is None:
                raise BuildError(f"{name_of(problem)}: {why}")
            return str(line)

        yield finished


def build_all(problems: Sequence[SoftmaxProblem], args: argparse.Namespace) -> None:
    arch = for_device(parse_arch(args.target), args.device, "softmax", [args.log])
    with builds_of(problems, arch, args, args.build_only) as finished:
        for problem in problems:
            print(finished(problem), flush=True)


def run_all(problems: Sequence[SoftmaxProblem], args: argparse.Namespace) -> None:
    arch = local_gpu()
    if arch is None:
        raise UsageError("no CUDA GPU here to compare on; --build-only needs none")
    device, launch = str(device_name(arch)), GRAPH if args.graph else STREAM
    out = args.out or args.log / slug(device) / file_of(args.sets)
    results = Results(out, device, bench.versions_here(arch), kind=KIND, launch=launch, fresh=args.fresh)
    left = [problem for problem in problems if not (args.missing and problem in results)]
    with contextlib.ExitStack() as stack:
        timer, builds = stack.enter_context(CudaTimer()), args.builds
        finished: Callable[[SoftmaxProblem], str] | None = None
        if not (builds or args.search):
            builds = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            finished = stack.enter_context(builds_of(left, arch, args, builds))

        def run(problem: SoftmaxProblem, choice: Choice) -> dict[str, Any]:
            if finished:
                finished(problem)
            how = dict(seed=args.seed, builds=builds, launch=launch)
            return softmax_case.run_case(problem, arch, choice, args.peers, timer, args.seconds, **how)

        def result(problem: SoftmaxProblem, found: Found) -> dict[str, Any]:
            return case_result(problem, found, launch)

        comparison = Comparison(lambda problem: chosen(problem, arch, args), run, result, name_of, line_of)
        run_cases(comparison, left, arch, results, search_of(args))
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
    run_script(main, "stopped; the cases that were finished are kept, --missing goes on")
