"""The GPU schedules: correct by every route, for every function and step, at every width."""

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
from schedules.core.registry import operator
from schedules.lowering.annotations import STREAMING
from schedules.operators.softmax import candidates
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem
from tests.conftest import EMULATED_ARCHES, ROCM_ARCHES, assert_changes_the_source, assert_correct, caught, problem_of

GPU_SCHEDULES = ["warp", "block_registers", "block_streaming", "split"]
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("warp", {}),
    ("warp", dict(threads=8, groups=4, rows_per_group=2)),
    ("warp", dict(threads=8, groups=4, rows_per_group=4, in_flight=2, streaming="both")),
    ("warp", dict(numerators=True)),
    ("block_registers", {}),
    ("block_registers", dict(threads=64, rows_per_block=3, in_flight=3, streaming="stores")),
    ("block_registers", dict(threads=64, rows_per_block=2, in_flight=2, numerators=True)),
    ("block_streaming", {}),
    ("block_streaming", dict(threads=256, unroll=2)),
    ("split", {}),
    ("split", dict(threads=64, packs=1)),
]
PROBLEMS: dict[str, dict[str, Any]] = {
    "softmax, padded packs, bfloat16": dict(cols=100, dtype="bfloat16"),
    "log, packs over several rounds": dict(cols=1000, function="log_softmax"),
    "gradient, odd width": dict(cols=257, function="softmax_grad"),
    "log gradient, float32": dict(cols=64, function="log_softmax_grad", dtype="float32"),
    "scale, mask and dropout": dict(cols=96, scale=-0.5, mask="full", keep=0.8),
    "dropout drawn": dict(cols=104, keep=0.6, drop="drawn"),
    "gradient with dropout drawn, odd width": dict(cols=101, function="softmax_grad", keep=0.6, drop="drawn"),
    "mask of columns, float32": dict(cols=96, scale=2.0, mask="cols", dtype="float32"),
    "gradient with scale and dropout, bfloat16": dict(
        cols=200, function="softmax_grad", keep=0.7, scale=0.3, dtype="bfloat16"
    ),
    "one column": dict(cols=1),
}


def skip_what_is_not_for(arch: Arch, fields: dict[str, Any], config: dict[str, Any]) -> None:
    if config.get("threads", 0) > arch.max_threads:
        pytest.skip("not a config of this arch")
    if config.get("numerators") and fields.get("function", "softmax") != "softmax":
        pytest.skip("not a config of this function")


def names(items: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [" ".join([name, *(f"{k}={v}" for k, v in config.items())]) for name, config in items]


def choices(parity: int) -> list[Any]:
    """Each config with each fourth problem."""
    return [
        pytest.param(schedule, config, fields, id=f"{problem}-{name}")
        for i, ((schedule, config), name) in enumerate(zip(CONFIGS, names(CONFIGS), strict=True))
        for j, (problem, fields) in enumerate(PROBLEMS.items())
        if (i + j) % 4 == 2 * parity
    ]


# what one route leaves out, the other takes
@pytest.mark.parametrize(("schedule", "config", "fields"), choices(1))
def test_schedules_are_correct(schedule: str, config: dict[str, Any], fields: dict[str, Any]) -> None:
    """With waves of 64, which have no streaming; the code of warps of 32 is run below."""
    arch, config = parse_arch("gfx90a"), {name: value for name, value in config.items() if name != "streaming"}
    skip_what_is_not_for(arch, fields, config)
    assert_correct(problem_of("softmax", rows=7, **fields), arch, schedule, config, ["serial"])


@pytest.mark.parametrize(("schedule", "config", "fields"), choices(0))
def test_generated_cuda_is_correct(
    emulation: None, sm_90a: Arch, schedule: str, config: dict[str, Any], fields: dict[str, Any]
) -> None:
    skip_what_is_not_for(sm_90a, fields, config)
    assert_correct(problem_of("softmax", rows=7, **fields), sm_90a, schedule, config, ["emulated"])


@pytest.mark.parametrize("arch", EMULATED_ARCHES, ids=str)
@pytest.mark.parametrize("schedule", GPU_SCHEDULES)
def test_every_cuda_arch(emulation: None, arch: Arch, schedule: str) -> None:
    assert_correct(problem_of("softmax", rows=5, cols=300), arch, schedule, routes=["emulated"])


def test_gfx942_is_to_a_schedule_what_gfx90a_is() -> None:
    other = parse_arch("gfx90a")
    same = {name: getattr(other, name) for name in ("name", "features", "device", "matrix_rates")}
    assert replace(parse_arch("gfx942"), **same) == other


EVERY = [1, 2, 3, 7, 31, 33, 64, 255, 1023, 1024, 1025, 4096, 12289, 50257, 100000]
RULES = ["sm_75", "gfx90a", "sm_90a", "gfx1100"]


@pytest.mark.parametrize(("arch", "cols"), [(RULES[(i + j) % 4], cols) for i, cols in enumerate(EVERY) for j in (0, 1)])
def test_the_rule_serves_every_width(arch: str, cols: int) -> None:
    """By the serial route where the schedule has one; the others are on the next test's routes."""
    problem, target = problem_of("softmax", rows=2, cols=cols), parse_arch(arch)
    spec = operator("softmax").schedule_for(problem, target)
    assert spec.default(problem, target).check(problem, target) is None
    if "serial" not in spec.no_routes:
        assert_correct(problem, target, routes=["serial"])


@pytest.mark.parametrize("cols", [50257, 100000])
def test_long_rows_for_which_the_rule_has_better_while_they_are_few(sm_90a: Arch, cols: int) -> None:
    assert_correct(problem_of("softmax", rows=2, cols=cols), sm_90a, "block_streaming", routes=["serial"])


WIDTHS = [7, 32, 100, 1000, 1023, 2048, 8192, 32768, 50257, 100000]


# every width with softmax and with one other function
@pytest.mark.parametrize(
    ("function", "cols"),
    [(function, WIDTHS[i]) for i in range(len(WIDTHS)) for function in ("softmax", FUNCTIONS[1 + i % 3])],
)
def test_the_rule_serves_every_width_in_cuda(emulation: None, sm_90a: Arch, cols: int, function: str) -> None:
    assert_correct(problem_of("softmax", rows=2, cols=cols, function=function), sm_90a, routes=["emulated"])


def chosen(cols: int, target: str = "sm_90a", rows: int = 49152, **fields: Any) -> str:
    problem = problem_of("softmax", rows=rows, cols=cols, **fields)
    return operator("softmax").choose(problem, parse_arch(target))


def test_the_rule() -> None:
    assert chosen(37) == chosen(77) == chosen(13, function="softmax_grad") == chosen(77, "sm_75") == "tiles"
    assert {chosen(cols) for cols in (100, 128, 1023, 4096, 16384)} == {chosen(1000, dtype="float32")} == {"frames"}
    assert chosen(50257) == chosen(50257, function="softmax_grad") == chosen(100001) == chosen(10**6) == "cluster"
    assert chosen(10**6, "sm_80") == "parts" and chosen(100, "gfx90a") == "warp"
    assert chosen(4096, "llvm") == chosen(10**6, "llvm", rows=1) == "cpu"


def test_the_rule_splits_long_rows_that_are_few() -> None:
    assert chosen(1024, rows=1) == chosen(1000, "sm_80", rows=64) == "frames"
    assert chosen(50257, rows=1) == chosen(65536, rows=8) == chosen(128256, rows=32) == "cluster"
    assert chosen(2**20, rows=1) == chosen(2**22, rows=1) == "parts"  # too long for a cluster that is alone
    assert chosen(50257, "sm_80", rows=1) == chosen(2**20, "sm_80", rows=8) == "parts"
    assert chosen(2**20, "gfx942", rows=1) == "split"


@pytest.mark.parametrize("rows", [2**15, 2**17])
def test_a_row_more_costs_no_less(sm_90a: Arch, rows: int) -> None:
    """And a schedule that reads rows once costs less than one that reads them twice, where both fill the GPU."""

    def costs(count: int, cols: int) -> dict[str, float]:
        return {name: us for us, name in candidates(problem_of("softmax", rows=count, cols=cols), sm_90a)}

    for cols in (5, 37, 100, 333, 1000, 4096):
        fewer, more = costs(rows, cols), costs(2 * rows, cols)
        assert all(fewer[name] < more[name] for name in fewer.keys() & more.keys())
        assert min(fewer, key=fewer.__getitem__) in ("tiles", "frames") and fewer["frames"] < fewer["parts"]


CUT = [
    ("warp", {}), ("block_registers", {}), ("block_streaming", {}), ("split", {}),
    ("tiles", {}), ("frames", {}), ("frames", dict(threads=64, groups=1, online=True)),
    ("cluster", dict(cluster=2, threads=64, in_shared=0)), ("parts", dict(threads=64, packs=1)),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CUT)), ids=lambda case: f"{CUT[case][0]}{case}")
def test_rows_of_which_the_first_columns_count(emulation: None, sm_90a: Arch, case: int) -> None:
    schedule, config = CUT[case]
    masks = [dict(mask="lengths"), dict(mask="causal", queries=4, scale=-0.5)]
    dtype, function = SoftmaxProblem.dtypes[case % 3], ("softmax", "log_softmax")[case // 3 % 2]
    for cols, mask in zip((777, 1000), masks if case % 2 else reversed(masks), strict=True):
        problem = problem_of("softmax", rows=9, cols=cols, dtype=dtype, function=function, **mask)
        config = config if schedule != "tiles" else operator("softmax").schedule("tiles").default(problem, sm_90a)
        assert_correct(problem, sm_90a, schedule, config, ["emulated"])


def test_packs_of_columns_that_do_not_count_are_not_read(sm_90a: Arch) -> None:
    problem, words = problem_of("softmax", rows=9, cols=1000, mask="lengths"), dict(threads=64, groups=1)
    built = build(problem, sm_90a, "frames", words, device_code=False)
    source = str(built.sources["cu"])
    loads = re.findall(r"if \(([^{]*)\) {\s*pack_load_\w*16", source[source.rindex("main_kernel(") :])
    assert len(loads) == 2 and all("counted_ptr[0]" in condition for condition in loads)


@settings(max_examples=8)
@given(
    rows=st.integers(1, 9), cols=st.integers(1, 700), function=st.sampled_from(FUNCTIONS),
    dtype=st.sampled_from(SoftmaxProblem.dtypes), choice=st.sampled_from(CONFIGS),
)  # fmt: skip
def test_any_shape_is_correct(
    sm_90a: Arch, rows: int, cols: int, function: str, dtype: str, choice: tuple[str, dict[str, Any]]
) -> None:
    problem = problem_of("softmax", rows=rows, cols=cols, function=function, dtype=dtype)
    schedule, config = choice
    spec = operator("softmax").schedule(schedule)
    try:
        chosen = spec.config_for(problem, sm_90a, config)
    except ConfigError:
        return
    assert_correct(problem, sm_90a, schedule, chosen, ["serial"])


def run_rows(built: Built, x: np.ndarray) -> np.ndarray:
    """The built softmax on `x` by the emulator, in its first mode."""
    problem = replace(built.problem, rows=len(x))
    for _, run in emulated_runs(built, str(built.sources["cu"])):
        return run([x, *poisoned(problem)])[0]
    raise AssertionError


@pytest.mark.parametrize("schedule", GPU_SCHEDULES)
def test_one_build_serves_any_number_of_rows(emulation: None, sm_90a: Arch, schedule: str) -> None:
    built = build(problem_of("softmax", rows=3, cols=40), sm_90a, schedule, device_code=False)
    for rows in (1, 2, 65):
        problem = problem_of("softmax", rows=rows, cols=40)
        (x,) = built.operator.inputs(problem, np.random.default_rng(rows))
        assert judge(problem, [x], [run_rows(built, x)]).passed


def _fields() -> list[tuple[str, str, Any]]:
    return [
        ("warp", "threads", 16),
        ("warp", "groups", 8),
        ("warp", "rows_per_group", 2),
        ("warp", "vector", 4),
        ("warp", "min_blocks", 4),
        ("warp", "in_flight", 2),
        ("warp", "streaming", "both"),
        ("warp", "numerators", True),
        ("block_registers", "threads", 128),
        ("block_registers", "vector", 4),
        ("block_registers", "min_blocks", 1),
        ("block_registers", "rows_per_block", 2),
        ("block_registers", "in_flight", 2),
        ("block_registers", "streaming", "stores"),
        ("block_registers", "numerators", True),
        ("block_streaming", "threads", 512),
        ("block_streaming", "vector", 4),
        ("block_streaming", "unroll", 2),
        ("block_streaming", "streaming", "no"),
        ("split", "threads", 128),
        ("split", "vector", 4),
        ("split", "packs", 4),
        ("split", "min_blocks", 4),
    ]


def test_every_field_is_listed() -> None:
    listed = {(schedule, field) for schedule, field, _ in _fields()}
    gpu = [
        spec for spec in operator("softmax").schedules if spec.name in GPU_SCHEDULES
    ]  # others' are in their own tests
    assert listed == {(spec.name, field) for spec in gpu for field in spec.config().to_json()}


@pytest.mark.parametrize(("schedule", "field", "value"), _fields())
def test_every_field_changes_the_source(sm_90a: Arch, schedule: str, field: str, value: Any) -> None:
    narrow = schedule == "warp" or field in ("in_flight", "rows_per_block", "numerators")
    problem = problem_of("softmax", rows=1, cols=1024 if narrow else 8 * 4096)
    spec = operator("softmax").schedule(schedule)
    rows = "rows_per_group" if schedule == "warp" else "rows_per_block"
    base = spec.config_for(problem, sm_90a, {rows: 2} if field == "in_flight" else {})
    assert_changes_the_source(problem, sm_90a, schedule, base, **{field: value})


def test_rows_move_in_128_bit_accesses_and_shuffles(cuda_compiler: None, sm_90a: Arch) -> None:
    built = build(problem_of("softmax", rows=64, cols=1024), sm_90a, "warp")
    source = str(built.sources["cu"])
    assert "load_evict_last_uint4((&(x_ptr" in source and "store_uint4((&(out_ptr" in source
    assert "__shfl_" in source
    assert "__shared__" not in source and "__syncthreads" not in source
    found = summary(material(built))
    assert found.counts["global load 128-bit"] == found.counts["global store 128-bit"] == 4
    assert found.counts["shuffle"] >= 10


@pytest.mark.parametrize("schedule", ["block_registers", "block_streaming"])
def test_a_result_is_read_and_divided_by_once(cuda_compiler: None, sm_90a: Arch, schedule: str) -> None:
    """Not by every element, from shared memory."""
    ptx = str(build(problem_of("softmax", rows=64, cols=4096), sm_90a, schedule).sources["ptx"])
    assert len(re.findall(r"ld\.volatile\.shared", ptx)) == 2
    assert len(re.findall(r"(?:rcp|div)\.\S*f32", ptx)) == 1


@pytest.mark.parametrize("numerators", [False, True])
def test_kept_exponentials_are_computed_once(cuda_compiler: None, sm_90a: Arch, numerators: bool) -> None:
    built = build(problem_of("softmax", rows=64, cols=1024), sm_90a, "warp", dict(numerators=numerators))
    assert len(re.findall(r"ex2\.approx", str(built.sources["ptx"]))) == (32 if numerators else 64)


# on sm_90a other widths are in tests of the schedules that the rule has there
@pytest.mark.parametrize(
    ("target", "cols"),
    [(("sm_75", "sm_90a")[i % 2], cols) for i, cols in enumerate([32, 100, 1000, 1024, 2048, 8192, 16384, 32768])],
)
def test_defaults_do_not_spill(cuda_compiler: None, target: str, cols: int) -> None:
    built = build(problem_of("softmax", rows=64, cols=cols), parse_arch(target))
    for kernel in built.resources:
        assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, built.config


@pytest.mark.parametrize("arch", ROCM_ARCHES, ids=str)
@pytest.mark.parametrize("schedule", GPU_SCHEDULES)
def test_amd_code_objects(amd_linker: None, arch: Arch, schedule: str) -> None:
    built = build(problem_of("softmax", rows=64, cols=1024), arch, schedule)
    assembly, code = str(built.sources["s"]), built.sources["hsaco"]
    assert isinstance(code, bytes) and int.from_bytes(code[18:20], "little") == 224
    assert built.launch

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", assembly)[1])  # type: ignore[index]

    assert number("group_segment_fixed_size") <= 64 * 1024
    assert number("private_segment_fixed_size") == 0
    assert number("max_flat_workgroup_size") >= built.launch.threads
    assert re.search(r"global_load_(dwordx4|b128)", assembly)


@pytest.mark.parametrize(
    ("schedule", "config", "cols", "words"),
    [
        ("warp", dict(threads=12), 64, "threads=12 is not a power of two up to"),
        ("warp", dict(threads=64), 64, "threads=64"),
        ("warp", dict(vector=16), 64, "vector=16 does not divide 8"),
        ("warp", dict(vector=8), 100, "vector=8 does not divide 4"),
        ("warp", dict(groups=64), 64, "2048 threads a block"),
        ("warp", dict(threads=2), 4096, "need about"),
        ("block_registers", dict(threads=48), 64, "threads=48 is not a multiple of the wave"),
        ("block_registers", dict(min_blocks=40), 4096, "min_blocks=40"),
        ("block_registers", dict(rows_per_block=3, in_flight=2), 4096, "in_flight=2 does not divide the 3 rows"),
        ("block_registers", dict(threads=64, rows_per_block=8, in_flight=8), 8192, "need about"),
        ("block_registers", dict(rows_per_block=0), 4096, "must be positive"),
        ("warp", dict(streaming="loads"), 64, "streaming=loads is not one of no, stores, both, evict_last"),
        ("block_streaming", dict(unroll=0), 64, "unroll=0"),
        ("split", dict(threads=0), 64, "threads=0 is not a multiple of the wave"),
        ("split", dict(packs=0), 64, "packs=0 must be at least 1"),
        ("split", dict(vector=0), 64, "vector=0 does not divide 8"),
        ("split", dict(packs=64), 2**20, "need about"),
    ],
)
def test_illegal_configs_are_refused(
    sm_90a: Arch, schedule: str, config: dict[str, Any], cols: int, words: str
) -> None:
    if schedule == "warp" and "threads" not in config and "groups" in config:
        config = {**config, "threads": 32}
    with pytest.raises(ConfigError, match=words):
        build(problem_of("softmax", rows=1, cols=cols), sm_90a, schedule, config)


def test_what_is_for_one_function_or_target_is_refused_elsewhere(sm_90a: Arch) -> None:
    with pytest.raises(ConfigError, match="numerators=true is for function=softmax, not softmax_grad"):
        build(problem_of("softmax", rows=1, cols=64, function="softmax_grad"), sm_90a, "warp", dict(numerators=True))
    with pytest.raises(ConfigError, match="streaming=both is for CUDA"):
        build(problem_of("softmax", rows=1, cols=64), parse_arch("gfx90a"), "warp", dict(streaming="both"))


def bits_of(instruction: str) -> int:
    """Bits of a PTX access: ld.global.nc.v4.u16 moves 64."""
    found = re.search(r"(?:\.v(\d))?\.[a-z](\d+)$", instruction)
    assert found, instruction
    return int(found[1] or 1) * int(found[2])


@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize(
    ("cols", "dtype", "vector"),
    [(100, "float16", 64), (1000, "float16", 128), (100, "float32", 128), (7, "float32", 32)],
)
def test_accesses_stay_whole(
    cuda_compiler: None, sm_90a: Arch, cols: int, dtype: str, vector: int, streaming: str
) -> None:
    """Also where the last pack is predicated: the compiler takes a struct of halves apart there."""
    problem = problem_of("softmax", rows=64, cols=cols, dtype=dtype)
    ptx = str(build(problem, sm_90a, "warp", dict(streaming=streaming)).sources["ptx"])
    loads, stores = set(re.findall(r"ld\.global\S*", ptx)), set(re.findall(r"st\.global\S*", ptx))
    bits = {bits_of(name) for name in loads | stores}
    assert bits == {vector}, loads | stores
    assert all(".cs." in name for name in stores) == (streaming in ("stores", "both"))
    assert all(".cs." in name for name in loads) == (streaming == "both")
    assert all("cache_hint" in name for name in loads) == (streaming == "evict_last")


def test_missing_barriers_are_caught(emulation: None, sm_90a: Arch) -> None:
    """Barriers whose absence the data can show: all but those after which only the writing thread reads."""
    problem = problem_of("softmax", rows=6, cols=2048)
    built = build(problem, sm_90a, "block_registers", dict(threads=128), device_code=False)
    source = str(built.sources["cu"])
    barriers = [match.start() for match in re.finditer(r"__syncthreads\(\);", source)]
    arrays = built.operator.inputs(problem, np.random.default_rng(0))

    assert not caught(built, source, arrays)
    found = [caught(built, source[:at] + source[at + len("__syncthreads();") :], arrays) for at in barriers]
    assert sum(found) >= 2 * len(barriers) // 3 - 1, found
    assert caught(built, source.replace("red_buf0_ptr_1[", "red_buf0_ptr[", 3), arrays)
