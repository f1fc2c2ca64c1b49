"""The kernel: what it waits for, what reaches an output, and how it copies and stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.build.inspect import view
from schedules.check.verify import emulated_runs, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.registry import operator
from tests.conftest import assert_correct, assert_mutants_caught, problem_of
from tests.hopper_kernels import opcodes
from tests.windows.kernels import SHAPES, SMALL

BARRIER = r"tvm_builtin_cuda_cta_sync\(\);"


def built_for_emulation(name: str, shape: str, num_stages: int = 2, **fields: Any) -> Built:
    given, words = SHAPES[shape]
    problem = problem_of(name, **(given | dict(dtype="float16") | fields))
    return build(
        problem, parse_arch("sm_90a"), "mma_windows", SMALL | words | {"num_stages": num_stages}, device_code=False
    )


def test_mutants_are_caught(emulation: None) -> None:
    built = built_for_emulation("conv2d_nhwc", "7x7, stride 2", num_stages=1)
    mutants = {
        "a patch before its copies": (r"tvm_builtin_ptx_cp_async_wait_group\w*\(\);", ""),
        "a patch before other threads' copies": (r"(while[\s\S]*?)" + BARRIER, r"\1"),
        "a patch over one that is read": (r"(while[\s\S]*cta_sync[\s\S]*)" + BARRIER, r"\1"),
    }
    assert_mutants_caught(built, mutants)
    built = built_for_emulation("conv2d_nchw", "7x7, stride 2", num_stages=1)  # which waits in registers
    assert_mutants_caught(built, {"a patch over one that is read": (r"(while[\s\S]*cta_sync[\s\S]*)" + BARRIER, r"\1")})
    built = built_for_emulation("conv2d_nhwc", "3x3", w=41)  # whose pixels have a fourth channel of zeros
    assert_mutants_caught(built, {"elements beside zeros": (BARRIER + r"(?=[\s\S]*while)", "")})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("conv2d_nhwc", "7x7, stride 2"),  # an element leads
        ("conv2d_nhwc", "a loop"),  # rows beyond the last
        ("conv2d_nchw", "one channel"),
        ("conv2d_nchw", "ragged, residual"),
        ("conv2d_hwcn", "3x3"),  # two images share each word
    ],
)
def test_nans_reach_the_outputs_whose_windows_hold_them(emulation: None, name: str, shape: str) -> None:
    built = built_for_emulation(name, shape, bias=False, residual=False, activation="none")
    rng = np.random.default_rng(0)
    data, weight = operator(name).inputs(built.problem, rng)
    data[rng.random(data.shape) < 0.003] = np.nan
    expected = operator(name).reference(built.problem, [data, weight])[0].values
    _, run = next(iter(emulated_runs(built, str(built.sources["cu"]))))
    (output,) = run([data, weight, *poisoned(built.problem)])
    assert 0 < np.isnan(expected).sum() < expected.size
    np.testing.assert_array_equal(np.isnan(np.asarray(output, dtype="float32")), np.isnan(expected))


@pytest.mark.parametrize(
    ("name", "fields", "copies", "stores"),
    [
        ("conv2d_nhwc", dict(stride=2), "LDGSTS.E.BYPASS.128", "STG.E.128"),
        ("conv2d_nhwc", dict(), "LDG.E.128", "STG.E.128"),  # a fourth channel of zeros
        ("conv2d_nchw", dict(stride=2), "LDG.E.128", "STG.E.128"),
        ("conv2d_nchw", dict(w=227), "LDG.E.U16", "STG.E.U16"),
        ("conv2d_nchw32", dict(dtype="int8"), "LDGSTS.E ", "STG.E.64"),
    ],
)
def test_copies_and_stores_are_wide(
    cuda_compiler: None, sm_90a: Arch, name: str, fields: dict[str, Any], copies: str, stores: str
) -> None:
    words = dict(tile_h=4, tile_w=32, block_n=32, warps_m=2, warps_n=1, num_stages=1, blocks_sm=1, grid=132)
    given = dict(n=8, h=224, w=224, ci=3, co=64, kh=3, kw=3, pad=1, dtype="float16") | fields
    built = build(problem_of(name, **given), sm_90a, "mma_windows", words)
    found, sass = opcodes(built), view(built, "sass").replace(".desc", "").replace(".CONSTANT", "")
    assert found["IMMA" if "dtype" in fields else "HMMA"] and not found["STL"] and not found["LDL"]
    assert copies in sass and stores in sass, sorted({line for line in sass.split() if "LDG" in line or "STG" in line})


def test_products_take_filters_as_they_come(cuda_compiler: None, sm_90a: Arch) -> None:
    words = dict(tile_h=8, tile_w=16, block_n=64, warps_m=2, warps_n=1, num_stages=1, blocks_sm=1, grid=132)
    given = dict(n=8, h=224, w=224, ci=3, co=64, kh=3, kw=3, stride=2, pad=1, dtype="float16")
    lines = view(build(problem_of("conv2d_nchw", **given), sm_90a, "mma_windows", words), "sass").splitlines()
    products = [number for number, line in enumerate(lines) if "HMMA" in line]
    moves = [line for line in lines[products[0] : products[-1]] if " MOV " in line or "IMAD.MOV" in line]
    assert len(moves) < len(products) / 4


@pytest.mark.parametrize(
    ("shape", "words", "early"),
    [
        ("3x3", {}, True),
        ("3x3", dict(num_stages=1), True),
        ("7x7, stride 2", dict(warps_m=1), False),  # for which there are too few registers
    ],
)
def test_a_patch_is_loaded_before_the_one_before_is_multiplied(shape: str, words: dict[str, Any], early: bool) -> None:
    given, more = SHAPES[shape]
    problem = problem_of("conv2d_nchw", **given, dtype="float16")
    built = build(problem, parse_arch("sm_90a"), "mma_windows", SMALL | more | words, device_code=False)
    loop = str(built.sources["cu"]).split("while", 1)[1].split("windows_mma(", 1)
    assert ("windows_load_words" in loop[0]) == early and ("windows_load_words" in loop[1]) != early
    assert "windows_put_words" in loop[1]


def test_on_ampere(emulation: None) -> None:
    given, words = SHAPES["3x3"]
    assert_correct(
        problem_of("conv2d_nhwc", **given, dtype="float16"), parse_arch("sm_80"), "mma_windows", SMALL | words
    )
