"""The auto-scheduler as a search strategy: MetaSchedule's design spaces, evolved under its cost model.

A candidate is a trace; `operators.auto` replays it.  Each batch is the best, as the model predicts, of some fresh
points and of mutants of the fastest programs known, and a few at random.
Source: Zheng et al., "Ansor"; Shao et al., "Tensor Program Optimization with Probabilistic Programs".
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace
from tvm_ffi import structural_hash

from schedules.core.arch import Arch
from schedules.core.errors import ConfigError
from schedules.core.problem import Problem
from schedules.measure.records import Record
from schedules.operators import auto
from schedules.operators.auto import AutoConfig
from schedules.tune.strategy import Candidate
from schedules.tune.trace_model import Features, TraceModel
from schedules.tune.trace_space import TraceSpace

WIDTH = 4  # programs examined for each one asked, tens of milliseconds each; small batches cost as much as one of four
LEAST = 16  # programs examined for a batch however small
ELITE = 32  # fastest programs that are mutated
FRESH = 0.15  # of the examined programs, drawn anew once there are parents
GREEDY = 0.9  # of a batch, by the model; the rest at random
MATRIX_DTYPES = ("float16", "int8")


def default_space(problem: Problem, arch: Arch) -> str:
    """The space that is searched unless another is named: matrix instructions where TVM has them for the dtype."""
    if arch.kind == "cuda" and hasattr(problem, "kh") and getattr(problem, "dtype", "") in MATRIX_DTYPES:
        return "cuda-tensorcore"
    return arch.kind


@dataclass(frozen=True)
class _Program:
    """A finished point of the space."""

    sch: Schedule
    structure: int
    features: Features


class AutoSearch:
    """A `Strategy` over the design space `space` of `problem` on `arch`.

    `effort` counts how many points may be drawn in a row without a new program before the space is taken for exhausted.
    Raises ConfigError if the space does not fit, ToolchainError if xgboost is not installed.
    """

    name: str = "auto"
    size: int | None = None

    def __init__(
        self,
        problem: Problem,
        arch: Arch,
        seed: int = 0,
        space: str | None = None,
        *,
        effort: int = 200,
    ) -> None:
        self.problem, self.arch, self.seed, self.effort = problem, arch, seed, effort
        self._model = TraceModel(seed)
        self.space = TraceSpace(problem, arch, space or default_space(problem, arch))
        self._open: dict[str, _Program] = {}  # asked, not told
        self._known: set[str] = set()  # traces asked or told
        self._structures: set[int] = set()  # of the programs asked or told
        self._fastest: list[tuple[float, int, Trace]] = []  # (us, order of telling, trace)
        self._asks = 0
        self.lost = 0  # told configs that this version of TVM no longer replays

    def ask(self, count: int) -> list[Candidate]:
        """Up to `count` candidates, none asked or told before; none at all once the space is exhausted."""
        self._asks += 1
        # new points after a resume too, where the same seed meets a longer history
        rng = random.Random(f"{self.seed} {self._asks} {len(self._known)}")
        programs = self._evolved(max(LEAST, WIDTH * count), rng)
        scores = self._model.scores([program.features for program in programs])
        if scores is None:
            ranked = rng.sample(programs, len(programs))
        else:
            ranked = [programs[i] for i in sorted(range(len(programs)), key=lambda i: -scores[i])]
            greedy = math.ceil(GREEDY * count)
            ranked[greedy:] = rng.sample(ranked[greedy:], len(ranked[greedy:]))
        asked: list[Candidate] = []
        for program in ranked:
            if len(asked) == count:
                break
            self._structures.add(program.structure)
            config = AutoConfig.of(self.space.name, program.sch)
            if str(config) in self._known or not self.space.verified(program.sch):
                continue
            self._known.add(str(config))
            self._open[str(config)] = program
            asked.append(Candidate(auto.NAME, config))
        return asked

    def tell(self, records: Sequence[Record]) -> None:
        """Learn from trials of this problem; those of other schedules and spaces are passed over."""
        mine = [record for record in records if self._is_mine(record)]
        self._known.update(str(record.config) for record in mine)
        for record, program in zip(mine, self._programs(self.space, mine), strict=True):
            if program is None:
                self.lost += 1
                continue
            self._structures.add(program.structure)
            self._model.add(self.problem.key, program.features, record.us)
            if record.correct:
                self._fastest.append((record.us, len(self._fastest), program.sch.trace))
        self._fastest = sorted(self._fastest, key=lambda entry: entry[:2])[:ELITE]

    def learn(self, records: Sequence[Record]) -> None:
        """Learn from trials of the operator's other problems in the same space."""
        others: dict[Problem, list[Record]] = {}
        for record in records:
            if _space(record) == self.space.name and record.problem != self.problem:
                others.setdefault(record.problem, []).append(record)
        for problem, found in others.items():
            for record, program in zip(found, self._programs(self.space, found), strict=True):
                if program is not None:
                    self._model.add(problem.key, program.features, record.us)

    def _is_mine(self, record: Record) -> bool:
        return record.problem == self.problem and _space(record) == self.space.name

    def _programs(self, space: TraceSpace, records: Sequence[Record]) -> Iterator[_Program | None]:
        """The program of each record: as it was asked, or replayed; None if it does not replay."""
        for record in records:
            config = record.config
            assert isinstance(config, AutoConfig)
            if record.problem == self.problem and str(config) in self._open:
                yield self._open.pop(str(config))
                continue
            try:
                sch = auto.replay(auto.program(record.problem), config.steps)
            except ConfigError:
                yield None
                continue
            yield _Program(sch, structural_hash(sch.mod), space.features([sch])[0])

    def _evolved(self, wanted: int, rng: random.Random) -> list[_Program]:
        """Up to `wanted` new programs: fresh ones, mutants of the fastest known, mutants of what promises most.

        Without parents, half are fresh, and the rest mutants of them: a mutant of a sound program is mostly sound.
        """
        found: list[_Program] = []
        structures: set[int] = set()
        fresh = max(4, round(FRESH * wanted)) if self._fastest else wanted // 2
        promising: list[_Program] | None = None
        idle = tries = 0
        # near exhaustion most points are known ones: then what was found is enough
        while len(found) < wanted and idle < self.effort and (not found or tries < self.effort + 4 * wanted):
            tries += 1
            if len(found) < fresh:
                trace = self.space.draw(rng)
            elif self._fastest and len(found) < (wanted + fresh) // 2:
                weights = [self._fastest[0][0] / us for us, _, _ in self._fastest]
                trace = self.space.mutate(rng.choices(self._fastest, weights)[0][2], rng)
            else:
                promising = promising or self._promising(found)
                trace = self.space.mutate(rng.choice(promising).sch.trace, rng)
            sch = None if trace is None else self.space.finish(trace, rng.randrange(1, 2**30))
            program = None if sch is None else self._new(sch, structures)
            idle = 0 if program else idle + 1
            if program:
                found.append(program)
        return found

    def _promising(self, programs: list[_Program]) -> list[_Program]:
        """The quarter that the model likes best; all while it knows too little."""
        scores = self._model.scores([program.features for program in programs])
        if scores is None:
            return programs
        ranked = sorted(range(len(programs)), key=lambda i: -scores[i])
        return [programs[i] for i in ranked[: max(1, len(ranked) // 4)]]

    def _new(self, sch: Schedule, structures: set[int]) -> _Program | None:
        """The program of `sch`, unless it was asked or told before, or is in `structures`, where it is added."""
        structure = structural_hash(sch.mod)
        if structure in self._structures or structure in structures:
            return None
        structures.add(structure)
        return _Program(sch, structure, self.space.features([sch])[0])


def _space(record: Record) -> str | None:
    """The design space of a record of `auto`."""
    return record.config.space if isinstance(record.config, AutoConfig) else None
