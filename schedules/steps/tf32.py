"""float32 in TF32 on matrix cores that take it from float32: a schedule `mma` whose operands are rounded as they are
fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.arithmetic import TF32
from schedules.core.operator import ScheduleSpec
from schedules.core.space import ProductSpace
from schedules.steps.tensor_core import TensorCoreConfig


@dataclass(frozen=True)
class Tf32Config(TensorCoreConfig):
    tf32: ClassVar[bool] = True


def tf32_schedule(mma: ScheduleSpec) -> ScheduleSpec:
    """The schedule ``mma_tf32`` of an operator: only used where it is named, since its errors are not float32's."""

    def default(problem: Any, arch: Arch) -> TensorCoreConfig:
        return Tf32Config.parse(mma.default(problem, arch).to_json())

    def space(problem: Any, arch: Arch) -> Sequence[TensorCoreConfig]:
        found = mma.space(problem, arch)
        assert isinstance(found, ProductSpace)
        return ProductSpace(Tf32Config, *found.axes)

    return replace(
        mma,
        name="mma_tf32",
        summary="float32 rounded to TF32 on matrix cores that take it (MFMA), errors up to 2^-10; only if named",
        kinds=("rocm",),
        config=Tf32Config,
        default=default,
        space=space,
        arithmetic=TF32,
    )
