from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch, physical_cores, vector_unit
from schedules.core.errors import ConfigError
from schedules.operators.conv2d_nhwc.cpu import CpuConfig, default, estimated, is_alone, rows_of
from tests.conftest import assert_changes_the_source, assert_correct, problem_of
from tests.operators.conv2d_nhwc.shapes import SHAPES


# each shape in two of the dtypes
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (shape, dtype)
        for i, shape in enumerate(SHAPES)
        for j, dtype in enumerate(("float32", "float16", "bfloat16"))
        if (i + j) % 3
    ],
)
def test_it_is_correct(host: Arch, shape: str, dtype: str) -> None:
    assert_correct(problem_of("conv2d_nhwc", **SHAPES[shape], dtype=dtype), host, "cpu")


@pytest.mark.parametrize("shape", ["1x1", "ragged, stride 2", "asymmetric, stride 3, dilated"])
@pytest.mark.parametrize(
    "config",
    [
        dict(vector=4, block_lanes=3, block_x=5, tiles_x=2, chunk=1),
        dict(vector=8, block_x=1, tiles_y=3, chunk=2),
        dict(vector=1),
    ],
    ids=str,
)
def test_other_configs_are_correct(host: Arch, shape: str, config: dict[str, Any]) -> None:
    assert_correct(problem_of("conv2d_nhwc", **SHAPES[shape]), host, "cpu", config)


def test_default_fits_the_registers_and_the_problem(host: Arch) -> None:
    problem = problem_of("conv2d_nhwc", n=1, h=14, w=14, ci=8, co=64, kh=3, kw=3, pad=1, dtype="float32")
    for target, vector in (("llvm:x86-64-v4", 16), ("llvm:x86-64-v3", 8), ("llvm:x86-64", 4)):
        arch = parse_arch(target)
        config = default(problem, arch)
        assert config.vector == vector and config.sums + config.block_lanes < vector_unit(arch).registers
    short = default(problem_of("conv2d_nhwc", n=1, h=3, w=3, ci=8, co=3, kh=3, kw=3), host)
    assert short.panel <= 8 and short.block_x == 1


def test_sums_stay_in_registers() -> None:
    """No store and no spill in the inner loop."""
    problem = problem_of("conv2d_nhwc", n=1, h=12, w=12, ci=64, co=32, kh=3, kw=3, pad=1, dtype="float32")
    config = dict(vector=8, block_lanes=2, block_x=4)
    built = build(problem, parse_arch("llvm:x86-64-v3"), "cpu", config)
    blocks = re.split(r"^\.LBB\w+:", str(built.sources["s"]), flags=re.M)
    loop = max((text.split("\tj")[0] for text in blocks), key=lambda text: text.count("vfmadd"))
    assert loop.count("vfmadd") % 8 == 0 and "rsp" not in loop and not re.search(r"vmovups\s+%ymm\d+, ", loop)


@pytest.mark.parametrize("size", [dict(kh=1, kw=1), dict(kh=3, kw=3, pad=1)], ids=str)
def test_default_tasks_cover_the_cores(host: Arch, size: dict[str, int]) -> None:
    small = problem_of("conv2d_nhwc", n=1, h=7, w=7, ci=512, co=512, dtype="float32", **size)
    config = default(small, host)
    rows, columns, channels = config.counts(small)
    tasks = -(-rows // config.tiles_y) * -(-columns // config.tiles_x) * -(-channels // (config.chunk or channels))
    assert tasks >= physical_cores()


def test_pixels_of_pointwise_layers_are_one_row(host: Arch) -> None:
    problem = problem_of("conv2d_nhwc", n=3, h=5, w=7, ci=4, co=8, kh=1, kw=1, dtype="float32")
    assert rows_of(problem) == (1, 1, 105)
    assert rows_of(replace(problem, stride=(2, 1))) == (3, 3, 7)


def test_a_task_that_owns_all_pixels_packs_its_own_filters(host: Arch) -> None:
    problem = problem_of("conv2d_nhwc", n=1, h=7, w=6, ci=20, co=40, kh=3, kw=3, pad=1, dtype="float32")
    config = dict(vector=8, block_lanes=2, block_x=4, tiles_x=2, chunk=1)
    made = CpuConfig(**config, tiles_y=7)  # type: ignore[arg-type]
    assert is_alone(made, problem)
    assert not any(is_alone(other, problem) for other in (replace(made, tiles_y=6), replace(made, tiles_x=1)))
    assert not is_alone(made, replace(problem, n=2)) and is_alone(replace(made, tiles_n=2), replace(problem, n=2))
    assert not is_alone(replace(made, tiles_n=2), replace(problem, n=2, n_from=1))
    for n, tiles in ((1, dict(tiles_y=7)), (1, dict(tiles_y=4)), (3, dict(tiles_y=7, tiles_n=3))):
        assert_correct(replace(problem, n=n), host, "cpu", {**config, **tiles})


@pytest.mark.parametrize("tiles_n", [2, 3, 9])
def test_a_task_may_own_images(host: Arch, tiles_n: int) -> None:
    """The last of five is alone, or there are more than those."""
    problem = problem_of("conv2d_nhwc", n=5, h=5, w=6, ci=9, co=20, kh=3, kw=3, pad=1, stride=2, dtype="float32")
    config = dict(vector=8, block_lanes=1, block_x=2, tiles_x=2, tiles_y=3)
    assert_correct(problem, host, "cpu", {**config, "tiles_n": tiles_n})


def test_any_number_of_images_is_computed_one_by_one(host: Arch) -> None:
    problem = problem_of("conv2d_nhwc", n=8, h=7, w=7, ci=64, co=64, kh=3, kw=3, pad=1, n_from=1)
    assert default(problem, host).tiles_n == 1
    with pytest.raises(ConfigError, match="tiles_n=2 is for a number of images that is known; use tiles_n=1"):
        build(problem, host, "cpu", dict(tiles_n=2))


def test_a_few_pixels_of_large_filters_are_owned_by_their_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedules.operators.conv2d_nhwc.cpu.physical_cores", lambda: 2)
    arch, chosen = parse_arch("llvm:x86-64-v4"), estimated.__wrapped__
    problem = problem_of("conv2d_nhwc", n=1, h=16, w=16, ci=1280, co=1280, kh=3, kw=3, stride=2, pad=1)
    assert is_alone(chosen(problem, arch)[1], problem)
    many = replace(problem, h=128, w=128, ci=128, co=128)
    assert not is_alone(chosen(many, arch)[1], many)


def test_outputs_go_past_the_caches(host: Arch) -> None:
    problem = problem_of("conv2d_nhwc", n=2, h=7, w=6, ci=20, co=32, kh=3, kw=3, pad=1, dtype="float32", bias=True)
    config = CpuConfig(block_lanes=2, block_x=4)
    assert_changes_the_source(problem, host, "cpu", config, streaming="stores")
    assert_correct(problem, host, "cpu", replace(config, streaming="stores").to_json())
    ragged = replace(config, streaming="stores").check(replace(problem, co=40), host)
    assert ragged and "rows of whole tiles" in ragged
