"""NCHW convolution of few filters on Hopper: pixels x (kw, output channels) by TMA and wgmma.

With few filters a matrix product with output channels as rows is mostly padding.  Here pixels are its rows, and the
filters of all taps along a row its columns (`few_tiles`); the way out adds up the kw columns of an output channel, each
shifted by its tap (`few_results`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product
from typing import Any

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.space import ProductSpace, Words, axis
from schedules.hopper.config import DEPTHS, REGISTERS, ROWS, clusters, first_legal
from schedules.hopper.schedule import SHIFTING, tma_schedule
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.few_tiles import FewWork, TmaWgmmaFewConfig, columns_of, pitches
from schedules.operators.conv2d_nchw.repack import repack


def _more(problem: NchwProblem, work: FewWork) -> dict[str, Any]:
    """How results leave, and the kernel before."""
    from schedules.operators.conv2d_nchw.few_results import FewResults

    return dict(way_out=FewResults, prepare=partial(repack, problem))


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaFewConfig:
    return first_legal(space(problem, arch).with_least("num_stages"), problem, arch)


def space(problem: NchwProblem, arch: Arch) -> ProductSpace[TmaWgmmaFewConfig]:
    widths = [columns_of(problem, pitch) for pitch in pitches(problem)]
    return ProductSpace(
        TmaWgmmaFewConfig, axis("block_n", widths), _tiles(arch.device), axis("block_k", (64, 32, 16, 128)), DEPTHS
    )


@lru_cache
def _tiles(device: Device) -> tuple[Words, ...]:
    """Fields of every tile and cluster, and what consumers may have of their own."""
    return tuple(_each_tile(device))


def _each_tile(device: Device) -> Iterator[Words]:
    for (consumers, blocks_sm), blocks_m in product(REGISTERS, (1, 2, 3, 4)):
        for words in clusters(blocks_sm, device):
            if words["cluster_n"] == 1:
                found = dict(words, block_m=ROWS * blocks_m * consumers, consumers=consumers)
                yield found
                if words["split_k"] == 1 and consumers > 1:
                    # tiles of a consumer's rows, with which the filters stay, or a block's
                    own = dict(found, block_m=ROWS * blocks_m, ping_pong=True)
                    yield own
                    yield dict(own, stationary=True)


SCHEDULE = tma_schedule(
    "tma_wgmma_few",
    "few filters on Hopper: pixels x (kernel columns x channels), rows by TMA once, wgmma, persistent",
    TmaWgmmaFewConfig,
    default,
    space,
    siblings=("mma", "direct"),
    reason=SHIFTING,
    more=_more,
    ranges=True,
)
