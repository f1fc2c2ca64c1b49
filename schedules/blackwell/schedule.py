"""What Blackwell's schedules have in common, whatever the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from schedules.blackwell.config import BlackwellConfig
from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec, WrittenInTirx


def tcgen05_schedule(
    summary: str,
    config: type[BlackwellConfig],
    apply: Callable[[Any, Any, Arch], Any],
    default: Callable[[Any, Arch], BlackwellConfig],
    space: Callable[[Any, Arch], Iterable[BlackwellConfig]],
    estimate: Callable[[Any, Any, Arch], float],
    siblings: tuple[str, ...],
) -> ScheduleSpec:
    """The schedule ``tma_tcgen05`` of an operator, whose TE schedules for the same problems are `siblings`."""
    return ScheduleSpec(
        name="tma_tcgen05",
        summary=summary,
        kinds=("cuda",),
        config=config,
        apply=apply,
        default=default,
        space=space,
        ranges=True,
        estimate=estimate,
        tirx=WrittenInTirx(
            reason="one thread multiplies by tcgen05 what another loads by TMA, and warps read the sums out of tensor "
            "memory; the schedule language gives all threads the same loops, and has neither mbarriers nor that memory",
            siblings=siblings,
        ),
    )
