"""Rows over the blocks of a cluster: right at any width, number of rows and config, and what the generated code is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from schedules.build.builder import Built, build
from schedules.build.inspect import material, summary
from schedules.build.toolchain import cuda
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.operators.softmax.cluster import SCHEDULE, ClusterConfig
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem
from schedules.operators.softmax.packs import Frame
from tests.conftest import assert_correct, assert_mutants_caught, is_right, problem_of

Fields = dict[str, Any]
TWO: Fields = dict(cluster=2, threads=64)
TURNS: Fields = dict(cluster=2, threads=64, grid=4, in_shared=1)  # clusters that compute row after row
# (problem, config): every function, dtype and fused form, every field of the config, blocks without a pack
CASES: list[tuple[Fields, Fields]] = [
    (dict(cols=5), dict(TWO, cluster=4)),
    (dict(cols=1100, function="log_softmax", dtype="bfloat16"), dict(TWO, grid=4, online=True)),
    (dict(cols=2049, mask="cols", keep=0.8, drop="drawn"), TURNS),
    (dict(cols=1025, dtype="float32", mask="full", keep=0.7, scale=-0.5), dict(TURNS, online=True)),
    (dict(cols=2056, mask="cols", dtype="bfloat16"), dict(TURNS, in_shared=2, streaming="evict_last")),
    (dict(cols=2048, function="softmax_grad"), dict(TWO, in_shared=2, streaming="both")),
    (dict(cols=2315, function="softmax_grad", keep=0.7, scale=0.3), dict(TURNS, in_shared=2)),
    (dict(cols=2317, function="softmax_grad", keep=0.7, drop="drawn"), dict(TURNS, in_shared=2)),
    (dict(cols=4999, function="log_softmax_grad", dtype="float32"), dict(TURNS, cluster=8, grid=8)),
    (dict(cols=2333, function="cross_entropy", dtype="bfloat16"), dict(TURNS, online=True)),
    (dict(cols=3001), dict(TWO, kept="numerators")),
    (dict(cols=9000, mask="full"), dict(TWO, cluster=16, kept="numerators", online=True)),
    (dict(cols=9000, dtype="float32"), dict(TWO, cluster=16, online=True, direct=True)),
    (dict(cols=9000), dict(cluster=16, threads=128, online=True, direct=True, kept="numerators")),
    (dict(cols=4999, function="softmax_grad"), dict(TWO, cluster=4, direct=True)),
]


def softmax(**fields: Any) -> SoftmaxProblem:
    problem = problem_of("softmax", **fields)
    assert isinstance(problem, SoftmaxProblem)
    return problem


def built_for(arch: Arch, fields: Fields, config: Fields) -> Built:
    return build(softmax(rows=5, **fields), arch, "cluster", ClusterConfig(**config), device_code=False)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_configs_and_problems(emulation: None, sm_90a: Arch, case: int) -> None:
    """One build serves any number of rows: the tensor's last pack is whole or not, clusters have rows left over."""
    built = built_for(sm_90a, *CASES[case])
    for mode, rows in enumerate((1, 2, 7)):
        assert is_right(built, rows, (case + mode) % 3), rows


def test_copies_have_no_cache_policy(sm_90a: Arch) -> None:
    """An H200 called cp.async with one an illegal instruction in some kernels; the emulator takes it."""
    built = built_for(sm_90a, dict(cols=2056), dict(TWO, in_shared=1, streaming="evict_last"))
    source = str(built.sources["cu"])
    assert "ld.global.L2::cache_hint" in source and "cp.async.cg.shared.global" in source
    assert not re.search(r"cp\.async[^;]*cache_hint", source)


MUTANTS = {  # what to replace in the generated source
    "blocks written to before they begin": (r"(?m)^ +tvm_builtin_ptx_barrier_cluster_wait\w+\(\);", ""),
    "other blocks not waited for": (r"(?m)^ +tvm_builtin_cuda_mbarrier_wait_acquire_cluster\([^;]*;", ""),
    "too few bytes expected": (r"(arrive_expect_tx_shared_b64\(.*), \(uint\)16\);", r"\1, (uint)8);"),
    "rows before not counted": (r"rows_before_ptr\[0\] = \(rows_before_ptr\[0\] \+ 1\);", ""),
    "barriers waited for out of turn": (r"int parity = .*;", "int parity = 0;"),
    "sent to the same block": (r"(_mapa_\w+\([^;]*?), \(\(uint\)\(\(\(int\)threadIdx.x\) & 31\)\)\)", r"\1, 0)"),
    "the same slot for all": (r"\(\(\(int\)blockIdx\.x\) % 2\) \* 2\)", "0)"),
    "copies not waited for": (r"tvm_builtin_ptx_cp_async_wait_group\w*\([^;]*;", ""),
    "the next row not copied": (r"(?s)if \(following < rows\) \{.*?\}", ""),
    "no barriers": (r"tvm_builtin_cuda_cta_sync\(\);", ""),
}


def test_faults_are_caught(emulation: None, sm_90a: Arch) -> None:
    built = built_for(sm_90a, dict(cols=2051), TURNS)
    assert_mutants_caught(built, MUTANTS)


def test_rows_take_turns_at_what_is_exchanged(sm_90a: Arch) -> None:
    """Where one barrier is between two rows, warps may be one row apart, and blocks may be anyway; the emulator's
    orders do not show it."""
    fields = dict(cols=2048, function="softmax_grad")
    source = str(built_for(sm_90a, fields, dict(TWO, grid=4)).sources["cu"])
    body = source[source.rindex("main_kernel(") :]
    assert re.search(r"\(\(turn_ptr\[0\] \* 4\) \+ \(.*threadIdx\.x\) >> 5\)\)\] = total_of_warp;", body)
    assert "turn_ptr[0] = (turn_ptr[0] ^ 1);" in body
    assert re.search(r"int slots_turn = \(rows_before_ptr\[0\] & 1\);", body)
    assert re.search(r"int parity = \(\(rows_before_ptr\[0\] >> 1\) & 1\);", body)
    assert "turn_ptr" not in str(built_for(sm_90a, fields, TWO).sources["cu"])


def test_offsets_beyond_32_bits(sm_90a: Arch) -> None:
    source = str(build(softmax(rows=132, cols=2**20 + 1), sm_90a, "cluster", device_code=False).sources["cu"])
    assert re.search(r"int64_t begin = \(row_ptr\[0\] \* \(int64_t\)1048577\);", source)


@pytest.mark.parametrize(
    ("fields", "in_shared"),
    [
        (dict(cols=2**20), 8),
        (dict(cols=2**20, function="softmax_grad"), 5),
        (dict(cols=65536, rows=8, dtype="float32"), 0),
    ],
    ids=str,
)
def test_defaults_read_once_by_packs_and_do_not_spill(
    cuda_compiler: None, sm_90a: Arch, fields: Fields, in_shared: int
) -> None:
    problem = softmax(**{"rows": 132, **fields})
    built = build(problem, sm_90a, "cluster")
    (kernel,) = built.resources
    assert isinstance(built.config, ClusterConfig) and built.config.in_shared == in_shared
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, built.config
    found = summary(material(built))
    assert found.blocks_sm is not None and found.blocks_sm >= built.config.blocks_sm
    if found.counted_in != "SASS":
        pytest.skip("no SASS disassembler; pip install nvidia-cuda-nvdisasm")
    counts, rounds, inputs = found.counts, built.config.rounds(problem), 2 if problem.is_grad else 1
    assert counts.get("global load 128-bit", 0) == (rounds - in_shared) * inputs  # once
    assert counts.get("cp.async", 0) == in_shared * inputs and counts["global store 128-bit"] == rounds
    assert "global load" not in counts and "global store" not in counts
    code = cuda.disassemble(bytes(built.sources["cubin"]))  # type: ignore[arg-type]
    assert "STAS" in code and "MEMBAR" not in code  # what blocks exchange waits for no other store
    first_wait = re.search(r"DEPBAR\.LE SB0|MUFU|HMNMX2|SHFL\.BFLY", code)
    last_copy = max(match.start() for match in re.finditer(r"LDGSTS|LDG\.E\.128", code))
    between = code[first_wait.start() : last_copy] if first_wait else ""
    assert len(re.findall(r"LDG", between)) <= 2  # nearly all in flight before the first is used


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_default_is_legal_if_a_row_fits(sm_90a: Arch, function: str) -> None:
    for dtype in SoftmaxProblem.dtypes:
        for cols in (1, 1000, 65536, 65537, 262143, 2**20, 2**20 + 1, 2**22):
            for rows, fields in ((1, {}), (8, {}), (132, {}), (132, dict(scale=0.5, keep=0.8))):
                problem = softmax(rows=rows, cols=cols, function=function, dtype=dtype, **fields)
                config = SCHEDULE.default(problem, sm_90a)
                reason = config.check(problem, sm_90a)
                if not fields and cols * Frame.of_row(problem).itemsize * (1 + problem.is_grad) <= 2**22:
                    assert reason is None or cols == 2**20 + 1
                assert reason is None or re.search("registers|bytes of shared memory|more than 32", reason)


def test_small_clusters_where_rows_are_many() -> None:
    def cluster(rows: int, cols: int) -> int:
        return SCHEDULE.default(softmax(rows=rows, cols=cols), parse_arch("sm_90a")).to_json()["cluster"]

    assert [cluster(rows, 65536) for rows in (1, 8, 32, 132)] == [16, 16, 16, 8]
    assert [cluster(132, cols) for cols in (1000, 50257, 65536, 2**20)] == [2, 2, 8, 16]


@pytest.mark.parametrize(("rows", "cols"), [(132, 65536), (132, 2**20), (8, 2**20), (8, 65536)])
def test_searches_have_configs(sm_90a: Arch, rows: int, cols: int) -> None:
    for function in FUNCTIONS:
        legal = list(SCHEDULE.legal_space(softmax(rows=rows, cols=cols, function=function), sm_90a))
        assert (5 if cols == 2**20 else 30) < len(set(legal)) == len(legal) < 1000


def test_the_rule_takes_them_for_long_rows_that_are_not_too_few() -> None:
    def chosen(rows: int, cols: int, target: str = "sm_90a", **fields: Any) -> str:
        return operator("softmax").choose(softmax(rows=rows, cols=cols, **fields), parse_arch(target))

    assert chosen(8, 65536) == chosen(132, 65536) == chosen(132, 2**20) == chosen(10**5, 2**20) == "cluster"
    assert chosen(132, 50257) == chosen(8, 32768, dtype="float32") == chosen(132, 2**20 - 1) == "cluster"
    assert chosen(10**5, 16384) == chosen(132, 1000) == "frames" and chosen(10**5, 50257) == "cluster"
    assert chosen(1, 65536) == "cluster" and chosen(1, 2**20) == "parts"
    assert chosen(132, 2**22) == chosen(132, 2**20, "sm_80") == "parts"


def test_every_field_changes_the_source(sm_90a: Arch) -> None:
    base = ClusterConfig(2, 64, 0, 1)
    changes: dict[str, Fields] = {
        "cluster": dict(cluster=4),
        "threads": dict(threads=128),
        "in_shared": dict(in_shared=1),
        "blocks_sm": dict(blocks_sm=2),
        "grid": dict(grid=4),
        "kept": dict(kept="numerators"),
        "online": dict(online=True),
        "direct": dict(online=True, direct=True),
        "streaming": dict(streaming="evict_last"),
    }
    assert changes.keys() == base.to_json().keys()
    problem = softmax(rows=1, cols=4000)
    sources = {
        str(build(problem, sm_90a, "cluster", replace(base, **change), device_code=False).sources["cu"])
        for change in ({}, *changes.values())
    }
    assert len(sources) == 1 + len(changes)


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (dict(cluster=3), {}, "cluster=3 is not one of 2, 4, 8, 16"),
        (dict(threads=96), {}, "threads=96 is not a power of two up to 1024"),
        (dict(threads=32), {}, "threads=32 must be at least 64"),
        (dict(blocks_sm=5), {}, "blocks_sm=5 of 512 threads, a multiprocessor of cuda:sm_90a holds 1 to 4"),
        (dict(grid=12), {}, "grid=12 is no multiple of cluster=8"),
        (dict(threads=64), dict(cols=2**18), "threads=64 gives each 64 packs, more than 32"),
        (dict(in_shared=1), {}, "in_shared=1 is not from 0 to 0, the packs that every thread has"),
        (dict(in_shared=2), dict(cols=65537), "in_shared=2 is not from 0 to 1"),
        (dict(in_shared=1, kept="numerators"), dict(cols=65536), "kept=numerators is for rows that are all in reg"),
        ({}, dict(cols=2**19), "in_shared=0 leaves 16 packs in about 92 registers, cuda:sm_90a has 64 for each of"),
        (dict(in_shared=15), dict(cols=2**19), "in_shared=15 needs 123"),
        (dict(kept="shared"), {}, "kept=shared is not one of packed, numerators"),
        (dict(online=True), dict(function="softmax_grad"), "softmax_grad has one reduction"),
    ],
)
def test_illegal_configs_are_refused(sm_90a: Arch, config: Fields, fields: Fields, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(softmax(rows=1, **{"cols": 1000, **fields}), sm_90a, "cluster", ClusterConfig(**config))


def test_other_archs_are_refused() -> None:
    with pytest.raises(ConfigError, match="cuda:sm_80 has no clusters of blocks; choose another --schedule"):
        build(softmax(rows=1, cols=64), parse_arch("sm_80"), "cluster")


def test_an_arch_has_clusters_of_so_many() -> None:
    problem, arch = softmax(rows=8, cols=2**18), parse_arch("sm_120a")
    assert "cluster=16 is over 8, the most of cuda:sm_120a" in (ClusterConfig(16).check(problem, arch) or "legal")
    assert ClusterConfig(16).check(problem, parse_arch("sm_100a")) is None
    assert operator("softmax").schedule("cluster").config_for(problem, arch).cluster <= 8
    assert_correct(softmax(rows=2, cols=2056), arch, "cluster", dict(TWO), ["emulated"])


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("cols", [1000, 50257, 65536, 2**18, 2**20 - 1, 2**20])
def test_defaults_on_a_device(gpu: Arch, function: str, cols: int) -> None:
    if "cluster" not in gpu.features:
        pytest.skip(f"{gpu} has no clusters of blocks")
    for rows in (1, 8, 133):
        assert_correct(softmax(rows=rows, cols=cols, function=function), gpu, "cluster", routes=["device"])


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(len(CASES)))
def test_configs_on_a_device(gpu: Arch, case: int) -> None:
    if "cluster" not in gpu.features:
        pytest.skip(f"{gpu} has no clusters of blocks")
    fields, config = CASES[case]
    for rows in (3, 1013):
        assert_correct(softmax(rows=rows, **fields), gpu, "cluster", ClusterConfig(**config), ["device"])
