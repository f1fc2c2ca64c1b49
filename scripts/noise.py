#!/usr/bin/env python3
"""Whether a search beside other work chooses what it chooses on a quiet machine.

    scripts/noise.py                                             # 20 searches on this CPU beside busy neighbours
    scripts/noise.py softmax rows=512 cols=512 --runs 5 --trials 40 --keep tuning_logs

One search runs alone.  Then each of --runs runs beside a spinning process for each core, and one that comes and goes.
The configs that they chose are timed side by side at the end, alone again: exit code 1 if one is more than 3% slower
than the one chosen alone.  Needs a machine that nothing else works on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from schedules.cli.arguments import split_words
from schedules.cli.script import run_script
from schedules.core.arch import parse_arch
from schedules.core.device import slug
from schedules.core.presets import resolve
from schedules.core.problem import Problem
from schedules.measure.contest import Contest
from schedules.measure.records import Record, now
from schedules.tune import evaluate
from schedules.tune.crew import Job, LocalCrew
from schedules.tune.evaluate import Artifact, Failure
from schedules.tune.session import Work, tune
from schedules.tune.strategy import Candidate
from schedules.tune.tuner import Limits, Result

SLOWER = 1.03  # than what is chosen on a quiet machine, at most
PROBLEM = ("conv2d_hwcn", "n=16", "h=7", "w=7", "ci=16", "co=16", "kh=3", "kw=3")
SECONDS = 60.0  # of the comparison at the end
SPIN = "while True: pass"
COME_AND_GO = """
import random, sys, time
draw = random.Random(int(sys.argv[1]))
while True:
    end = time.monotonic() + draw.uniform(0.01, 1)
    while time.monotonic() < end: pass
    time.sleep(draw.uniform(0.01, 1))
"""


class RememberingCrew(LocalCrew):
    """Builds each candidate once: what is looked at is the timing."""

    def __init__(self, *arguments: Any) -> None:
        self.made: dict[tuple[Problem, Candidate], Future[Artifact | Failure]] = {}
        super().__init__(*arguments)

    def build(self, problem: Problem, candidate: Candidate) -> Future[Artifact | Failure]:
        if (problem, candidate) not in self.made:
            self.made[problem, candidate] = super().build(problem, candidate)
        return self.made[problem, candidate]


@contextlib.contextmanager
def neighbours(seed: int) -> Iterator[None]:
    """Other work while the body runs: a process that spins for each core, and one that comes and goes."""
    words = [["-c", SPIN]] * len(os.sched_getaffinity(0)) + [["-c", COME_AND_GO, str(seed)]]
    running = [subprocess.Popen([sys.executable, *each]) for each in words]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def search(work: Work, crew: LocalCrew, folder: Path) -> Record:
    """What a search chooses that knows of no other."""
    with tempfile.TemporaryDirectory(dir=folder) as logs:
        result: Result = tune(work, crew, folder=logs)
    assert result.best, "nothing was correct"
    print(f"  {result.best.us:8.2f} us  {result.best.config}; {result.verdict}", flush=True)
    return result.best


def side_by_side(work: Work, crew: LocalCrew, chosen: Sequence[Record]) -> Contest:
    """The configs of `chosen` in turn, none of them dropped."""
    built = [crew.build(work.problem, Candidate(record.schedule, record.config)).result() for record in chosen]
    arguments = (built, work.seed, 0, range(len(built)), SECONDS)
    job = Job(evaluate.measure_in_turn, work.problem, arguments, (work.seed,), 10, evaluate.LONGEST)
    found: evaluate.Rounds = crew.measure(job).result()
    return found.contest


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="NAME [field=value ...]", help="an operator or a preset")
    parser.add_argument("--runs", type=int, default=20, help="searches beside other work (default: 20)")
    parser.add_argument("--trials", type=int, default=24, help="of each search (default: 24)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", metavar="DIR", help="write the result to <DIR>/<device>/noise.json")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    name, *fields = args.words or PROBLEM
    _, problem = resolve(name, split_words(fields))
    arch = parse_arch("llvm")
    work = Work(problem, arch, Limits(trials=args.trials), seed=args.seed)
    crew = RememberingCrew(arch)
    try:
        with tempfile.TemporaryDirectory() as folder:
            print("alone:")
            quiet = search(work, crew, Path(folder))
            print("beside other work:")
            busy = []
            for run in range(args.runs):
                with neighbours(args.seed + run):
                    busy.append(search(work, crew, Path(folder)))
        chosen = list({record.key: record for record in (quiet, *busy)}.values())
        time.sleep(1)  # until the neighbours are gone
        contest = side_by_side(work, crew, chosen)
    finally:
        crew.close()
    slower = {record.key: contest.ratio(0, index) for index, record in enumerate(chosen)}
    entries = []
    for record in chosen:
        times = sum(other.key == record.key for other in busy)
        ratio = slower[record.key]
        entries.append(
            {
                "config": record.config.to_json(),
                "chosen": times,
                "slower": [round(value, 4) for value in (ratio.value, ratio.low, ratio.high)],
            }
        )
        between = f"[{ratio.low:.3f}, {ratio.high:.3f}]"
        print(f"{times:3} of {args.runs}: {ratio.value:.3f} x the time {between}  {record.config}")
    near = sum(slower[record.key].value <= SLOWER for record in busy)
    print(f"{near} of {args.runs} within {SLOWER - 1:.0%} of what is chosen alone, over {contest.rounds} rounds")
    if args.keep:
        file = Path(args.keep) / slug(crew.device) / "noise.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        head = {"kind": "noise", "device": crew.device, "date": now(), "versions": crew.versions}
        asked = {"problem": problem.to_json(), "trials": args.trials, "seed": args.seed, "rounds": contest.rounds}
        file.write_text(
            json.dumps({**head, **asked, "runs": args.runs, "near": near, "chosen": entries}, indent=1) + "\n"
        )
    return 0 if near == args.runs else 1


if __name__ == "__main__":
    run_script(main)
