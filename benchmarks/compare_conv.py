"""Our convolutions beside cuDNN's for the same work, in one run on this GPU.

    python -m benchmarks.compare_conv 'k100-nhwc-*' --graph  # presets; both sides launched from CUDA graphs
    python -m benchmarks.compare_conv 'resnet50-*' --set n=256 --graph        # with fields replaced
    python -m benchmarks.compare_conv k100-nhwc-2 --schedule tma_wgmma --search 40
    python -m benchmarks.compare_conv tutorial --schedule tf32 --graph        # float32 in TF32, beside cuDNN's TF32 too
    python -m benchmarks.compare_conv --ceilings  # the matrix products of this GPU, for the file

Every result of ours is compared with the float64 reference on the device before it is timed.  A result is written after
every case, in place of the same problem's launched the same way; --missing goes on where a run was cut off.
python -m benchmarks.results_table prints it as tables.
"""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers import bench, ceilings, convolution_case
from benchmarks.peers.comparison import GRAPH, STREAM, Results
from benchmarks.peers.convolution import OPERATORS, PEERS, require_patterns
from benchmarks.peers.convolution_case import KIND, line_of, name_of
from benchmarks.peers.runs import Comparison, Found, add_arguments, check_arguments, run_cases, search_of
from schedules.build.present import device_name, local_gpu
from schedules.cli.script import run_script
from schedules.core.arch import Arch
from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.device import slug
from schedules.core.errors import UsageError
from schedules.core.presets import presets, resolve
from schedules.core.problem import Conv2dProblem, Problem
from schedules.core.registry import operator_of
from schedules.measure.choice import Choice, choose, default_choice
from schedules.measure.timer import CudaTimer


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is compared")
    what.add_argument("presets", nargs="*", metavar="PRESET", help="presets and patterns of presets (k100-nhwc-[2-5])")
    what.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields in place of the presets'")
    what.add_argument("--peers", nargs="*", default=["*"], metavar="PATTERN", help=", ".join(PEERS))
    what.add_argument("--graph", action="store_true", help="launch ours and the peers from CUDA graphs")
    what.add_argument("--ceilings", action="store_true", help="also time large matrix products, kept with the result")
    add_arguments(parser, 1.0, "conv_compare.json")
    args = parser.parse_args(words)
    check_arguments(args)
    require_patterns(args.peers)
    if not args.presets and not args.ceilings:
        raise UsageError(
            "name presets, as 'resnet50-*', or measure --ceilings alone; `schedules list` shows the presets"
        )
    return args


def problems_of(patterns: Sequence[str], fields: Mapping[str, str]) -> list[Conv2dProblem]:
    """The convolutions of the presets that fit `patterns`, each once, with `fields` replaced.

    Raises UsageError for a pattern that fits none, and for a preset, named as it is, that is no convolution.
    """
    found: dict[Conv2dProblem, None] = {}
    for pattern in patterns:
        names = [pattern]
        if set(pattern) & set("*?["):
            names = [name for name in presets() if fnmatch.fnmatchcase(name, pattern) and convolves(name)]
        if not names:
            raise UsageError(f"{pattern!r} fits no preset of a convolution; `schedules list` shows them")
        for name in names:
            _, problem = resolve(name, fields)
            if not is_compared(problem):
                raise UsageError(f"{name} is not a convolution; python -m benchmarks.compare_softmax compares softmax")
            assert isinstance(problem, Conv2dProblem)
            found[problem] = None
    return list(found)


def convolves(name: str) -> bool:
    """Whether the preset is a convolution of this version that is compared."""
    preset = presets()[name]
    return preset.available and is_compared(preset.problem())


def is_compared(problem: Problem) -> bool:
    """Whether the peers compute it: a convolution in which every output takes all input channels."""
    return operator_of(problem).name in OPERATORS


def chosen(problem: Conv2dProblem, arch: Arch, args: argparse.Namespace) -> Choice:
    if args.default:
        return default_choice(problem, arch, args.schedule)
    return choose(problem, arch, args.schedule, folders=[args.log])


def run_all(problems: Sequence[Conv2dProblem], args: argparse.Namespace) -> None:
    arch = local_gpu()
    if arch is None:
        raise UsageError("no CUDA GPU here to compare on")
    device, launch = str(device_name(arch)), GRAPH if args.graph else STREAM
    out = args.out or args.log / slug(device) / "conv_compare.json"
    results = Results(out, device, bench.versions_here(arch), kind=KIND, launch=launch, fresh=args.fresh)

    def arithmetic(problem: Conv2dProblem) -> Arithmetic:
        # only a schedule that is named has another
        return operator_of(problem).schedule(args.schedule).arithmetic if args.schedule else FLOAT32

    left = [problem for problem in problems if not (args.missing and results.has(problem, arithmetic(problem)))]
    with CudaTimer() as timer:
        if args.ceilings:
            results.note(ceilings=ceilings.measure_ceilings(timer, args.seconds))

        def run(problem: Conv2dProblem, choice: Choice) -> dict[str, Any]:
            return convolution_case.run_case(
                problem, arch, choice, args.peers, timer, args.seconds, seed=args.seed, launch=launch
            )

        def result(problem: Conv2dProblem, found: Found) -> dict[str, Any]:
            return convolution_case.case_result(problem, found, launch, arithmetic(problem))

        comparison = Comparison(lambda problem: chosen(problem, arch, args), run, result, name_of, line_of)
        run_cases(comparison, left, arch, results, search_of(args))
    print(f"{len(left)} cases compared, {len(results.cases)} in {out}")


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    if wrong := [word for word in args.set if "=" not in word]:
        raise UsageError(f"--set {wrong[0]} is not FIELD=VALUE")
    problems = problems_of(args.presets, dict(word.split("=", 1) for word in args.set))
    for problem in problems if args.schedule else ():
        operator_of(problem).schedule(args.schedule)
    run_all(problems, args)
    return 0


if __name__ == "__main__":
    run_script(main, "stopped; the cases that were finished are kept, --missing goes on")
