"""Records of measurements that never were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedules.build.builder import compiler_of, operator_of
from schedules.build.present import cpu_name
from schedules.core.arch import parse_arch
from schedules.core.problem import Problem
from schedules.measure.records import Record, environment


def record_of(
    problem: Problem,
    us: float | None = 10.0,
    config: Mapping[str, Any] | None = None,
    *,
    target: str = "llvm",
    schedule: str | None = None,
    **changed: Any,
) -> Record:
    """A record of this CPU with today's versions, of direct products unless another schedule is named: correct if
    there is a time, else one that did not compile."""
    arch, op = parse_arch(target), operator_of(problem)
    spec = op.schedule_for(problem, arch, schedule or ("cpu" if target == "llvm" else None))
    values: dict[str, Any] = dict(
        operator=op.name,
        problem=problem,
        schedule=spec.name,
        config=spec.config_for(problem, arch, dict(config or {})),
        target=target,
        device=cpu_name(),
        date="2026-11-20T20:00:00+00:00",
        versions=environment(arch, compiler_of(arch)),
        stage="trial",
        outcome="correct" if us is not None else "compile",
        reason="" if us is not None else "TVM refused the program",
        median_us=us,
        p10_us=us,
        p90_us=us and 1.1 * us,
        runs=9 if us else 0,
        error=0.25 if us else None,
    )
    return Record(**{**values, **changed})
