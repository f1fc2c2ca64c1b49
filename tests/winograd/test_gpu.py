"""Winograd's tiles on GPUs: correct in every layout, four kernels without spills, used where exact and fast enough."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.check.verify import MODES, emulated_runs, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.arithmetic import FLOAT32
from schedules.core.errors import ConfigError
from schedules.measure.choice import default_choice
from schedules.winograd.cut import cuts
from schedules.winograd.gpu import WinogradConfig, default, space
from tests.conftest import assert_correct, assert_mutants_caught, problem_of

LAYOUTS = ("conv2d_hwcn", "conv2d_nchw", "conv2d_nhwc")
SHAPES: dict[str, dict[str, Any]] = {
    "ragged, fused": dict(n=3, h=7, w=11, ci=13, co=13, kh=3, kw=3, pad=1, bias=True, activation="relu", residual=True),
    "no padding": dict(n=1, h=10, w=6, ci=8, co=4, kh=3, kw=3),
    "5x3, dilated": dict(n=2, h=13, w=9, ci=16, co=6, kh=5, kw=3, pad="4,2", dilation="2,3"),
    "a row": dict(n=4, h=3, w=15, ci=40, co=8, kh=1, kw=3, pad="0,1"),
}
SMALL: dict[str, dict[str, str]] = {  # cuts that are quick to build
    "ragged, fused": dict(tile_h="2", tile_w="4+2"),
    "no padding": dict(tile_h="4", tile_w="2"),
    "5x3, dilated": dict(tile_h="2", tile_w="2"),
    "a row": dict(tile_h="1", tile_w="4"),
}
UNEQUAL = dict(tile_h="4+2", tile_w="6+4+4")
PARTS: dict[str, Any] = dict(tile_h="4", tile_w="5", tile=(8, 8), num_thread=(4, 8), vthread=(2, 2), step=16, stages=2)
LAYER: dict[str, Any] = dict(n=16, h=56, w=56, ci=64, co=64, kh=3, kw=3, pad=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_schedule_is_correct(layout: str, shape: str) -> None:
    arch = parse_arch("gfx942" if layout == "conv2d_nchw" else "sm_80")
    assert_correct(problem_of(layout, **SHAPES[shape]), arch, "winograd", SMALL[shape], ["serial"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_generated_cuda_is_correct(emulation: None, layout: str, arch: str) -> None:
    problem = problem_of(layout, **SHAPES["ragged, fused"])
    assert_correct(problem, parse_arch(arch), "winograd", {"tile_h": "4", "tile_w": "4"}, ["emulated"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unequal_tiles_are_correct(emulation: None, sm_90a: Arch, layout: str) -> None:
    problem = problem_of(layout, n=2, h=6, w=14, ci=16, co=8, kh=3, kw=3, pad=1)
    assert_correct(problem, sm_90a, "winograd", {**UNEQUAL, "transform_warps": "3"}, ["emulated"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("words", [dict(part=32), dict(part=16, ahead=True, num_thread=(8, 4))], ids=str)
def test_channels_in_parts_are_correct(emulation: None, sm_90a: Arch, layout: str, words: dict[str, Any]) -> None:
    """Of five steps the last is a part of its own, or each is."""
    problem = problem_of(layout, n=2, h=7, w=9, ci=72, co=40, kh=3, kw=3, pad=1, bias=True)
    assert_correct(problem, sm_90a, "winograd", PARTS | words, ["emulated"])


def test_broken_parts_are_caught(emulation: None, sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nchw", n=2, h=7, w=9, ci=72, co=40, kh=3, kw=3, pad=1)
    built = build(problem, sm_90a, "winograd", PARTS | dict(part=32), device_code=False)
    assert_mutants_caught(
        built,
        {
            "only the last part": (r"(conv_local_ptr\[.*\]) = \(\1 \+ (tile_sums.*)\);", r"\1 = \2;"),
            "parts not from zero": (r"tile_sums\w*\[.*\] = 0\S+;", ";"),
            "a step too few": (r"int tile = 0; tile < min", "int tile = 1; tile < min"),
        },
        within="",
    )


def test_sums_in_parts_are_twice_as_exact(emulation: None, sm_90a: Arch) -> None:
    """In one chain the worst of these is off by 0.64 of the tolerance."""
    problem = problem_of("conv2d_nchw", n=4, h=12, w=12, ci=256, co=64, kh=3, kw=3, pad=1)
    worst = []
    for part in (0, 32):
        config = {**PARTS, "tile_w": "4", "part": part}
        built = build(problem, sm_90a, "winograd", config, device_code=False)
        arrays = built.operator.inputs(problem, np.random.default_rng(0))
        ((_, run),) = emulated_runs(built, str(built.sources["cu"]), MODES[:1])
        (expected,) = built.operator.reference(problem, arrays)
        off = np.abs(run([*arrays, *poisoned(problem)])[0] - expected.values) / expected.magnitude
        worst.append(float(off.max()) / FLOAT32.error)
        assert (built.schedule.arithmetic_of(problem, built.config) == FLOAT32) == (part > 0)
    assert worst[1] < 0.4 < 0.55 < worst[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resources(cuda_compiler: None, sm_90a: Arch, layout: str) -> None:
    built = build(problem_of(layout, **LAYER), sm_90a, "winograd")
    assert len(built.resources) == 4 and all(kernel.shared for kernel in built.resources)
    assert isinstance(built.config, WinogradConfig) and built.config.part  # two sets of sums
    for kernel in built.resources:
        assert kernel.spill_stores <= 4  # bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_amd_code_object(amd_linker: None, layout: str) -> None:
    built = build(problem_of(layout, **LAYER), parse_arch("gfx942"), "winograd")
    assembly = str(built.sources["s"])
    assert len(re.findall(r"^\s*\.amdhsa_kernel main_kernel\w*$", assembly, re.M)) == 4
    assert all(int(size) <= 64 * 1024 for size in re.findall(r"\.group_segment_fixed_size:\s+(\d+)", assembly))
    assert set(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", assembly)) == {"0"}


def test_a_batch_inside_makes_plain_vectors(sm_90a: Arch) -> None:
    """Neighbouring threads take neighbouring images, without a test or a division that depends on the image."""
    problem = problem_of("conv2d_hwcn", n=64, h=14, w=14, ci=16, co=8, kh=3, kw=3, pad=1)
    source = str(build(problem, sm_90a, "winograd", UNEQUAL, device_code=False).sources["cu"])
    accesses = re.findall(r"(?:data|products)_ptr\[.*?\+ \(\(int\)threadIdx\.x\)\)", source)
    assert accesses and not re.search(r"\(int\)threadIdx\.x\) [%/]", source)


@pytest.mark.parametrize(
    ("shape", "config", "words"),
    [
        (dict(stride=2), {}, "stride=(2, 2) is not 1"),
        (dict(dtype="float16"), {}, "dtype=float16: transforms are in float32"),
        (dict(ci=9), {}, "ci=9: sums of so few products"),
        (dict(kh=1, kw=1, pad=0), {}, "kh=kw=1 is a product already"),
        (dict(pad=2), {}, "pad=2 shows more border"),
        ({}, dict(tile_h="4+x"), "tile_h=4+x is not one to 3 of 1, 2, 3, 4, 5, 6"),
        ({}, dict(tile_w="2+4"), "tile_w=2+4: larger tiles come first"),
        (dict(kh=9, pad="4,1"), dict(tile_h="6"), "tile_h=6: no points are known for 6 outputs of 9 taps"),
        ({}, dict(tile_h="6+6+6", tile_w="6+6+6"), "need 61440 bytes of shared memory"),
        ({}, dict(transform_warps=9), "transform_warps=9 is not 1 to 8"),
        ({}, dict(part=24), "part=24 is not 0, nor a multiple of step=16 with stages=2"),
        ({}, dict(part=32, stages=1), "part=32 is not 0, nor a multiple of step=16 with stages=2"),
    ],
)
def test_illegal_configs_are_refused(sm_90a: Arch, shape: dict[str, Any], config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(problem_of("conv2d_nchw", **{**LAYER, **shape}), sm_90a, "winograd", config)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "gfx1100", "llvm"])
def test_it_is_chosen_where_it_takes_less_time(layout: str, target: str) -> None:
    arch = parse_arch(target)
    large, small = ({**LAYER, "h": size, "w": size, "ci": c, "co": c} for size, c in ((28, 256), (4, 16)))
    assert default_choice(problem_of(layout, **large), arch).schedule.startswith(("winograd", "bf16x6"))
    assert not default_choice(problem_of(layout, **{**small, "n": 1}), arch).schedule.startswith("winograd")
    half = problem_of(layout, **{**large, "dtype": "float16"})
    assert not default_choice(half, arch).schedule.startswith("winograd")


@pytest.mark.parametrize("ci", [32, 64, 512])
@pytest.mark.parametrize(
    ("kernel", "larger"),
    [(dict(kh=3, kw=3, pad=1), ("6", "6")), (dict(kh=5, kw=5, pad=2), ("4", "4")), (dict(kh=1, kw=3, pad="0,1"), ())],
)
def test_what_is_not_named_is_as_exact_as_float32(sm_90a: Arch, kernel: dict[str, Any], larger: Any, ci: int) -> None:
    problem = problem_of("conv2d_nchw", n=8, h=14, w=14, ci=ci, co=64, **kernel)
    found = [config.arithmetic_of(problem) for config in islice(space(problem, sm_90a), 0, None, 50)]
    assert found and set(found) == {FLOAT32}
    if larger:
        named = WinogradConfig(tile_h=larger[0], tile_w=larger[1])
        assert named.check(problem, sm_90a) is None and named.arithmetic_of(problem).error > FLOAT32.error


def test_the_default_takes_fewer_products(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1)
    rows, columns = default(problem, sm_90a).splits(problem)
    assert rows.points * rows.periods * columns.points * columns.periods <= 440  # directly: 1764
    chain, halves, parts = (set(cuts(problem, part)) for part in (0, 128, 32))
    assert {("4+3", "3"), ("3", "3"), ("2", "2")} <= chain and ("4", "4") not in chain
    assert chain < halves < parts and ("4", "4") in halves and ("5", "4") in parts - halves
    assert WinogradConfig().tile_h == "4"
