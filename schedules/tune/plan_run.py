"""Running a plan: every entry in turn, each best exported, a report that is true after each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from schedules.bundle.export import export_record
from schedules.core.arch import Arch
from schedules.core.errors import SchedulesError, UsageError
from schedules.core.files import unwritable
from schedules.core.registry import operator_of
from schedules.measure.choice import best_of
from schedules.measure.journal import DEFAULT_FOLDER, journal_file, read_journal
from schedules.measure.lookup import default_record
from schedules.tune import summary
from schedules.tune.crew import Crew
from schedules.tune.crews import CrewOptions
from schedules.tune.plan import Plan
from schedules.tune.progress import View
from schedules.tune.session import tune
from schedules.tune.summary import Outcome, write_report
from schedules.tune.tuner import Result, environment_of


def run_plan(
    plan: Plan,
    view: View,
    *,
    folder: str | Path = DEFAULT_FOLDER,
    out: str | Path | None = None,
    open_crew: Callable[[Arch], Crew] | None = None,
    fresh: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Search every entry of `plan` on every of its targets, journals under `folder`, bundles and report in `out`.

    Run again, it goes on where it was: a search that came to its limits takes a moment.  A search, an export or a
    report that fails is noted and the next search starts; `stop` ends the plan.  Raises UsageError if `out` is no place
    to write to.
    """
    out = Path(out or plan.out)
    # by priority first, then by target: one that ends early has the important ones
    outcomes = [Outcome(entry, arch) for entry in plan.entries for arch in entry.targets]
    deadline = None if plan.minutes is None else time.monotonic() + 60 * plan.minutes
    crews = _Crews(open_crew or CrewOptions().open)
    report = _Report(out, plan.file.stem, outcomes, view)
    report.begin()
    try:
        for number, outcome in enumerate(outcomes):
            if stop():
                break
            until = None
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    outcome.state = summary.NO_TIME
                    continue
                # what an earlier one leaves over is shared by the later ones
                until = time.monotonic() + left / (len(outcomes) - number)
            view.heading(f"{number + 1} of {len(outcomes)}: {outcome.name}")
            outcome.state = summary.SEARCHING
            report.write()
            _run(outcome, until, crews, Path(folder), fresh, view, stop)
            if outcome.note:
                view.note(f"{outcome.name}: {outcome.note}")
            _export(outcome, out, view)
            report.write()
    finally:
        crews.close()
        report.write()
    return outcomes


def _run(
    outcome: Outcome,
    until: float | None,
    crews: _Crews,
    folder: Path,
    fresh: bool,
    view: View,
    stop: Callable[[], bool],
) -> None:
    entry, arch = outcome.entry, outcome.arch
    view.status = None
    try:
        crew = crews.get(arch)
        work = entry.work(arch, until)
        result = tune(work, crew, folder=folder, fresh=fresh, watcher=view, stop=stop)
        outcome.state, outcome.why = summary.DONE if result.finished else summary.STOPPED, result.why
        file = journal_file(folder, crew.device, operator_of(entry.problem).name)
        _look_up(outcome, file, crew, result)
        if not outcome.best and result.finished:
            outcome.state, outcome.note = summary.FAILED, "no candidate was correct"
    except Exception as error:  # a fault of this package must not cost the rest of the plan
        outcome.state, outcome.note = summary.FAILED, _told(error)
        if not isinstance(error, SchedulesError):
            crews.drop(arch)
    finally:
        view.close()
        outcome.status = view.status


def _look_up(outcome: Outcome, file: Path, crew: Crew, result: Result) -> None:
    """The record that dispatch uses from now on, whichever search it is of, and the default's."""
    problem, arch = outcome.entry.problem, outcome.arch
    known = [
        record
        for record in read_journal(file)[0]
        if record.problem == problem and record.environment == environment_of(crew, arch)
    ]
    outcome.best = best_of(known, outcome.entry.schedules)
    outcome.default = result.default or result.status.default or default_record(known, problem, arch)


def _export(outcome: Outcome, out: Path, view: View) -> None:
    if not (outcome.best and outcome.entry.export):
        return
    try:
        outcome.bundle = export_record(outcome.best, outcome.arch, out / outcome.name)
    except Exception as error:  # of the disk, or of this package: the search is done and the next one can start
        outcome.note = f"not exported: {_told(error)}"
        view.note(f"{outcome.name}: {outcome.note}")


def _told(error: Exception) -> str:
    """`error` in a line."""
    text = str(error) if isinstance(error, SchedulesError) else f"internal: {type(error).__name__}: {error}"
    return " ".join(text.split())


@dataclass
class _Report:
    """The report of a plan in the folder `out`; that it cannot be written is said once and ends nothing."""

    out: Path
    title: str
    outcomes: Sequence[Outcome]
    view: View
    said: bool = False

    def begin(self) -> None:
        """Write the first one.  Raises UsageError if there can be none in `out`."""
        if isinstance(refused := self._write(), UsageError):
            raise refused

    def write(self) -> None:
        if (refused := self._write()) and not self.said:
            self.said = True
            self.view.note(f"no report: {refused}")

    def _write(self) -> SchedulesError | None:
        """Returns what the file system said, if it refused."""
        refused = None
        try:
            write_report(self.out, self.title, self.outcomes)
        except OSError as error:
            refused = unwritable(self.out, error, "choose another folder: export in the plan's [defaults], or --out")
        for outcome in self.outcomes:
            outcome.reported = refused is None
        return refused


class _Crews:
    """One crew for each arch, started when it is first needed; an arch that has none keeps saying why."""

    def __init__(self, open_crew: Callable[[Arch], Crew]) -> None:
        self._open = open_crew
        self._crews: dict[Arch, Crew] = {}
        self._errors: dict[Arch, SchedulesError] = {}

    def get(self, arch: Arch) -> Crew:
        if arch in self._errors:
            raise self._errors[arch]
        if arch not in self._crews:
            try:
                self._crews[arch] = self._open(arch)
            except SchedulesError as error:
                self._errors[arch] = error
                raise
        return self._crews[arch]

    def drop(self, arch: Arch) -> None:
        """Forget a crew that may be beyond repair: the next search gets a new one."""
        crew = self._crews.pop(arch, None)
        if crew:
            crew.close()

    def close(self) -> None:
        for crew in self._crews.values():
            crew.close()


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 if every search came to its end and what was asked for is written, 130 if the plan was stopped, else 1."""
    states = {outcome.state for outcome in outcomes}
    if states & {summary.STOPPED, summary.WAITING}:
        return 130
    written = all(o.reported and (o.bundle or not (o.best and o.entry.export)) for o in outcomes)
    return 0 if written and summary.FAILED not in states else 1
