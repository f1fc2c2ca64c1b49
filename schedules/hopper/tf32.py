"""What schedules of float32 in TF32 have in common, whatever the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from schedules.core.arch import Arch
from schedules.core.arithmetic import TF32
from schedules.core.operator import ScheduleSpec
from schedules.hopper.config import HopperConfig
from schedules.tirx import NO_ROUTES


def tf32_schedule(
    config: type[HopperConfig],
    apply: Callable[[Any, Any, Arch], Any],
    default: Callable[[Any, Arch], HopperConfig],
    space: Callable[[Any, Arch], Iterable[HopperConfig]],
) -> ScheduleSpec:
    """The schedule ``tf32`` of an operator: only used where it is named, since its errors are not float32's."""
    return ScheduleSpec(
        name="tf32",
        summary="float32 rounded to TF32 on Hopper's tensor cores, errors up to 2^-10; only if named",
        kinds=("cuda",),
        config=config,
        apply=apply,
        default=default,
        space=space,
        no_routes=NO_ROUTES,
        arithmetic=TF32,
        opt_in=True,
    )
