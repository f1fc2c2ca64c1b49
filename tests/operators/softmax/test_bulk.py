"""Rows by bulk copies: right at any width, number of rows and config, and what the generated code is."""

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
from schedules.check.verify import emulated_runs, judge, poisoned, verify
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError, UsageError
from schedules.core.operator import Array
from schedules.core.registry import operator
from schedules.operators.softmax.bulk import SCHEDULE, BulkConfig
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem
from schedules.operators.softmax.packs import Frame
from tests.conftest import assert_changes_the_source, assert_correct, assert_mutants_caught, problem_of

Fields = dict[str, Any]
BLOCK: Fields = dict(threads=64, grid=3)  # a row to a block of two warps
WARP: Fields = dict(threads=32, groups=2, grid=2)  # a row to a warp
ABREAST: Fields = dict(
    threads=8, abreast=8, rows=16, num_stages=3, grid=2
)  # eight rows side by side, a stage is two times that
WIDE_ROWS: Fields = dict(WARP, groups=1, abreast=8, rows=8, kept="packed", stores="bulk")
CONFIGS: list[Fields] = [
    BLOCK,
    dict(BLOCK, kept="packed", num_stages=1, streaming="stores"),
    dict(BLOCK, chunks=2, num_stages=1),
    dict(BLOCK, kept="numerators", online=True, num_stages=3),
    dict(BLOCK, kept="packed", online=True, stores="bulk", num_stages=3),
    dict(BLOCK, kept="packed", stores="bulk", num_stages=1, rows=3, streaming="evict_last"),
    dict(BLOCK, rows=3, num_stages=3),
    WARP,
    dict(WARP, kept="numerators", stores="bulk", num_stages=3, rows=2),
    ABREAST,
    dict(ABREAST, kept="packed", stores="bulk"),
]
PROBLEMS: list[Fields] = [
    dict(cols=100),
    dict(cols=257, function="log_softmax", dtype="bfloat16"),
    dict(cols=129, function="softmax_grad", dtype="float32"),
    dict(cols=200, function="log_softmax_grad", scale=0.3, keep=0.7, dtype="bfloat16"),
    dict(cols=203, function="softmax_grad", scale=0.3, keep=0.7),
    dict(cols=96, scale=-0.5, mask="full", keep=0.8),
    dict(cols=131, scale=2.0, mask="cols", keep=0.8, dtype="float32"),
    dict(cols=64, mask="cols", function="log_softmax", keep=0.5),
    dict(cols=33, keep=0.5, dtype="bfloat16"),
]


def softmax(**fields: Any) -> SoftmaxProblem:
    problem = problem_of("softmax", **fields)
    assert isinstance(problem, SoftmaxProblem)
    return problem


def fitted(fields: Fields, problem: SoftmaxProblem) -> BulkConfig:
    """The config of `fields` without what is not for the problem's function."""
    config = BulkConfig(**fields)
    if config.kept == "numerators" and problem.function != "softmax":
        config = replace(config, kept="packed")
    config = replace(config, online=False) if problem.is_grad else config
    return replace(config, chunks=min(config.chunks, config.rounds(problem)))


def one_mode(built: Built, arrays: list[Array], rows: int, mode: int = 0) -> list[Array]:
    """The outputs for `arrays` of `rows` rows, by the emulator in one mode."""
    problem = replace(built.problem, rows=rows)  # type: ignore[call-arg]
    _, call = list(emulated_runs(built, str(built.sources["cu"])))[mode]
    return call([*arrays, *poisoned(problem)])


def is_right(built: Built, rows: int, mode: int = 0) -> bool:
    problem = replace(built.problem, rows=rows)  # type: ignore[call-arg]
    arrays = list(built.operator.inputs(problem, np.random.default_rng(rows)))
    return judge(problem, arrays, one_mode(built, arrays, rows, mode)).passed


# every config with two of the problems or three, every problem with two or three of the configs
PAIRS = [(c, p) for c in range(len(CONFIGS)) for p in range(len(PROBLEMS)) if (c + p) % 4 == 0]


@pytest.mark.parametrize(("config", "fields"), PAIRS)
def test_configs_and_problems(emulation: None, sm_90a: Arch, config: int, fields: int) -> None:
    """13 rows: more than the grid has teams, and no multiple of a stage's."""
    problem = softmax(rows=13, **PROBLEMS[fields])
    built = build(problem, sm_90a, "bulk", fitted(CONFIGS[config], problem), device_code=False)
    assert is_right(built, 13, config % 3)


@pytest.mark.parametrize(
    ("fields", "config"),
    [
        (dict(cols=1023), BLOCK),
        (dict(cols=3001, keep=0.5, mask="full"), dict(BLOCK, chunks=4, num_stages=1, kept="numerators")),
        (dict(cols=2001, keep=0.5, dtype="float32"), dict(BLOCK, chunks=3, stores="bulk", num_stages=3)),
        (dict(cols=2049, function="softmax_grad", keep=0.5), dict(BLOCK, kept="packed", stores="bulk")),
        (dict(cols=1023, mask="full", keep=0.5), dict(WIDE_ROWS, num_stages=3)),
    ],
    ids=str,
)  # fmt: skip
def test_long_odd_rows_in_every_mode(emulation: None, sm_90a: Arch, fields: Fields, config: Fields) -> None:
    assert_correct(softmax(rows=13, **fields), sm_90a, "bulk", BulkConfig(**config), ["emulated"])


@pytest.mark.parametrize(
    ("cols", "config"),
    [
        *((cols, dict(ABREAST, stores="bulk", kept="packed")) for cols in (1, 7, 100)),
        *((cols, config) for cols, config in zip((1, 7, 100), (WARP, BLOCK, dict(BLOCK, grid=0)), strict=True)),
    ],
    ids=str,
)
def test_one_build_serves_any_number_of_rows(emulation: None, sm_90a: Arch, config: Fields, cols: int) -> None:
    """The tensor's last pack is whole or not, its first row may be its last, blocks have no row at all."""
    built = build(softmax(rows=1, cols=cols, keep=0.5), sm_90a, "bulk", BulkConfig(**config), device_code=False)
    for rows in (1, 2, 13, 77):
        assert is_right(built, rows), rows


@settings(max_examples=6)
@given(
    rows=st.integers(1, 40), cols=st.integers(1, 600), function=st.sampled_from(FUNCTIONS),
    dtype=st.sampled_from(SoftmaxProblem.dtypes), mask=st.sampled_from(["none", "full", "cols"]),
    keep=st.sampled_from([1.0, 0.8]), config=st.sampled_from(CONFIGS), mode=st.integers(0, 2),
)  # fmt: skip
def test_any_shape(
    emulation: None, sm_90a: Arch, rows: int, cols: int, function: str, dtype: str, mask: str, keep: float,
    config: Fields, mode: int,
) -> None:  # fmt: skip
    mask = "none" if function.endswith("grad") else mask
    problem = softmax(rows=rows, cols=cols, function=function, dtype=dtype, mask=mask, keep=keep)
    built = build(problem, sm_90a, "bulk", fitted(config, problem), device_code=False)
    assert is_right(built, rows, mode)


def test_a_default_is_correct_in_every_mode(emulation: None, sm_90a: Arch) -> None:
    assert_correct(softmax(rows=7, cols=1000), sm_90a, "bulk", routes=["emulated"])


def test_there_is_no_serial_route(sm_90a: Arch) -> None:
    with pytest.raises(UsageError, match="TIRx"):
        verify(softmax(rows=2, cols=64), sm_90a, "bulk", routes=["serial"])


BYTES = r"(arrive_expect_tx_shared_b64\(\w+\(\(&\(.*?\]\)\)\)), (.*)\);"
MUTANTS = {  # what to replace in the generated source
    "copies not waited for": (r"tvm_builtin_cuda_mbarrier_wait\([^;]*;", ""),
    "phase never turned": (r"phase_ptr\[0\] = \(phase_ptr\[0\] \^ 1\);", ""),
    "too few bytes expected": (BYTES, r"\1, (\2) - 16);"),
    "too many bytes expected": (BYTES, r"\1, (\2) + 16);"),
    "no barriers": (r"tvm_builtin_cuda_cta_sync\(\);", ""),
    "other rows' elements count": (r"pack_fill_16\([^;]*\);", ""),
    "a row's ends not stored": (r"pack_store_some_\d\([^;]*\);", ""),
    "the tensor's last elements not copied": (r"bulk_copy_unsigned_short\([^;]*\);", ""),
    "the stage in use filled": (r"\(\(stage_ptr\[0\] == 0\) \? 2 : stage_ptr\[0\]\)", "(stage_ptr[0] + 1)"),
}


def test_faults_are_caught(emulation: None, sm_90a: Arch) -> None:
    problem = softmax(rows=13, cols=203)
    built = build(problem, sm_90a, "bulk", BulkConfig(**BLOCK), device_code=False)
    assert_mutants_caught(built, MUTANTS)


LEAVING = {
    "written, not fenced, copied": (r"tvm_builtin_ptx_fence_proxy_\w+\(\);", ""),
    "filled again before it has left": (r"tvm_builtin_ptx_cp_async_bulk_wait_group_\w*read\w*\([^;]*;", ""),
    "no group to wait for": (r"tvm_builtin_ptx_cp_async_bulk_commit_group\w*\([^;]*;", ""),
}


def test_faults_of_copies_that_leave_are_caught(emulation: None, sm_90a: Arch) -> None:
    config = BulkConfig(**{**ABREAST, "kept": "packed", "stores": "bulk", "grid": 1, "rows": 8})
    assert_mutants_caught(build(softmax(rows=40, cols=100), sm_90a, "bulk", config, device_code=False), LEAVING)


def test_offsets_beyond_32_bits(sm_90a: Arch) -> None:
    """Elements are counted in 64 bits, though stages are in 32."""
    source = str(build(softmax(rows=49152, cols=50257), sm_90a, "bulk", device_code=False).sources["cu"])
    body = source[source.rindex("main_kernel(") :]
    assert re.search(r"int64_t tile_begin = \(\(\(int64_t\)tile_ptr\[0\]\) \* \(int64_t\)50257\);", body)
    assert re.search(r"int64_t elements = \(rows \* \(int64_t\)50257\);", body)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", SoftmaxProblem.dtypes)
@pytest.mark.parametrize("fields", [{}, dict(scale=0.5, keep=0.8)], ids=str)
def test_the_default_is_legal_if_a_row_fits(sm_90a: Arch, function: str, dtype: str, fields: Fields) -> None:
    for cols in (1, 7, 32, 100, 1000, 1023, 1024, 2048, 4096, 8192, 16384, 32768, 50257, 100000):
        problem = softmax(rows=49152, cols=cols, function=function, dtype=dtype, **fields)
        config = SCHEDULE.default(problem, sm_90a)
        reason = config.check(problem, sm_90a)
        if BulkConfig().stage_bytes(problem) < 220 * 1024 and config.rounds(problem) <= 8:
            assert reason is None
        assert reason is None or "bytes of shared memory" in reason or "registers" in reason


@pytest.mark.parametrize("cols", [100, 1000, 1023, 4096])
def test_searches_have_some_hundred_configs(sm_90a: Arch, cols: int) -> None:
    for function in FUNCTIONS:
        legal = list(SCHEDULE.legal_space(softmax(rows=49152, cols=cols, function=function), sm_90a))
        assert 100 < len(set(legal)) == len(legal) < 2000


@pytest.mark.parametrize(
    ("cols", "function"), [(100, "softmax"), (1000, "softmax_grad"), (1023, "softmax"), (32768, "softmax_grad")]
)
def test_defaults_move_packs_and_do_not_spill(cuda_compiler: None, sm_90a: Arch, function: str, cols: int) -> None:
    problem = softmax(rows=49152, cols=cols, function=function)
    built = build(problem, sm_90a, "bulk")
    (kernel,) = built.resources
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, built.config
    assert isinstance(built.config, BulkConfig)
    found = summary(material(built))
    assert found.blocks_sm is not None and found.blocks_sm >= built.config.blocks_sm
    if found.counted_in != "SASS":
        pytest.skip("no SASS disassembler; pip install nvidia-cuda-nvdisasm")
    rounds, inputs = built.config.rounds(problem), 2 if problem.is_grad else 1
    assert found.counts["shared load 128-bit"] == rounds * inputs  # once: the row is kept in registers
    if cols % 8 == 0:
        assert "global load" not in found.counts and "global store" not in found.counts
        assert found.counts["global store 128-bit"] == rounds


@pytest.mark.parametrize(
    "fields",
    [
        dict(cols=50257, function="softmax_grad"),
        dict(cols=32768, mask="full", keep=0.8, scale=0.5),
        dict(cols=32768, function="softmax_grad", keep=0.8, scale=0.5),
    ],
    ids=str,
)
def test_rows_that_fill_a_multiprocessor_do_not_spill(cuda_compiler: None, sm_90a: Arch, fields: Fields) -> None:
    """One stage, so that the row must be out of it soon: it is kept in registers."""
    built = build(softmax(rows=49152, **fields), sm_90a, "bulk")
    (kernel,) = built.resources
    assert isinstance(built.config, BulkConfig)
    assert built.config.num_stages == 1 and built.config.kept != "shared"
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, built.config


def test_frames() -> None:
    assert Frame(1000, 1, 2) == Frame(cols=1000, rows=1, itemsize=2)
    assert Frame(1000, 1, 2).aligned and Frame(1000, 1, 2).most == 125
    assert not Frame(1000, 1, 1).aligned and Frame(1000, 1, 1).most == 63  # from 8 bytes inside a pack
    assert not Frame(1023, 1, 2).aligned and Frame(1023, 1, 2).most == 129 and Frame(1023, 8, 2).most == 1023
    for cols, rows, itemsize in [(7, 3, 2), (1023, 1, 4), (100, 2, 1), (50257, 1, 2)]:
        frame = Frame(cols, rows, itemsize)
        starts = (rows * cols * k for k in range(frame.pack))
        packs = [-(-(start + rows * cols) // frame.pack) - start // frame.pack for start in starts]
        assert frame.most == max(packs)


def test_packs_of_two_rows_are_read_before_they_are_written(emulation: None, sm_90a: Arch) -> None:
    """Rows of 100 elements share packs; of the two barriers between reads and writes neither may be missing."""
    problem = softmax(rows=40, cols=100)
    fields = {**ABREAST, "kept": "packed", "stores": "bulk", "grid": 1}
    config = BulkConfig(**fields)
    assert config.shares_packs(problem) and not config.shares_packs(softmax(rows=40, cols=96))
    reason = BulkConfig(**{**fields, "kept": "shared"}).check(problem, sm_90a)
    assert reason and reason.startswith("kept=shared with stores=bulk is for rows of whole packs")
    barriers = {
        shares: str(build(softmax(rows=40, cols=cols), sm_90a, "bulk", config, device_code=False).sources["cu"])
        for shares, cols in ((True, 100), (False, 96))
    }
    # one before a turn's writes, one behind its last
    count = {shares: source.count("tvm_builtin_cuda_cta_sync();") for shares, source in barriers.items()}
    assert count[True] >= count[False] + 2


def test_every_field_changes_the_source(sm_90a: Arch) -> None:
    base = BulkConfig(threads=64, num_stages=3)
    narrow = BulkConfig(threads=16, abreast=2, rows=4)
    changes: dict[str, tuple[BulkConfig, Fields]] = {
        "threads": (base, dict(threads=128)),
        "abreast": (narrow, dict(abreast=4)),
        "groups": (narrow, dict(groups=2)),
        "rows": (base, dict(rows=2)),
        "num_stages": (base, dict(num_stages=4)),
        "chunks": (base, dict(chunks=2)),
        "blocks_sm": (base, dict(blocks_sm=2)),
        "grid": (base, dict(grid=264)),
        "kept": (base, dict(kept="packed")),
        "stores": (base, dict(stores="bulk")),
        "online": (base, dict(online=True)),
        "streaming": (base, dict(streaming="both")),
    }
    assert changes.keys() == base.to_json().keys()
    problem = softmax(rows=1, cols=1000)
    for config, change in changes.values():
        assert_changes_the_source(problem, sm_90a, "bulk", config, **change)


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (dict(threads=48), {}, "threads=48 is not a power of two up to 1024"),
        (dict(threads=2048), {}, "threads=2048 is not a power of two"),
        (dict(threads=16), {}, "threads=16 x abreast=1 is no multiple of a warp"),
        (dict(threads=64, abreast=2, rows=2), {}, "abreast=2 is for rows of up to a warp"),
        (dict(threads=64, groups=2), {}, "groups=2 is for teams of a warp"),
        (dict(threads=32, abreast=2, rows=3), {}, "rows=3 is no multiple of abreast=2"),
        (dict(threads=32, groups=40), {}, "groups=40 makes 1280 threads a block"),
        (dict(num_stages=0), {}, "num_stages=0 must be at least 1"),
        (dict(grid=-1), {}, "grid=-1 must be at least 0"),
        (dict(threads=512, blocks_sm=8), {}, "blocks_sm=8 of 512 threads are more"),
        (dict(threads=64), dict(cols=32768), "threads=64 gives each 64 packs, more than 32"),
        (dict(threads=128, kept="numerators"), dict(cols=32768), "kept=numerators needs about 280 registers"),
        (dict(threads=1024, num_stages=4), dict(cols=32768), "num_stages=4 needs 262"),
        (dict(threads=64, chunks=4), {}, "chunks=4 of 2 packs to a thread"),
        (dict(threads=32, chunks=2), {}, "chunks=2 is for stages of one row of more than a warp"),
        (dict(kept="registers"), {}, "kept=registers is not one of shared, packed, numerators"),
        (dict(stores="copied"), {}, "stores=copied is not one of direct, bulk"),
        (dict(streaming="loads"), {}, "streaming=loads is not one of no, stores, both, evict_last"),
        (dict(kept="numerators"), dict(function="log_softmax"), "kept=numerators is for function=softmax"),
        (dict(online=True, kept="packed"), dict(function="softmax_grad"), "softmax_grad has one reduction"),
        (dict(threads=32, online=True), {}, "online=true is for rows of more than a warp"),
    ],
)
def test_illegal_configs_are_refused(sm_90a: Arch, config: Fields, fields: Fields, words: str) -> None:
    problem = softmax(rows=1, **{"cols": 1000, **fields})
    with pytest.raises(ConfigError, match=words):
        build(problem, sm_90a, "bulk", BulkConfig(**config))


def test_other_archs_are_refused() -> None:
    with pytest.raises(ConfigError, match="cuda:sm_80 has no bulk copies; choose another --schedule"):
        build(softmax(rows=1, cols=64), parse_arch("sm_80"), "bulk")
    assert "bulk" not in [spec.name for spec in operator("softmax").offered(parse_arch("gfx90a"))]


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("cols", [1, 7, 32, 100, 1000, 1023, 2049, 4096, 32768, 50257])
def test_defaults_on_a_device(gpu: Arch, function: str, cols: int) -> None:
    """More rows than the stages of all multiprocessors together."""
    if "tma" not in gpu.features:
        pytest.skip(f"{gpu} has no bulk copies")
    assert_correct(softmax(rows=2000, cols=cols, function=function), gpu, "bulk", routes=["device"])


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("fields", PROBLEMS, ids=str)
def test_configs_on_a_device(gpu: Arch, config: Fields, fields: Fields) -> None:
    if "tma" not in gpu.features:
        pytest.skip(f"{gpu} has no bulk copies")
    problem = softmax(rows=1013, **fields)
    for grid in (3, 264):
        chosen = replace(fitted(config, problem), grid=grid)
        assert_correct(problem, gpu, "bulk", chosen, ["device"])
