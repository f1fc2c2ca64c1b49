"""The schedule `mma_windows`, whatever the operator."""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.core.problem import Conv2dProblem
from schedules.core.tvm import tvm
from schedules.windows.config import WindowsConfig, default, space
from schedules.windows.cost import clocks
from schedules.windows.geometry import Windows


def _apply(problem: Conv2dProblem, config: WindowsConfig, arch: Arch) -> tvm.IRModule:
    from schedules.windows.program import program

    return program(problem, config)


def _estimate(problem: Conv2dProblem, config: WindowsConfig, arch: Arch) -> float:
    return clocks(Windows(problem, config), arch) * arch.device.timings.cycle / 1000


def windows_schedule(siblings: tuple[str, ...], ranges: bool = True) -> ScheduleSpec:
    """The schedule ``mma_windows`` of an operator; `siblings` are its TE schedules of the same problems, `ranges` says
    whether one kernel may serve several batches."""

    return ScheduleSpec(
        name="mma_windows",
        summary="few input channels on tensor cores: mma.sync reads windows of the image where they lie",
        kinds=("cuda",),
        config=WindowsConfig,
        apply=_apply,
        default=default,
        space=space,
        ranges=ranges,
        estimate=_estimate,
        tirx=WrittenInTirx(
            reason="fragments are read from rows of the image that windows share, at addresses of each lane; the "
            "schedule language tensorizes tiles that were copied window by window",
            siblings=siblings,
        ),
    )
