"""What a model needs, made ahead: a plan to tune its layers, and a library of their kernels.

A plan's minutes go where the network gains most: to a layer as many as the time of all its calls above what the device
allows is of that of all layers.  The idea is that of Ansor's task scheduler (OSDI 2020), with the gain that is known
beforehand, time above the roof, in the place of what was gained lately.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import UsageError
from schedules.core.problem import Problem
from schedules.core.registry import operator_of
from schedules.core.versions import versions
from schedules.torch.kernels import arch_of
from schedules.torch.network import problems

if TYPE_CHECKING:  # what these import, TVM's compiler first of all, is for those who tune and export
    from schedules.bundle.library.collect import Made
    from schedules.tune.plan import Plan
    from schedules.tune.plan_run import Outcome

logger = logging.getLogger("schedules")

LEAST = 0.5  # minutes of a layer
PATIENCE = 150  # trials without a gain, after which a layer's minutes are the others'
PEAK, BANDWIDTH = 60.0, 3000.0  # TFLOP/s and GB/s of a device that has no row: only their ratio matters


def export(
    model: nn.Module,
    example_inputs: Any,
    out: str | Path,
    *,
    target: str | None = None,
    memory_format: torch.memory_format | None = None,
    force: bool = False,
) -> Path:
    """A library of the kernels that `optimize` would put into a model: its folder, in `out`.

    `target` is as of `schedules build`, by default the model's device.  Each kernel is what is chosen today; one that
    cannot be built is left out, with a line in the log.  With `force` a library that is there is replaced.  The folder
    serves `use_bundles`, and programs without this package ("Libraries" in docs/libraries.md).

    Raises UsageError for a model without layers to serve, BundleError, BuildError if no kernel was built.
    """
    from schedules.bundle.library.collect import Order, collect
    from schedules.bundle.library.write import write_library

    arch, found = _needs(model, example_inputs, target, memory_format)

    def make(folder: Path) -> list[Made]:
        orders = [Order(name_of(problem), arch, folder / name_of(problem), problem=problem) for problem in found]
        made = list(collect(orders, len(os.sched_getaffinity(0))))
        for each in made:
            if not each.entry:
                logger.warning("%s is left out: %s", each.preset, each.why)
        return made

    return write_library(out, arch, versions()["te-schedules"], make, force=force).path


def plan(
    model: nn.Module,
    example_inputs: Any,
    minutes: float = 60.0,
    *,
    target: str | None = None,
    memory_format: torch.memory_format | None = None,
    out: str | Path = "out/model",
) -> Plan:
    """A plan to search the model's layers for `minutes` in all, those first that have the most to gain.

    Raises UsageError for a model without layers to serve, and for minutes that are not over 0.
    """
    from schedules.measure.choice import choose
    from schedules.tune.plan import Entry, Plan
    from schedules.tune.tuner import Limits

    if not minutes > 0:
        raise UsageError(f"minutes={minutes} must be over 0")
    arch, found = _needs(model, example_inputs, target, memory_format)

    def gain(problem: Problem, count: int) -> float:
        chosen = choose(problem, arch)
        known = chosen.record.us if chosen.record else chosen.predicted.us if chosen.predicted else None
        least = least_us(problem, arch)
        return count * (least if known is None else max(known - least, least / 10))

    gains = {problem: gain(problem, count) for problem, count in found.items()}
    total = sum(gains.values())
    entries = tuple(
        Entry(
            name_of(problem), problem, (arch,),
            Limits(None, max(LEAST, minutes * part / total), PATIENCE), priority=part, export=False,
        )
        for problem, part in sorted(gains.items(), key=lambda item: -item[1])
    )  # fmt: skip
    return Plan(Path(out), entries, Path(out), minutes)


def tune(
    model: nn.Module,
    example_inputs: Any,
    minutes: float = 60.0,
    *,
    target: str | None = None,
    memory_format: torch.memory_format | None = None,
    log: str | Path | None = None,
    out: str | Path = "out/model",
) -> list[Outcome]:
    """Search the model's layers by `plan`, with a view of the progress; what came of each.

    Journals go to `log`, by default ``tuning_logs``, where the next choice finds them; the report to `out`.  Run again,
    it goes on.  Raises UsageError as `plan`, and what `schedules tune --plan` raises.
    """
    import sys

    from schedules.measure.journal import DEFAULT_FOLDER
    from schedules.tune.plan_run import run_plan
    from schedules.tune.progress import watcher_for
    from schedules.tune.session import stopping_signals

    work = plan(model, example_inputs, minutes, target=target, memory_format=memory_format, out=out)
    with watcher_for(sys.stderr) as watcher, stopping_signals(watcher.urgent) as stop:
        return run_plan(work, watcher, folder=log or DEFAULT_FOLDER, out=out, stop=stop)


def name_of(problem: Problem) -> str:
    """A problem's name in a library and a plan."""
    return f"{operator_of(problem).name}-{problem.key}"


def least_us(problem: Problem, arch: Arch) -> float:
    """Microseconds that the device needs at least, by its peaks and bandwidth."""
    peaks, dtype = arch.device.peaks, getattr(problem, "dtype", "float32")
    bandwidth = arch.device.bandwidth or BANDWIDTH
    return max(problem.flops / (peaks.get(dtype, PEAK) * 1e6), problem.min_bytes / (bandwidth * 1e3))


def _needs(
    model: nn.Module, example_inputs: Any, target: str | None, memory_format: torch.memory_format | None
) -> tuple[Arch, Mapping[Problem, int]]:
    """The target, and the problems of a model with how many layers each has."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if target is None and len(devices) > 1:
        raise UsageError(f"the model is on {len(devices)} devices; name the target")
    arch = parse_arch(target) if target else arch_of(next(iter(devices), torch.device("cpu")))
    found = problems(model, example_inputs, memory_format=memory_format, on_gpu=arch.is_gpu)
    if not found:
        raise UsageError("the model has no layer that kernels serve; print kernels.optimize(...).report to see why")
    return arch, found
