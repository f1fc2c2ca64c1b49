"""Winograd's tiles on GPUs: correct in every layout, four kernels without spills, only by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.winograd.cut import cuts
from schedules.winograd.gpu import WinogradConfig, default
from tests.conftest import assert_correct, problem_of

LAYOUTS = ("conv2d_hwcn", "conv2d_nchw", "conv2d_nhwc")
SHAPES: dict[str, dict[str, Any]] = {
    "ragged, fused": dict(n=3, h=7, w=11, ci=5, co=13, kh=3, kw=3, pad=1, bias=True, activation="relu", residual=True),
    "no padding": dict(n=1, h=10, w=6, ci=8, co=4, kh=3, kw=3),
    "5x3, dilated": dict(n=2, h=13, w=9, ci=4, co=6, kh=5, kw=3, pad="4,2", dilation="2,3"),
    "a row": dict(n=4, h=3, w=15, ci=4, co=8, kh=1, kw=3, pad="0,1"),
}
SMALL: dict[str, dict[str, str]] = {  # cuts that are quick to build
    "ragged, fused": dict(tile_h="2", tile_w="4+2"),
    "no padding": dict(tile_h="4", tile_w="2"),
    "5x3, dilated": dict(tile_h="2", tile_w="2"),
    "a row": dict(tile_h="1", tile_w="4"),
}
UNEQUAL = dict(tile_h="4+2", tile_w="6+4+4")
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
    problem = problem_of(layout, n=2, h=6, w=14, ci=4, co=8, kh=3, kw=3, pad=1)
    assert_correct(problem, sm_90a, "winograd", {**UNEQUAL, "transform_warps": "3"}, ["emulated"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resources(cuda_compiler: None, sm_90a: Arch, layout: str) -> None:
    built = build(problem_of(layout, **LAYER), sm_90a, "winograd")
    assert len(built.resources) == 4 and all(kernel.shared for kernel in built.resources)
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
    problem = problem_of("conv2d_hwcn", n=64, h=14, w=14, ci=8, co=8, kh=3, kw=3, pad=1)
    source = str(build(problem, sm_90a, "winograd", UNEQUAL, device_code=False).sources["cu"])
    accesses = re.findall(r"(?:data|products)_ptr\[.*?\+ \(\(int\)threadIdx\.x\)\)", source)
    assert accesses and not re.search(r"\(int\)threadIdx\.x\) [%/]", source)


@pytest.mark.parametrize(
    ("shape", "config", "words"),
    [
        (dict(stride=2), {}, "stride=(2, 2) is not 1"),
        (dict(dtype="float16"), {}, "dtype=float16: transforms are in float32"),
        (dict(ci=3), {}, "ci=3: sums over fewer than 4 channels"),
        (dict(kh=1, kw=1, pad=0), {}, "kh=kw=1 is a product already"),
        (dict(pad=2), {}, "pad=2 shows more border"),
        ({}, dict(tile_h="4+x"), "tile_h=4+x is not one to 3 of 1, 2, 4, 6"),
        ({}, dict(tile_w="2+4"), "tile_w=2+4: larger tiles come first"),
        ({}, dict(tile_h="1"), "tile_h=1: 1 outputs of 3 taps take 3 points"),
        ({}, dict(tile_h="6+6+6", tile_w="6+6+6"), "need 61440 bytes of shared memory"),
        ({}, dict(transform_warps=9), "transform_warps=9 is not 1 to 8"),
    ],
)
def test_illegal_configs_are_refused(sm_90a: Arch, shape: dict[str, Any], config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(problem_of("conv2d_nchw", **{**LAYER, **shape}), sm_90a, "winograd", config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_by_name(sm_90a: Arch, host: Arch, layout: str) -> None:
    for arch in (sm_90a, host):
        assert not any(spec.name.startswith("winograd") for spec in operator(layout).offered(arch))


def test_the_default_takes_fewer_products(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1)
    rows, columns = default(problem, sm_90a).splits(problem)
    assert rows.points * columns.points <= 400  # 14 = 6 + 4 + 4 or 6 + 6 + 2; direct multiplication: 1764
    assert {"6", "4+2", "6+4+4"} <= set(cuts(3, 14)) and WinogradConfig().tile_h == "4"
