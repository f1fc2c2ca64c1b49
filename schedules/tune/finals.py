"""The finals of a search: its fastest candidates timed again in turn, beside the one that is used so far.

The time that found a candidate is the luckiest of many, and was taken at another moment than the others'.  In the
finals all meet the same machine, and what is used so far stays unless another is ahead of it by more than chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import numpy as np

from schedules.core.arch import Arch
from schedules.core.problem import Problem
from schedules.measure.contest import Contest, Ratio
from schedules.measure.records import Record, now
from schedules.tune import evaluate
from schedules.tune.crew import Crew, Job
from schedules.tune.evaluate import Artifact, Failure
from schedules.tune.noise import BUSY
from schedules.tune.strategy import Candidate

FINALISTS = 10
SECONDS = 20.0  # of finals at most, once they have had a first look
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
    spent: float,
    stop: Callable[[], bool] = lambda: False,
) -> list[Record]:
    """Records of the fastest FINALISTS of `trials`, the default and the incumbent (else the default), timed in turn
    for as long as the search took (`spent` seconds), SECONDS at most; the winner's `more` says so, and the verdict in a
    line.

    None if nothing was correct, or once `stop` says True.
    """

    def result(pending: Future[Any]) -> Any:
        while not wait([pending], timeout=0.2).done:
            if stop():
                pending.cancel()
                return Failure("runtime", "stopped")
        return pending.result()

    fastest = sorted((record for record in trials if record.correct), key=lambda record: record.us)
    holder = incumbent or default or next((record for record in trials if record.correct), None)
    finalists = {record.key: record for record in fastest[:FINALISTS]}
    for extra in (default, holder):
        if extra:
            finalists.setdefault(extra.key, extra)
    building = {
        key: crew.build(problem, Candidate(record.schedule, record.config))
        for key, record in finalists.items()
        if key not in artifacts
    }
    made = {key: result(building[key]) if key in building else artifacts[key] for key in finalists}
    seeds = (seed, *(seed + more for more in CONFIRM_SEEDS))
    # those that never were a new best have been seen on one set of data
    checking = {
        key: crew.measure(Job(evaluate.confirm_candidate, problem, (artifact, seeds, None), seeds, 2))
        for key, artifact in made.items()
        if not isinstance(artifact, Failure)
    }
    built = {key: made[key] for key, checked in checking.items() if not isinstance(result(checked), Failure)}
    if not built or stop():
        return []
    keys = list(built)
    first = keys.index(holder.key) if holder and holder.key in built else 0  # the fastest, where the holder is gone
    known = keys.index(default.key) if default and default.key in built else None
    seconds = min(SECONDS, max(1.0, spent))
    arguments = (tuple(built.values()), seed, first, () if known is None else (known,), seconds)
    job = Job(evaluate.measure_in_turn, problem, arguments, (seed,), timeouts=10, seconds=evaluate.LONGEST)
    found = result(crew.measure(job))
    if isinstance(found, Failure):
        return []
    contest, busy = found.contest, found.busy
    told = found.ahead or busy <= BUSY  # else others' turns were timed, and what is fast beside them is not fast alone
    won = contest.winner if told else contest.holder
    name = "default" if first == known else "earlier best" if incumbent in finalists.values() else "fastest trial"
    date = now()
    records = []
    for index, key in enumerate(keys):
        p10, median, p90 = (float(value) for value in np.percentile(contest.calls[index], (10, 50, 90)))
        record = finalists[key]
        more = {**record.more, "winner": index == won, "rounds": len(contest.scores[index])}
        more |= {"busy": round(busy, 2)} if busy else {}
        if known is not None and index != known and (over := contest.ratio(index, known)).low > 0:
            more["over_default"] = [round(value, 4) for value in (over.value, over.low, over.high)]
        if index == won:
            more["verdict"] = verdict(contest, name, busy, told)
        records.append(
            replace(
                record,
                stage="final",
                device=crew.device,
                date=date,
                versions=crew.versions,
                median_us=median,
                p10_us=p10,
                p90_us=p90,
                runs=len(contest.calls[index]),
                verified=tuple(dict.fromkeys((*record.verified, *(f"seed {used}" for used in seeds)))),
                program=built[key].program,
                more=more,
            )
        )
    return records


def verdict(contest: Contest, holder: str, busy: float = 0.0, told: bool = True) -> str:
    """What a contest showed, in a line; `holder` is what the others had to be ahead of, `told` whether the machine let
    it show anything."""
    rounds = f"in {contest.rounds} rounds"
    if not told:
        return f"this machine was too busy to tell {rounds}: the {holder} stays; stop the other work, search on"
    rivals = [contest.ratio(index, contest.holder) for index in range(len(contest.scores)) if index != contest.holder]
    nearest = max(rivals, key=lambda ratio: ratio.high, default=None)
    if contest.winner != contest.holder:
        text = f"ahead of the {holder} {rounds}: {ratio_text(contest.ratio(contest.winner, contest.holder))}"
    elif nearest and nearest.high >= 1:
        text = f"no difference was found {rounds}: the {holder} stays; the nearest is {ratio_text(nearest)}"
    else:
        text = f"the {holder} stays: it is ahead of all others {rounds}"
    return f"{text}; the machine was busy, which makes this uncertain" if busy > BUSY else text


def ratio_text(ratio: Ratio) -> str:
    """``1.06 x [1.03, 1.09]``: over 1 is faster."""
    return f"{ratio.value:.2f} x [{ratio.low:.2f}, {ratio.high:.2f}]"
