"""Direct convolution: correct by every route, balanced vector loads, the next channels under way while these are
multiplied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.build.inspect import dynamic_shared, material, summary
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.presets import preset
from schedules.core.registry import operator
from schedules.measure.journal import read_journal
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.direct import DirectConfig, default, space
from tests.amd import assert_fits
from tests.conftest import (
    CUDA_ARCHES,
    EMULATED_ARCHES,
    ROCM_ARCHES,
    assert_changes_the_source,
    assert_correct,
    caught,
    problem_of,
)
from tests.documents import ROOT
from tests.operators.conv2d_nchw.shapes import SHAPES

ARTICLE = preset("direct-article").problem()
SMALL = dict(block="4x16", pixels="1x4", filters=4, channels_per_stage=2, stages=1)
CONFIGS: list[dict[str, Any]] = [
    SMALL,
    dict(block="4x8", pixels="2x2", filters=3, channels_per_stage=1, stages=1, vector=2, unroll_rows=False),
    dict(block="3x8", pixels="1x1", filters=1, channels_per_stage=0, stages=1, vector=1, min_blocks=2),
]
ASYNC: list[dict[str, Any]] = [
    dict(block="4x16", pixels="2x4", filters=4, channels_per_stage=1, stages=3, exchange=True),
    dict(block="4x8", pixels="1x2", filters=3, channels_per_stage=2, stages=2, vector=2, unroll_rows=False),
]
EXCHANGED = dict(block="3x16", pixels="1x4", filters=5, exchange=True)
GPUS = [*CUDA_ARCHES, *ROCM_ARCHES]


# each shape with the default config and one of the others
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        (shape, config)
        for i, shape in enumerate(SHAPES)
        for j, config in enumerate([{}, *CONFIGS, *ASYNC, EXCHANGED])
        if not config or (i + j) % 6 == 0
    ],
)
def test_schedule_is_correct(sm_90a: Arch, shape: str, config: dict[str, Any]) -> None:
    assert_correct(problem_of("conv2d_nchw", **SHAPES[shape]), sm_90a, "direct", config, ["serial"])


@pytest.mark.parametrize("arch", GPUS, ids=str)
def test_schedule_is_correct_on(arch: Arch) -> None:
    problem = problem_of("conv2d_nchw", **SHAPES["ragged, stride 2, fused"])
    assert_correct(problem, arch, "direct", SMALL, routes=["serial"])


# each shape with one of the configs
@pytest.mark.parametrize(("shape", "config"), [(shape, CONFIGS[i % 3]) for i, shape in enumerate(SHAPES)])
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str, config: dict[str, Any]) -> None:
    assert_correct(problem_of("conv2d_nchw", **SHAPES[shape]), sm_90a, "direct", config, ["emulated"])


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        *((shape, ASYNC[i % 2]) for i, shape in enumerate(SHAPES)),
        ("whole tiles", EXCHANGED),
        ("packed filter, float16", EXCHANGED),
    ],
    ids=str,
)
def test_generated_cuda_is_correct_with_other_copies(
    emulation: None, sm_90a: Arch, shape: str, config: dict[str, Any]
) -> None:
    assert_correct(problem_of("conv2d_nchw", **SHAPES[shape]), sm_90a, "direct", config, ["emulated"])


@pytest.mark.parametrize("arch", EMULATED_ARCHES, ids=str)
def test_generated_cuda_is_correct_on(emulation: None, arch: Arch) -> None:
    problem = problem_of("conv2d_nchw", n=2, h=20, w=40, ci=6, co=6, kh=6, kw=6)
    assert_correct(problem, arch, "direct", routes=["emulated"])


@settings(max_examples=8)
@given(
    n=st.integers(1, 2), h=st.integers(1, 14), w=st.integers(1, 20), ci=st.integers(1, 5), co=st.integers(1, 7),
    kh=st.integers(1, 4), kw=st.integers(1, 4), stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    pad=st.tuples(st.integers(0, 3), st.integers(0, 3)), dilation=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    channels=st.integers(0, 3), stages=st.integers(1, 3), exchange=st.booleans(),
)  # fmt: skip
def test_any_shape_is_correct(
    sm_90a: Arch, channels: int, stages: int, exchange: bool, h: int, w: int, **fields: Any
) -> None:
    (dy, dx), (py, px) = fields["dilation"], fields["pad"]
    h = max(h, dy * (fields["kh"] - 1) + 1 - 2 * py)
    w = max(w, dx * (fields["kw"] - 1) + 1 - 2 * px)
    problem = problem_of("conv2d_nchw", h=h, w=w, **fields)
    copies = dict(channels_per_stage=channels, stages=stages, exchange=exchange)
    config = DirectConfig.parse({**SMALL, **copies})
    assume(config.check(problem, sm_90a) is None)  # a wide halo of all channels does not fit sixteen threads' registers
    assert_correct(problem, sm_90a, "direct", config, ["serial"])


def test_the_rule_prefers_it_for_few_channels_and_large_images(sm_90a: Arch) -> None:
    op = operator("conv2d_nchw")
    assert op.choose(ARTICLE, sm_90a) == "direct"
    assert op.choose(replace(ARTICLE, co=64), sm_90a) == "simt"
    assert op.choose(replace(ARTICLE, h=64, w=64), sm_90a) == "simt"


def test_the_default_is_what_records_say(sm_90a: Arch) -> None:
    records, _ = read_journal(ROOT / "tuning_logs" / "nvidia-h200" / "conv2d_nchw.jsonl")
    of_default: dict[Any, float] = {}
    at_once: dict[Any, float] = {}
    for record in records:
        problem, config = record.problem, record.config
        if isinstance(config, DirectConfig) and isinstance(problem, NchwProblem) and record.correct:
            ahead = default(problem, sm_90a)
            for found, counts in ((of_default, config == ahead), (at_once, config.stages == 1)):
                if counts and ahead.stages > 1:
                    found[problem] = min(record.us, found.get(problem, record.us))
    assert len(of_default) >= 4 and of_default[ARTICLE] < 0.95 * at_once[ARTICLE]
    assert all(us < at_once.get(problem, us + 1) for problem, us in of_default.items())


def test_channels_come_ahead_only_where_that_was_measured(sm_90a: Arch) -> None:
    wide = problem_of("conv2d_nchw", n=1, h=768, w=512, ci=6, co=6, kh=3, kw=3, pad=1)
    assert default(wide, sm_90a).stages > 1 and default(wide, parse_arch("sm_80")) == default(wide, sm_90a)
    others = [
        dict(h=64, w=64), dict(stride=2), dict(dilation=2), dict(dtype="float16"), dict(w=510), dict(w=32),
        dict(ci=1), dict(ci=32), dict(co=32), dict(kh=7, kw=7), dict(co=16, kh=5, kw=5),
    ]  # fmt: skip
    for words in others:
        problem = type(wide).parse({**wide.to_json(), **words})
        assert default(problem, sm_90a).stages == 1, words
    for arch in (parse_arch("sm_75"), parse_arch("gfx942")):
        assert default(wide, arch).stages == 1


@pytest.mark.parametrize(
    ("arch", "ci", "co", "k"), [("gfx942", 8, 8, 5), ("gfx942", 1, 8, 9), ("gfx942", 4, 16, 11), ("gfx1100", 8, 8, 7)]
)
def test_the_default_for_amd_is_sparing_of_registers(amd_linker: None, arch: str, ci: int, co: int, k: int) -> None:
    """LLVM unrolls none of its loops, though it knows their extents."""
    problem = problem_of("conv2d_nchw", n=1, h=64, w=64, ci=ci, co=co, kh=k, kw=k, pad=k // 2)
    config = default(problem, parse_arch(arch))
    assert config.channels_per_stage == 1 and not config.unroll_rows
    found = summary(build(problem, parse_arch(arch), "direct", config))
    assert found.registers and found.registers <= 128 and found.waves and found.waves >= 4 and found.scratch == 0


def test_blocks_that_are_asked_for_have_registers_on_amd(amd_linker: None, capfd: pytest.CaptureFixture[str]) -> None:
    """But of blocks that shared memory has no room for LLVM is not asked."""
    problem, arch = problem_of("conv2d_nchw", n=1, h=64, w=64, ci=8, co=8, kh=5, kw=5, pad=2), parse_arch("gfx942")
    for config, blocks, most in ((default(problem, arch), 8, 80), (DirectConfig(filters=4), 5, 256)):
        found = summary(build(problem, arch, "direct", replace(config, min_blocks=blocks)))
        assert found.registers and 0.75 * most < found.registers <= most
    assert "failed to meet occupancy" not in capfd.readouterr().err


@settings(max_examples=200)
@given(
    n=st.integers(1, 4), h=st.integers(8, 2000), w=st.integers(8, 500).map(lambda w: 4 * w), ci=st.integers(1, 20),
    co=st.integers(1, 20), kh=st.integers(1, 7), kw=st.integers(1, 7), pad=st.integers(0, 3),
)  # fmt: skip
def test_channels_ahead_are_legal(**fields: int) -> None:
    problem = problem_of("conv2d_nchw", **fields)
    for arch in GPUS:
        assert default(problem, arch).check(problem, arch) is None


def test_source_of_the_article(sm_90a: Arch) -> None:
    built = build(ARTICLE, sm_90a, "direct", DirectConfig(), device_code=False)
    source = str(built.sources["cu"])
    assert built.launch and built.launch.threads == 192 and built.launch.grid == (8, 64, 1)
    # the halo of all channels, 6 x 17 rows x 18 vectors, in ten rounds of 192 vectors
    assert re.search(r"float4 halo_registers_local_ptr\[10\]", source)
    assert re.search(r"= \*\(float4\*\)\(data_ptr", source)
    assert re.search(r"\*\(float4\*\)\(halo_shared_ptr", source)
    assert source.count("__syncthreads()") == 1
    assert source.rindex("data_ptr +") < source.index(
        "halo_shared_ptr +"
    )  # every load is under way before the first store


def test_resources_of_the_article(cuda_compiler: None, sm_90a: Arch) -> None:
    built = build(ARTICLE, sm_90a, "direct", DirectConfig())
    (kernel,) = built.resources
    assert kernel.shared == DirectConfig().shared_bytes(ARTICLE)
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0
    assert kernel.registers <= 64
    found = summary(material(built))
    assert found.counts["global load 128-bit"] == 10
    assert found.counts["fp32 multiply-add"] == 6 * 6 * 6 * 4
    assert found.counts["shared load 128-bit"] >= 60
    assert found.blocks_sm >= 5


def test_channels_come_ahead_by_cp_async(cuda_compiler: None, sm_90a: Arch) -> None:
    config = DirectConfig((24, 64), (2, 4), channels_per_stage=1, stages=3, exchange=True)
    built = build(ARTICLE, sm_90a, "direct", config)
    source, found = str(built.sources["cu"]), summary(material(built))
    assert (found.threads, found.shared, found.spills) == (192, (3 * 2 * 192 + 6 * 24 * 64) * 4, 0)
    assert isinstance(found.registers, int) and found.registers <= 168 and found.blocks_sm == 2
    # 29 rows of 18 vectors by 180 of the threads, ten rows at a time, for two channels ahead of the loop and one in it
    assert found.counts["cp.async"] == 3 * (3 + 2) and "global load" not in found.counts
    assert found.counts["fp32 multiply-add"] == 6 * 6 * 6 * 8
    assert found.counts["shared load 128-bit"] <= 6 * (6 + 1) + 6 * 6  # a row of the window is loaded once
    loop = source[source.index("for (int tile") : source.index("cp_async_wait_0();", source.index("for (int tile"))]
    assert loop.count("__syncthreads") == 1
    fetch, compute = loop.index("cp_async_16("), loop.index("conv_local_ptr")
    assert fetch < compute
    # the exchange: one barrier after all have written, and stores of neighbouring pixels
    assert source[source.index(loop) + len(loop) :].count("__syncthreads") == 2
    assert found.counts["shared store 128-bit"] == 12 and found.counts["global store"] == 48


@pytest.mark.parametrize("shape", ["whole tiles", "packed filter, float16"])
@pytest.mark.parametrize(
    "config",
    [*ASYNC, dict(ASYNC[0], block="8x16", stages=2), dict(SMALL, stages=2, exchange=True), EXCHANGED],
    ids=str,
)
def test_shared_memory_is_what_the_check_says(sm_90a: Arch, shape: str, config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_nchw", **SHAPES[shape])
    built = build(problem, sm_90a, "direct", config, device_code=False)
    assert isinstance(built.config, DirectConfig)
    source = str(built.sources["cu"])
    declared = re.findall(r"__shared__ alignas\(\d+\) (float|half|nv_bfloat16) \w+\[(\d+)\]", source)
    static = sum(int(count) * {"float": 4}.get(kind, 2) for kind, count in declared)
    used, said = static + dynamic_shared(built.lowered), built.config.shared_bytes(problem)
    assert used <= said if built.config.exchange and built.config.stages == 1 else used == said


def test_next_channel_is_loaded_before_this_one_is_computed(sm_90a: Arch) -> None:
    built = build(ARTICLE, sm_90a, "direct", DirectConfig(channels_per_stage=1), device_code=False)
    source = str(built.sources["cu"])
    loop = source[re.search(r"for \(int rc_0 = 0; rc_0 < 5;", source).start() :]  # type: ignore[union-attr]
    load, compute, store = (
        loop.index(text) for text in ("(data_ptr +", "+ (halo_shared_ptr[", "*(float4*)(halo_shared_ptr +")
    )
    assert load < compute < store
    assert len(re.findall(r"float4 halo_registers_local_ptr\[2\]", source)) == 1


def test_whole_rows_are_stored_as_vectors(sm_90a: Arch) -> None:
    problem = replace(ARTICLE, w=517)
    config = operator("conv2d_nchw").schedule("direct").default(problem, sm_90a)
    built = build(problem, sm_90a, "direct", config, device_code=False)
    source = str(built.sources["cu"])
    assert built.problem.to_json()["w"] == 517 and re.search(r"\*\(float4\*\)\(output_ptr", source)
    assert "float4*)(data_ptr" not in source  # but rows of 517 do not start at 16 bytes


def _changes() -> list[tuple[str, Any]]:
    return [
        ("block", (8, 32)),
        ("pixels", (2, 4)),
        ("filters", 3),
        ("channels_per_stage", 2),
        ("stages", 2),
        ("exchange", True),
        ("vector", 2),
        ("unroll_rows", False),
        ("min_blocks", 4),
    ]


def test_every_field_is_listed() -> None:
    assert {name for name, _ in _changes()} == set(DirectConfig().to_json())


@pytest.mark.parametrize(("field", "value"), _changes())
def test_every_field_changes_the_source(sm_90a: Arch, field: str, value: Any) -> None:
    base = DirectConfig((8, 64))  # small enough for any of them
    assert_changes_the_source(ARTICLE, sm_90a, "direct", base, **{field: value})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(block="12x65"), "block=65 is not a multiple of pixels=4"),
        (dict(block="32x64"), "block=(32, 64) needs 71680 bytes of shared memory"),
        (dict(block="64x128", channels_per_stage=1), "makes blocks of 2048 threads, cuda:sm_90a allows 1024"),
        (dict(filters=64, channels_per_stage=1), "filters=64 x pixels=(1, 4)"),
        (dict(filters=0), "filters=0"),
        (dict(vector=8), "vector=8"),
        (dict(pixels=0), "pixels=(0, 0)"),
        (dict(channels_per_stage=-1), "channels_per_stage=-1"),
        (dict(stages=0), "stages=0 must be at least 1"),
        (dict(stages=8), "block=(12, 64) needs 296448 bytes of shared memory, cuda:sm_90a has 232448"),
        (dict(exchange=True), "needs 54528 bytes of shared memory, cuda:sm_90a has 49152"),
    ],
)
def test_illegal_configs_are_refused(sm_90a: Arch, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(ARTICLE, sm_90a, "direct", DirectConfig.parse(config))


@pytest.mark.parametrize("config", [{}, dict(channels_per_stage=1, unroll_rows=False)], ids=str)
@pytest.mark.parametrize("arch", ROCM_ARCHES, ids=str)
def test_amd_code_object(amd_linker: None, arch: Arch, config: dict[str, Any]) -> None:
    built = build(ARTICLE, arch, "direct", config)
    assert_fits(built)
    assert summary(material(built)).counts["global load 128-bit"] >= 2


@pytest.mark.parametrize("arch", ["sm_75", "gfx90a"])
def test_cp_async_is_asked_for_only_where_it_is(arch: str) -> None:
    with pytest.raises(ConfigError, match="has no cp.async, only stages=1"):
        build(ARTICLE, parse_arch(arch), "direct", dict(block="8x32", channels_per_stage=1, stages=2))


def _mutants(source: str) -> Iterator[tuple[str, str]]:
    for i, match in enumerate(re.finditer(r"__syncthreads\(\);", source)):
        yield f"without barrier {i}", source[: match.start()] + source[match.end() :]
    yield "halo row", re.sub(r"\(ry \* (\d+)\)", lambda found: f"(ry * {int(found[1]) - 1})", source, count=1)
    yield "border", re.sub(r"\(1 <= ", "(0 <= ", source, count=1)


def test_broken_kernels_are_caught(emulation: None, sm_90a: Arch) -> None:
    """Each mutant of the pipelined kernel must be wrong in some mode of the emulator; the kernel itself in none."""
    problem = problem_of("conv2d_nchw", n=1, h=9, w=40, ci=6, co=4, kh=3, kw=3, pad=1)
    built = build(problem, sm_90a, "direct", SMALL, device_code=False)
    source = str(built.sources["cu"])
    inputs = built.operator.inputs(problem, np.random.default_rng(0))
    assert not caught(built, source, inputs)
    mutants = dict(_mutants(source))
    assert len(mutants) == 5
    for name, mutant in mutants.items():
        assert mutant != source, name
        assert caught(built, mutant, inputs), name


def test_broken_copies_are_caught(emulation: None, sm_90a: Arch) -> None:
    """Each mutant of the kernel that copies ahead must be wrong in some mode of the emulator; the kernel in none."""
    problem = problem_of("conv2d_nchw", n=1, h=9, w=40, ci=6, co=4, kh=3, kw=3, pad=1)
    config = dict(ASYNC[0], block="8x16", stages=2)  # the output's tile covers both stages
    built = build(problem, sm_90a, "direct", config, device_code=False)
    source = str(built.sources["cu"])
    inputs = built.operator.inputs(problem, np.random.default_rng(0))
    assert not caught(built, source, inputs)
    main = source.index("for (int tile")
    barriers = [match.start() for match in re.finditer(r"__syncthreads\(\);", source) if match.start() > main]
    assert len(barriers) == 3  # of the loop, after it, after the exchange's stores
    mutants = {
        "without the wait": source.replace("cp.async.wait_group 0;", "cp.async.wait_group 1;", 1),
        **{f"without barrier {i}": source[:at] + source[at + 16 :] for i, at in enumerate(barriers)},
        "one channel too few": source.replace("tile < 6", "tile < 5", 1),
        "border": re.sub(r"\(1 <= ", "(0 <= ", source, count=1),
    }
    for name, mutant in mutants.items():
        assert mutant != source, name
        assert caught(built, mutant, inputs), name


def test_the_space_is_worth_searching(sm_90a: Arch) -> None:
    legal = [config for config in space(ARTICLE, sm_90a) if config.check(ARTICLE, sm_90a) is None]
    assert 200 <= len(legal) == len(set(legal)) <= 20000
    assert {config.stages > 1 for config in legal} == {config.exchange for config in legal} == {False, True}
    plain = parse_arch("sm_75")
    assert all(config.stages == 1 for config in space(ARTICLE, plain) if config.check(ARTICLE, plain) is None)
