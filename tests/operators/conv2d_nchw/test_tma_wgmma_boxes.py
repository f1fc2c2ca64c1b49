"""NCHW convolution from boxes that are turned in shared memory: what it is made of, what it refuses, and whether it is
right."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.hopper.runs import TurnedLines
from schedules.hopper.turning import units_source
from schedules.operators.conv2d_nchw.tma_wgmma_boxes import BoxWork, space, tiles_of, turned
from tests.conftest import caught, problem_of
from tests.hopper_kernels import assert_emulated, assert_producer_fits, assert_well_made

NAME = "tma_wgmma_boxes"
HALF = dict(dtype="float16")
WORK: dict[str, Any] = dict(n=2, h=24, w=32, ci=64, co=64, kh=3, kw=3, pad=1)
SHAPES: dict[str, dict[str, Any]] = {
    "images": dict(n=2, h=11, w=24, ci=40, co=72, kh=3, kw=3, pad=1, bias=True, activation="relu"),
    "1x1, an image as one row": dict(n=3, h=12, w=6, ci=48, co=40, kh=1, kw=1, residual=True),
    "1x1 that leaves rows out": dict(n=2, h=5, w=64, ci=40, co=24, kh=1, kw=1, stride="2,1"),
    "1x1 that leaves rows of any width out": dict(n=2, h=5, w=63, ci=40, co=24, kh=1, kw=1, stride="2,1"),
    "1x1 that leaves pixels out": dict(n=2, h=16, w=24, ci=40, co=24, kh=1, kw=1, stride=2),
    "1x1 that leaves out rows between whole 16 bytes": dict(n=2, h=10, w=28, ci=40, co=24, kh=1, kw=1, stride=2),
    "1x1 that leaves pixels of rows of any width out": dict(n=2, h=8, w=27, ci=40, co=24, kh=1, kw=1, stride=2),
    "a row of taps that leaves rows out": dict(n=2, h=7, w=32, ci=32, co=24, kh=1, kw=3, pad="0,1", stride="3,2"),
    "a row of taps that leaves rows of any width out": dict(
        n=2, h=7, w=30, ci=32, co=24, kh=1, kw=3, pad="0,1", stride="3,2", bias=True
    ),
    "a row of taps, padding above": dict(n=2, h=8, w=16, ci=32, co=24, kh=1, kw=3, pad=1, stride=2),
    "a row of taps": dict(n=1, h=9, w=16, ci=32, co=24, kh=1, kw=7, pad="0,3", bias=True),
    "a column of taps": dict(n=1, h=9, w=16, ci=32, co=24, kh=7, kw=1, pad="3,0"),
    "stride 2": dict(n=2, h=19, w=40, ci=32, co=40, kh=5, kw=5, stride=2, pad=1, bias=True),
    "stride 2, planes of unlike taps": dict(n=1, h=10, w=16, ci=32, co=24, kh=2, kw=4, pad="0,1", stride="1,2"),
    "strides and dilation": dict(n=1, h=13, w=24, ci=16, co=24, kh=3, kw=2, pad="2,1", stride="2,3", dilation="2,1"),
    "output rows that are no whole vectors": dict(n=1, h=9, w=24, ci=32, co=24, kh=3, kw=3, dilation=2, residual=True),
    "packed": dict(n=1, h=8, w=8, ci=16, co=24, kh=3, kw=3, pad=1, filter_layout="hwoi"),
    "padding wider than the image": dict(n=2, h=3, w=8, ci=16, co=16, kh=5, kw=7, pad="4,9"),
    "rows of any width": dict(n=2, h=11, w=13, ci=40, co=72, kh=3, kw=3, pad=1, bias=True, activation="relu"),
    "rows of any width, stride 2": dict(n=2, h=19, w=37, ci=16, co=40, kh=3, kw=3, stride=2, residual=True),
    "rows of any width, stride 2, more taps": dict(n=2, h=15, w=30, ci=32, co=24, kh=5, kw=5, stride=2, pad=1),
    "an image of any size as one row": dict(n=3, h=9, w=7, ci=24, co=40, kh=1, kw=1, bias=True),
    "rows of any width, strides and dilation": dict(
        n=1, h=12, w=26, ci=16, co=24, kh=3, kw=2, pad="2,1", stride="2,3", dilation="2,1"
    ),
    "rows of any width, padding wider than the image": dict(n=2, h=4, w=6, ci=16, co=16, kh=5, kw=7, pad="4,9"),
    "bfloat16": dict(n=1, h=12, w=16, ci=16, co=24, kh=3, kw=3, pad=1, dtype="bfloat16", residual=True),
}
SMALL = dict(
    block_m=64, block_n=32, block_k=32, num_stages=2, consumers=1, cluster_m=1, cluster_n=1, grid=2, blocks_sm=1,
    split_k=1, ping_pong=False, stationary=False, row=True,
)  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    SMALL | dict(block_m=128, block_n=64, consumers=2, cluster_m=2, grid=4),
    SMALL | dict(block_m=256, block_n=16, consumers=2, row=False),
    SMALL | dict(block_k=64, num_stages=4, row=False),
    SMALL | dict(consumers=2, ping_pong=True, num_stages=3),
    SMALL | dict(consumers=3, ping_pong=True, num_stages=5, row=False, block_n=16),
    SMALL | dict(block_m=192, block_n=48, consumers=3),
    SMALL | dict(consumers=2, ping_pong=True, stationary=True),
    SMALL | dict(blocks_sm=2, grid=3, row=False, block_n=16),
    SMALL | dict(split_k=4, grid=4),
    SMALL | dict(block_k=16, num_stages=3),
    SMALL | dict(block_k=16, num_stages=4, consumers=2, ping_pong=True, stationary=True, row=False),
    SMALL | dict(block_k=16, block_m=128, consumers=2, pairs=3, cluster_m=2, grid=4),
]
# by three pairs of warps that take turns at chunks: fewer than pairs, of tiles one after the other
IN_TURN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(ci=40), dict(block_k=64)),
    (dict(ci=400, co=72, bias=True), dict(block_m=128, consumers=2, block_n=64, block_k=64)),
    (dict(h=8, w=8, ci=200), dict(split_k=2, grid=4)),
    (dict(h=14, w=14, ci=264), dict(consumers=2, ping_pong=True, num_stages=3)),
    (dict(co=72), dict(cluster_m=2, grid=4)),
]
# or that share each: words of a chunk, fewer than of pairs, rows one by one, of several remainders, of parts
SHARED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(kh=3, kw=3, pad=1, h=8, w=16, ci=72), dict(block_n=16)),
    (dict(kh=1, kw=3, pad="0,1", h=1, w=64), dict(block_k=64)),
    (dict(kh=1, kw=5, pad="0,2", ci=72), dict(row=False)),
    (dict(kh=3, kw=3, pad=1, h=15, w=36, stride=2, bias=True), dict(consumers=2, ping_pong=True, num_stages=3)),
    (dict(kh=3, kw=3, h=19, w=40, stride=2, ci=40), dict(block_m=128, consumers=2, cluster_m=2, grid=4)),
]
# taps far apart make a turned tile of so many rows that a thread that turns has registers for one unit at a time
MANY_ROWS = dict(n=1, h=1, w=389, ci=40, co=16, kh=1, kw=5, pad="0,10", dilation="1,5")


def work_of(arch: Arch, fields: dict[str, Any], **words: Any) -> BoxWork:
    problem: Any = problem_of("conv2d_nchw", **HALF | fields)
    config: Any = operator("conv2d_nchw").schedule(NAME).config_for(problem, arch, SMALL | words)
    work: BoxWork | None = config.work(problem)
    assert work is not None
    return work


@pytest.mark.parametrize("width, box", [(152, (1, 2, 32)), (24, (1, 8, 8)), (56, (1, 8, 8)), (75, (1, 4, 16))])
def test_boxes_of_whole_sectors_may_be_a_few_more(width: int, box: tuple[int, int, int]) -> None:
    """Of 64 pixels: one in twenty more of them for lines of a sector or more, not one in seven."""
    problem: Any = problem_of("conv2d_nchw", **HALF | dict(n=1, h=width, w=width, ci=16, co=16, kh=1, kw=1))
    sides = problem.unchecked(h=2 * width, w=2 * width, stride=(2, 2))
    found = tiles_of(sides, 64, 1)
    assert found is not None and found.box == box


def test_boxes_of_lines_one_by_one_have_no_more_than_are_loaded(sm_90a: Arch) -> None:
    """Nine lines in eight classes are too many loads, with which no tile of 128 pixels was legal; five are not."""
    work = work_of(sm_90a, dict(n=1, h=129, w=129, ci=64, co=32, kh=3, kw=3, stride=2), block_m=128, consumers=2)
    assert work.tiles.box == (1, 2, 64) and isinstance(work.turned, TurnedLines) and work.turned.reason() is None
    rows = work_of(sm_90a, dict(n=1, h=128, w=128, ci=64, co=32, kh=3, kw=3, stride=2), block_m=128, consumers=2)
    assert rows.tiles.box == (1, 4, 32)


@pytest.mark.parametrize(
    "ci, k, tried", [(48, 3, True), (64, 3, True), (112, 3, True), (128, 3, False), (120, 3, False), (48, 1, False)]
)
def test_stages_of_16_channels_are_tried_of_few_or_where_they_waste_less(
    sm_90a: Arch, ci: int, k: int, tried: bool
) -> None:
    problem: Any = problem_of("conv2d_nchw", **HALF | dict(n=2, h=64, w=64, ci=ci, co=64, kh=k, kw=k, pad=k // 2))
    assert (16 in {config.block_k for config in space(problem, sm_90a)}) == tried


def test_all_filters_of_few_channels_stay_beside_chunks_of_16(sm_90a: Arch) -> None:
    fields = dict(n=2, h=320, w=320, ci=48, co=96, kh=3, kw=3, stride=2, pad=1)
    tile = dict(block_m=128, block_n=96, consumers=2, ping_pong=True, stationary=True)
    work_of(sm_90a, fields, block_k=16, num_stages=8, **tile)
    with pytest.raises(ConfigError, match="bytes of shared memory"):
        work_of(sm_90a, fields, block_k=32, **tile)


@pytest.mark.parametrize("shape", SHAPES)
def test_emulated(emulation: None, shape: str) -> None:
    """By rows of the kernel, and each other shape tap by tap."""
    row = list(SHAPES).index(shape) % 2 == 0
    assert_emulated("conv2d_nchw", HALF | SHAPES[shape], SMALL | dict(row=row), NAME)


@pytest.mark.parametrize("words", CONFIGS, ids=str)
def test_configs_emulated(emulation: None, words: dict[str, Any]) -> None:
    fields = dict(n=2, h=11, w=24, ci=40, co=32, kh=3, kw=2, pad=1, bias=True)
    assert_emulated("conv2d_nchw", HALF | fields, words, NAME)


@pytest.mark.parametrize("fields, words", IN_TURN, ids=str)
def test_pairs_that_take_turns_emulated(emulation: None, fields: dict[str, Any], words: dict[str, Any]) -> None:
    sizes = HALF | dict(n=3, h=9, w=7, ci=136, co=40, kh=1, kw=1) | fields
    assert_emulated("conv2d_nchw", sizes, SMALL | dict(pairs=3) | words, NAME)


@pytest.mark.parametrize("fields, words", SHARED, ids=str)
def test_pairs_that_share_a_chunk_emulated(emulation: None, fields: dict[str, Any], words: dict[str, Any]) -> None:
    sizes = HALF | dict(n=2, ci=136, co=40, h=9, w=7) | fields
    assert_emulated("conv2d_nchw", sizes, SMALL | dict(pairs=3) | words, NAME)


@pytest.mark.parametrize("fields", [dict(), dict(h=23, w=29), dict(stride=2)], ids=str)
def test_pairs_that_share_a_chunk_have_no_slots_of_their_own(sm_90a: Arch, fields: dict[str, Any]) -> None:
    one, three = (work_of(sm_90a, WORK | fields, pairs=pairs).turned for pairs in (1, 3))
    assert (one.turners, three.turners) == (2, 6) and one.slots == three.slots


def test_pairs_that_share_a_chunk_are_all_waited_for(sm_90a: Arch) -> None:
    for pairs in (1, 3):
        words = SMALL | dict(pairs=pairs)
        turned = work_of(sm_90a, WORK, **words).turned
        built = build(problem_of("conv2d_nchw", **WORK, **HALF), sm_90a, NAME, words, device_code=False)
        source = str(built.sources["cu"])
        counts = re.findall(r"mbarrier_init_init_shared_b64\(.*, \(uint\)(\d+)\);", source)
        # those that have read a box, and those that have turned a chunk
        assert counts.count(str(turned.turners)) == turned.arriving_slots + turned.slots


@pytest.mark.parametrize("words", [dict(), dict(block_m=128, consumers=2, block_n=192)], ids=str)
def test_pairs_have_registers_and_slots_of_their_own(cuda_compiler: None, sm_90a: Arch, words: dict[str, Any]) -> None:
    fields = dict(n=4, h=14, w=14, ci=256, co=192, kh=1, kw=1)
    built = build(problem_of("conv2d_nchw", **fields, **HALF), sm_90a, NAME, SMALL | dict(pairs=3, block_k=64) | words)
    assert_producer_fits(built)
    assert built.launch and built.launch.threads == 128 * (words.get("consumers", 1) + 2)
    for more in ({}, dict(block_k=32), dict(h=15, w=15)):
        sizes = {name: size for name, size in more.items() if name != "block_k"}
        work = work_of(sm_90a, fields | sizes, **dict(pairs=3) | words | dict(block_k=more.get("block_k", 64)))
        turned = work.turned
        assert (turned.in_turn, turned.turners) == (3, 2)
        assert turned.slots % 3 == turned.arriving_slots % (3 * turned.arrivals) == 0


@pytest.mark.parametrize("w", (389, 400))
def test_many_rows_emulated(emulation: None, w: int) -> None:
    words = SMALL | dict(block_m=192, consumers=3, block_n=16, num_stages=3, row=False)
    assert_emulated("conv2d_nchw", HALF | MANY_ROWS | dict(w=w), words, NAME)


@pytest.mark.parametrize("plane", [(9, 15), (9, 14), (9, 12), (20, 8)], ids=("8 classes", "4", "2", "1"))
@pytest.mark.parametrize(
    "words",
    [dict(), dict(block_k=64), dict(block_k=64, block_m=192, consumers=3, block_n=16), dict(block_m=128)],
    ids=str,
)
def test_neighbours_as_they_lie_emulated(emulation: None, plane: tuple[int, int], words: dict[str, Any]) -> None:
    """Of products of pixels 16 bytes are read at once, whatever multiple of them a channel begins after."""
    fields = HALF | dict(n=2, h=plane[0], w=plane[1], ci=72, co=24, kh=1, kw=1, bias=True)
    config = SMALL | words | (dict(consumers=2) if words.get("block_m") == 128 else {})
    assert_emulated("conv2d_nchw", fields, config, NAME)


@pytest.mark.parametrize("w, loads", [(65, 15), (70, 14), (68, 12), (72, 8)])
def test_neighbours_are_read_at_once(sm_90a: Arch, w: int, loads: int) -> None:
    """A word that lies in two multiples of 16 bytes needs two loads, in place of one for each pixel."""
    fields = WORK | dict(h=65, w=w, kh=1, kw=1, pad=0)
    work = work_of(sm_90a, fields, block_m=128, consumers=2, block_k=64)
    assert work.a.turned
    source = units_source(work.a.turned)
    assert source.count("ld.shared") == loads and source.count("st.shared.v4") == 8
    several = work_of(sm_90a, WORK).a.turned
    assert several and several.late is None


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    words = SMALL | dict(block_m=128, block_n=64, consumers=2, num_stages=3, grid=0, pairs=1)
    built = build(problem_of("conv2d_nchw", **WORK, **HALF, filter_layout="hwoi"), sm_90a, NAME, words)
    found = assert_well_made(built, "HGMMA")
    assert_producer_fits(built)
    # a stage has three taps of the filter, and another warp has boxes of the data brought; a consumer's two lines leave
    assert len(built.resources) == 1 and (found["UTMALDG"], found["UTMASTG"]) == (4, 2)
    # 4 lines of 32 pixels, and one around: 6 of 4 groups, each 6 words, in 5 blocks of a warp, for 2 groups of channels
    ptx = str(built.sources["ptx"])
    assert ptx.count("ld.shared.b32") == 5 * 2 * 8 and ptx.count("@p st.shared.v4") == 5 * 2 * 2


@pytest.mark.parametrize("fields", [dict(), dict(residual=True)], ids=str)
def test_only_what_the_kernel_before_fills_is_waited_for(
    cuda_compiler: None, sm_90a: Arch, fields: dict[str, Any]
) -> None:
    source = str(build(problem_of("conv2d_nchw", **WORK | fields, **HALF), sm_90a, NAME).sources["cu"])
    # filters are packed by it; boxes and residuals were there before it began
    assert source.count("griddepcontrol_wait();") == 1
    filters, boxes = (source.index(words, source.index("griddepcontrol_wait();")) for words in ("&(b_map)", "&(a_map)"))
    assert filters < boxes


def test_what_it_is_made_of_where_rows_come_one_by_one(cuda_compiler: None, sm_90a: Arch) -> None:
    fields = WORK | dict(h=23, w=29, filter_layout="hwoi")
    words = SMALL | dict(block_m=128, block_n=64, consumers=2, num_stages=3, grid=0, pairs=1)
    built = build(problem_of("conv2d_nchw", **fields, **HALF), sm_90a, NAME, words)
    found = assert_well_made(built, "HGMMA", stored_by_tma=False)
    assert_producer_fits(built)
    # three taps of the filter, and six lines in eight classes of channels
    source = work_of(sm_90a, fields, **words).a.source
    assert isinstance(source, TurnedLines) and (source.lines, source.classes.count) == (6, 8)
    assert len(built.resources) == 1 and found["UTMALDG"] == 3 + 6 * 8
    # pixels are read one by one, of blocks of a warp, for 2 groups of channels
    ptx, blocks = str(built.sources["ptx"]), source.tile.rows // 32
    assert ptx.count("ld.shared.u16") >= blocks * 2 * 8 and ptx.count("@p st.shared.v4") == blocks * 2


def test_every_tap_finds_the_pixel_that_it_looks_at(sm_90a: Arch) -> None:
    for fields in SHAPES.values():
        layout = work_of(sm_90a, fields).layout
        for y, x, ry, rx in np.ndindex(layout.y.size, layout.x.size, layout.y.k, layout.x.k):
            row = (y * (layout.x.size // 8) + x // 8) * layout.pitch + x % 8
            looked_at = y * layout.y.stride + ry * layout.y.dilation, x * layout.x.stride + rx * layout.x.dilation
            assert layout.pixels[row + layout.moved_down(ry) + layout.moved_across(rx)] == looked_at
        placed = [(row, word.at + i) for word in layout.words for i, row in enumerate(word[1:]) if row >= 0]
        place = dict(placed)
        assert len(place) == len(placed) and set(place) <= set(range(layout.rows))
        (width, _), y_axis, x_axis = layout.box, layout.y, layout.x
        for y, x, ry, rx in np.ndindex(y_axis.size, x_axis.size, y_axis.k, x_axis.k):
            row = (y * (x_axis.size // 8) + x // 8) * layout.pitch + x % 8
            at = place[row + layout.moved_down(ry) + layout.moved_across(rx)]
            down = y * y_axis.stride + ry * y_axis.dilation
            across = x * x_axis.stride + rx * x_axis.dilation - x_axis.pad + layout.left
            assert divmod(at, width) == (down, across)


@pytest.mark.parametrize("kernel, row, unrolled", [(3, False, 9), (3, True, 3 * 3), (5, False, 5), (5, True, 5 * 5)])
def test_stages_of_a_chunk_are_unrolled(sm_90a: Arch, kernel: int, row: bool, unrolled: int) -> None:
    """All of them, or those of a row of the kernel where they are many: a loop would reckon where each one's taps look
    for longer than they are multiplied."""
    problem = problem_of("conv2d_nchw", **HALF, **WORK | dict(kh=kernel, kw=kernel, pad=kernel // 2))
    built = build(problem, sm_90a, NAME, SMALL | dict(row=row), device_code=False)
    calls = re.findall(r"^ +hopper_wgmma_m64n32_f16\(", str(built.sources["cu"]), re.M)
    assert len(calls) == unrolled * SMALL["block_k"] // 16


def test_one_more_chunk_waits_where_each_is_read_once(sm_90a: Arch) -> None:
    def slots(fields: dict[str, Any], block_m: int, block_k: int) -> int:
        words = dict(block_m=block_m, block_k=block_k, consumers=min(2, block_m // 64))
        return work_of(sm_90a, WORK | fields, **words).turned.slots

    one = dict(kh=1, kw=1, pad=0)
    # 8, 16 and 32 KiB of a chunk
    assert [slots(one, *tile) for tile in ((64, 64), (128, 64), (256, 64))] == [3, 3, 2]
    assert slots({}, 64, 32) == 2


def test_tiles_are_those_that_are_cheap_to_turn(sm_90a: Arch) -> None:
    # lines of 32 pixels, whose words are of all banks, rather than squares
    for pixels, box in ((64, (1, 2, 32)), (128, (1, 4, 32)), (256, (1, 8, 32))):
        words = dict(block_m=pixels, consumers=2 if pixels > 64 else 1, block_n=16)
        found = work_of(sm_90a, dict(n=1, h=96, w=96, ci=32, co=16, kh=3, kw=3, pad=1), **words)
        assert found.tiles.box == box


@pytest.mark.parametrize(
    "what",
    [r"fence_proxy_proxy_async\w*\(", r"mbarrier_wait\(.*turned_slot"],
    ids=["fence of what is turned", "wait for it"],
)
def test_what_is_left_out_is_noticed(emulation: None, sm_90a: Arch, what: str) -> None:
    problem = problem_of("conv2d_nchw", **HALF | SHAPES["images"])
    built = build(problem, sm_90a, NAME, SMALL | dict(grid=1))
    arrays = operator("conv2d_nchw").inputs(problem, np.random.default_rng(0))
    lines = str(built.sources["cu"]).splitlines()
    found = [i for i, line in enumerate(lines) if re.match(rf" +\w*{what}", line)]
    assert found and not caught(built, "\n".join(lines), arrays)
    # the last: a fence of barriers comes before, and of waits that of who turns
    assert caught(built, "\n".join(lines[: found[-1]] + lines[found[-1] + 1 :]), arrays)


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec, problem = operator("conv2d_nchw").schedule(NAME), problem_of("conv2d_nchw", **WORK, **HALF)
    for words, reason in (
        (dict(block_n=48, cluster_m=4, grid=4), "block_n=48 is not 4 times a multiple of 8 rows"),
        (dict(cluster_n=2), "cluster_n=2 would share pixels, which threads bring for their own block; give 1"),
        (dict(block_k=128), "block_k=128 is not 16, 32 or 64"),
        (dict(num_stages=40), "num_stages=40 needs"),
        (dict(pairs=2), "pairs=2 of warps that turn is not 1 or 3"),
        (dict(pairs=3, block_m=192, consumers=3), "pairs=3 is for consumers and blocks_sm of 1 and 1, 2 and 1"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem, sm_90a, SMALL | words)
    for fields, reason in (
        (dict(h=22, w=13, ci=22), "ci=22 is not a multiple of the 4 channels that are whole 16 bytes"),
        (dict(h=23, w=13, ci=20), "ci=20 is not a multiple of the 8 channels that are whole 16 bytes"),
        (dict(h=23, w=13, kh=7, pad="3,1"), "a tile looks at .* lines in 8 classes, at most 64 loads"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nchw", **WORK | fields, **HALF), sm_90a, SMALL)
    with pytest.raises(ConfigError, match="a tile looks at 264 pixels of an image side by side, TMA brings 256"):
        wide = problem_of("conv2d_nchw", **WORK | dict(h=23, w=29, kh=1, kw=1, pad=0), **HALF)
        spec.config_for(wide, sm_90a, SMALL | dict(block_m=256, block_n=16, consumers=2))
    with pytest.raises(ConfigError, match="dtype=float32 is not float16 or bfloat16"):
        spec.config_for(problem_of("conv2d_nchw", **WORK), sm_90a)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem, parse_arch("sm_80"))


def test_what_the_choice_is_told_of_memory_is_what_a_block_has(sm_90a: Arch) -> None:
    for pixels, channels in ((64, 32), (64, 64), (256, 32)):
        words = dict(block_m=pixels, block_k=channels, consumers=2 if pixels > 64 else 1)
        work = work_of(sm_90a, WORK, **words)
        assert work.a.turned is not None
        found = turned(work.given, pixels, channels)
        assert found == (work.a.turned.beside_stages, work.layout.loaded)
    odd: Any = problem_of("conv2d_nchw", **WORK | dict(h=23, w=13, kh=7, pad="3,1"), **HALF)
    assert turned(odd, 64, 32) is None


@pytest.mark.parametrize("fields", [dict(), dict(kh=1, kw=1, pad=0), dict(stride=2)], ids=str)
def test_the_space_holds_the_default(sm_90a: Arch, fields: dict[str, Any]) -> None:
    problem, spec = problem_of("conv2d_nchw", **WORK | fields, **HALF), operator("conv2d_nchw").schedule(NAME)
    assert spec.default(problem, sm_90a).check(problem, sm_90a) is None
    assert spec.default(problem, sm_90a) in spec.space(problem, sm_90a)


@pytest.mark.parametrize(
    "fields, pairs",
    [
        (dict(kh=1, kw=1, pad=0, co=512), {1, 3}),
        (dict(), {1, 3}),
        (dict(co=256), {1}),
        (dict(co=256, stride=2), {1, 3}),
    ],
    ids=str,
)
def test_pairs_are_tried_where_a_chunk_is_soon_multiplied(
    sm_90a: Arch, fields: dict[str, Any], pairs: set[int]
) -> None:
    problem = problem_of("conv2d_nchw", **WORK | fields, **HALF)
    assert {config.pairs for config in operator("conv2d_nchw").schedule(NAME).space(problem, sm_90a)} == pairs
