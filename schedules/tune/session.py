"""One search from end to end: a crew, a journal, a strategy, signals; what a command or a plan asks for."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from schedules.build.toolchain.devices import on_named
from schedules.core.arch import Arch
from schedules.core.device import slug
from schedules.core.errors import ConfigError, UsageError
from schedules.core.interrupts import Deferred
from schedules.core.problem import Problem
from schedules.core.registry import operator_of
from schedules.measure.choice import best_of, default_choice, nearest
from schedules.measure.journal import DEFAULT_FOLDER, Journal, journal_file
from schedules.measure.records import STRATEGIES, Record
from schedules.predict.rank import ranked
from schedules.tune.crew import Crew
from schedules.tune.strategy import Candidate, Strategy
from schedules.tune.template import TemplateSearch
from schedules.tune.tuner import Limits, Result, Silent, Tuner, Watcher, environment_of

NEIGHBOURS = 3  # other problems whose best is tried first
PROMISING = 8  # of the configs that are predicted to be fastest, which a search begins with


@dataclass(frozen=True)
class Work:
    """One search as it is asked for.  `search` is one of STRATEGIES; `schedules` narrow a template search; `space`
    names the auto-scheduler's space ("" for the one that fits)."""

    problem: Problem
    arch: Arch
    limits: Limits
    search: str = "template"
    schedules: tuple[str, ...] = ()
    seed: int = 0
    space: str = ""

    def __post_init__(self) -> None:
        if self.search not in STRATEGIES:
            raise UsageError(f"search {self.search!r} is not one of {', '.join(STRATEGIES)}")


def tune(
    work: Work,
    crew: Crew,
    *,
    journal: str | Path | None = None,
    folder: str | Path = DEFAULT_FOLDER,
    fresh: bool = False,
    watcher: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Search as `work` says, with the trials in `journal`, by default the file of the device and operator in `folder`.

    Goes on where an earlier search of the same problem, target, device, versions and strategy ended, unless `fresh` or
    there are schedules that it did not know.
    Raises UsageError, JournalError, TuningError, ToolchainError.
    """
    work = replace(work, arch=on_named(work.arch, crew.device, (crew.device,)))  # what defaults and spaces are for
    file = Path(journal) if journal else journal_file(folder, crew.device, operator_of(work.problem).name)
    strategy = strategy_for(work)
    told = watcher or Silent()
    with Journal(file, wait=0.1, note=told.note) as opened:  # a command that looks whether it is locked is done by then
        known = [record for record in opened.records if record.environment == environment_of(crew, work.arch)]
        incumbent = best_of((record for record in known if record.problem == work.problem), work.schedules)
        tuner = Tuner(
            work.problem,
            work.arch,
            strategy,
            crew,
            opened,
            work.limits,
            seed=work.seed,
            schedules=work.schedules,
            space=work.space,
            offered=offered_to(work),
            first=first_candidates(work, incumbent, known),
            incumbent=incumbent,
            fresh=fresh,
            watcher=watcher,
            stop=stop,
        )
        return tuner.run()


def tune_each(
    work: Work,
    crews: Sequence[Crew],
    *,
    folder: str | Path = DEFAULT_FOLDER,
    fresh: bool = False,
    watch: Callable[[Crew], Watcher | None] = lambda crew: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Result]:
    """`tune` with each of `crews` at once, each with the journal of its device and a watcher of its own.

    Crews of one device name (whose versions differ) take turns: they share a journal.  What one raises is raised when
    the others have ended.
    """

    def run(mine: list[Crew]) -> list[Result]:
        return [tune(work, crew, folder=folder, fresh=fresh, watcher=watch(crew), stop=stop) for crew in mine]

    by_device: dict[str, list[Crew]] = {}
    for crew in crews:
        by_device.setdefault(slug(crew.device), []).append(crew)
    with ThreadPoolExecutor(max(1, len(by_device))) as threads:
        found = [threads.submit(run, mine) for mine in by_device.values()]
    results = [result for future in found for result in future.result()]
    order = [id(crew) for mine in by_device.values() for crew in mine]
    by_crew = dict(zip(order, results, strict=True))
    return [by_crew[id(crew)] for crew in crews]


def strategy_for(work: Work) -> Strategy:
    """The strategy that `work` names, at its beginning."""
    if work.search == "auto":
        from schedules.tune.auto import AutoSearch

        return AutoSearch(work.problem, work.arch, space=work.space or None, seed=work.seed)
    return TemplateSearch(
        work.problem, work.arch, schedules=work.schedules, seed=work.seed, model=work.search == "template"
    )


def offered_to(work: Work) -> tuple[str, ...]:
    """The schedules that a template search draws from if it is not narrowed to some."""
    if work.search == "auto" or work.schedules:
        return ()
    return tuple(sorted(spec.name for spec in operator_of(work.problem).offered(work.arch)))


def first_candidates(work: Work, incumbent: Record | None, known: Sequence[Record]) -> list[Candidate]:
    """What is measured before any other: the default, the best known of this problem, what is predicted to be fastest
    after the default, the best known of the nearest problems, the defaults of the other schedules."""
    if work.search == "auto":
        return []
    problem, arch, op = work.problem, work.arch, operator_of(work.problem)
    names = list(work.schedules) or [spec.name for spec in op.offered(arch)]
    found: list[Candidate] = []
    with contextlib.suppress(ConfigError):  # a rule's schedule need not be among `names`
        ruled = default_choice(problem, arch, names[0] if work.schedules else None)
        found.append(Candidate(ruled.schedule, ruled.config))
    if incumbent:
        found.append(Candidate(incumbent.schedule, incumbent.config))
    promising = [each for each in ranked(problem, arch) if each.schedule in names]
    found += [Candidate(each.schedule, each.config) for each in promising[:PROMISING]]
    near = nearest(problem, known, work.schedules)[:NEIGHBOURS]
    found += [Candidate(record.schedule, record.config) for record in near]
    for name in names:
        with contextlib.suppress(ConfigError):
            other = default_choice(problem, arch, name)
            found.append(Candidate(other.schedule, other.config))
    return [c for c in dict.fromkeys(found) if c.schedule in names and c.config.check(problem, arch) is None]


def stopping_signals(note: Callable[[str], None]) -> Deferred:
    """In the body Ctrl-C, SIGTERM and SIGHUP ask to stop, which is told to `note`; the function that the ``with`` gives
    says so.  A second one ends the process, and with it its workers, at once."""

    def tell(number: int) -> None:
        note(f"{signal.Signals(number).name}: finishing what is being measured; once more to abort")

    return Deferred(tell)
