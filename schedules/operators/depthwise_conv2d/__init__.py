"""Depthwise convolution: a filter for each channel, by itself."""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import Operator
from schedules.core.problem import Config
from schedules.operators.depthwise_conv2d import bands, cpu, windows
from schedules.operators.depthwise_conv2d.bands_tile import BandsConfig
from schedules.operators.depthwise_conv2d.cost import COSTS, Costs
from schedules.operators.depthwise_conv2d.definition import DepthwiseProblem, definition, inputs, reference
from schedules.operators.depthwise_conv2d.windows import WindowsConfig


def estimate(problem: DepthwiseProblem, config: Config, arch: Arch, costs: Costs = COSTS) -> float:
    """About how many us a legal config of a GPU's schedule takes."""
    if isinstance(config, BandsConfig):
        return bands.estimate(problem, config, arch, costs)
    assert isinstance(config, WindowsConfig)
    return windows.estimate(problem, config, arch, costs)


def choose(problem: DepthwiseProblem, arch: Arch) -> str:
    """The rule: on GPUs the schedule whose default takes least by the estimate; there is one for CPUs."""
    if not arch.is_gpu:
        return "cpu"
    served = [spec for spec in OPERATOR.offered(arch) if spec.serves(problem, arch)] or [windows.SCHEDULE]
    return min(served, key=lambda spec: estimate(problem, spec.default(problem, arch), arch)).name


OPERATOR = Operator(
    name="depthwise_conv2d",
    summary="2-D convolution of each channel with a filter of its own, NCHW or NHWC, epilogue fused",
    problem=DepthwiseProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(windows.SCHEDULE, bands.SCHEDULE, cpu.SCHEDULE),
    choose=choose,
)
