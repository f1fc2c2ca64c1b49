"""A row split over blocks: right however the parts fall, and what the generated code is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import Built, build
from schedules.build.inspect import material, summary
from schedules.check.verify import emulated_runs, judge, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.operator import Array
from schedules.core.registry import operator
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem
from schedules.operators.softmax.split import SCHEDULE, SplitConfig
from tests.conftest import ROCM_ARCHES, assert_correct, caught, problem_of

# parts of 64 or 128 columns: a row of a few hundred has several
SMALL = dict(threads=32, packs=2, vector=1)
ROUTES = ["serial", "emulated"]


def softmax(**fields: Any) -> SoftmaxProblem:
    problem = problem_of("softmax", **fields)
    assert isinstance(problem, SoftmaxProblem)
    return problem


def run(built: Built, arrays: list[Array], rows: int) -> list[Array]:
    """The outputs for `arrays` of `rows` rows, by the emulator in its first mode."""
    problem = replace(built.problem, rows=rows)  # type: ignore[call-arg]
    for _, call in emulated_runs(built, str(built.sources["cu"])):
        return call([*arrays, *poisoned(problem)])
    raise AssertionError


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "cols"), [("float16", 1023), ("float32", 1024)])
def test_every_function(emulation: None, sm_90a: Arch, function: str, dtype: str, cols: int) -> None:
    problem = softmax(rows=3, cols=cols, function=function, dtype=dtype)
    assert_correct(problem, sm_90a, "split", SMALL, ROUTES)


# every two of them together
@pytest.mark.parametrize(
    ("function", "mask", "keep"),
    [("softmax", "full", 1.0), ("softmax", "cols", 0.8), ("log_softmax", "full", 0.8), ("log_softmax", "cols", 1.0)],
)
def test_scale_masks_and_dropout(emulation: None, sm_90a: Arch, function: str, mask: str, keep: float) -> None:
    problem = softmax(rows=3, cols=600, function=function, mask=mask, keep=keep, scale=-0.5)
    assert_correct(problem, sm_90a, "split", dict(threads=64, packs=2, vector=4), ROUTES)


@pytest.mark.parametrize("function", ["softmax_grad", "log_softmax_grad"])
def test_gradients_with_scale_and_dropout(emulation: None, sm_90a: Arch, function: str) -> None:
    problem = softmax(rows=3, cols=777, function=function, keep=0.7, scale=0.3, dtype="float32")
    assert_correct(problem, sm_90a, "split", SMALL, ROUTES)


@settings(max_examples=8)
@given(
    rows=st.integers(1, 5), cols=st.integers(1, 3000), function=st.sampled_from(FUNCTIONS),
    dtype=st.sampled_from(["float16", "float32"]), mask=st.sampled_from(["none", "full", "cols"]),
    keep=st.sampled_from([1.0, 0.8]), threads=st.sampled_from([64, 128, 256]), packs=st.integers(1, 5),
    target=st.sampled_from(["sm_90a", "gfx90a"]),
)  # fmt: skip
def test_any_shape_is_correct(
    rows: int, cols: int, function: str, dtype: str, mask: str, keep: float, threads: int, packs: int, target: str
) -> None:
    mask = "none" if function.endswith("grad") else mask
    problem = softmax(rows=rows, cols=cols, function=function, dtype=dtype, mask=mask, keep=keep)
    assert_correct(problem, parse_arch(target), "split", dict(threads=threads, packs=packs), ["serial"])


@pytest.mark.parametrize(("rows", "cols"), [(1, 50257), (8, 50257), (1, 2**20), (132, 40000)])
def test_long_rows(sm_90a: Arch, rows: int, cols: int) -> None:
    assert_correct(softmax(rows=rows, cols=cols), sm_90a, "split", routes=["serial"])


@pytest.mark.parametrize("cols", [50257, 2**18])
def test_long_rows_in_cuda(emulation: None, sm_90a: Arch, cols: int) -> None:
    problem = softmax(rows=1, cols=cols)
    built = build(problem, sm_90a, "split", device_code=False)
    arrays = list(built.operator.inputs(problem, np.random.default_rng(0)))
    assert judge(problem, arrays, run(built, arrays, 1)).passed


def test_one_build_serves_any_number_of_rows(emulation: None, sm_90a: Arch) -> None:
    built = build(softmax(rows=1, cols=200), sm_90a, "split", SMALL, device_code=False)
    for rows in (1, 2, 300):
        problem = softmax(rows=rows, cols=200)
        arrays = list(built.operator.inputs(problem, np.random.default_rng(rows)))
        assert judge(problem, arrays, run(built, arrays, rows)).passed


def test_rows_and_parts_share_the_one_grid_axis_without_a_limit_of_65535(sm_90a: Arch) -> None:
    built = build(softmax(rows=1, cols=200), sm_90a, "split", SMALL, device_code=False)
    assert built.launch and built.launch.grid[1:] == (1, 1)
    assert str(built.launch.grid[0]).startswith("rows *")
    assert "blockIdx.y" not in str(built.sources["cu"])


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("scale", [1.0, -2.0])
def test_special_rows(emulation: None, sm_90a: Arch, function: str, scale: float) -> None:
    """Columns that are masked, infinite or NaN, in one part of four or in all of them, come out as in PyTorch."""
    problem = softmax(rows=13, cols=250, function=function, dtype="float32", scale=scale)
    lowest = -np.inf * scale
    rng = np.random.default_rng(3)
    x = rng.standard_normal((13, 250)).astype(np.float32)
    parts = [slice(0, 64), slice(64, 128), slice(128, 192), slice(192, 250)]
    x[0] = lowest  # the whole row: NaN
    x[1, parts[0]] = lowest  # whole parts: no share in the row
    x[2, parts[2]] = lowest
    x[3, parts[3]] = lowest
    x[4, :249] = lowest  # all but one column
    x[5, 70] = np.nan
    x[6, 249] = -lowest
    x[7, parts[1]] = np.nan
    x[8, parts[1]] = -lowest
    x[9, parts[0]], x[9, 100] = lowest, np.nan
    x[10, parts[0]], x[10, 200] = lowest, -lowest
    x[11] *= 1e30
    x[12, parts[0]] = np.finfo(np.float32).min / abs(scale)
    built = build(problem, sm_90a, "split", SMALL, device_code=False)
    assert SplitConfig(**SMALL).packing(problem).parts == len(parts)
    (y,) = run(built, [x], 13)
    assert judge(problem, [x], [y]).passed
    assert [bool(np.isnan(row).all()) for row in y] == [i in (0, 5, 6, 7, 8, 9, 10) for i in range(13)]


@pytest.mark.parametrize("mask", ["full", "cols"])
def test_a_part_that_is_masked_throughout(emulation: None, sm_90a: Arch, mask: str) -> None:
    problem = softmax(rows=3, cols=250, mask=mask, keep=0.5)
    built = build(problem, sm_90a, "split", SMALL, device_code=False)
    x, masked, drop = built.operator.inputs(problem, np.random.default_rng(0))
    masked = masked.copy()
    masked[..., 64:192] = -np.inf
    y, output = run(built, [x, masked, drop], 3)
    assert judge(problem, [x, masked, drop], [y, output]).passed
    assert not y[:, 64:192].any() and not np.isnan(y).any()


def test_wrong_ways_to_combine_are_caught(emulation: None, sm_90a: Arch) -> None:
    problem = softmax(rows=6, cols=2600, dtype="float32")  # 41 parts: more than one to some threads, none to others
    built = build(problem, sm_90a, "split", SMALL, device_code=False)
    source = str(built.sources["cu"])
    arrays = list(built.operator.inputs(problem, np.random.default_rng(0)))
    (usual,) = arrays
    raised = usual.copy()
    raised[0, :100] += 200  # a peak that only the first parts have
    assert not caught(built, source, [usual]) and not caught(built, source, [raised])

    def mutant(pattern: str, replacement: str) -> str:
        found, count = re.subn(pattern, replacement, source)
        assert count == 1, pattern
        return found

    peak, total = r"(peak_shares_local_ptr\[\w+\])", r"(total_shares_local_ptr\[\w+\])"
    factor = rf"{total} \* exp2f\(\(\({peak} - peak_local_ptr\[0\]\) \* [^)]*\)\)"
    assert caught(built, mutant(factor, r"\1"), [usual])  # totals added as if the parts had one peak
    assert caught(built, mutant(rf"max\(in_thread_peak_local_ptr\[0\], {peak}\)", r"\1"), [raised])
    neutral = r"(condval_\w+ = )-0x1\.fffffep\+127f(?=[^;]*;\s*\}\s*peak_shares)"
    assert caught(built, mutant(neutral, r"\g<1>1000.0f"), [usual])
    assert caught(built, mutant(r"(?<=threadIdx\.x\)) < \(int64_t\)2\)", " < (int64_t)1)"), [usual])  # no total stored
    assert caught(built, mutant(r"partials_ptr\[(?=[^;]*\] = condval)", "partials_ptr[1 + "), [usual])


@pytest.mark.parametrize("rows", [1, 8, 132])
@pytest.mark.parametrize("fields", [{}, dict(function="softmax_grad", dtype="float32")], ids=str)
def test_a_row_of_a_million_columns(cuda_compiler: None, sm_90a: Arch, rows: int, fields: dict[str, Any]) -> None:
    """Two kernels without spills that move 128 bits at a time; the second waits at no barrier."""
    problem = softmax(rows=rows, cols=2**20, **fields)
    built = build(problem, sm_90a, "split")
    assert isinstance(built.config, SplitConfig)
    assert len(built.resources) == 2
    assert all(k.spill_stores == k.spill_loads == k.stack == 0 for k in built.resources)
    config = built.config
    packing = config.packing(problem)
    counts = summary(material(built)).counts
    inputs = 2 if problem.is_grad else 1
    assert counts["global load 128-bit"] == 2 * inputs * packing.rounds
    assert counts["global store 128-bit"] == packing.rounds
    # beside those: each number of each part that a thread combines, and the first kernel's one store
    numbers = 1 if problem.is_grad else 2
    assert counts["global load"] == numbers * packing.parts // sm_90a.wave
    assert counts["global store"] == 1
    source = str(built.sources["cu"])
    assert "__syncthreads" not in source[source.rindex('extern "C"') :]
    assert rows * packing.parts >= 256


@pytest.mark.parametrize("arch", [parse_arch("sm_75"), parse_arch("sm_90a"), *ROCM_ARCHES], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 132, 49152])
@pytest.mark.parametrize("cols", [1, 1023, 50257, 2**20, 2**20 + 1, 2**22])
def test_the_default_is_legal(arch: Arch, rows: int, cols: int) -> None:
    for fields in ({}, dict(dtype="float32"), dict(function="softmax_grad", keep=0.5), dict(mask="full", keep=0.5)):
        problem = softmax(rows=rows, cols=cols, **fields)
        config = SCHEDULE.default(problem, arch)
        assert config.check(problem, arch) is None
        assert any(SCHEDULE.legal_space(problem, arch))


def test_more_parts_than_a_warp_combines_are_refused(sm_90a: Arch) -> None:
    with pytest.raises(ConfigError, match="1024 parts of a row, a wave of cuda:sm_90a combines at most 512"):
        build(softmax(rows=1, cols=2**20), sm_90a, "split", dict(threads=128, packs=1))


def test_rows_too_long_to_combine_are_streamed(sm_90a: Arch) -> None:
    assert operator("softmax").choose(softmax(rows=1, cols=2**28), sm_90a) == "block_streaming"


@pytest.mark.parametrize("arch", ROCM_ARCHES, ids=str)
def test_amd_code_objects(amd_linker: None, arch: Arch) -> None:
    built = build(softmax(rows=1, cols=2**20, mask="cols", keep=0.9), arch)
    assert built.schedule.name == "split"
    assembly = str(built.sources["s"])
    assert len(set(re.findall(r"\.symbol:\s+(main_kernel\w*)\.kd", assembly))) == 2
    assert all(int(size) == 0 for size in re.findall(r"\.private_segment_fixed_size:\s+(\d+)", assembly))
    assert re.search(r"global_load_(dwordx4|b128)", assembly)
    assert summary(built).counts["barrier"] == 2  # one for each reduction by several waves
