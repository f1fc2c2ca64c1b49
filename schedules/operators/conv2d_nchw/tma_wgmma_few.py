"""NCHW convolution of few filters on Hopper: pixels x (kw, output channels) by TMA and wgmma.

With few filters a matrix product with output channels as rows is mostly padding.  Here pixels are its rows, and the
filters of all taps along a row its columns (`few_tiles`); the way out adds up the kw columns of an output channel, each
shifted by its tap (`few_results`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.core.space import ProductSpace
from schedules.hopper.config import REGISTERS, ROWS, STAGES, clusters
from schedules.hopper.cost import estimate_of
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.few_tiles import FewWork, TmaWgmmaFewConfig, channels_of, columns_of, pitches
from schedules.operators.conv2d_nchw.repack import repack

if TYPE_CHECKING:
    import tvm


def schedule(problem: NchwProblem, config: TmaWgmmaFewConfig, arch: Arch) -> tvm.IRModule:
    """The TIRx program for data (n, ci, h, w), filter (kh, kw, co, ci) or (co, ci, kh, kw), the terms of the
    epilogue, output (n, co, out_h, out_w)."""
    from schedules.hopper.program import program
    from schedules.operators.conv2d_nchw.few_results import FewResults

    return program(FewWork(problem, config), FewResults, partial(repack, problem))


def _configs(problem: NchwProblem, device: Device) -> Iterator[TmaWgmmaFewConfig]:
    ways = product(pitches(problem), REGISTERS, (1, 2, 3, 4), (64, 32, 16, 128))
    for pitch, (consumers, blocks_sm), blocks_m, block_k in ways:
        rows, columns = ROWS * blocks_m * consumers, columns_of(problem, pitch)
        yield TmaWgmmaFewConfig(rows, columns, block_k, 2, consumers, blocks_sm=blocks_sm).filling(device)


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaFewConfig:
    """The legal tile with the least loaded by the busiest multiprocessor, as many stages as fit."""
    p = problem
    best: tuple[Any, TmaWgmmaFewConfig] | None = None
    for config in _configs(p, arch.device):
        if config.blocks_sm > 1 or config.check(p, arch) is not None:
            continue
        work = FewWork(p, config)
        tiles = -(-work.clusters // arch.device.multiprocessors)
        key = tiles * (work.a.tile.rows + p.kh * config.block_n), -config.consumers
        if best is None or key < best[0]:
            best = key, config
    if best is None:
        # whose check says what is wrong
        return TmaWgmmaFewConfig(128, columns_of(p, channels_of(p)), 16, 2).filling(arch.device)
    config = best[1]
    work = FewWork(p, config)
    work.fill_shared(arch)
    return work.config


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaFewConfig]:
    return ProductSpace(
        lambda config, stages: replace(config, num_stages=stages),
        list(_ways(problem, arch.device)),
        STAGES,
    )


def _ways(problem: NchwProblem, device: Device) -> Iterator[TmaWgmmaFewConfig]:
    """Every tile and cluster, and what consumers may have of their own."""
    for config in _configs(problem, device):
        for words in clusters(config.blocks_sm, device):
            if words["cluster_n"] == 1:
                found = replace(config, **words)
                yield found
                if words["split_k"] == 1 and config.consumers > 1:
                    # tiles of a consumer's rows, with which the filters stay, or a block's
                    own = replace(found, block_m=found.rows, ping_pong=True)
                    yield own
                    yield replace(own, stationary=True)


SCHEDULE = ScheduleSpec(
    name="tma_wgmma_few",
    summary="few filters on Hopper: pixels x (kernel columns x channels), rows by TMA once, wgmma, persistent",
    kinds=("cuda",),
    config=TmaWgmmaFewConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    estimate=estimate_of(FewWork),
    tirx=WrittenInTirx(
        reason="one warp loads by TMA while others multiply by wgmma and add sums out of other threads' registers; "
        "the schedule language gives all threads the same loops, and no thread a value of another",
        siblings=("mma", "direct"),
    ),
)
