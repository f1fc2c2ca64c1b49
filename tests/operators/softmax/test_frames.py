"""Rows in registers as the packs of 16 bytes they lie in: right at any width and config, and what the code is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schedules.build.builder import Built, build
from schedules.build.inspect import material, summary
from schedules.build.toolchain import cuda
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem
from schedules.operators.softmax.frames import SCHEDULE, FramesConfig
from tests.conftest import assert_changes_the_source, assert_correct, assert_mutants_caught, is_right, problem_of

Fields = dict[str, Any]
PART: Fields = dict(threads=4, groups=16)  # a row to a part of a warp
WARP: Fields = dict(threads=32, groups=2)
BLOCK: Fields = dict(threads=64)
# (problem, config): every width, function, dtype and fused form, every field of the config
CASES: list[tuple[Fields, Fields]] = [
    (dict(cols=1, keep=0.5, drop="drawn"), {}),
    (dict(cols=7, function="log_softmax", dtype="bfloat16", mask="full"), {}),
    (dict(cols=7, function="softmax_grad", keep=0.7), dict(threads=1, groups=32, rows_per_group=2, streaming="both")),
    (dict(cols=100, mask="cols", keep=0.8, drop="drawn"), PART),
    (dict(cols=100, function="log_softmax_grad", dtype="bfloat16", scale=0.3, keep=0.7), PART),
    (dict(cols=100, function="softmax_grad", dtype="float32"), {}),
    (
        dict(cols=101, dtype="float32", scale=-0.5, mask="full", keep=0.8),
        dict(PART, rows_per_group=4, streaming="evict_last"),
    ),
    (dict(cols=1000, mask="cols", dtype="bfloat16"), WARP),
    (dict(cols=1000, function="softmax_grad"), dict(BLOCK, rows_per_group=3, min_blocks=4)),
    (
        dict(cols=1023, mask="cols", scale=2.0, keep=0.8, drop="drawn"),
        dict(WARP, kept="numerators", min_blocks=4, streaming="stores"),
    ),
    (
        dict(cols=1023, function="log_softmax_grad", dtype="float32", keep=0.5, drop="drawn"),
        dict(BLOCK, rows_per_group=2),
    ),
    (dict(cols=1023, mask="full", keep=0.8, dtype="bfloat16"), dict(BLOCK, online=True, rows_per_group=2)),
    (dict(cols=1023), dict(BLOCK, online=True, kept="numerators")),
    (dict(cols=2049, function="log_softmax", mask="cols"), dict(BLOCK, rows_per_group=2)),
    (dict(cols=100, mask="cols"), {}),  # packs of 8 bytes
    (
        dict(cols=100, scale=-0.5, mask="full", keep=0.8, drop="drawn", dtype="bfloat16"),
        dict(PART, rows_per_group=2, access=8),
    ),
    (
        dict(cols=100, function="log_softmax_grad", keep=0.7),
        dict(threads=8, groups=4, access=8, streaming="evict_last"),
    ),
    (dict(cols=516), dict(BLOCK, online=True, access=8)),
    (dict(cols=501), dict(BLOCK, threads=128, online=True, access=2)),
    (
        dict(cols=37, function="softmax_grad", dtype="bfloat16"),
        dict(threads=8, groups=8, access=2, streaming="evict_last"),
    ),
    (dict(cols=102, mask="cols", function="log_softmax"), dict(threads=16, groups=4, access=4)),
    (dict(cols=333, dtype="float32", mask="full"), dict(threads=32, groups=2, access=4, kept="packed")),
    (dict(cols=77, y_dtype="float32"), dict(threads=16, groups=4, access=2, kept="numerators")),
    (dict(cols=100, function="log_softmax"), dict(threads=8, groups=8, access=8, kept="widened")),
    (dict(cols=36, function="softmax_grad", dtype="bfloat16"), dict(threads=4, groups=16, access=8, kept="widened")),
    (
        dict(cols=1023, function="log_softmax_grad", scale=0.3, keep=0.7, drop="drawn"),
        dict(WARP, kept="widened", rows_per_group=2),
    ),
    (dict(cols=6, function="softmax_grad", dtype="float32"), {}),
    (dict(cols=2049, function="softmax_grad", keep=0.5, scale=0.5), dict(threads=128)),
]


def softmax(**fields: Any) -> SoftmaxProblem:
    problem = problem_of("softmax", **fields)
    assert isinstance(problem, SoftmaxProblem)
    return problem


def built_for(arch: Arch, fields: Fields, config: Fields) -> Built:
    problem = softmax(rows=13, **fields)
    return build(problem, arch, "frames", FramesConfig(**config) if config else None, device_code=False)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_configs_and_problems(emulation: None, sm_90a: Arch, case: int) -> None:
    """One build serves any number of rows: the tensor's last pack is whole or not, blocks have rows left over."""
    built = built_for(sm_90a, *CASES[case])
    for mode, rows in enumerate((1, 2, 13)):
        assert is_right(built, rows, (case + mode) % 3), rows


def test_the_oldest_arch(emulation: None) -> None:
    assert_correct(softmax(rows=3, cols=203, keep=0.5), parse_arch("sm_75"), "frames", routes=["emulated"])
    with pytest.raises(ConfigError, match="dtype=bfloat16 needs sm_80 or newer"):
        build(softmax(rows=3, cols=203, dtype="bfloat16"), parse_arch("sm_75"), "frames")


MUTANTS = {  # what to replace in the generated source
    "other rows' elements count": (r"pack_fill_4_16\([^;]*\);", ""),
    "a row's ends not stored": (r"pack_store_some_\d\([^;]*\);", ""),
    "the tensor's last elements not read": (r"pack_load_some_4_2\([^;]*\);", ""),
    "stored over other rows": (r"(pack_store_some_2\([^;]*), [^,;]*, [^,;]*\);", r"\1, 0, 16);"),
    "no barriers": (r"tvm_builtin_cuda_cta_sync\(\);", ""),
}


def test_faults_are_caught(emulation: None, sm_90a: Arch) -> None:
    built = built_for(sm_90a, dict(cols=203), BLOCK)
    assert_mutants_caught(built, MUTANTS)


def test_no_pack_is_read_that_passes_the_tensors_end(sm_90a: Arch) -> None:
    """Guard pages do not show it: tensors start at whole packs, and pages are whole packs too."""
    source = str(built_for(sm_90a, dict(cols=203, keep=0.5), BLOCK).sources["cu"])
    body = source[source.rindex("main_kernel(") :]
    assert re.search(r"whole_ptr\[0\] = \(\(\(rows \* \(int64_t\)203\) < .*\) \? \(.* - 1\) :", body)
    loads = r"pack_load_\d+\([^;]*;\s*"
    assert re.search(rf"< whole_ptr\[0\]\) {{\s*{loads}{loads}}}", body) and len(re.findall(loads, body)) == 2


def test_offsets_beyond_32_bits(sm_90a: Arch) -> None:
    source = str(build(softmax(rows=49152, cols=50257), sm_90a, "frames", device_code=False).sources["cu"])
    assert re.search(r"int64_t begin = \(row_ptr\[0\] \* \(int64_t\)50257\);", source)


@pytest.mark.parametrize(
    ("fields", "rounds"),
    [(dict(cols=1000), 4), (dict(cols=1023), 5), (dict(cols=16384), 4), (dict(cols=50257), 7)],
    ids=str,
)
def test_defaults_move_packs_and_do_not_spill(cuda_compiler: None, sm_90a: Arch, fields: Fields, rounds: int) -> None:
    built = build(softmax(rows=49152, **fields), sm_90a, "frames")
    (kernel,) = built.resources
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, built.config
    found = summary(material(built))
    if found.counted_in != "SASS":
        pytest.skip("no SASS disassembler; pip install nvidia-cuda-nvdisasm")
    counts, wide = found.counts, built.config.to_json()["threads"] > 32
    assert counts["global load 128-bit"] == counts["global store 128-bit"] == rounds
    assert ("barrier" in counts) == ("shared load" in counts) == wide
    if fields["cols"] % 8 == 0:
        assert "global load" not in counts and "global store" not in counts
    code = cuda.disassemble(bytes(built.sources["cubin"]))  # type: ignore[arg-type]
    assert set(re.findall(r"LDG\.E\.128(\S*)", code)) <= {"", ".CONSTANT"}  # no hint
    last_load = [match.start() for match in re.finditer(r"LDG\.E\.128", code)][-1]
    assert not re.search(r"MUFU|HMNMX2|SHFL\.BFLY", code[:last_load])  # all in flight before the first is used


@pytest.mark.parametrize(
    ("fields", "config", "why"),
    [
        (dict(cols=100), dict(access=1), "not one of 16, 8, 4, 2 bytes"),
        (dict(cols=100, dtype="float32"), dict(access=2), "at least one element of float32"),
        (dict(cols=101), dict(access=8), "rows of whole packs"),
        (dict(cols=102, dtype="float32", keep=0.5), dict(access=8), "packs of four elements"),
    ],
)
def test_packs_of_8_bytes_are_whole(sm_90a: Arch, fields: Fields, config: Fields, why: str) -> None:
    assert why in str(FramesConfig(**PART, **config).check(softmax(rows=3, **fields), sm_90a))


def test_rows_of_whole_packs_of_8_bytes_share_none(cuda_compiler: None, sm_90a: Arch) -> None:
    built = build(softmax(rows=49152, cols=100), sm_90a, "frames")
    assert built.config.to_json()["access"] == 8
    code = cuda.disassemble(bytes(built.sources["cubin"]))  # type: ignore[arg-type]
    assert len(re.findall(r"LDG\.E\.64", code)) == len(re.findall(r"LDG", code)) == 4
    assert len(re.findall(r"STG\.E\.64", code)) == len(re.findall(r"STG", code)) == 4
    assert "pack_fill" not in str(built.sources["cu"])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", SoftmaxProblem.dtypes)
def test_the_default_is_legal_if_a_row_fits(sm_90a: Arch, function: str, dtype: str) -> None:
    for cols in (1, 7, 32, 100, 1000, 1023, 1024, 2049, 4096, 8192, 16384, 32768, 50257, 100000):
        for fields in ({}, dict(scale=0.5, keep=0.8)):
            problem = softmax(rows=49152, cols=cols, function=function, dtype=dtype, **fields)
            reason = SCHEDULE.default(problem, sm_90a).check(problem, sm_90a)
            if cols * (4 if dtype == "float32" else 2) <= (32768 if problem.is_grad else 65536) and not fields:
                assert reason is None
            assert reason is None or "registers" in reason


@pytest.mark.parametrize("cols", [100, 1000, 1023, 4096, 50257])
def test_searches_have_some_hundred_configs(sm_90a: Arch, cols: int) -> None:
    legal = list(SCHEDULE.legal_space(softmax(rows=49152, cols=cols), sm_90a))
    assert (10 if cols == 50257 else 50) < len(set(legal)) == len(legal) < 1500


def test_what_is_kept_widened_is_tried(sm_90a: Arch) -> None:
    """Of log-softmax and gradients in 16 bits, for rows of up to a warp; packs of 8 bytes take it by default."""

    def kept(cols: int, **fields: Any) -> tuple[str, set[tuple[bool, str]]]:
        problem = softmax(rows=49152, cols=cols, **fields)
        tried = {(config.threads > 32, config.kept) for config in SCHEDULE.legal_space(problem, sm_90a)}
        return SCHEDULE.default(problem, sm_90a).kept, tried

    assert kept(100, function="log_softmax")[0] == kept(100, function="softmax_grad", dtype="bfloat16")[0] == "widened"
    _, tried = kept(1000, function="log_softmax")
    assert tried == {(False, "packed"), (False, "widened"), (True, "packed")}
    default, tried = kept(100)
    assert default == "numerators" and {each for _, each in tried} == {"packed", "numerators"}
    default, tried = kept(102, function="softmax_grad", dtype="float32")
    assert default == "packed" and {each for _, each in tried} == {"packed"}


def test_what_is_widened_is_widened_once(cuda_compiler: None, sm_90a: Arch) -> None:
    def instructions(kept: str) -> int:
        problem = softmax(rows=64, cols=100, function="log_softmax")
        built = build(problem, sm_90a, "frames", FramesConfig(8, 8, access=8, kept=kept))
        return cuda.disassemble(bytes(built.sources["cubin"])).count(";")  # type: ignore[arg-type]

    assert instructions("widened") < 0.85 * instructions("packed")


def test_every_field_changes_the_source(sm_90a: Arch) -> None:
    base, narrow = FramesConfig(threads=64), FramesConfig(threads=32)
    changes: dict[str, tuple[FramesConfig, Fields]] = {
        "threads": (base, dict(threads=128)),
        "groups": (narrow, dict(groups=2)),
        "rows_per_group": (base, dict(rows_per_group=2)),
        "min_blocks": (base, dict(min_blocks=2)),
        "kept": (base, dict(kept="numerators")),
        "online": (base, dict(online=True)),
        "access": (base, dict(access=8)),
        "streaming": (base, dict(streaming="evict_last")),
    }
    assert changes.keys() == base.to_json().keys()
    problem = softmax(rows=1, cols=1000)
    for config, change in changes.values():
        assert_changes_the_source(problem, sm_90a, "frames", config, **change)


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (dict(threads=48), {}, "threads=48 is not a power of two up to 1024"),
        (dict(threads=16), {}, "threads=16 x groups=1 is no multiple of a warp"),
        (dict(threads=64, groups=2), {}, "groups=2 is for rows of up to a warp"),
        (dict(threads=32, groups=40), {}, "groups=40 makes 1280 threads a block"),
        (dict(groups=0), {}, "groups=0 must be at least 1"),
        (dict(rows_per_group=0), {}, "rows_per_group=0 must be at least 1"),
        (dict(threads=512, min_blocks=5), {}, "min_blocks=5 of 512 threads"),
        (dict(threads=64), dict(cols=32768), "threads=64 gives each 64 packs, more than 32"),
        (dict(threads=1024), dict(cols=100000), "threads=1024 needs about 76 registers for 13 packs"),
        (dict(kept="shared"), {}, "kept=shared is not one of packed, numerators, widened"),
        (dict(kept="widened"), dict(dtype="float32"), "kept=widened is for elements of 16 bits, not float32"),
        (dict(threads=32, kept="widened"), dict(cols=8192), "threads=32 needs about 280 registers for 32 packs"),
        (dict(kept="numerators"), dict(function="log_softmax"), "kept=numerators is for function=softmax"),
        (dict(threads=64, online=True), dict(function="softmax_grad"), "softmax_grad has one reduction"),
        (dict(threads=32, online=True), {}, "online=true is for rows of more than a warp"),
    ],
)
def test_illegal_configs_are_refused(sm_90a: Arch, config: Fields, fields: Fields, words: str) -> None:
    problem = softmax(rows=1, **{"cols": 1000, **fields})
    with pytest.raises(ConfigError, match=words):
        build(problem, sm_90a, "frames", FramesConfig(**config))
