"""The configs of an operator's schedules for a problem, the fastest first as far as can be told."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from schedules.core.arch import Arch
from schedules.core.operator import Array, Operator, ScheduleSpec
from schedules.core.problem import Config, Problem, numpy_dtype
from schedules.core.registry import operator_of
from schedules.hopper.config import STAGES, STAGING
from schedules.predict import trees
from schedules.predict.configs import FILLED, Columns, columns_of, columns_of_space
from schedules.predict.estimate import LAUNCH, Work, peak, tile_of, work
from schedules.predict.features import OWN, features, table

HOPELESS = 4.0  # times the least estimate of all schedules, beyond which one is not looked at
SIFTED = 1200  # configs of a schedule that the coarse trees put in order, those of the least estimate
KEPT = 48  # legal ones of them that all trees look at
TRIED = 500  # configs that may be illegal before a schedule is given up
HALO = 1.25  # times the pixels of a tile that a stage with a halo has, about
RANKED = 16  # that are handed back


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
    specs = [spec for spec in specs if worth_a_look(problem, spec, arch)]
    spaces = {spec: columns_of_space(spec, problem, arch) for spec in specs}
    works = {spec: work(problem, spec, columns, arch) for spec, columns in spaces.items() if columns.count}
    least = min((made.total.min() for made in works.values()), default=0.0)
    found: list[tuple[float, int, ScheduleSpec, Columns, Work]] = []
    for spec, made in works.items():
        columns = (
            candidates(op, problem, spec, spaces[spec], arch)
            if made.total.min() < HOPELESS * least
            else spaces[spec].take([])
        )
        if columns.count:
            made = work(problem, spec, columns, arch)
            times = predicted(op, problem, spec, columns, made, arch, known)
            found += [(float(us), row, spec, columns, made) for row, us in enumerate(times)]
    best = []
    for us, row, spec, columns, made in sorted(found, key=lambda each: each[0])[:RANKED]:
        parts = tuple((name, float(part[row])) for name, part in made.parts.items())
        best.append(Ranked(spec.name, columns.make(row), us, made.limit(row), parts))
    return tuple(best)


def worth_a_look(problem: Any, spec: ScheduleSpec, arch: Arch) -> bool:
    """Whether the schedule can be near the fastest: CUDA cores only where a launch takes as long as their products."""
    if problem.dtype == "float32" or any(field.name == "block_n" for field in fields(spec.config)):
        return True
    memory = problem.min_bytes / ((arch.device.bandwidth or 1000) * 1e3)
    return problem.flops / 2 / peak(problem, arch, matrix=False) < HOPELESS * (LAUNCH + memory)


def predicted(
    op: Operator, problem: Problem, spec: ScheduleSpec, columns: Columns, made: Work, arch: Arch, known: trees.Trees
) -> Array:
    """Predicted us of configs of a schedule."""
    parts = features(op.name, problem, spec, columns, made, arch, any(name.startswith(OWN) for name in known.names))
    found: Array = made.total * np.exp(known.predict(table([parts], [columns.count], known.names)))
    return found


def predicted_us(problem: Problem, schedule: str, config: Config, arch: Arch) -> float | None:
    """Predicted us of one config; None where the trees know nothing of such problems or the schedule."""
    op = operator_of(problem)
    known, spec = knows(op, problem, arch), op.schedule(schedule)
    if known is None or f"is {op.name}.{schedule}" not in known.names:
        return None
    columns = columns_of([config])
    return float(predicted(op, problem, spec, columns, work(problem, spec, columns, arch), arch, known)[0])


def candidates(op: Operator, problem: Problem, spec: ScheduleSpec, least: Columns, arch: Arch) -> Columns:
    """The legal configs of a space that the coarse trees take for the fastest, with as many stages as there is room
    for, where `least` has the fewest."""
    columns, coarse = roughly_filled(least, problem, spec, arch), trees.load(trees.COARSE)
    made = work(problem, spec, columns, arch)
    order = np.argsort(made.total, kind="stable")[:SIFTED]
    if coarse is not None:
        sifted = columns.take(order)
        times = predicted(op, problem, spec, sifted, work(problem, spec, sifted, arch), arch, coarse)
        order = order[np.argsort(times, kind="stable")]
    kept: list[Config] = []
    for row in order[:TRIED]:
        if least.make(int(row)).check(problem, arch) is None:
            kept.append(filled(columns.make(int(row)), problem, arch))
            if len(kept) == KEPT:
                break
    return columns_of(kept) if kept else columns.take([])


def roughly_filled(columns: Columns, problem: Any, spec: ScheduleSpec, arch: Arch) -> Columns:
    """The same with about as many stages as there is room for, if there are stages to be filled."""
    if FILLED not in columns.fields:
        return columns
    item = numpy_dtype(problem.dtype).itemsize
    (m, n), blocks_sm = tile_of(columns), columns.get("blocks_sm", 1.0)
    room = np.minimum(arch.shared_block, arch.shared_sm / blocks_sm - arch.shared_reserved)
    results = np.minimum(m * n * item, STAGING * columns.get("consumers", 1.0))
    halo = columns.get("halo", 0.0) > 0  # a stage has the filters of all kernel rows, and pixels for them
    pixels, channels = (n, m) if spec.channels_along_rows else (m, n)
    side = pixels * np.where(halo, HALO, 1.0) + channels * np.where(halo, problem.kh, 1.0)
    stages = np.floor((room - results) / (side * columns.get("block_k", 64.0) * item))
    stages = np.clip(stages, STAGES[0], STAGES[-1])

    def make(row: int) -> Config:
        return replace(columns.make(row), **{FILLED: int(stages[row])})

    return replace(columns, fields={**columns.fields, FILLED: stages}, make=make)


def filled(config: Any, problem: Any, arch: Arch) -> Config:
    """The config, which has about the most stages that are legal, with the most that are, if it has stages."""
    if not hasattr(config, FILLED):
        return config  # type: ignore[no-any-return]

    def legal(stages: int) -> bool:
        return replace(config, **{FILLED: stages}).check(problem, arch) is None

    stages = getattr(config, FILLED)
    if legal(stages):
        while stages < STAGES[-1] and legal(stages + 1):
            stages += 1
    else:
        stages = next(fewer for fewer in range(stages - 1, 0, -1) if fewer == 1 or legal(fewer))
    return replace(config, **{FILLED: stages})  # type: ignore[no-any-return]
