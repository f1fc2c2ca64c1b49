#!/usr/bin/env python3
"""Trials whose kernels are built on a machine without a GPU, and measured on another.

    python -m scripts.carry_trials build FOLDER --shapes SHAPES.json --seconds 1800 --known tuning_logs/nvidia-h200
    python -m scripts.carry_trials measure FOLDER OUT.jsonl

Built are the configs that are predicted to be fastest, of each problem a few that differ by more than their stages, and
others at random if asked, but none that the trials of the `known` folders have.  FOLDER holds the libraries and
``index.jsonl``; OUT.jsonl is what `collect_trials` writes, verified and timed as there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import SchedulesError
from schedules.core.problem import Config
from schedules.core.registry import operator, operator_of
from schedules.core.versions import versions
from schedules.predict.rank import ranked, varied
from scripts.collect_trials import LATE, PEERS, Child, build_at, draws, measurer, names
from scripts.drawn_layers import given, problems
from scripts.fit_choice import known
from scripts.trials import problem_of

INDEX = "index.jsonl"
BARE = 0.7  # of the problems drawn, the share that loses what a network does with the sums


def likely(
    problem: Any, arch: Arch, count: int, tried: Collection[Any], schedules: Sequence[str] = ()
) -> list[tuple[str, Config]]:
    """The first `count` of the ranking that differ in their tiles, then others, none of those `tried`; and as many of
    each of `schedules`."""
    found: list[tuple[str, Config]] = []
    for only in (None, *schedules):
        first = [(each.schedule, each.config) for each in varied(ranked(problem, arch, only))]
        found += [each for each in first if each not in tried and each not in found][:count]
    return found


def built(asked: argparse.Namespace, number: int, name: str, problem: Any, tried: Collection[Any]) -> str:
    """Build what is likely to be fastest of a problem; its line of the index, "" where nothing was built."""
    arch, found = parse_arch(asked.target), []
    schedules = [spec.name for spec in operator_of(problem).offered(arch) if spec.name in asked.schedules.split(",")]
    candidates = likely(problem, arch, asked.count, tried, schedules)
    if asked.drawn:
        others = draws(problem, arch, asked.drawn, random.Random(number), 0, only=schedules)
        candidates += [each for each in others if each not in tried and each not in candidates]
    for index, (schedule, config) in enumerate(candidates):
        library = asked.folder / f"{number}-{index}.so"
        try:
            workspaces = build_at(library, problem, schedule, config, arch)
        except SchedulesError as error:
            print(f"{problem} {schedule} {config}: {error}", file=sys.stderr)
            continue
        found.append([schedule, list(config.to_json(True).values()), library.name, workspaces])
    line = {"op": operator_of(problem).name, "p": str(problem), "set": name, "t": found}
    return json.dumps(line, separators=(",", ":")) if found else ""


def wanted(asked: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """(set, problem): those of a file, or drawn ones, of the operators that are asked for, most without what a network
    does with their sums, each once."""
    if asked.problems:
        yield from given(asked.problems)
        return
    r, seen = random.Random(asked.seed), set()
    for name, problem in problems(asked.shapes, asked.seed, asked.sorts.split(",")):
        op = operator_of(problem).name
        if r.random() < BARE and problem.dtype != "int8":
            ends = dict(bias=False, residual=False, activation="none")
            problem = replace(problem, **{name: end for name, end in ends.items() if hasattr(problem, name)})
        if (op, problem) not in seen and op in (asked.operators.split(",") if asked.operators else [op]):
            seen.add((op, problem))
            yield name, problem


def build(asked: argparse.Namespace) -> None:
    tried: dict[tuple[str, Any], set[Any]] = {}
    for layer in known(*asked.known)[1] if asked.known else []:
        tried.setdefault((layer.operator.name, layer.problem), set()).update(trial[:2] for trial in layer.trials)
    asked.folder.mkdir(parents=True, exist_ok=True)
    running: set[Future[str]] = set()
    layers, failed, end = 0, 0, time.time() + asked.seconds

    def settle(index: TextIO) -> None:
        nonlocal layers, failed
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            running.remove(future)
            if error := future.exception():  # costs its problem
                failed += 1
                print(f"{type(error).__name__}: {str(error)[-150:]}", file=sys.stderr)
            elif line := future.result():
                layers += 1
                index.write(line + "\n")

    pool = ProcessPoolExecutor(asked.builders, multiprocessing.get_context("spawn"))
    with (asked.folder / INDEX).open("w", buffering=1) as index, pool:
        for number, (name, problem) in enumerate(wanted(asked)):
            if time.time() > end or number == asked.layers:
                break
            have = tried.get((operator_of(problem).name, problem), set())
            running.add(pool.submit(built, asked, number, name, problem, have))
            if len(running) >= 2 * asked.builders:
                settle(index)
        while running:
            settle(index)
    print(f"{layers} problems built, {failed} failed")


def parsed(line: str, fields: dict[str, list[str]]) -> tuple[dict[str, Any], Any]:
    """A line of the index, and its problem; trials of which the index has values for other fields are left out."""
    words = json.loads(line)
    op = operator(words["op"])
    words["t"] = [each for each in words["t"] if len(each[1]) == len(fields[f"{op.name}.{each[0]}"])]
    return words, problem_of(op, words["p"])


def trials_of(
    child: Child, number: int, problem: Any, folder: Path, built: Sequence[Any]
) -> tuple[list[Any], list[Any], float | None]:
    """[[schedule, values, us, p10 us]] and [[schedule, values, reason]] of what was `built` of a problem, and cuDNN's
    us, from a measurer; a kernel at which it dies or hangs is left out, and the others are measured again."""
    rest, failed, at = list(built), [], None
    while rest:
        if at is not None:
            failed.append([*rest.pop(at)[:2], "crashed"])
        child.send((number, problem, [(str(folder / file), spaces) for *_, file, spaces in rest]), number)
        done, wrong, at = [], [], None
        while child.pipe.poll(max(1.0, child.heard + LATE - time.time())):
            try:
                which, index, median, low, text = child.pipe.recv()
            except (EOFError, OSError):
                break
            child.heard = time.time()
            if which == -1:  # begun anew
                continue
            if text == "start":
                at = index
            elif text == "end":
                return done, failed + wrong, median and round(median, 2)
            elif text:
                wrong.append([*rest[index][:2], text])
            else:
                done.append([*rest[index][:2], round(median, 2), round(low, 2)])
        child.restart()
        if at is None:  # in the timing, or in cuDNN: whose fault it was is not known
            return [], failed + wrong, None
    return [], failed, None


def measure(asked: argparse.Namespace) -> None:
    fields, trials, bad = names(), 0, 0
    child = Child(measurer, os.environ.get("CUDA_VISIBLE_DEVICES", "0"), asked.target, asked.peers)
    lines = (asked.folder / INDEX).read_text().splitlines()
    _, _, device, torch, _ = child.pipe.recv()
    head = {"device": device, "torch": str(torch), "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    with asked.out.open("w", buffering=1) as out:
        out.write(json.dumps({**head, "target": asked.target, "fields": fields}) + "\n")
        for number, line in enumerate(lines):
            words, problem = parsed(line, fields)
            done, failed, us = trials_of(child, number, problem, asked.folder, words["t"])
            trials, bad = trials + len(done), bad + len(failed)
            if done or failed:
                told = {name: words[name] for name in ("op", "p", "set")}
                out.write(json.dumps({**told, "cudnn": us, "t": done, "bad": failed}, separators=(",", ":")) + "\n")
    child.process.kill()
    print(f"{trials} trials of {len(lines)} problems, {bad} wrong or crashed")


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--target", default="cuda:sm_90a")
    steps = words.add_subparsers(dest="step", required=True)
    step = steps.add_parser("build", help="on a machine that has compilers")
    step.add_argument("folder", type=Path)
    step.add_argument("--shapes", type=Path)
    step.add_argument("--problems", type=Path, help="lines of a set, an operator and fields: these and no others")
    step.add_argument("--known", type=Path, nargs="*", default=[], help="folders whose trials are not built again")
    step.add_argument("--operators", default="", help="only of these")
    step.add_argument("--schedules", default="", help="of these as many, beside those of all")
    step.add_argument("--drawn", type=int, default=0, help="configs at random, of --schedules if there are any")
    step.add_argument("--sorts", default="few,flat,other", help="of layers, as in collect_trials")
    step.add_argument("--count", type=int, default=5, help="configs of a problem")
    step.add_argument("--layers", type=int, help="problems, at most")
    step.add_argument("--seconds", type=float, default=1800)
    step.add_argument("--builders", type=int, default=os.cpu_count() or 2)
    step.add_argument("--seed", type=int, default=0)
    step = steps.add_parser("measure", help="on a machine that has the GPU")
    step.add_argument("folder", type=Path)
    step.add_argument("out", type=Path)
    step.add_argument("--peers", type=int, default=PEERS, help="of as many problems, cuDNN is timed on one")
    asked = words.parse_args()
    if asked.step == "build" and (asked.folder / INDEX).exists():
        words.error(f"{asked.folder} has kernels already; name a new folder")
    (build if asked.step == "build" else measure)(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
