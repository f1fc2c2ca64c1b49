"""The configs of an operator's schedules for a problem, the fastest first as far as can be told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from schedules.core.arch import Arch
from schedules.core.operator import Array, Operator, ScheduleSpec
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator_of
from schedules.predict import trees
from schedules.predict.configs import FILLED, Columns, columns_of, columns_of_space
from schedules.predict.estimate import Work, work
from schedules.predict.features import features, table

KEPT = 48  # legal configs of a schedule that are looked at closely, those of the least estimate
ALIKE = 4  # of them that compute tiles of one size
TRIED = 260  # configs that may be illegal before a schedule is given up
STAGES = tuple(range(8, 1, -1))


@dataclass(frozen=True)
class Ranked:
    """A legal config, its predicted time in us, the estimate's parts in us, and which of them limits it."""

    schedule: str
    config: Config
    us: float
    limit: str
    parts: tuple[tuple[str, float], ...]


def knows(operator: Operator, problem: Any, arch: Arch) -> trees.Trees | None:
    """The shipped trees, if they were trained on problems as this one for `arch`."""
    found = trees.load()
    if found is None or str(arch) != found.header["target"]:
        return None
    return found if kind_of(operator, problem) in found.header["kinds"] else None


def kind_of(operator: Operator, problem: Any) -> str:
    """What must agree for trials of one problem to tell of another: bfloat16 is as fast as float16."""
    dtype = getattr(problem, "dtype", "")
    return f"{operator.name} {'float16' if dtype == 'bfloat16' else dtype}"


@lru_cache(maxsize=512)
def ranked(problem: Problem, arch: Arch, schedule: str | None = None) -> tuple[Ranked, ...]:
    """Legal configs for `problem`, of `schedule` or of all schedules offered on `arch`, the fastest first; none where
    the trees know nothing of such problems."""
    op = operator_of(problem)
    known = knows(op, problem, arch)
    if known is None:
        return ()
    specs = [op.schedule(schedule)] if schedule else op.offered(arch)
    specs = [spec for spec in specs if f"is {op.name}.{spec.name}" in known.names and arch.kind in spec.kinds]
    groups = [(spec, list(candidates(problem, spec, arch))) for spec in specs]
    groups = [(spec, configs) for spec, configs in groups if configs]
    if not groups:
        return ()
    times, works = predicted(op, problem, groups, arch, known)
    found, start = [], 0
    for (spec, configs), made in zip(groups, works, strict=True):
        for row, config in enumerate(configs):
            parts = tuple((name, float(part[row])) for name, part in made.parts.items())
            found.append(Ranked(spec.name, config, float(times[start + row]), made.limit(row), parts))
        start += len(configs)
    return tuple(sorted(found, key=lambda each: each.us))


def predicted(
    op: Operator,
    problem: Problem,
    groups: Iterable[tuple[ScheduleSpec, Sequence[Config]]],
    arch: Arch,
    known: trees.Trees,
) -> tuple[Array, list[Work]]:
    """Predicted us of the configs of each schedule, one after the other, and their estimates."""
    parts, counts, works = [], [], []
    for spec, configs in groups:
        columns = columns_of(configs)
        works.append(work(problem, spec, columns, arch))
        parts.append(features(op.name, problem, spec, columns, works[-1], arch))
        counts.append(len(configs))
    total = np.concatenate([each.total for each in works])
    return total * np.exp(known.predict(table(parts, counts, known.names))), works


def candidates(problem: Problem, spec: ScheduleSpec, arch: Arch) -> Iterator[Config]:
    """The legal configs of least estimate, few of one tile, with as many stages as there is room for."""
    columns = columns_of_space(spec, problem, arch)
    if not columns.count:
        return
    made = work(problem, spec, columns, arch)
    seen: dict[tuple[float, ...], int] = {}
    kept = tried = 0
    for row in np.argsort(made.total, kind="stable"):
        tile = _tile(columns, int(row))
        if seen.get(tile, 0) >= ALIKE:
            continue
        config = filled(columns.make(int(row)), problem, arch)
        tried += 1
        if config is not None:
            seen[tile] = seen.get(tile, 0) + 1
            kept += 1
            yield config
        if kept >= KEPT or tried >= TRIED:
            return


_SIDES = ("block_m", "block_n", "block.0", "block.1", "tile.0", "tile.1", "num_thread.0", "num_thread.1")


def _tile(columns: Columns, row: int) -> tuple[float, ...]:
    return tuple(float(columns.fields[name][row]) for name in _SIDES if name in columns.fields)


def filled(config: Any, problem: Any, arch: Arch) -> Config | None:
    """`config` with the most stages that are legal, if it has stages to be filled; None if it is illegal."""
    if config.check(problem, arch) is not None:
        return None
    if not hasattr(config, FILLED):
        found: Config = config
        return found
    low, high = config.num_stages, max(STAGES)
    best = config
    while low < high:
        middle = (low + high + 1) // 2
        deeper = replace(config, **{FILLED: middle})
        if deeper.check(problem, arch) is None:
            low, best = middle, deeper
        else:
            high = middle - 1
    return best  # type: ignore[no-any-return]


