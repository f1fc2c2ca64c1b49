"""Template search: the legal configs of an operator's schedules, the cost model's favourites first."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from schedules.core.arch import Arch
from schedules.core.errors import UsageError
from schedules.core.operator import Array
from schedules.core.problem import Problem
from schedules.core.registry import operator_of
from schedules.measure.records import Record
from schedules.tune.features import features, matrix
from schedules.tune.model import CostModel
from schedules.tune.strategy import Candidate

LARGEST = 20000  # candidates kept of a space, at random
WARM = 12  # correct trials before the model chooses
EXPLORE = 0.2  # share of each batch that is drawn at random
NEAR = 0.2  # share that differs from one of the fastest in a single field
ELITE = 4  # how many are the fastest
LEAST = 0.02  # chance of a schedule that was hopeless so far, beside the fastest


class TemplateSearch:
    """The configs of `schedules` (by default all of the operator's for the arch) in one space.

    With `model` off every candidate is drawn at random.  Raises UsageError if no config is legal.
    """

    def __init__(
        self, problem: Problem, arch: Arch, *, schedules: Sequence[str] = (), seed: int = 0, model: bool = True
    ) -> None:
        self.name = "template" if model else "random"
        self._problem = problem
        self._random = random.Random(f"{seed} {problem} {arch}")
        space = candidates(problem, arch, schedules)
        if not space:
            which = f"schedule {schedules[0]}" if schedules else f"any schedule of {operator_of(problem).name}"
            raise UsageError(f"no config of {which} is legal for {problem} on {arch}; choose another --schedule")
        self.size: int | None = len(space)
        if len(space) > LARGEST:
            space = self._random.sample(space, LARGEST)
        self._left = {candidate.key: candidate for candidate in space}
        self._words = {candidate.key: candidate.config.to_json() for candidate in space}
        self._rows = {candidate.key: features(problem, candidate) for candidate in space}
        self._model = CostModel(seed) if model else None
        self._told: list[Record] = []
        self._others: list[Record] = []
        self._trained = 0  # records that the model has seen
        self._columns: list[str] = []
        self._table: dict[tuple[str, str], Array] = {}
        self._tabulate(())

    def tell(self, records: Sequence[Record]) -> None:
        self._told += records
        for record in records:
            self._left.pop(record.key, None)

    def learn(self, records: Sequence[Record]) -> None:
        self._others += [record for record in records if record.schedule != "auto"]
        self._tabulate([features(record.problem, Candidate(record.schedule, record.config)) for record in self._others])

    def ask(self, count: int) -> list[Candidate]:
        self._train()
        chosen: list[Candidate] = []
        if self._model and self._model.trained:
            near = self._neighbours()
            self._random.shuffle(near)
            chosen += self._take(near[: round(NEAR * count)])
            chosen += self._take(self._ranked()[: count - len(chosen) - round(EXPLORE * count)])
        chosen += self._take(self._drawn(count - len(chosen)))
        return chosen

    def _take(self, keys: Sequence[tuple[str, str]]) -> list[Candidate]:
        return [self._left.pop(key) for key in keys]

    def _tabulate(self, others: Sequence[Mapping[str, float]]) -> None:
        """Every candidate's row in one table, with the columns that other problems' records need too."""
        rows = [*self._rows.values(), *others]
        self._columns = sorted({name for row in rows for name in row})
        self._table = dict(zip(self._rows, matrix(list(self._rows.values()), self._columns), strict=True))

    def _train(self) -> None:
        """Train on everything told, each problem a group, scored by its speed relative to its group's fastest."""
        records = self._others + self._told
        if not self._model or len(records) < self._trained + max(8, self._trained // 20):
            return
        fastest: dict[Problem, float] = {}
        for record in records:
            fastest[record.problem] = min(record.us, fastest.get(record.problem, math.inf))
        kept = [record for record in records if fastest[record.problem] < math.inf]
        if sum(record.correct for record in kept) < WARM:
            return
        self._trained = len(records)
        groups = {problem: number for number, problem in enumerate(fastest)}
        rows = [features(record.problem, Candidate(record.schedule, record.config)) for record in kept]
        scores = [fastest[record.problem] / record.us for record in kept]
        numbers = [groups[record.problem] for record in kept]
        self._model.train(matrix(rows, self._columns), scores, numbers)

    def _ranked(self) -> list[tuple[str, str]]:
        """What is left, the model's favourites first."""
        assert self._model
        keys = list(self._left)
        if not keys:
            return []
        scores = self._model.rank(np.stack([self._table[key] for key in keys]))
        return [keys[index] for index in np.argsort(-scores, kind="stable")]

    def _drawn(self, count: int) -> list[tuple[str, str]]:
        """Up to `count` of what is left at random: first a schedule, the faster its best the likelier, then a config
        of it."""
        left: dict[str, list[tuple[str, str]]] = {}
        for key in self._left:
            left.setdefault(key[0], []).append(key)
        best = {name: min((r.us for r in self._told if r.schedule == name), default=math.inf) for name in left}
        fastest = min(best.values(), default=math.inf)
        tried = {record.schedule for record in self._told}

        def weight(name: str) -> float:
            if name not in tried or fastest == math.inf:
                return 1.0
            return max(LEAST, (fastest / best[name]) ** 2)

        found: list[tuple[str, str]] = []
        while left and len(found) < count:
            names = list(left)
            (name,) = self._random.choices(names, [weight(name) for name in names])
            found.append(left[name].pop(self._random.randrange(len(left[name]))))
            if not left[name]:
                del left[name]
        return found

    def _neighbours(self) -> list[tuple[str, str]]:
        """What is left that differs from one of the fastest in one field of its config."""
        elite = sorted((record for record in self._told if record.correct), key=lambda record: record.us)[:ELITE]
        words = [(record.schedule, record.config.to_json()) for record in elite]
        return [
            key
            for key in self._left
            if any(name == key[0] and _differences(known, self._words[key]) == 1 for name, known in words)
        ]


def candidates(problem: Problem, arch: Arch, schedules: Sequence[str] = ()) -> list[Candidate]:
    """Every legal config of `schedules`, by default of all that the operator offers on `arch`; each once."""
    op = operator_of(problem)
    for name in schedules:
        op.schedule(name).require_kind(arch)
    specs = [spec for spec in op.schedules if spec.name in schedules] if schedules else op.offered(arch)
    found = [Candidate(spec.name, config) for spec in specs for config in spec.legal_space(problem, arch)]
    return list({candidate.key: candidate for candidate in found}.values())


def _differences(known: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    return sum(value != other.get(name) for name, value in known.items())
