"""What an operator folder hands to the rest: the definition, the reference, and its schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any

import numpy as np

from schedules.core.arch import Arch
from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.errors import ConfigError, UnknownNameError
from schedules.core.problem import Argument, Config, Problem
from schedules.core.tvm import PrimFunc, te, tvm

Array = np.ndarray[Any, Any]
# schedules that every operator has, by the module whose SCHEDULE they are: `auto`, which only a search gives a config
SHARED_SCHEDULES = {"auto": "schedules.operators.auto"}
FORMER_NAMES = {"mfma": "mma"}  # in journals, bundles and commands of earlier versions


@dataclass(frozen=True)
class Expected:
    """A float64 reference output, and the magnitude that an error of each element is measured against.

    For a sum of products that magnitude is the sum of the absolute products, which bounds the rounding of any order of
    summation (Higham, "Accuracy and Stability of Numerical Algorithms", ch. 3); it broadcasts to the shape of `values`.
    `values` may hold only the first rows of an output whose later rows repeat them.
    """

    values: Array
    magnitude: Array
    roundings: float = 1.0  # times the result is rounded to the output's dtype on its way


@dataclass(frozen=True)
class WrittenInTirx:
    """Why a schedule is a program in TIRx, where threads, barriers and copies are spelled out, and not steps of
    `s_tir.Schedule` on a tensor expression."""

    reason: str  # one sentence: what a schedule of a tensor expression cannot say
    siblings: tuple[str, ...]  # the operator's TE schedules for the same problems


# ways to verify that mean nothing for a program in TIRx, and why
_NO_ROUTES_OF_TIRX = {
    "serial": "a program in TIRx is made of threads that wait for each other, there are no loops to run one by one",
}


@dataclass(frozen=True)
class ScheduleSpec:
    """One named way to run an operator on a family of targets."""

    name: str
    summary: str
    kinds: tuple[str, ...]  # of Arch.kind
    config: type[Config]
    apply: Callable[
        [Any, Any, Arch], tvm.IRModule
    ]  # (problem, config, arch) -> scheduled program with one function "main"
    default: Callable[[Any, Arch], Config]  # where none is legal, one whose check says what is wrong
    # every config worth trying, legal or not; of a sequence (`space.ProductSpace`) only those drawn need be made
    space: Callable[[Any, Arch], Iterable[Config]]
    fixed_shape: bool = False  # what is built takes the problem's shapes only, without run-time extents
    ranges: bool = False  # whether what is built may take a range of extents at run time, as its problem says
    tirx: WrittenInTirx | None = None  # None for steps of `s_tir.Schedule` on a tensor expression
    arithmetic: Arithmetic = FLOAT32  # that results are held to, whatever the config
    channels_along_rows: bool = False  # whether the rows of a block's tile (block_m) are output channels, or pixels
    # (problem, legal config, arch) -> about how many microseconds it takes
    estimate: Callable[[Any, Any, Arch], float] | None = None
    # (problem, step) -> whether taps and channels are one axis that steps cut; None where channels are cut tap by tap.
    # Of a column of steps, a column.
    joined: Callable[[Any, Any], Any] | None = None
    # (problem, output pixels of a tile, blocks of a cluster with pixels of their own, whether the data's channels are
    # turned inside) -> tiles of a channel, whose boxes reach over the ends of an image; None if there are no such boxes
    boxes: Callable[[Any, int, int, bool], int | None] | None = None
    folded: bool = False  # whether it computes what the problem says is the same (`folded`), with fewer taps
    # problem, pixels of a tile, channels of a chunk, where data are turned beside the stages -> bytes of shared memory
    # for that, and bytes from L2 for each channel; None if there are no such tiles
    turned: Callable[[Any, int, int], tuple[int, int] | None] | None = None
    # problem, pixels of a tile, channels of a chunk -> bytes of shared memory that pixels of a stage take, where those
    # are not a row of channels for each pixel
    stage_bytes: Callable[[Any, int, int], int] | None = None
    # problem -> phases of the reduction, each of as many of the channels, where data are read as they lie
    phases: Callable[[Any], int] | None = None
    # (problem, config, arch) -> the TE program that `apply` schedules; None where there is none, of programs in TIRx
    graph: Callable[[Any, Any, Arch], PrimFunc] | None = None

    @property
    def opt_in(self) -> bool:
        """Whether it is used only where a user names it, as what is less exact than float32 is: no rule, record or
        search of all schedules chooses it."""
        return not self.arithmetic.exact

    @property
    def language(self) -> str:
        """What the schedule is written in: "TE" or "TIRx"."""
        return "TIRx" if self.tirx else "TE"

    @property
    def no_routes(self) -> Mapping[str, str]:
        """Ways to verify that mean nothing for this schedule, and why."""
        return _NO_ROUTES_OF_TIRX if self.tirx else {}

    def definition(self, operator: Operator, problem: Problem, config: Config, arch: Arch) -> PrimFunc:
        """What this schedule of `operator` starts from; of a program in TIRx, what the operator defines."""
        if self.graph is not None:
            return self.graph(problem, config, arch)
        return te.create_prim_func(list(operator.definition(problem)))

    def arguments(self, problem: Problem) -> tuple[Argument, ...]:
        """The tensors of a function built with this schedule."""
        arguments = problem.arguments()
        return tuple(replace(a, runtime_axis=None) for a in arguments) if self.fixed_shape else arguments

    def arithmetic_of(self, problem: Problem, config: Config) -> Arithmetic:
        """What results of `config` are held to."""
        return config.arithmetic_of(problem) or self.arithmetic

    def takes_range(self, problem: Problem) -> bool:
        """Whether what is built takes the range of extents that `problem` may have."""
        return (self.ranges and not self.fixed_shape) or problem.representative() == problem

    def numbered_space(self, problem: Problem, arch: Arch) -> Sequence[Config]:
        """The search space, legal or not, to be drawn from by number; empty where no config can be legal."""
        space = () if self.config.unfit(problem, arch) else self.space(problem, arch)
        return space if isinstance(space, Sequence) else list(space)

    def legal_space(self, problem: Problem, arch: Arch) -> Iterator[Config]:
        return (config for config in self.numbered_space(problem, arch) if config.check(problem, arch) is None)

    def config_for(self, problem: Problem, arch: Arch, overrides: Config | dict[str, Any] | None = None) -> Config:
        """The default config with `overrides` (field to value or text) applied, or a config as it is; checked.

        Raises ConfigError or UnknownNameError.
        """
        self.require_kind(arch)
        self.require_shape(problem)
        if isinstance(overrides, Config):
            overrides.require(problem, arch)
            return overrides
        given = overrides or {}
        complete = {f.name for f in fields(self.config) if f.init} <= given.keys()
        config = self.config.parse(given if complete else {**self.default(problem, arch).to_json(), **given})
        config.require(problem, arch)
        return config

    def serves(self, problem: Problem, arch: Arch) -> bool:
        """Whether its default config is legal."""
        if not self.takes_range(problem) or arch.kind not in self.kinds or self.config.unfit(problem, arch):
            return False
        return self.default(problem, arch).check(problem, arch) is None

    def require_shape(self, problem: Problem) -> None:
        """Raise ConfigError for a problem with a range of extents, if what is built takes one only."""
        if not self.takes_range(problem):
            raise ConfigError(
                f"schedule {self.name} is built for one shape, not for {problem}; choose another --schedule, or leave "
                f"out the range"
            )

    def require_kind(self, arch: Arch) -> None:
        if arch.kind not in self.kinds:
            raise ConfigError(
                f"schedule {self.name} runs on {' and '.join(self.kinds)}, not on {arch}; choose another --schedule"
            )


def by_kind(gpu: str, cpu: str = "cpu") -> Callable[[Any, Arch], str]:
    """The rule of an operator that has one schedule for GPUs and one for CPUs."""
    return lambda problem, arch: gpu if arch.is_gpu else cpu


@dataclass(frozen=True)
class Operator:
    """An operator: what is computed, and the schedules that compute it.

    Besides `schedules`, every operator has those of SHARED_SCHEDULES.
    """

    name: str
    summary: str
    problem: type[Problem]
    definition: Callable[[Any], Sequence[te.Tensor]]  # problem -> the arguments of the TE graph, outputs last
    reference: Callable[[Any, Sequence[Array]], Sequence[Expected]]  # (problem, inputs) -> one per output
    inputs: Callable[[Any, np.random.Generator], Sequence[Array]]
    schedules: tuple[ScheduleSpec, ...]
    choose: Callable[[Any, Arch], str]  # the rule: which schedule serves this problem on this arch

    def schedule(self, name: str) -> ScheduleSpec:
        """The schedule called `name`.  Raises UnknownNameError with the nearest name."""
        own = {spec.name: spec for spec in self.schedules}
        name = FORMER_NAMES.get(name, name)
        if name in own:
            return own[name]
        if name in SHARED_SCHEDULES:
            shared: ScheduleSpec = import_module(SHARED_SCHEDULES[name]).SCHEDULE
            return shared
        raise UnknownNameError(f"schedule of {self.name}", name, [*SHARED_SCHEDULES, *own])

    def offered(self, arch: Arch) -> tuple[ScheduleSpec, ...]:
        """The schedules for `arch` that may be used unasked."""
        return tuple(spec for spec in self.schedules if arch.kind in spec.kinds and not spec.opt_in)

    def opt_in(self, name: str) -> bool:
        """Whether the schedule called `name` is one that only a user chooses."""
        return any(spec.name == name and spec.opt_in for spec in self.schedules)

    def schedule_for(self, problem: Problem, arch: Arch, name: str | None = None) -> ScheduleSpec:
        """The schedule called `name`, or the one the operator's rule chooses."""
        schedule = self.schedule(name or self.choose(problem, arch))
        schedule.require_kind(arch)
        return schedule
