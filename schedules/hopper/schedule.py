"""Schedules of the kernel that every operator shares (`program`): what sets one apart is its work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from schedules.core.arch import Arch
from schedules.core.arithmetic import BF16X3, BF16X6, TF32
from schedules.core.device import Device
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.core.tvm import tvm
from schedules.hopper.config import HopperConfig
from schedules.hopper.cost import estimate_of, microseconds
from schedules.hopper.split import PAIRS

# why it is no schedule in TE
SHARING = (
    "one warp loads by TMA while others multiply by wgmma, and the blocks of a cluster share loads; "
    "the schedule language gives all threads the same loops, and has neither mbarriers nor clusters"
)
SHIFTING = (
    "one warp loads by TMA while others multiply by wgmma and add sums out of other threads' registers; "
    "the schedule language gives all threads the same loops, and no thread a value of another"
)
ROUNDING = (
    "a warp loads by TMA, which rounds to TF32, while others multiply by wgmma; the schedule language "
    "gives all threads the same loops, and has neither mbarriers nor clusters"
)
ADDING = (
    "one warp loads by TMA while others multiply by wgmma and add sums of stages up; the schedule "
    "language gives all threads the same loops, and has neither mbarriers nor clusters"
)

More = Callable[[Any, Any], Mapping[str, Any]]


def tma_schedule(
    name: str,
    summary: str,
    config: type[HopperConfig],
    default: Callable[..., HopperConfig],
    space: Callable[..., Iterable[HopperConfig]],
    siblings: tuple[str, ...],
    reason: str = SHARING,
    estimate: Callable[[Any, Device], float] | None = microseconds,
    more: More | None = None,
    **words: Any,
) -> ScheduleSpec:
    """The schedule `name` of an operator, whose TE schedules of the same problems are `siblings`.

    `more` says of a problem and its work what else `program` takes; `words` are further fields of the schedule.
    """

    def apply(problem: Any, config: HopperConfig, arch: Arch) -> tvm.IRModule:
        """The TIRx program for the problem's arguments."""
        from schedules.hopper.program import program

        work = config.work(problem)
        if work is not None and not work.again and work.stages < config.num_stages:
            # no more than are ever filled: what memory is left, blocks of the next kernel set themselves up in
            work = replace(config, num_stages=work.stages).work(problem)
        assert work is not None  # the config is legal
        return program(work, **(more(problem, work) if more else {}))

    return ScheduleSpec(
        name=name,
        summary=summary,
        kinds=("cuda",),
        config=config,
        apply=apply,
        default=default,
        space=space,
        estimate=estimate and estimate_of(estimate),
        tirx=WrittenInTirx(reason=reason, siblings=siblings),
        **words,
    )


# float32 rounded, which is only used where it is named, since its errors are not float32's
tf32_schedule = partial(
    tma_schedule,
    "tf32",
    "float32 rounded to TF32 on Hopper's tensor cores, errors up to 2^-10; only if named",
    reason=ROUNDING,
    estimate=None,
    ranges=True,
    arithmetic=TF32,
)


def split_schedules(
    kinds: Sequence[type[HopperConfig]],
    default: Callable[..., HopperConfig],
    space: Callable[..., Iterable[HopperConfig]],
    siblings: tuple[str, ...],
    more: More,
    prefix: str = "",
    **words: Any,
) -> tuple[ScheduleSpec, ...]:
    """The schedules ``bf16x3``, only used where it is named, and ``bf16x6``, after a `prefix` of their names, whose
    configs are of `kinds`.

    `default` and `space` take the kind last; `siblings` are the operator's TE schedules of float32.
    """
    tiles = ", fewer by Winograd's tiles along rows" if prefix else ""
    return tuple(
        tma_schedule(
            prefix + arithmetic.name,
            f"float32 as {len(PAIRS[kind.addends])} bfloat16 products on Hopper{tiles}, {errors}",
            kind,
            partial(default, kind=kind),
            partial(space, kind=kind),
            siblings,
            ADDING,
            more=more,
            arithmetic=arithmetic,
            **words,
        )
        for kind, arithmetic, errors in zip(
            kinds, (BF16X3, BF16X6), ("errors up to 3 * 2^-16; only if named", "errors of a float32 sum"), strict=True
        )
    )
