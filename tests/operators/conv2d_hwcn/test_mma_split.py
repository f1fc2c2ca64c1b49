"""float32 as pairs of bfloat16 on tensor cores: correct by every route, as exact as it says, and used only when asked
for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.build.inspect import summary
from schedules.check.verify import MODES, emulated_runs, judge, on_device, poisoned, verify
from schedules.core.arch import ARCHES, Arch, parse_arch
from schedules.core.arithmetic import BF16X3, BF16X6, FLOAT32, TF32
from schedules.core.errors import ConfigError
from schedules.core.operator import Array
from schedules.core.registry import operator
from schedules.measure.choice import best_of, choose, nearest
from schedules.measure.journal import append
from schedules.operators.conv2d_hwcn.mma_split import SHAPES as DEFAULTS
from schedules.operators.conv2d_hwcn.mma_split import MmaSplitConfig, default, space
from schedules.tune.evaluate import Artifact, Bench, Failure, build_candidate
from schedules.tune.session import Work, first_candidates
from schedules.tune.strategy import Candidate
from schedules.tune.template import candidates
from schedules.tune.tuner import Limits
from tests.conftest import assert_correct, caught, problem_of
from tests.operators.conv2d_hwcn.test_mma import SHAPES
from tests.operators.conv2d_hwcn.test_tutorial import TUTORIAL
from tests.tune.fakes import record_of

CONFIGS: list[dict[str, Any]] = [
    dict(block_m=64, block_n=64, warps_m=2, warps_n=2, stages=4, block_k=32, ahead=True),
    dict(block_m=16, block_n=64, warps_m=1, warps_n=2, stages=2, min_blocks=0),
    dict(block_m=64, block_n=8, warps_m=2, warps_n=1, stages=3, skip_padding=False),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_schedule_is_correct(emulation: None, sm_90a: Arch, shape: str) -> None:
    assert_correct(problem_of("conv2d_hwcn", **SHAPES[shape]), sm_90a, "mma_split", routes=["emulated"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_other_architectures(emulation: None, arch: str) -> None:
    problem = problem_of("conv2d_hwcn", **SHAPES["ragged, stride 2"])
    assert_correct(problem, parse_arch(arch), "mma_split", routes=["emulated"])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_hwcn", **SHAPES["ragged, stride 2"])
    assert_correct(problem, sm_90a, "mma_split", config, ["serial", "emulated"])


@pytest.mark.parametrize("shape", DEFAULTS, ids=str)
def test_every_default_shape_is_correct(sm_90a: Arch, shape: tuple[int, int, int, int]) -> None:
    problem = problem_of("conv2d_hwcn", n=11, h=2, w=2, ci=3, co=19, kh=2, kw=2, pad=1)
    names = ("block_m", "block_n", "warps_m", "warps_n")
    config = MmaSplitConfig(**dict(zip(names, shape, strict=True)), stages=2)
    assert_correct(problem, sm_90a, "mma_split", config, ["serial"])


# ---- errors


def emulated(built: Built, arrays: Sequence[Array]) -> Array:
    ((_, run),) = emulated_runs(built, str(built.sources["cu"]), MODES[:1])
    return run([*arrays, *poisoned(built.problem)])[0]


def parts_of(x: Array) -> tuple[Array, Array]:
    """The parts in float64."""
    high = x.astype(ml_dtypes.bfloat16)
    low = (x - high.astype(np.float32)).astype(ml_dtypes.bfloat16)
    return high.astype(np.float64), low.astype(np.float64)


def towards_zero(exact: Array) -> Array:
    near = exact.astype(np.float32)
    return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)


def norm_error(got: Array, exact: Array) -> float:
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def test_errors_are_what_they_are_said_to_be(emulation: None, sm_90a: Arch) -> None:
    """On normal data, over as many channels as the tutorial's problem has products."""
    problem = problem_of("conv2d_hwcn", n=64, h=1, w=1, ci=2304, co=64, kh=1, kw=1)
    built = build(problem, sm_90a, "mma_split", device_code=False)
    data, weight = built.operator.inputs(problem, np.random.default_rng(0))
    (expected,) = built.operator.reference(problem, [data, weight])
    got, exact = emulated(built, [data, weight]).astype(np.float64), expected.values
    assert norm_error(got, exact) < 5e-6
    assert np.abs(got - exact).max() / np.sqrt(np.mean(exact**2)) < 3e-5
    # the emulator cuts sums off as the tensor cores do; nothing is lost beside what the split leaves out
    (high, low), (of_data, of_data_low) = parts_of(weight[0, 0].T), parts_of(data[0, 0])
    model = high @ of_data + high @ of_data_low + low @ of_data
    assert norm_error(model, exact) == pytest.approx(4.4e-6, rel=0.05)
    assert norm_error(got[0, 0], model) < 5e-7


def test_sums_within_the_tensor_cores_would_drift() -> None:
    """They cut off towards zero: over 432 products that costs more than the split does, over the twelve of a tile
    nothing."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((64, 2304), (2304, 64)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    (high, low), (of_b, of_b_low) = parts_of(a), parts_of(b)
    steps = [slice(k, k + 16) for k in range(0, 2304, 16)]

    def product(total: Array, k: slice) -> Array:
        for x, y in ((low, of_b), (high, of_b_low), (high, of_b)):
            total = towards_zero(total + x[:, k] @ y[k])
        return total

    within = apart = tile = np.zeros((64, 64), np.float32)
    for number, k in enumerate(steps):
        within, tile = product(within, k), product(tile, k)
        if number % 4 == 3:
            apart, tile = apart + tile, np.zeros_like(tile)
    assert norm_error(within, exact) > 1e-5
    assert norm_error(apart, exact) < 5e-6


def test_one_product_is_within_the_bound_and_not_within_float32s(emulation: None, sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", n=128, h=1, w=1, ci=1, co=128, kh=1, kw=1)
    built = build(problem, sm_90a, "mma_split", device_code=False)
    arrays = built.operator.inputs(problem, np.random.default_rng(1))
    got = emulated(built, arrays)
    assert 0.2 < judge(problem, arrays, [got], arithmetic=BF16X3).error < 1
    assert judge(problem, arrays, [got], arithmetic=FLOAT32).error > 4


def test_special_values(emulation: None, sm_90a: Arch) -> None:
    """Each with each: infinities, NaN, zeros, and the largest, which would round to infinity.

    What overflows is not finite: the infinity, or NaN where the products of the parts overflow both ways.
    """
    largest = float(np.finfo(np.float32).max)
    values = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -2.0, 1 / 3, -1e30, 1e-30, largest, -largest, 3.395e38]
    count = len(values)
    problem = problem_of("conv2d_hwcn", n=count, h=1, w=1, ci=1, co=count, kh=1, kw=1)
    built = build(problem, sm_90a, "mma_split", device_code=False)
    data, weight = (np.array(values, np.float32).reshape(1, 1, 1, count) for _ in range(2))
    got = emulated(built, [data, weight])
    with np.errstate(all="ignore"):
        exact = weight[0, 0].T.astype(np.float64) * data[0, 0].astype(np.float64)
        wanted = exact.astype(np.float32)
        close = np.abs(got[0, 0] - exact) <= BF16X3.error * np.abs(exact) + 2.0**-126
    same = (got[0, 0] == wanted) | (np.isnan(got[0, 0]) & np.isnan(wanted))
    overflowed = np.isfinite(exact) & ~np.isfinite(wanted)
    assert np.where(np.isfinite(wanted), close, np.where(overflowed, ~np.isfinite(got[0, 0]), same)).all()


@pytest.mark.parametrize("tap", [0, 1])
def test_a_row_with_an_infinity_spoils_no_other(emulation: None, sm_90a: Arch, tap: int) -> None:
    problem = problem_of("conv2d_hwcn", n=8, h=3, w=3, ci=20, co=24, kh=2, kw=2)
    built = build(problem, sm_90a, "mma_split", device_code=False)
    data, weight = built.operator.inputs(problem, np.random.default_rng(0))
    data, weight = np.array(data), np.array(weight)
    data[tap, 0, 3, 5], weight[1, 1, 7, 9] = -np.inf, np.nan
    (check,) = [judge(problem, [data, weight], [emulated(built, [data, weight])], arithmetic=BF16X3)]
    assert check.passed, str(check)


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [SHAPES["ragged, stride 2"], SHAPES["one of everything"], TUTORIAL], ids=str)
def test_on_the_gpu(gpu: Arch, fields: dict[str, Any]) -> None:
    """Within the tolerance; and on normal data as near as the model is, whose sums are exact."""
    problem = problem_of("conv2d_hwcn", **fields)
    built = build(problem, gpu, "mma_split")
    arrays = built.operator.inputs(problem, np.random.default_rng(0))
    expected = built.operator.reference(problem, arrays)
    (got,) = on_device(built, problem, gpu)([*arrays, *poisoned(problem)])
    assert judge(problem, arrays, [got], expected, BF16X3).passed
    if got.size > 1:
        assert norm_error(got.astype(np.float64), expected[0].values) < 5e-6


def _mutants(source: str) -> dict[str, str]:
    main = source.index("for (int tile")
    barrier = source.index("__syncthreads();", main)
    return {
        "without low x high": source.replace("mma_bf16(c, a_low, b_high);", ""),
        "without high x low": source.replace("mma_bf16(c, a_high, b_low);", ""),
        "without high x high": source.replace("mma_bf16(c, a_high, b_high);", ""),
        "low x low instead": source.replace("(c, a_low, b_high)", "(c, a_low, b_low)"),
        "only the last tile": re.sub(r"(conv_local_ptr\[.*\]) = \(\1 \+ (tile_sums.*)\);", r"\1 = \2;", source),
        "tiles not apart": re.sub(r"tile_sums\w*\[.*\] = 0\S+;", ";", source, count=1),
        "without the barrier": source[:barrier] + source[barrier + len("__syncthreads();") :],
        "without the wait": source.replace("cp.async.wait_group 1;", "cp.async.wait_group 2;"),
    }


def test_broken_kernels_are_caught(emulation: None, sm_90a: Arch) -> None:
    """Each mutant of the generated CUDA must be wrong in some mode of the emulator; the kernel itself in none."""
    # two blocks of four warps and twelve steps each
    problem = problem_of("conv2d_hwcn", n=64, h=3, w=2, ci=160, co=64, kh=2, kw=2)
    config = dict(block_m=64, block_n=64, warps_m=2, warps_n=2, stages=3, block_k=64)
    built = build(problem, sm_90a, "mma_split", config, device_code=False)
    assert built.launch and (built.launch.grid, built.launch.threads) == ((2, 1, 1), 128)
    source = str(built.sources["cu"])
    inputs = built.operator.inputs(problem, np.random.default_rng(0))
    assert not caught(built, source, inputs)
    for name, mutant in _mutants(source).items():
        assert mutant != source, name
        assert caught(built, mutant, inputs), name


def test_taps_in_the_padding_are_left_out(emulation: None, sm_90a: Arch) -> None:
    """Filters are NaN wherever no pixel lies under them: only work that is done can show it."""
    problem = problem_of("conv2d_hwcn", n=8, h=2, w=1, ci=20, co=8, kh=3, kw=3, pad=1)
    for skip in (True, False):
        built = build(problem, sm_90a, "mma_split", dict(skip_padding=skip), device_code=False)
        data, weight = built.operator.inputs(problem, np.random.default_rng(0))
        weight = np.array(weight)
        weight[:, [0, 2]] = np.nan
        assert np.isfinite(emulated(built, [data, weight])).all() == skip


# ---- what it is made of


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    built = build(problem_of("conv2d_hwcn", **TUTORIAL), sm_90a, "mma_split")
    kernel, source, ptx = summary(built), str(built.sources["cu"]), str(built.sources["ptx"])
    assert kernel.spills == 0 and not any("spill" in name for name in kernel.counts)
    assert (kernel.shared, kernel.blocks_sm) == (3 * 64 * (128 + 128) * 2 * 2, 1)
    # four k steps of a 32 x 64 tile: three products for each pair of fragments, which are loaded once
    assert kernel.counts["mma"] == 3 * (4 * 2 * 8)
    assert kernel.counts["ldmatrix"] == 2 * (4 * (2 + 4))
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx
    assert re.search(r"cp\.async\.cg\.shared\.global \[.*\], 16,", ptx)
    # eight elements of a thread in each of two copies, and nothing narrower anywhere
    assert kernel.counts["global load 128-bit"] == 2 * 2 and kernel.counts["global store 128-bit"] > 2 * 2
    assert not {"global load", "global store", "shared store"} & kernel.counts.keys()
    loop = source[source.index("for (int tile") : source.index("cp_async_wait_0();", source.index("for (int tile"))]
    assert loop.count("__syncthreads") == 1 and " / " not in loop


CHANGES: list[tuple[str, Any]] = [
    ("block_m", 64),
    ("block_n", 32),
    ("block_k", 32),
    ("warps_m", 8),
    ("warps_n", 4),
    ("stages", 3),
    ("min_blocks", 0),
    ("ahead", True),
    ("skip_padding", True),  # by which a build takes three times as long
]


def test_every_field_changes_the_source(sm_90a: Arch) -> None:
    problem, base = problem_of("conv2d_hwcn", **TUTORIAL), MmaSplitConfig(block_n=64, stages=2, skip_padding=False)
    assert [name for name, _ in CHANGES] == list(base.to_json())
    configs = [base, *(replace(base, **{name: value}) for name, value in CHANGES)]
    sources = [str(build(problem, sm_90a, "mma_split", config, device_code=False).sources["cu"]) for config in configs]
    assert len(set(sources)) == len(configs)


@pytest.mark.parametrize(
    ("arch", "changes", "config", "words"),
    [
        ("sm_90a", dict(dtype="float16"), {}, "dtype=float16 is not split; mma takes it as it is"),
        ("sm_75", {}, {}, "needs sm_80 or newer tensor cores"),
        ("gfx90a", {}, {}, "runs on cuda, not on rocm:gfx90a"),
        ("sm_90a", {}, dict(stages=4), "stages=4 needs 262144 bytes of shared memory"),
        ("sm_90a", {}, dict(warps_m=2), "block_m=128 x block_n=128 needs about 360 registers"),
        ("sm_90a", {}, dict(stages=0), "stages=0 must be at least 1"),
        ("sm_90a", {}, dict(block_k=16), "block_k=16 is not a multiple of 32"),
    ],
)
def test_what_is_refused(arch: str, changes: dict[str, Any], config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(problem_of("conv2d_hwcn", **{**TUTORIAL, **changes}), parse_arch(arch), "mma_split", config)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("n", [1, 8, 24, 1000])
@pytest.mark.parametrize("co", [1, 10, 48, 512])
def test_the_default_is_legal(arch: str, n: int, co: int) -> None:
    problem = problem_of("conv2d_hwcn", n=n, h=9, w=9, ci=5, co=co, kh=3, kw=3, pad=1)
    config = default(problem, parse_arch(arch))
    assert config.check(problem, parse_arch(arch)) is None


def test_the_space_is_worth_searching(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", **TUTORIAL)
    legal = [config for config in space(problem, sm_90a) if config.check(problem, sm_90a) is None]
    assert 300 <= len(legal) == len(set(legal)) <= 2000
    assert default(problem, sm_90a) in legal


# ---- used only where it is named

PROBLEM = problem_of("conv2d_hwcn", **TUTORIAL)
NEAR = replace(PROBLEM, n=128)


def records(arch: Arch) -> list[Any]:
    """mma_split twice as fast as simt, on the problem and on one near it."""
    op = operator("conv2d_hwcn")
    return [
        record_of(problem, op.name, Candidate(name, op.schedule(name).config_for(problem, arch)), us, str(arch))
        for problem in (PROBLEM, NEAR)
        for name, us in (("mma_split", 1.0), ("simt", 2.0))
    ]


def test_no_rule_chooses_it() -> None:
    op = operator("conv2d_hwcn")
    assert op.schedule("mma_split").opt_in and op.opt_in("mma_split") and not op.opt_in("mma")
    for arch in ARCHES.values():
        for dtype in op.problem.dtypes:
            assert op.choose(replace(PROBLEM, dtype=dtype), arch) != "mma_split"
        assert "mma_split" not in [spec.name for spec in op.offered(arch)]


def test_a_search_takes_it_by_name_only(sm_90a: Arch) -> None:
    small = problem_of("conv2d_hwcn", n=8, h=3, w=3, ci=8, co=8, kh=1, kw=1)
    assert "mma_split" not in {candidate.schedule for candidate in candidates(small, sm_90a)}
    named = ("mma_split", "simt")
    assert {candidate.schedule for candidate in candidates(small, sm_90a, named)} == set(named)

    known = records(sm_90a)
    unasked = first_candidates(Work(PROBLEM, sm_90a, Limits()), best_of(known[:2]), known)
    assert {candidate.schedule for candidate in unasked} == {
        "simt",
        "tutorial",
        "winograd",
        "bf16x6",
        "winograd_bf16x6",
    }
    asked = Work(PROBLEM, sm_90a, Limits(), schedules=("mma_split",))
    assert {c.schedule for c in first_candidates(asked, known[0], known)} == {"mma_split"}


def test_no_record_brings_it_unasked(sm_90a: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split, simt, *others = records(sm_90a)
    assert best_of([split, simt]) is simt and best_of([split]) is None
    assert best_of([split, simt], ("mma_split",)) is split
    assert [record.schedule for record in nearest(PROBLEM, others)] == ["simt"]
    assert [record.schedule for record in nearest(PROBLEM, others, ("mma_split",))] == ["mma_split"]

    monkeypatch.setattr("schedules.measure.choice._same_versions", lambda record, arch: True)
    for folder, kept, expected in (("exact", [split, simt], "simt"), ("near", others, "winograd_bf16x6")):
        for record in kept:
            append(tmp_path / folder, record)
        assert choose(PROBLEM, sm_90a, folders=[tmp_path / folder]).schedule == expected
        found = choose(PROBLEM, sm_90a, "mma_split", folders=[tmp_path / folder])
        assert found.schedule == "mma_split" and found.record


def test_verification_uses_its_tolerance_for_it_alone(emulation: None, sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", n=128, h=1, w=1, ci=1, co=128, kh=1, kw=1)
    checks = verify(problem, sm_90a, "mma_split", routes=["emulated"], seeds=(1,))
    assert all(check.passed and check.error > 0.2 for check in checks)
    others = {"mma_split": BF16X3, "bf16x3": BF16X3, "bf16x6": BF16X6, "tf32": TF32, "mma_tf32": TF32}
    others |= {"winograd_bf16x3": BF16X3, "winograd_bf16x6": BF16X6}
    for spec in operator("conv2d_hwcn").schedules:
        assert spec.arithmetic == others.get(spec.name, FLOAT32)


def test_a_search_holds_each_candidate_to_its_arithmetic(cuda_compiler: None, sm_90a: Arch, host: Arch) -> None:
    small = problem_of("conv2d_hwcn", n=8, h=3, w=3, ci=8, co=8, kh=1, kw=1)
    op = operator("conv2d_hwcn")
    for name, arithmetic in (("mma_split", BF16X3), ("simt", FLOAT32)):
        built = build_candidate(small, sm_90a, Candidate(name, op.schedule(name).config_for(small, sm_90a)))
        assert isinstance(built, Artifact) and built.arithmetic == arithmetic

    bench = Bench(small, host, 0)
    (expected,) = bench.expected
    off = (expected.values + 10 * FLOAT32.error * expected.magnitude).astype(np.float32)

    def function(*tensors: Any) -> None:
        tensors[-1].copyfrom(off)

    assert bench.check(function, BF16X3)[0] is None
    assert isinstance(bench.check(function)[0], Failure)
