"""Building presets in parallel, each with what `schedules build` would take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedules.build.builder import Built, build
from schedules.bundle.bundle import LIBRARY, Bundle, write_bundle
from schedules.bundle.package.loader import MANIFEST, sha256
from schedules.core.arch import Arch
from schedules.core.errors import ConfigError
from schedules.core.operator import ScheduleSpec
from schedules.core.parallel import attempt, outcome, processes
from schedules.core.presets import preset
from schedules.core.problem import Problem
from schedules.core.registry import operator_of
from schedules.measure.choice import Choice, choose, default_choice, for_device

SECONDS = 900.0  # that a build may take


@dataclass(frozen=True)
class Order:
    """What a worker is to build: the preset's kernel for `arch` as a bundle in `folder`.

    `device` and `logs` are those of dispatch; `default` leaves records aside.  `preset` only names a `problem` that is
    given.
    """

    preset: str
    arch: Arch
    folder: Path
    device: str | None = None
    logs: tuple[str, ...] | None = None
    default: bool = False
    problem: Problem | None = None


@dataclass(frozen=True)
class Made:
    """What became of a preset: `entry` is its line of the index, None if there is none and `why` says so.

    `skipped` tells a preset that is not for this target from one that failed.
    """

    preset: str
    entry: dict[str, Any] | None = None
    why: str = ""
    skipped: bool = False


def collect(orders: Sequence[Order], workers: int) -> Iterator[Made]:
    """Build every order by `workers` processes, in order; a build that fails costs no other."""
    with processes(workers, main=False) as pool:  # so that scripts may call this without a guard
        tasks = [(order, pool.schedule(attempt, args=[make, order], timeout=SECONDS)) for order in orders]
        for order, task in tasks:
            made, why = outcome(task)
            yield made or Made(order.preset, why=why)


def make(order: Order) -> Made:
    """Build one preset.  Raises BuildError, BundleError, ToolchainError, JournalError."""
    problem = order.problem
    if problem is None:
        wanted = preset(order.preset)
        if not wanted.available:
            return Made(order.preset, why=f"operator {wanted.operator} is not in this version", skipped=True)
        problem = wanted.problem()
    try:
        chosen = _choice(problem, order)
    except ConfigError as error:  # the operator's schedules do not take this problem on this target
        return Made(order.preset, why=str(error), skipped=True)
    built = build(chosen.problem, order.arch, chosen.schedule, chosen.config)
    measured = chosen.record.to_json() if chosen.record and chosen.source == "record" else None
    return Made(order.preset, entry_of(write_bundle(built, order.folder, measured=measured), built, chosen))


def _choice(problem: Problem, order: Order) -> Choice:
    if order.default:
        return default_choice(problem, for_device(order.arch, order.device, operator_of(problem).name, order.logs))
    return choose(problem, order.arch, folders=order.logs, device=order.device)


def entry_of(bundle: Bundle, built: Built, chosen: Choice) -> dict[str, Any]:
    """A kernel's entry of the index.

    `source` is record, nearest or default, `why` the same in words; `run_time` the fields of the problem that may be
    another at each call; `files` has a SHA-256 and the bytes of each.
    """
    files = described(bundle.path / name for name in sorted([*bundle.manifest["files"], MANIFEST]))
    return {
        "operator": built.operator.name,
        "problem": built.problem.to_json(every=True),
        "run_time": run_time_fields(built.problem, built.schedule),
        "schedule": built.schedule.name,
        "config": built.config.to_json(),
        "source": chosen.source,
        "why": str(chosen),
        "us": chosen.record.us if chosen.record and chosen.source == "record" else None,
        "compiler": built.compiler,
        "library": LIBRARY,
        "files": files,
        "bytes": sum(about["bytes"] for about in files.values()),
    }


def described(files: Iterable[Path]) -> dict[str, Any]:
    """The checksum and the bytes of each file, by its name."""
    contents = {file.name: file.read_bytes() for file in files}
    return {name: {"sha256": sha256(data), "bytes": len(data)} for name, data in contents.items()}


def run_time_fields(problem: Problem, spec: ScheduleSpec) -> list[str]:
    """The fields of `problem` that a function built with `spec` takes other values of."""
    return list(problem.run_time) if spec.takes_range(problem) and not spec.fixed_shape else []
