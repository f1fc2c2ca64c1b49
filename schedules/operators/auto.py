"""The schedule `auto`: a program that TVM's auto-scheduler made, as the trace of its steps.

Every operator has it.  A config holds the space that the search drew from and the trace, TVM's list of scheduling
instructions with the decisions taken.  Replaying the trace on the operator's unscheduled program gives the scheduled
one again, in any process.  There is no default and nothing to enumerate: traces come from `tune.auto`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.errors import ConfigError, UnknownNameError
from schedules.core.frames import quick_frames
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator_of
from schedules.core.tvm import Schedule, tirx, tvm
from schedules.definitions.program import of_shapes, program_of
from schedules.operators.traces import MOST_BYTES, Steps, pack
from schedules.steps.story import only_step

NAME = "auto"
# kinds of targets that each space makes programs for
SPACES: dict[str, tuple[str, ...]] = {
    "llvm": ("llvm",),
    "cuda": ("cuda",),
    "cuda-tensorcore": ("cuda",),
    "rocm": ("rocm",),
}


@dataclass(frozen=True)
class AutoConfig(Config):
    """`space` names the design space; `trace` is TVM's JSON of a trace, compressed: of the tensor-core spaces it is
    30 KB."""

    letters: ClassVar[int] = MOST_BYTES

    space: str
    trace: str

    @classmethod
    def of(cls, space: str, sch: Schedule) -> AutoConfig:
        """The config that gives the program of `sch`, a schedule of the program of `space`."""
        return cls(space, pack(_plain(sch.trace.as_json())))

    @cached_property
    def steps(self) -> Steps:
        """The trace, checked.  Raises ConfigError."""
        return Steps.unpack(self.trace)

    def __str__(self) -> str:
        """Short, and another for each trace."""
        try:
            text = json.dumps(self.steps.to_json())
        except ConfigError:
            text = self.trace
        return f"space={self.space} trace={hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def check(self, problem: Problem, arch: Arch) -> str | None:
        """Why the trace cannot be replayed on `problem`; what was replayed is kept for the build that follows."""
        try:
            replayed(problem, self, arch)
        except ConfigError as error:
            return str(error)
        return None


def schedule(problem: Problem, config: AutoConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for ``problem.arguments()``, every extent of it fixed.  Raises ConfigError."""
    sch = replayed(problem, config, arch)
    only_step(sch, f"What the search found in the space {config.space}", program(problem))
    return sch.mod


def replayed(problem: Problem, config: AutoConfig, arch: Arch) -> Schedule:
    """What the trace of `config` makes of the operator's program.  Raises ConfigError with the reason."""
    from schedules.steps.intrinsics import described

    if config.space not in SPACES:
        raise ConfigError(str(UnknownNameError("space", config.space, SPACES)))
    if arch.kind not in SPACES[config.space]:
        raise ConfigError(f"space={config.space} is for {' and '.join(SPACES[config.space])}, not for {arch}")
    return _replayed(problem, config, described())


@lru_cache(maxsize=8)  # a config is checked, then built, then verified
def _replayed(problem: Problem, config: AutoConfig, as_described: bool) -> Schedule:
    """`as_described` leaves the loops that a tensor intrinsic stands for, which any target can run."""
    steps = config.steps.without("Tensorize") if as_described else config.steps
    return replay(program(problem), steps)


def replay(mod: tvm.IRModule, steps: Steps) -> Schedule:
    """`mod` after `steps`.  Raises ConfigError."""
    from tvm.s_tir.schedule import Trace

    if any(step[0] == "Tensorize" for step in steps.instructions):
        register_intrinsics()
    sch = Schedule(mod, error_render_level="fast")
    try:
        Trace.apply_json_to_schedule(steps.to_json(), sch)
    except Exception as error:  # TVM raises many types; whichever it is, the trace is not one of this program
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"trace does not replay on this problem ({reason}); tune it again") from error
    return sch


def _plain(value: Any) -> Any:
    """TVM's strings, numbers and arrays as Python's."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tirx.IntImm):
        return int(value)
    if isinstance(value, tirx.FloatImm):
        return float(value)
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value]


@lru_cache
def register_intrinsics() -> None:
    """TVM's tensor intrinsics; the import takes seconds, hence only where a trace has one."""
    with quick_frames():
        import tvm.s_tir.tensor_intrin  # noqa: F401


@lru_cache(maxsize=16)
def program(problem: Problem) -> tvm.IRModule:
    """The unscheduled program that traces start from, every extent of it fixed."""
    tensors = operator_of(problem).definition(problem)
    return tvm.IRModule({"main": of_shapes(program_of(tensors), problem.arguments())})


def _no_default(problem: Any, arch: Arch) -> Config:
    raise ConfigError("auto has no default config; tune it first: schedules tune ... --search auto")


def _no_space(problem: Any, arch: Arch) -> Iterator[Config]:
    return iter(())


SCHEDULE = ScheduleSpec(
    name=NAME,
    summary="made by TVM's auto-scheduler",
    kinds=("llvm", "cuda", "rocm"),
    config=AutoConfig,
    apply=schedule,
    default=_no_default,
    space=_no_space,
    fixed_shape=True,
    graph=lambda problem, config, arch: program(problem)["main"],
)
