"""What schedules of float32 in TF32 have in common, whatever the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from schedules.core.arch import Arch
from schedules.core.arithmetic import TF32
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.hopper.config import HopperConfig


def tf32_schedule(
    config: type[HopperConfig],
    apply: Callable[[Any, Any, Arch], Any],
    default: Callable[[Any, Arch], HopperConfig],
    space: Callable[[Any, Arch], Iterable[HopperConfig]],
    siblings: tuple[str, ...],
) -> ScheduleSpec:
    """The schedule ``tf32`` of an operator: only used where it is named, since its errors are not float32's.

    `siblings` are the operator's TE schedules of float32.
    """
    return ScheduleSpec(
        name="tf32",
        summary="float32 rounded to TF32 on Hopper's tensor cores, errors up to 2^-10; only if named",
        kinds=("cuda",),
        config=config,
        apply=apply,
        default=default,
        space=space,
        ranges=True,
        tirx=WrittenInTirx(
            reason="a warp loads by TMA, which rounds to TF32, while others multiply by wgmma; the schedule language "
            "gives all threads the same loops, and has neither mbarriers nor clusters",
            siblings=siblings,
        ),
        arithmetic=TF32,
    )
