"""A search in a process of its own, for tests that end it: prints a line for each trial, and one at the end.

python -m tests.tune.search_process JOURNAL TRIALS [FAULT+FAULT...]
"""

from __future__ import annotations

import os
import sys

import schedules.check.verify  # noqa: F401  what workers import, which are forks of this process
from schedules.core import child
from schedules.core.arch import parse_arch
from schedules.core.errors import SchedulesError
from schedules.core.registry import operator
from schedules.measure.records import Record
from schedules.tune import evaluate, finals
from schedules.tune.crew import LocalCrew
from schedules.tune.session import Work, stopping_signals, tune
from schedules.tune.tuner import Limits, Result, Silent, Status
from tests.forked import SUBPROCESS

child.STOPPED = 2.0
child.subprocess = SUBPROCESS  # type: ignore[assignment]
finals.SECONDS = 0.5
evaluate.SECONDS = 0.05  # in the workers too, which import this file: no test needs exact times


class Printer(Silent):
    def start(self, status: Status) -> None:
        print(f"start {status.resumed}", flush=True)

    def trial(self, record: Record, status: Status) -> None:
        print(f"trial {status.done} {record.outcome}", flush=True)

    def note(self, text: str) -> None:
        # not through the stream: a signal's handler may have interrupted a write to it
        os.write(1, f"note {text}\n".encode())

    def finish(self, result: Result) -> None:
        print(f"end {result.status.done} {'finished' if result.finished else 'stopped'}", flush=True)


def main(journal: str, trials: int, faults: str) -> int:
    # not by tests.conftest: every worker imports what this file does, and that would be pytest too
    problem = operator("faulty").problem.parse(dict(n=1000, faults=faults, good=200 if faults == "none" else 7))
    arch = parse_arch("llvm")
    try:
        builders = 1 if faults == "none" else 2  # each takes seconds to start
        crew = LocalCrew(arch, builders=builders, build_timeout=4.0, measure_timeout=4.0, memory=2**30)
        try:
            with stopping_signals(Printer().note) as stop:
                work = Work(problem, arch, Limits(trials=trials), search="random")
                tune(work, crew, journal=journal, watcher=Printer(), stop=stop)
        finally:
            crew.close()
    except SchedulesError as error:
        print(f"error {error}", flush=True)
        return error.exit_code
    except KeyboardInterrupt:  # asked again to stop, while the crew was closed: as the command line ends then
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "none"))
