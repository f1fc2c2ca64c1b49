"""The finals of a search: its fastest candidates timed again in turn, beside the one that is used so far.

The time that found a candidate is the luckiest of many; a second look under equal conditions is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from schedules.core.arch import Arch
from schedules.core.problem import Problem
from schedules.measure.records import Record, now
from schedules.tune import evaluate
from schedules.tune.crew import Crew, Job
from schedules.tune.evaluate import Artifact, Failure
from schedules.tune.strategy import Candidate

FINALISTS = 5
CONFIRM_SEEDS = (1,)  # added to the search's seed for the data that a new best is confirmed on


def hold_finals(
    problem: Problem,
    arch: Arch,
    crew: Crew,
    trials: Sequence[Record],
    incumbent: Record | None,
    artifacts: Mapping[tuple[str, str], Artifact],
    seed: int,
    *,
    default: Record | None = None,
) -> list[Record]:
    """Records of the fastest FINALISTS of `trials`, the default and the incumbent (else the default), timed in turn;
    the winner's `more` says so.  None if nothing was correct."""
    fastest = sorted((record for record in trials if record.correct), key=lambda record: record.us)
    holder = incumbent or default or next((record for record in trials if record.correct), None)
    finalists = {record.key: record for record in fastest[:FINALISTS]}
    for extra in (default, holder):
        if extra:
            finalists.setdefault(extra.key, extra)
    built: dict[tuple[str, str], Artifact] = {}
    for key, record in finalists.items():
        made = artifacts.get(key) or crew.build(problem, Candidate(record.schedule, record.config)).result()
        if not isinstance(made, Failure):
            built[key] = made
    seeds = (seed, *(seed + more for more in CONFIRM_SEEDS))
    for key in list(built):
        # those that never were a new best have been seen on one set of data
        checked = crew.measure(Job(evaluate.confirm_candidate, problem, (built[key], seeds, None), seeds, 2)).result()
        if isinstance(checked, Failure):
            del built[key]
    entries = [finalists[key] for key in built]
    job = Job(evaluate.measure_in_turn, problem, (tuple(built.values()), seed), (seed,), timeouts=10)
    rounds = crew.measure(job).result() if built else Failure("runtime", "no finalist is left")
    if isinstance(rounds, Failure):
        return []
    times = np.array(rounds)  # (finalist, round)
    won = winner(times, next((i for i, entry in enumerate(entries) if holder and entry.key == holder.key), None))
    found = []
    for index, entry in enumerate(entries):
        p10, median, p90 = (float(value) for value in np.percentile(times[index], (10, 50, 90)))
        artifact = built[entry.key]
        found.append(
            replace(
                entry,
                stage="final",
                device=crew.device,
                date=now(),
                versions=crew.versions,
                median_us=median,
                p10_us=p10,
                p90_us=p90,
                runs=times.shape[1],
                verified=tuple(dict.fromkeys((*entry.verified, *(f"seed {used}" for used in seeds)))),
                program=artifact.program,
                more={**entry.more, "winner": index == won},
            )
        )
    return found


def winner(times: np.ndarray, incumbent: int | None) -> int:
    """The index of the finalist to use, from the times (finalist, round).

    The fastest by its median; the incumbent stays unless the fastest beat it in all rounds but one (a sign test: with
    nine rounds, two that are equal come out so one time in fifty).
    """
    best = int(np.argmin(np.median(times, axis=1)))
    if incumbent is None or best == incumbent:
        return best
    beaten = int(np.sum(times[best] < times[incumbent]))
    return best if beaten >= times.shape[1] - 1 else incumbent
