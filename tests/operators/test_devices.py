"""Default configs for devices of other sizes than the H200."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.operator import ScheduleSpec
from schedules.core.presets import preset, presets
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator_modules, operator_of
from schedules.hopper.config import HopperConfig
from tests.conftest import assert_correct, problem_of

SIZES = (78, 148)


def device_of(multiprocessors: int) -> Device:
    return Device(f"{multiprocessors} multiprocessors", "sm_90a", multiprocessors)


def problems(operator: str) -> list[Problem]:
    return [preset(name).problem() for name, found in presets().items() if found.operator == operator]


def held(config: Any, device: Device) -> int:
    """Blocks of `config` that `device` holds at once."""
    return device.resident(getattr(config, "cluster", 1)) * getattr(config, "blocks_sm", 1)


def grid_of(config: Any) -> int:
    """0 where it follows from the problem."""
    return getattr(config, "grid", 0)


def default(spec: ScheduleSpec, problem: Problem, arch: Arch) -> Config | None:
    """None if it is illegal."""
    config = spec.default(problem, arch)
    return config if config.check(problem, arch) is None else None


@pytest.mark.parametrize("name", [name for name in operator_modules() if not name.startswith("test")])
@pytest.mark.parametrize("size", SIZES)
def test_defaults_are_legal_and_fit(size: int, name: str, sm_90a: Arch) -> None:
    arch = sm_90a.on(device_of(size))
    for problem in problems(name):
        operator = operator_of(problem)
        assert operator.schedule_for(problem, arch).serves(problem, arch)
        for spec in operator.offered(arch):
            config = default(spec, problem, arch)
            assert (config is None) == (default(spec, problem, sm_90a) is None), f"{spec.name} {problem}"
            if config and grid_of(config):
                assert grid_of(config) == held(config, arch.device), f"{spec.name} {problem}: {config}"
            assert not isinstance(config, HopperConfig) or grid_of(config)


@pytest.mark.parametrize("name", ["k100-1", "resnet50-56-64-64-3x3", "oneflow-1000"])
@pytest.mark.parametrize("size", SIZES)
def test_search_spaces_fit(size: int, name: str, sm_90a: Arch) -> None:
    arch, problem = sm_90a.on(device_of(size)), preset(name).problem()
    for spec in operator_of(problem).offered(arch):
        space = spec.numbered_space(problem, arch)
        some = [space[number] for number in range(0, len(space), 1 + len(space) // 500)]
        assert all(grid_of(config) in (0, held(config, arch.device)) for config in some)


def test_estimates_follow_the_device(sm_90a: Arch) -> None:
    """A problem of 148 tiles takes one round on 148 multiprocessors and two on fewer."""
    from schedules.hopper.cost import rounds

    config = HopperConfig(cluster_m=1)
    assert [rounds(config, 148, device_of(size)) for size in (148, 147, 78, 74, 73)] == [1, 2, 2, 2, 3]
    assert rounds(replace(config, cluster_m=4), 36, device_of(148)) == 1  # 37 whole clusters
    assert rounds(replace(config, blocks_sm=2), 148, device_of(78)) == 1


def test_a_grid_of_another_device_is_right(emulation: None, sm_90a: Arch) -> None:
    """More tiles than the device holds blocks: some blocks compute two."""
    arch = sm_90a.on(device_of(78))
    problem = problem_of("conv2d_nhwc", n=1, h=72, w=72, ci=16, co=16, kh=1, kw=1, dtype="float16")
    tile = dict(block_m=64, block_n=16, block_k=16, num_stages=2, consumers=1, cluster_m=1, cluster_n=1, split_k=1)
    config = operator_of(problem).schedule("tma_wgmma").config_for(problem, arch, tile)
    assert isinstance(config, HopperConfig) and config.blocks(81) == config.grid == 78
    assert_correct(problem, arch, "tma_wgmma", config, ["emulated"])
