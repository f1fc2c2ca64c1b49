"""Our programs in TIRx beside our TE schedules of the same operator: the cases, and one of them run.

A results file of kind "languages"; see `comparison`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.bench import Bench
from benchmarks.peers.comparison import GRAPH, Times, compare, head_of
from benchmarks.peers.graphs import launching
from benchmarks.peers.layers import FOLDER, layers_of
from benchmarks.peers.softmax_case import WIDTHS, distinct_rows
from benchmarks.peers.softmax_case import cases as softmax_cases
from schedules.core.arch import Arch
from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.operator import ScheduleSpec
from schedules.core.presets import presets, short
from schedules.core.problem import Problem
from schedules.core.registry import operator, operator_of
from schedules.measure.choice import Choice
from schedules.measure.results import LANGUAGES
from schedules.measure.timer import Timer
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem
from schedules.predict.start import started

KIND = LANGUAGES
WIDE = 32  # channels of a convolution that tensor cores multiply in float32's stead: fewer would mostly be filled up
LAYERS = {"first": 12, "networks": 100, "hwcn": 10}  # files of layers, and that every how many of them are compared


def program_for(problem: Problem, arch: Arch, used: Sequence[ScheduleSpec | None] = ()) -> ScheduleSpec | None:
    """The program in TIRx that `problem` is computed with: the choice without records, else one that serves it and is
    only used where it is named, that which is least often among those `used`.  None if there is none."""
    op = operator_of(problem)
    chosen, _ = started(problem, arch)
    if chosen.tirx:
        return chosen
    if min(getattr(problem, "ci", WIDE), getattr(problem, "co", WIDE)) < WIDE:
        return None
    named = (spec for spec in op.schedules if spec.tirx and spec.opt_in and spec.serves(problem, arch))
    return min(named, key=used.count, default=None)


def cases(arch: Arch, operators: Sequence[str]) -> dict[Problem, ScheduleSpec]:
    """The problems of `operators` that are compared, each with its program in TIRx: of the presets, in their dtype and
    in float32, of softmax's widths in bfloat16, odd ones, and few long rows, and of layers of networks, those that
    have one."""
    known = (problem for problem in dict.fromkeys(_problems()) if operator_of(problem).name in operators)
    programs: dict[Problem, ScheduleSpec | None] = {}
    for problem in known:
        programs[problem] = program_for(problem, arch, list(programs.values()))
    found = {problem: program for problem, program in programs.items() if program}
    unused = (s for name in operators for s in operator(name).schedules if s.tirx and s not in found.values())
    for spec in unused:  # which the rule prefers nowhere: in place of one that has other problems
        served = (problem for problem in found if spec in operator_of(problem).schedules and spec.serves(problem, arch))
        several = (problem for problem in served if list(found.values()).count(found[problem]) > 1)
        found |= {problem: spec for problem in list(several)[-1:]}
    return found


def _problems() -> Iterator[Problem]:
    for preset in presets().values():
        if preset.available:
            problem = preset.problem()
            yield problem
            if "float32" in problem.dtypes:
                yield preset.problem({"dtype": "float32"})
    yield from softmax_cases(["widths"], WIDTHS, ["softmax"], "bfloat16")
    yield from softmax_cases(["odd"], WIDTHS, FUNCTIONS, "float16")
    yield from softmax_cases(["few"], WIDTHS, ["softmax"], "float16")
    for name, step in LAYERS.items():
        yield from (each.problem for each in layers_of(FOLDER / f"{name}.json", every=step))


def name_of(problem: Problem) -> str:
    """A short name that no other case has."""
    owner = operator_of(problem).name
    return f"{owner} {short(owner, problem)}"


def bundle_of(builds: Path, problem: Problem, schedule: str) -> Path:
    """The folder of a case's bundle of `schedule` below `builds`."""
    return builds / name_of(problem).replace(" ", "-") / schedule


def run_case(
    problem: Problem,
    arch: Arch,
    choice: Choice,
    siblings: Sequence[Choice],
    timer: Timer,
    seconds: float,
    *,
    seed: int = 0,
    builds: Path | None = None,
    launch: str = GRAPH,
) -> dict[str, Any]:
    """Compare `choice`, of a program in TIRx, with those of its `siblings`; what `case_result` says.

    All are held to the program's arithmetic, and launched the same way.  Raises what `Bench` and `compare` raise.
    """
    arithmetic = operator_of(problem).schedule(choice.schedule).arithmetic
    distinct = replace(problem, rows=distinct_rows(problem)) if isinstance(problem, SoftmaxProblem) else None
    bench, launched = Bench(problem, arch, seed, distinct, arithmetic), launching(launch)
    entrants = {
        name: bench.ours(each, builds and bundle_of(builds, problem, each.schedule), launched)
        for name, each in {"ours": choice, **{sibling.schedule: sibling for sibling in siblings}}.items()
    }
    return case_result(problem, compare(entrants, timer, bench.judge, bench.poison, seconds), launch, arithmetic)


def case_result(
    problem: Problem,
    found: Mapping[str, tuple[Times | None, dict[str, Any]]],
    launch: str = GRAPH,
    arithmetic: Arithmetic = FLOAT32,
) -> dict[str, Any]:
    """One case as plain data.  Names in `found`: "ours", for the program in TIRx, and those of its siblings.

    `ratio` is the time of `best`, the fastest of the siblings, as a multiple of the program's.
    """
    told = {name: {**about, **(times.to_json() if times else {})} for name, (times, about) in found.items()}
    ours = told.pop("ours")
    case = {**head_of(problem, launch, arithmetic), "ours": ours, "peers": told}
    timed = {name: words["us"] for name, words in told.items() if "us" in words}
    if timed and "us" in ours:
        best = min(timed, key=lambda name: timed[name])
        case |= {"best": best, "ratio": round(timed[best] / ours["us"], 4)}
    return case


def line_of(case: Mapping[str, Any]) -> str:
    """A case in a line, for people who watch."""
    problem = " ".join(f"{name}={value}" for name, value in case["problem"].items() if name not in ("pad", "stride"))
    sides = {case["ours"].get("schedule", "TIRx"): case["ours"], **case["peers"]}
    times = "  ".join(
        f"{name} {words['us']:.2f} us" if "us" in words else f"{name} - ({words.get('failed', 'not run')})"
        for name, words in sides.items()
    )
    ratio = f"  {case['ratio']:.2f} of {case['best']}" if "ratio" in case else ""
    return f"{case['operator']:14} {problem}  {times}{ratio}"
