"""The configs of an operator's schedules for a problem, the fastest first as far as can be told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import numpy as np

from schedules.core.arch import Arch
from schedules.core.operator import Array, Operator, ScheduleSpec
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator_of
from schedules.hopper.config import INSTRUCTION, STAGES, STAGING, SUM_BYTES, WARPGROUP, HopperConfig, work_of
from schedules.predict import trees
from schedules.predict.configs import FILLED, Columns, columns_of, columns_of_space
from schedules.predict.estimate import (
    LAUNCH,
    Work,
    by_pairs,
    distinct,
    lines_of,
    operand_bytes,
    threads_of,
    tile_of,
    waiting,
    work,
)
from schedules.predict.features import OWN, features, table
from schedules.windows.geometry import OTHERS

HOPELESS = 4.0  # times the least estimate of all schedules, beyond which a config is not looked at
BESIDE = 1.2  # times the least estimate of its way, up to which it is looked at all the same
SIFTED = (
    384  # configs of a schedule, of each way of it, those of the least estimate, that the coarse trees put in order
)
KEPT = 48  # legal configs of all schedules that all trees look at
EACH = (
    6  # of them that each way of a schedule has at least, which may be NEAR times as slow as the coarse trees' fastest
)
NEAR = 1.6
TRIED, MOST_TRIED = 100, 140  # configs of a schedule before it is given up: none of them legal, and few
FEWER = 2  # stages than there seems to be room for, at most
# loads of a loop that compilers unroll; of a longer one they may keep what waits in memory, and load one by one
UNROLLED = 32
HALO = 1.25  # times the pixels of a tile that a stage with a halo has, about
RANKED = 16  # that are handed back
# fields by which configs differ that are worth trying one after the other
TILE = ("block_m", "block_n", "split_k", "cluster_m", "cluster_n", "tile_h", "tile_w", "whole_sectors")
# fields by which a stage has something else, and what they usually are
WAYS = {
    "window": 0.0,
    "turned": 0.0,
    "halo": 0.0,
    "tall": 0.0,
    "phases": 0.0,
    "lines": 1.0,
    "pairs": 1.0,
    "whole_sectors": 0.0,
}


@dataclass(frozen=True)
class Ranked:
    """A legal config, its predicted time in us, the estimate's parts in us, and which of them limits it."""

    schedule: str
    config: Config
    us: float
    limit: str
    parts: tuple[tuple[str, float], ...]


def trained_for(arch: Arch) -> trees.Trees | None:
    """The shipped trees, if they were trained for `arch`."""
    found = trees.load()
    return found if found and str(arch) == found.header["target"] else None


def knows(operator: Operator, problem: Any, arch: Arch) -> trees.Trees | None:
    """The shipped trees, if they were trained on problems as this one for `arch`."""
    found = trained_for(arch)
    return found if found and kind_of(operator, problem) in found.header["kinds"] else None


def kind_of(operator: Operator, problem: Any) -> str:
    """What must agree for trials of one problem to tell of another: bfloat16 is as fast as float16."""
    dtype = getattr(problem, "dtype", "")
    return f"{operator.name} {'float16' if dtype == 'bfloat16' else dtype}"


@lru_cache(maxsize=512)
def ranked(problem: Problem, arch: Arch, schedule: str | None = None) -> tuple[Ranked, ...]:
    """Legal configs for `problem`, of `schedule` or of all schedules offered on `arch`, the fastest first.

    Where the trees know nothing of a schedule, its configs stand among the others by its own estimate, of a schedule on
    CUDA cores alone its default.  Where they know nothing of such problems that holds for all, and the schedule of the
    operator's rule stands among them, without an estimate of its own by that of `work`; but only it where no trees were
    trained for `arch`, on which such estimates were compared with nothing.  None if it has no estimate either.
    """
    op = operator_of(problem)
    known, specs = knows(op, problem, arch), [op.schedule(schedule)] if schedule else op.offered(arch)
    learned = [
        spec for spec in specs if known and f"is {op.name}.{spec.name}" in known.names and worth_a_look(problem, spec)
    ]
    rule = None
    if not learned:
        known, rule = None, op.schedule(schedule or op.choose(problem, arch))
        specs = specs if trained_for(arch) else [rule]
    own = [spec for spec in specs if by_default(spec) and spec.serves(problem, arch)]
    others = [
        spec
        for spec in specs
        if spec.estimate
        and not by_default(spec)
        and spec not in learned
        and (spec is rule or spec.serves(problem, arch))
    ]
    times = []
    for by, chosen in ((known, learned), (None, others)):
        parts = candidates(op, problem, [spec for spec in chosen if arch.kind in spec.kinds], arch, by is not None)
        times += _timed(op, problem, arch, by, parts)
    best = []
    for us, row, part in sorted(times, key=itemgetter(0))[:RANKED]:
        best.append(_ranked(us, row, part))
    for spec in own:
        config = spec.default(problem, arch)
        us = spec.estimate(problem, config, arch)  # type: ignore[misc]
        best.append(Ranked(spec.name, config, us, "own estimate", (("own estimate", us),)))
    if rule and not rule.estimate and best:
        part = _part(problem, rule, rule.default(problem, arch), arch)
        best.append(_ranked(float(part.made.total[0]), 0, part))
    return tuple(sorted(best, key=lambda each: each.us)[:RANKED])


def by_default(spec: ScheduleSpec) -> bool:
    """Whether the schedule's own estimate speaks of its default alone, which it chose."""
    return spec.estimate is not None and spec.tirx is None


def varied(found: Sequence[Ranked]) -> list[Ranked]:
    """`found` in the order in which they are worth trying: those of the same schedule and tiles as one before them,
    which differ little from it, after all others."""
    first: list[Ranked] = []
    later: list[Ranked] = []
    tiles = set()
    for each in found:
        tile = each.schedule, *(getattr(each.config, name, None) for name in TILE)
        (later if tile in tiles else first).append(each)
        tiles.add(tile)
    return first + later


@dataclass(frozen=True, eq=False)
class Part:
    """Configs of one schedule, and their estimate."""

    spec: ScheduleSpec
    columns: Columns
    made: Work

    def take(self, rows: Array) -> Part:
        return Part(self.spec, self.columns.take(rows), self.made.take(rows))


def _part(problem: Problem, spec: ScheduleSpec, config: Config, arch: Arch) -> Part:
    columns = columns_of([config])
    return Part(spec, columns, work(problem, spec, columns, arch))


def _ranked(us: float, row: int, part: Part) -> Ranked:
    told = tuple((name, float(values[row])) for name, values in part.made.parts.items())
    return Ranked(part.spec.name, part.columns.make(row), us, part.made.limit(row), told)


def _timed(
    op: Operator, problem: Problem, arch: Arch, known: trees.Trees | None, parts: Sequence[Part]
) -> list[tuple[float, int, Part]]:
    """Predicted us of each row of `parts`, in their order: by `known` trees, or by the schedules' own estimates, which
    begin after the launch."""
    if not parts:
        return []
    rows = [(row, part) for part in parts for row in range(part.columns.count)]
    if known is None:
        own = [(part.spec.estimate, part.columns.make(row)) for row, part in rows]
        us = [LAUNCH + estimate(problem, config, arch) if estimate else math.inf for estimate, config in own]
        return [(time, *each) for time, each in zip(us, rows, strict=True)]
    told = [features(op.name, problem, p.spec, p.columns, p.made, arch, OWN in known.names) for p in parts]
    total = np.concatenate([part.made.total for part in parts])
    times = total * np.exp(known.predict(table(told, [part.columns.count for part in parts], known.names)))
    return [(float(us), row, part) for us, (row, part) in zip(times, rows, strict=True)]


def worth_a_look(problem: Any, spec: ScheduleSpec) -> bool:
    """Whether the schedule can be near the fastest: in less than float32, tensor cores are."""
    return problem.dtype == "float32" or any(field.name == "block_n" for field in fields(spec.config))


def predicted_us(problem: Problem, schedule: str, config: Config, arch: Arch) -> float | None:
    """Predicted us of one config; None where the trees know nothing of it, nor has the schedule an estimate."""
    op = operator_of(problem)
    known, spec = knows(op, problem, arch), op.schedule(schedule)
    if spec.estimate and by_default(spec):
        return spec.estimate(problem, config, arch)
    if known is None or f"is {op.name}.{schedule}" not in known.names:
        known = None
    if known is None and spec.estimate is None:
        return None
    return _timed(op, problem, arch, known, [_part(problem, spec, config, arch)])[0][0]


def candidates(op: Operator, problem: Problem, specs: Sequence[ScheduleSpec], arch: Arch, trained: bool) -> list[Part]:
    """The legal configs that the coarse trees take for the fastest, or the estimate if not `trained`, with as many
    stages as there is room for."""
    ways: list[tuple[Part, Array, Array]] = []  # of a schedule, the rows of each, and their estimates
    for spec in specs:
        columns = roughly_filled(columns_of_space(spec, problem, arch), problem, spec, arch)
        if columns.count:
            part = Part(spec, columns, work(problem, spec, columns, arch))
            kinds, total = _ways(part), part.made.total
            each = (np.flatnonzero(kinds == kind) for kind in np.flatnonzero(np.bincount(kinds)))
            ways += [(part, rows, total[rows]) for rows in each]
    while len({part.spec.name for part, *_ in ways}) > 1:
        first = min(ways, key=lambda way: float(way[2].min()))[0].spec
        if first.default(problem, arch).check(problem, arch) is None:
            break
        # of a schedule that is never legal, which would make all others hopeless
        ways = [way for way in ways if way[0].spec is not first]
    least = min((total.min() for *_, total in ways), default=0.0)
    parts = [part.take(rows[_sifted(total, max(HOPELESS * least, BESIDE * total.min()))]) for part, rows, total in ways]
    parts = [part for part in parts if part.columns.count]
    if trained:
        found = _timed(op, problem, arch, trees.load(trees.COARSE), parts)
    else:
        found = [(float(us), row, part) for part in parts for row, us in enumerate(part.made.total)]
    order = sorted(found, key=itemgetter(0))
    kept: dict[Part, list[Config]] = {part: [] for part in parts}
    tried = dict.fromkeys(parts, 0)
    count = 0
    for us, row, part in order:
        own = kept[part]
        wanted = count < KEPT or len(own) < EACH and us < NEAR * order[0][0]
        if wanted and tried[part] < (MOST_TRIED if own else TRIED):
            tried[part] += 1
            config = filled(part.columns.make(row), problem, arch)
            if config is not None and config not in own:
                own.append(config)
                count += 1
    made = [(part.spec, columns_of(configs)) for part, configs in kept.items() if configs]
    return [Part(spec, columns, work(problem, spec, columns, arch)) for spec, columns in made]


def _ways(part: Part) -> Array:
    """A number for each way of a schedule: ways so different that the estimate tells little of several."""
    copies = part.made.parts["copies"]
    told = [copies > copies.min(), *(part.columns.get(name, usual) != usual for name, usual in WAYS.items())]
    found: Array = sum(np.broadcast_to(each, copies.shape) * 2**i for i, each in enumerate(told))
    return found


def _sifted(total: Array, most: float) -> Array:
    """The rows of the least estimate `total`, SIFTED or fewer, below `most`; the least first."""
    rows = np.flatnonzero(total < most)
    if len(rows) > SIFTED:  # not all are put in order
        rows = rows[total[rows] <= np.partition(total[rows], SIFTED - 1)[SIFTED - 1]]
    found: Array = rows[np.argsort(total[rows], kind="stable")][:SIFTED]
    return found


def roughly_filled(columns: Columns, problem: Any, spec: ScheduleSpec, arch: Arch) -> Columns:
    """Those for which there is room, about, with as many stages as there is room for if there are stages to be
    filled."""
    p, item = problem, operand_bytes(problem, spec)
    (m, n), blocks_sm = tile_of(columns), columns.get("blocks_sm", 1.0)
    room = np.minimum(arch.shared_block, arch.shared_sm / blocks_sm - arch.shared_reserved)
    if "tile_h" in columns.fields:  # a patch of the image, and all filters of the block
        h, w = (
            (columns.get(f"tile_{a}") - 1) * p.stride[i] + p.dilation[i] * (k - 1) + 1
            for i, (a, k) in enumerate((("h", p.kh), ("w", p.kw)))
        )
        taken, stage, least, most = n * p.kh * p.kw * p.ci * item, h * w * p.ci * item, 1, 2
        warps_m, warps_n = columns.get("warps_m"), columns.get("warps_n")
        registers = m * n / (32 * warps_m * warps_n) + (m / warps_m + n / warps_n) / 4 + OTHERS
        held = np.minimum(arch.registers_thread, arch.registers_sm / (32 * warps_m * warps_n * blocks_sm))
        room = np.where(registers <= held, room, 0.0)
    elif "consumers" in columns.fields:
        # a stage has the filters of all kernel rows, and pixels for them: of each remainder of the stride its own
        halo = columns.get("halo", 0.0) + columns.get("tall", 0.0) > 0
        beside = HALO * len({row * p.dilation[0] % p.stride[0] for row in range(p.kh)})
        pixels, channels = (n, m) if spec.channels_along_rows else (m, n)
        lines, kernel_rows, looked_at = lines_of(p, columns)
        pixels = pixels * lines * kernel_rows * looked_at
        stay, k = columns.get("stationary", 0.0) > 0, columns.get("block_k")  # filters of all steps
        # tap by tap, or with halo those of all rows, or those along a row, whose sums lie side by side or are no phases
        along = "consumers_n" in columns.fields or getattr(spec.config, "row_of_taps", False)
        one = (columns.get("phases", 0.0) > 0) | (columns.get("row", 1.0) == 0)
        row = np.where(one, 1, p.kw if along else 1)
        taps = np.where(halo, p.kh, kernel_rows) * row
        filters, steps = channels * taps * k / columns.get("cta_group", 1.0), p.kh * p.kw / taps * -(-p.ci // k)
        # sets of sums that the epilogue shifts, of the taps along a row
        shifted = np.where(columns.get("phases", 0.0) > 0, 1, p.kw) if "consumers_n" in columns.fields else 1
        room = np.where(_sums_fit(m * n * lines * shifted, columns, spec, arch), room, 0.0)
        of_pixels = pixels * np.where(halo, beside, 1.0) * k * item
        if spec.stage_bytes is not None:
            of_pixels = by_pairs(partial(spec.stage_bytes, p), pixels, k)
        stage = of_pixels + np.where(stay, 0.0, filters) * item
        results = np.minimum(m * n * item, STAGING * columns.get("consumers"))
        sent = m * n * SUM_BYTES * (1 - 1 / columns.get("split_k", 1.0))
        # a residual waits beside the stages, of all tiles that a block works on at once
        added = m * n * item * np.where(columns.get("ping_pong", 0.0) > 0, columns.get("consumers"), 1.0)
        added *= len(p.epilogue.of_axis("element")) * (columns.get("split_k", 1.0) == 1)
        taken, least, most = results + sent + added + np.where(stay, filters * steps * item, 0.0), 2, STAGES[-1]
        if spec.turned is not None:  # beside the stages
            stage = np.where(stay, 0.0, filters) * item
            taken = taken + by_pairs(partial(spec.turned, p), pixels, k)[:, 0]
    elif "block_k" in columns.fields:
        fit = columns.get("stages", 1.0) * (m + n) * columns.get("block_k") * item <= room
        unrolled = fit & (waiting(problem, spec, columns) <= UNROLLED)
        return columns.take(np.flatnonzero(unrolled if unrolled.any() else fit))
    else:
        return columns
    stages = np.minimum(np.floor((room - taken) / np.maximum(stage, 1.0)), most)
    fit = np.flatnonzero(stages >= least)
    stages, found = stages[fit], columns.take(fit)

    def make(row: int) -> Config:
        return replace(found.make(row), **{FILLED: int(stages[row])})

    return replace(found, fields={**found.fields, FILLED: stages}, make=make)


def _sums_fit(outputs: Array, columns: Columns, spec: ScheduleSpec, arch: Arch) -> Array:
    """Whether consumers have the registers for the sums of a tile's `outputs`, as `HopperConfig.check_sums` has it."""
    consumers, blocks_sm = columns.get("consumers"), columns.get("blocks_sm")
    parts = np.where(columns.get("ping_pong", 0.0) > 0, 1.0, consumers)
    names = [name for name in ("consumers", "blocks_sm", "pairs") if name in columns.fields]
    given, kind = distinct(*(columns.get(name) for name in names))
    config: Any = spec.config
    shares = (config(**dict(zip(names, block, strict=True))).shares for block in given)
    most = np.array([own[1] if own else 0 for own in shares])[kind]
    at_launch = arch.registers_sm // (threads_of(columns) * blocks_sm) // 8 * 8
    side = columns.get("block_n") / columns.get("consumers_n", 1.0) // 2 + INSTRUCTION
    fit: Array = (outputs / parts / WARPGROUP + config.addressing <= most) & (side <= at_launch)
    return fit


def filled(config: Any, problem: Any, arch: Arch) -> Config | None:
    """The config, which has about the most stages that there is room for, with the most, if it has stages; None if it
    is not legal."""
    reason = config.check(problem, arch)
    if reason is None and hasattr(config, FILLED):
        most = work_of(problem, config).most_stages(arch) if isinstance(config, HopperConfig) else STAGES[-1]
        for stages in range(min(most, STAGES[-1]), getattr(config, FILLED), -1):
            more = replace(config, **{FILLED: stages})
            if more.check(problem, arch) is None:
                config = more
                break
    for _ in range(FEWER):
        if reason is None or not reason.startswith(FILLED):
            break
        config = replace(config, **{FILLED: getattr(config, FILLED) - 1})
        reason = config.check(problem, arch)
    return config if reason is None else None
