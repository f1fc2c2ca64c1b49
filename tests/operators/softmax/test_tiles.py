"""Narrow rows cut out of tiles in shared memory: right at any width and config, and what the code is."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.inspect import material, summary
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.tiles import SCHEDULE
from schedules.operators.softmax.tiles_config import TilesConfig
from tests.conftest import assert_changes_the_source, assert_correct, assert_mutants_caught, is_right, problem_of

Fields = dict[str, Any]
# (problem, config): every kind of access, function, dtype and mask, every field of the config
CASES: list[tuple[Fields, Fields]] = [
    (dict(cols=1), {}),
    (dict(cols=5, function="log_softmax", dtype="bfloat16"), dict(rows_per_group=3)),
    (dict(cols=7, function="softmax_grad", scale=0.3), dict(streaming="both", min_blocks=4)),
    (dict(cols=13, dtype="float32", mask="full", scale=-0.5), {}),
    (dict(cols=37), dict(threads=2, groups=32, kept="numerators")),
    (dict(cols=37, mask="cols"), dict(threads=32, groups=8, streaming="evict_last")),
    (dict(cols=77, function="log_softmax_grad", dtype="bfloat16"), dict(threads=8, groups=16)),
    (dict(cols=102, mask="full", dtype="bfloat16"), dict(access=4)),
    (dict(cols=100, scale=2.0), dict(access=8)),
    (dict(cols=64, function="softmax_grad", dtype="float32"), dict(access=16)),
    (dict(cols=333, function="log_softmax"), {}),
]


def softmax(**fields: Any) -> SoftmaxProblem:
    problem = problem_of("softmax", **fields)
    assert isinstance(problem, SoftmaxProblem)
    return problem


@pytest.mark.parametrize("case", range(len(CASES)))
def test_configs_and_problems(emulation: None, sm_90a: Arch, case: int) -> None:
    """One build serves any number of rows: full tiles, ones of a row, and tensors that end inside a pack."""
    fields, given = CASES[case]
    problem = softmax(rows=200, **fields)
    built = build(problem, sm_90a, "tiles", SCHEDULE.config_for(problem, sm_90a, given), device_code=False)
    for mode, rows in enumerate((1, 131, 200)):
        assert is_right(built, rows, (case + mode) % 3), rows


def test_the_oldest_arch(emulation: None) -> None:
    assert_correct(softmax(rows=70, cols=37), parse_arch("sm_75"), "tiles", routes=["emulated"])


MUTANTS = {  # what to replace in the generated source
    "rows are computed before they are there": (r"tvm_builtin_cuda_cta_sync\(\);", ""),
    "the tensor's last elements not read": (r"tile_copy_2\(\(&\(x_tile[^;]*;", ""),
    "the tensor's last elements not written": (r"tile_copy_2\(\(&\(y_[^;]*;", ""),
    "packs not written": (r"pack_store_whole\([^;]*;", ""),
}


def test_faults_are_caught(emulation: None, sm_90a: Arch) -> None:
    built = build(softmax(rows=13, cols=37), sm_90a, "tiles", device_code=False)
    assert_mutants_caught(built, MUTANTS)


@pytest.mark.parametrize("cols", [5, 37, 100, 333])
def test_defaults_move_packs_and_do_not_spill(cuda_compiler: None, sm_90a: Arch, cols: int) -> None:
    built = build(softmax(rows=131072, cols=cols), sm_90a, "tiles")
    (kernel,) = built.resources
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, built.config
    found = summary(material(built))
    if found.counted_in != "SASS":
        pytest.skip("no SASS disassembler; pip install nvidia-cuda-nvdisasm")
    packs = -(-built.config.rows * cols // (8 * built.config.block))  # type: ignore[attr-defined]
    assert found.counts["global load 128-bit"] == found.counts["global store 128-bit"] == packs
    assert found.counts["barrier"] == 2


@pytest.mark.parametrize("dtype", SoftmaxProblem.dtypes)
def test_the_default_is_legal_for_narrow_rows_of_any_width(sm_90a: Arch, dtype: str) -> None:
    for cols in range(1, 513):
        for function in ("softmax", "log_softmax_grad"):
            for rows in (3, 131072):
                problem = softmax(rows=rows, cols=cols, function=function, dtype=dtype)
                assert SCHEDULE.default(problem, sm_90a).check(problem, sm_90a) is None, problem


def test_searches_have_some_hundred_configs(sm_90a: Arch) -> None:
    for cols in (5, 37, 333):
        legal = list(SCHEDULE.legal_space(softmax(rows=49152, cols=cols), sm_90a))
        assert 50 < len(set(legal)) == len(legal) < 1500


def test_every_field_changes_the_source(sm_90a: Arch) -> None:
    base = TilesConfig(threads=4, groups=32, access=4)
    changes: Fields = dict(
        threads=8, groups=64, rows_per_group=2, access=2, min_blocks=2, kept="numerators", streaming="both"
    )
    assert changes.keys() == base.to_json().keys()
    for field, value in changes.items():
        assert_changes_the_source(softmax(rows=1, cols=38), sm_90a, "tiles", base, **{field: value})


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (dict(threads=64), {}, "threads=64 is more than a warp"),
        (dict(threads=3), {}, "threads=3 is not a power of two"),
        (dict(groups=3), {}, "threads=4 x groups=3 is no multiple of a warp"),
        (dict(rows_per_group=0), {}, "rows_per_group=0 must be at least 1"),
        (dict(access=4), {}, "access=4 does not divide the bytes of a row of cols=37"),
        (dict(access=2), dict(dtype="float32"), "access=2 is not one of 2, 4, 8, 16 bytes, and at least one element"),
        (dict(threads=32, groups=1), {}, "rows_per_group=1 makes tiles of no whole packs; take 8"),
        (dict(threads=1, groups=128), dict(cols=65), "gives each 65 packs"),
        (dict(rows_per_group=64), {}, "rows_per_group=64 needs 151552 bytes of shared memory"),
        (dict(kept="shared"), {}, "kept=shared is not one of packed, numerators"),
        ({}, dict(keep=0.5), "take frames"),
    ],
)
def test_illegal_configs_are_refused(sm_90a: Arch, config: Fields, fields: Fields, words: str) -> None:
    problem = softmax(rows=1, **{"cols": 37, **fields})
    with pytest.raises(ConfigError, match=words):
        TilesConfig(**config).require(problem, sm_90a)
