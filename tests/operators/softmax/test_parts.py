"""Rows cut into parts: right at any width and config, and where the second kernel waits for the first."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.toolchain import cuda
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem
from schedules.operators.softmax.parts import SCHEDULE
from schedules.operators.softmax.parts_config import PartsConfig
from tests.conftest import assert_changes_the_source, assert_correct, assert_mutants_caught, is_right, problem_of

Fields = dict[str, Any]
SMALL: Fields = dict(threads=64, packs=1)
CASES: list[tuple[Fields, Fields]] = [
    (dict(cols=1), SMALL),
    (dict(cols=5003), SMALL),
    (dict(cols=4096, mask="full", keep=0.8, dtype="bfloat16"), SMALL),
    (dict(cols=5000, mask="cols", scale=-0.5, keep=0.5, drop="drawn"), dict(threads=64, packs=2)),
    (dict(cols=3001, function="softmax_grad", keep=0.7), dict(threads=128, packs=1, streaming="both")),
    (dict(cols=3003, function="log_softmax_grad", keep=0.7, drop="drawn"), dict(threads=128, packs=1)),
    (dict(cols=2049, function="log_softmax", dtype="float32"), dict(SMALL, min_blocks=4)),
    (dict(cols=2047, function="log_softmax_grad", dtype="bfloat16", scale=0.3), dict(SMALL, streaming="evict_last")),
    (dict(cols=40003, dtype="float32"), SMALL),  # three parts to a thread
    (dict(cols=2047), SMALL),  # a last part without elements
]


def softmax(**fields: Any) -> SoftmaxProblem:
    problem = problem_of("softmax", **fields)
    assert isinstance(problem, SoftmaxProblem)
    return problem


@pytest.mark.parametrize("case", range(len(CASES)))
def test_configs_and_problems(emulation: None, sm_90a: Arch, case: int) -> None:
    fields, config = CASES[case]
    built = build(softmax(rows=3, **fields), sm_90a, "parts", PartsConfig(**config), device_code=False)
    for mode, rows in enumerate((1, 3)):
        assert is_right(built, rows, (case + mode) % 3), rows


def test_without_hopper_two_kernels_follow_each_other(emulation: None) -> None:
    arch = parse_arch("sm_80")
    assert_correct(softmax(rows=2, cols=5003), arch, "parts", routes=["emulated"])
    built = build(softmax(rows=2, cols=5003), arch, "parts", device_code=False)
    assert "griddepcontrol" not in str(built.sources["cu"])


def test_faults_are_caught(emulation: None, sm_90a: Arch) -> None:
    built = build(softmax(rows=2, cols=5003), sm_90a, "parts", PartsConfig(**SMALL), device_code=False)
    assert_mutants_caught(built, {"no barriers": (r"tvm_builtin_cuda_cta_sync\(\);", "")})


@pytest.mark.parametrize("cols", [50257, 2**20])
def test_the_second_kernel_waits_between_its_loads_and_its_stores(cuda_compiler: None, sm_90a: Arch, cols: int) -> None:
    built = build(softmax(rows=1, cols=cols), sm_90a, "parts")
    assert all(kernel.spill_loads == kernel.stack == 0 for kernel in built.resources) and len(built.resources) == 2
    source = str(built.sources["cu"])
    assert source.count("griddepcontrol_launch_dependents();") == source.count("griddepcontrol_wait();") == 1
    try:
        code = cuda.disassemble(bytes(built.sources["cubin"]))  # type: ignore[arg-type]
    except FileNotFoundError:
        pytest.skip("no SASS disassembler; pip install nvidia-cuda-nvdisasm")
    (waiting,) = (kernel for kernel in code.split(".section") if "ACQBULK" in kernel)
    loads = [match.start() for match in re.finditer(r"LDG\.E\.128", waiting)]
    stores = [match.start() for match in re.finditer(r"STG\.E", waiting)]
    assert loads and max(loads) < waiting.index("ACQBULK") < min(stores)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", SoftmaxProblem.dtypes)
def test_the_default_is_legal_for_any_row(sm_90a: Arch, function: str, dtype: str) -> None:
    for cols in (1, 1000, 50257, 2**20, 2**24 + 1):
        for fields in ({}, dict(scale=0.5, keep=0.8)):
            for rows in (1, 49152 if cols < 2**15 else 132):
                problem = softmax(rows=rows, cols=cols, function=function, dtype=dtype, **fields)
                assert SCHEDULE.default(problem, sm_90a).check(problem, sm_90a) is None


def test_every_field_changes_the_source(sm_90a: Arch) -> None:
    base = PartsConfig(**SMALL)
    changes: Fields = dict(threads=128, packs=2, min_blocks=2, streaming="both")
    assert changes.keys() == base.to_json().keys()
    for field, value in changes.items():
        assert_changes_the_source(softmax(rows=1, cols=5000), sm_90a, "parts", base, **{field: value})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(threads=32), "threads=32 must be at least 64"),
        (dict(threads=96), "threads=96 is not a power of two"),
        (dict(packs=0), "packs=0 is not from 1 to 32"),
        (dict(packs=32), "needs about 168 registers for 32 packs"),
        (dict(threads=64, packs=1), "1954 parts of a row, a block combines at most 256"),
        (dict(min_blocks=9), "min_blocks=9 of 256 threads"),
    ],
)
def test_illegal_configs_are_refused(sm_90a: Arch, config: Fields, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PartsConfig(**{"min_blocks": 4 if config.get("packs") == 32 else 0, **config}).require(
            softmax(rows=1, cols=10**6), sm_90a
        )
