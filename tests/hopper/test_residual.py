"""A residual that comes by TMA: in whole boxes, and none before the one before it was read."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schedules.build.builder import build
from schedules.core.arch import parse_arch
from schedules.hopper.shared import TensorMap
from tests.conftest import problem_of
from tests.hopper.conftest import WorkOf
from tests.hopper.works import PLAIN, WORKS
from tests.hopper_kernels import assert_emulated

# more tiles than blocks, boxes than stages, and stages than one tile has
LAYER: dict[str, Any] = dict(n=3, h=9, w=11, ci=72, co=40, kh=1, kw=1, dtype="bfloat16", residual=True)
TILE = PLAIN | dict(block_m=128, block_n=96, block_k=32, num_stages=3)


@pytest.mark.parametrize("name", [name for name in WORKS if "TF32" not in name])
def test_it_comes_where_results_leave_by_tma(work_of: WorkOf, name: str) -> None:
    """But for few filters, shared reductions, several lines and data that are turned."""
    operator, schedule, fields, words = WORKS[name]
    work = work_of(operator, schedule, fields | dict(residual=True), words)
    added, staging = work.added, work.output.staging
    if added is None:
        others = schedule == "tma_wgmma_few", work.config.split_k > 1, work.leaving > 1, work.a.turned is not None
        assert not isinstance(work.output.target, TensorMap) or any(others)
    else:
        assert added.boxes * staging.width == staging.columns and added.source.box_bytes == staging.store_bytes


@pytest.mark.parametrize(
    "words",
    [
        TILE | dict(ping_pong=True, stationary=True, grid=2),
        TILE | dict(ping_pong=True, cluster_n=4, grid=8),
        TILE | dict(block_n=32, cluster_m=2, cluster_n=2, grid=4),
        TILE | dict(block_m=192, consumers=3, grid=1),
        TILE | dict(block_n=80, grid=2),  # boxes that TMA does not swizzle
    ],
    ids=str,
)
def test_tile_after_tile(emulation: None, words: dict[str, Any]) -> None:
    assert_emulated("conv2d_nhwc", LAYER, words)


@pytest.mark.parametrize(
    ("name", "fields", "write"),
    [
        ("conv2d_nhwc", LAYER, "stmatrix"),
        ("conv2d_nchw32", LAYER | dict(ci=64, co=64, dtype="int8"), "hopper_store_s8"),
    ],
)
def test_room_is_free_when_what_was_read_is_used(name: str, fields: dict[str, Any], write: str) -> None:
    """A load may still be on its way when the next instruction says that it is not: then TMA writes first."""
    words = TILE | dict(block_n=64, ping_pong=True, stationary=True, grid=2)
    built = build(problem_of(name, **fields), parse_arch("sm_90a"), "tma_wgmma", words, device_code=False)
    main = str(built.sources["cu"]).rsplit("main_kernel(", 1)[1]
    way_out = main[main.index("read_shared_pair") :]
    # of each box: its last pair's place in the text, and what follows up to where it is said to be free
    freed = re.split(r"mbarrier_arrive_arrive\w*\(", way_out)[:-1]
    assert freed
    for text in freed:
        *_, last = re.finditer(r"(residual_pair\w*) = ", text)
        after = text[last.end() :]
        used = re.search(rf"\b{last[1]}\b", after)
        assert used and write in after[used.end() :] and "fence_proxy_proxy_async" in after
