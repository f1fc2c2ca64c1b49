"""What Blackwell's schedules have in common, whatever the operator."""

from __future__ import annotations

from functools import partial
from typing import Any

from schedules.hopper.schedule import tma_schedule


def _more(problem: Any, work: Any) -> dict[str, Any]:
    from schedules.blackwell.cores import TensorCores, TensorResults

    return dict(way_out=TensorResults, multiplied_by=TensorCores)


# of an operator; its TE schedules of the same problems are `siblings`
tcgen05_schedule = partial(
    tma_schedule,
    "tma_tcgen05",
    reason="one thread multiplies by tcgen05 what another loads by TMA, and warps read the sums out of tensor "
    "memory; the schedule language gives all threads the same loops, and has neither mbarriers nor that memory",
    more=_more,
    ranges=True,
)
