"""NCHW convolution from a turned copy: what it is made of, what it refuses, and whether it is right."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from tests.conftest import problem_of
from tests.hopper_kernels import assert_correct_on, assert_emulated, assert_well_made

NAME = "tma_wgmma_turned"
WORK: dict[str, Any] = dict(n=8, h=14, w=14, ci=128, co=128, kh=3, kw=3, pad=1)
# pixels are turned in pairs and one by one; results are stored in vectors of 8, 4, 2 and 1
SHAPES: dict[str, dict[str, Any]] = {
    "whole vectors": dict(n=2, h=8, w=8, ci=64, co=64, kh=3, kw=3, pad=1),
    "vectors of four, stride 2": dict(n=3, h=14, w=14, ci=24, co=40, kh=3, kw=3, pad=1, stride=2, bias=True),
    "single pixels": dict(n=3, h=7, w=7, ci=16, co=70, kh=3, kw=3, pad=1, bias=True, activation="relu"),
    "ragged channels, remainders of different sizes": dict(
        n=2, h=9, w=13, ci=20, co=33, kh=3, kw=3, pad=1, stride=2, residual=True
    ),
    "remainders that no tap looks at": dict(
        n=2, h=11, w=10, ci=16, co=24, kh=3, kw=2, pad="2,1", stride="2,3", dilation="2,1"
    ),
    "a 1x1 kernel that leaves pixels out": dict(n=2, h=14, w=14, ci=32, co=48, kh=1, kw=1, stride=2),
    "1x1": dict(n=3, h=7, w=7, ci=32, co=48, kh=1, kw=1, bias=True),
    "whole planes, in blocks that are not alike": dict(n=2, h=7, w=7, ci=72, co=16, kh=1, kw=1),
    "whole planes of pairs": dict(n=2, h=6, w=6, ci=80, co=24, kh=3, kw=3, pad=1, stride=2),
    "one pixel": dict(n=5, h=1, w=1, ci=32, co=48, kh=1, kw=1, bias=True),
    "one pixel, ragged": dict(n=5, h=1, w=1, ci=12, co=10, kh=1, kw=1, residual=True),
    "the whole image": dict(n=5, h=3, w=3, ci=8, co=48, kh=3, kw=3),
    "the whole image, ragged": dict(n=5, h=3, w=3, ci=5, co=10, kh=3, kw=3),
    "packed, ragged": dict(n=2, h=8, w=8, ci=12, co=24, kh=3, kw=3, pad=1, filter_layout="hwoi"),
    "padding wider than the image": dict(n=2, h=2, w=3, ci=8, co=16, kh=5, kw=7, pad="4,6"),
    "bfloat16": dict(n=1, h=12, w=10, ci=16, co=24, kh=3, kw=3, pad=1, dtype="bfloat16", bias=True, residual=True),
}
CONFIGS: list[dict[str, Any]] = [
    dict(block_m=128, block_n=64, block_k=32, consumers=2, cluster_m=1, cluster_n=1, grid=4, lines_outside=True),
    dict(block_m=128, block_n=64, block_k=32, consumers=2, cluster_m=1, cluster_n=1, grid=4, lines_outside=False),
    dict(block_m=256, block_n=32, block_k=16, consumers=2, cluster_m=2, cluster_n=2, grid=4, lines_outside=True),
    dict(block_m=64, block_n=48, block_k=16, consumers=1, cluster_m=1, cluster_n=4, grid=4, lines_outside=False),
    dict(block_m=128, block_n=32, block_k=16, consumers=2, cluster_m=1, cluster_n=1, split_k=2, grid=4,
         lines_outside=True),
    dict(block_m=64, block_n=32, block_k=16, consumers=2, cluster_m=1, cluster_n=1, ping_pong=True, grid=2,
         lines_outside=False),
    dict(block_m=64, block_n=64, block_k=16, consumers=1, cluster_m=1, cluster_n=1, blocks_sm=2, grid=3,
         stationary=True, lines_outside=True, num_stages=2),
    dict(block_m=192, block_n=32, block_k=32, consumers=3, cluster_m=1, cluster_n=2, grid=4, lines_outside=False,
         whole_sectors=True),
    dict(block_m=64, block_n=32, block_k=32, consumers=2, cluster_m=1, cluster_n=1, ping_pong=True, grid=2,
         lines_outside=False, whole_sectors=True),
    dict(block_m=64, block_n=16, block_k=32, consumers=1, cluster_m=2, cluster_n=1, grid=4, lines_outside=False,
         gathered=True, whole_sectors=True),
    dict(block_m=128, block_n=32, block_k=64, consumers=2, cluster_m=2, cluster_n=1, grid=4, lines_outside=False,
         gathered=True),
]  # fmt: skip
CONFIGS = [dict(num_stages=3, split_k=1, gathered=False, whole_sectors=False) | words for words in CONFIGS]
ODD = dict(n=3, h=9, w=13, ci=24, co=40, kh=3, kw=3, pad=1, stride="2,1", bias=True)


@pytest.fixture(params=SHAPES)
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(dtype="float16") | SHAPES[request.param]


def test_emulated(emulation: None, fields: dict[str, Any]) -> None:
    assert_emulated("conv2d_nchw", fields, {}, NAME)


@pytest.mark.parametrize("words", CONFIGS, ids=str)
def test_configs_emulated(emulation: None, words: dict[str, Any]) -> None:
    small = dict(co=32, ci=16) if words.get("stationary") else {}
    assert_emulated("conv2d_nchw", dict(dtype="float16") | ODD | small, words, NAME)


@pytest.mark.parametrize("lines_outside", [False, True])
def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch, lines_outside: bool) -> None:
    words = CONFIGS[0] | dict(grid=0, lines_outside=lines_outside)
    built = build(problem_of("conv2d_nchw", **WORK, dtype="float16"), sm_90a, NAME, words)
    assert_well_made(built, "HGMMA", stored_by_tma=False)
    source = str(built.sources["cu"])
    assert len(built.resources) == 2 and all(each.stack == 0 for each in built.resources)
    # an image of 196 pixels is turned in pairs, and leaves in vectors of four, or by lines of 14 in vectors of two
    assert "nchw_column_2(" in source and f"hopper_copy_part_{2 if lines_outside else 4}(" in source
    # the product is launched while the copy is made, and waits before it loads; what follows is while it multiplies
    assert source.count("griddepcontrol_launch_dependents();") == 2 and source.count("griddepcontrol_wait();") == 1
    assert built.lowered.count("use_programtic_dependent_launch") == 1  # sic
    lines = 14 * 15 if lines_outside else 15 * 15
    assert built.launch and built.launch.grid[0] == -(-8 * lines // 128) * 2


@pytest.mark.parametrize("images, whole", [(1, False), (256, True)])
def test_larger_planes_are_whole_where_blocks_remain(
    emulation: None, monkeypatch: pytest.MonkeyPatch, images: int, whole: bool
) -> None:
    monkeypatch.setattr("schedules.operators.conv2d_nchw.turn.FEWEST", 256 // images)
    fields = dict(n=2, h=14, w=14, ci=24, co=16, kh=3, kw=3, pad=1, dtype="float16")
    built = assert_emulated("conv2d_nchw", fields, CONFIGS[1], NAME)
    assert ("cp_async_bulk_g2s" in str(built.sources["cu"])) == whole


@pytest.mark.parametrize("shape", ["one pixel", "the whole image"])
def test_what_lies_in_line_is_one_kernel(cuda_compiler: None, sm_90a: Arch, shape: str) -> None:
    words = dict(gathered=False, lines_outside=False)
    built = build(problem_of("conv2d_nchw", dtype="float16", **SHAPES[shape]), sm_90a, NAME, words)
    assert_well_made(built, "HGMMA")
    assert len(built.resources) == 1
    assert "nchw_turn" not in str(built.sources["cu"])


@pytest.mark.parametrize(
    "shape", ["single pixels", "remainders that no tap looks at", "ragged channels, remainders of different sizes",
              "the whole image, ragged", "bfloat16"],
)  # fmt: skip
def test_gathered_emulated(emulation: None, shape: str) -> None:
    assert_emulated("conv2d_nchw", dict(dtype="float16") | SHAPES[shape], CONFIGS[-1], NAME)


def test_several_outputs_of_a_thread_emulated(emulation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedules.operators.conv2d_nchw.turn.MANY", 1)  # as if blocks were left
    fields = dict(n=3, h=7, w=9, ci=24, co=16, kh=3, kw=3, pad=1, dtype="float16")
    built = assert_emulated("conv2d_nchw", fields, CONFIGS[-1], NAME)
    assert str(built.sources["cu"]).count("nchw_gather((") == 4


TILES: dict[str, dict[str, Any]] = {
    "several pieces of an image, ragged, to the tensor's last bytes": dict(n=3, h=9, w=17, ci=11, co=24),
    "images that share a tile": dict(n=5, h=3, w=5, ci=40, co=24),
    "more groups of channels than a block has": dict(n=2, h=5, w=7, ci=80, co=24, kh=3, kw=3, pad=1),
    "rows that a stride leaves": dict(n=2, h=9, w=23, ci=24, co=16, stride="3,1"),
    "rows in pieces": dict(n=2, h=5, w=131, ci=8, co=16, stride="2,2"),
    "planes of both remainders": dict(n=2, h=9, w=15, ci=16, co=24, kh=3, kw=3, stride=2),
    "pixels in pairs": dict(n=3, h=9, w=14, ci=20, co=24, kh=3, kw=3, pad=1),
    "rows in pairs, of which a stride leaves some": dict(n=2, h=7, w=70, ci=16, co=24, stride=2),
}


@pytest.mark.parametrize("fields", [dict(w=24, ci=24), dict(w=12, ci=20)], ids=["eight pixels", "four, ragged"])
def test_rows_that_a_stride_leaves_are_turned_in_registers_emulated(emulation: None, fields: dict[str, Any]) -> None:
    rows = dict(n=3, h=7, co=24, kh=1, kw=1, stride="3,1", dtype="float16")
    built = assert_emulated("conv2d_nchw", rows | fields, dict(gathered=False), NAME)
    assert f"nchw_turn_{8 if fields['w'] == 24 else 4}((" in str(built.sources["cu"])


@pytest.mark.parametrize("shape", TILES)
def test_turned_by_way_of_shared_memory_emulated(emulation: None, shape: str) -> None:
    fields = dict(kh=1, kw=1) | TILES[shape]
    for dtype in ("float16", "bfloat16") if shape == next(iter(TILES)) else ("float16",):
        built = assert_emulated("conv2d_nchw", dict(dtype=dtype, **fields), dict(gathered=False), NAME)
        assert str(built.sources["cu"]).count(f"nchw_column_{2 - fields['w'] % 2}((") == 1


def test_filters_larger_than_the_data_are_taken_as_they_lie(cuda_compiler: None, sm_90a: Arch) -> None:
    few = problem_of("conv2d_nchw", dtype="float16", n=2, h=8, w=8, ci=1280, co=1280, kh=3, kw=3, pad=1)
    built = build(few, sm_90a, NAME)
    config: Any = built.config
    assert config.gathered and "nchw_repack" not in str(built.sources["cu"])
    default: Any = (
        operator("conv2d_nchw").schedule(NAME).config_for(problem_of("conv2d_nchw", dtype="float16", **WORK), sm_90a)
    )
    assert not default.gathered


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec, problem = operator("conv2d_nchw").schedule(NAME), problem_of("conv2d_nchw", **WORK, dtype="float16")
    for words, reason in (
        (dict(block_n=48, cluster_m=4), "block_n=48 is not 4 times a multiple of 8 rows"),
        (dict(block_m=96), "block_m=96 gives each of 2 consumers no multiple of 64 rows"),
        (dict(num_stages=40), "num_stages=40 needs"),
        (dict(gathered=True), "gathered=True has no zeros between lines, lines_outside must be false"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem, sm_90a, CONFIGS[0] | words)
    for fields in (dict(filter_layout="hwoi"), dict(kh=1, kw=1)):
        with pytest.raises(ConfigError, match="gathered=True is for filters of several taps as they lie"):
            spec.config_for(problem_of("conv2d_nchw", **WORK | fields, dtype="float16"), sm_90a, CONFIGS[-1])
    with pytest.raises(ConfigError, match="dtype=float32 is not float16 or bfloat16"):
        spec.config_for(problem_of("conv2d_nchw", **WORK), sm_90a)
    with pytest.raises(ConfigError, match="data has 2\\*\\*31 elements or more"):
        huge = dict(WORK, n=4096, h=56, w=56, ci=256)
        spec.config_for(problem_of("conv2d_nchw", **huge, dtype="float16"), sm_90a)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem, parse_arch("sm_80"))


@pytest.mark.parametrize("fields", [dict(), dict(n=1, w=56, h=56), dict(kh=1, kw=1, pad=0, stride=2)], ids=str)
def test_the_space_holds_the_default(sm_90a: Arch, fields: dict[str, Any]) -> None:
    problem, spec = problem_of("conv2d_nchw", dtype="float16", **WORK | fields), operator("conv2d_nchw").schedule(NAME)
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)


def test_it_serves_what_others_cannot_load(sm_90a: Arch) -> None:
    for changes in (dict(), dict(w=16, stride=2), dict(w=16, ci=20), dict(n=2, h=8, w=8, ci=1280, co=1280)):
        problem = problem_of("conv2d_nchw", dtype="float16", **WORK | changes)
        assert operator("conv2d_nchw").schedule(NAME).serves(problem, sm_90a)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, *CONFIGS], ids=str)
def test_on_a_device(gpu: Arch, fields: dict[str, Any], words: dict[str, Any]) -> None:
    assert_correct_on(gpu, "conv2d_nchw", fields, words, NAME)


def test_filters_behind_many_blocks_of_pixels_are_packed(sm_90a: Arch) -> None:
    """The number of the first block that packs, times the filter's length, does not fit into 32 bits."""
    problem = problem_of("conv2d_nchw", n=64, h=384, w=384, ci=9, co=64, kh=16, kw=16, stride=16, dtype="float16")
    config = dict(block_m=128, block_n=64, block_k=16, num_stages=4, consumers=2, cluster_m=1, cluster_n=1, split_k=1)
    fields = dict(grid=132, blocks_sm=1, ping_pong=False, stationary=False, lines_outside=False, gathered=False)
    build(problem, sm_90a, "tma_wgmma_turned", config | fields, device_code=False)


@pytest.mark.parametrize(
    "fields",
    [
        dict(n=2, h=17, w=19, ci=24, co=33, kh=1, kw=1, bias=True, residual=True),
        dict(n=2, h=21, w=13, ci=16, co=17, kh=3, kw=3, pad=1),
        dict(n=2, h=33, w=35, ci=16, co=24, kh=3, kw=3, pad=1, stride=2),
        dict(n=5, h=7, w=7, ci=16, co=48, kh=3, kw=3, pad=1, residual=True),
        dict(n=7, h=3, w=5, ci=16, co=8, kh=1, kw=1, dtype="bfloat16"),
        dict(n=2, h=17, w=17, ci=16, co=24, kh=7, kw=1, pad="3,0"),
    ],
    ids=str,
)
def test_whole_sectors_emulated(emulation: None, fields: dict[str, Any]) -> None:
    """Planes of odd sizes, in tiles that overlap, or have whole images; of what is computed twice one is stored."""
    words = CONFIGS[0] | dict(block_m=64, block_n=32, consumers=1, lines_outside=False, whole_sectors=True)
    assert_emulated("conv2d_nchw", dict(dtype="float16") | fields, words, NAME)


def test_whole_sectors_say_why_not(sm_90a: Arch) -> None:
    words = CONFIGS[0] | dict(whole_sectors=True)
    for fields, more, reason in (
        (dict(h=9, w=9, ci=16, co=16), dict(lines_outside=True), "lines_outside must be false"),
        (dict(h=7, w=7, ci=16, co=20), dict(), "co=20 are no multiple"),
        (dict(h=90, w=1, ci=16, co=16, pad=4, dilation=4), dict(block_m=64, consumers=1), "not many more"),
        (dict(h=9, w=9, ci=64, co=16), dict(split_k=2), "give ping_pong=true"),
    ):
        problem = problem_of("conv2d_nchw", **dict(n=2, kh=3, kw=3, pad=1, dtype="float16") | fields)
        with pytest.raises(ConfigError, match=reason):
            operator("conv2d_nchw").schedule(NAME).config_for(problem, sm_90a, words | dict(lines_outside=False) | more)


def test_the_kernel_before_has_no_more_shared_memory_than_a_launch_gives(cuda_compiler: None, sm_90a: Arch) -> None:
    """Of what it turns, which the launch is told, and of the filter, which is the kernel's own, together."""
    fields = dict(n=256, h=20, w=20, ci=32, co=64, kh=4, kw=4, stride=2, dtype="float16")
    built = build(problem_of("conv2d_nchw", **fields), sm_90a, NAME)
    own = {each.name: each.shared for each in built.resources}
    assert built.launches
    kernel = built.launches["kernels"][0]
    assert kernel["shared"] > 0 and own[kernel["symbol"]] + kernel["shared"] <= 48 * 1024
