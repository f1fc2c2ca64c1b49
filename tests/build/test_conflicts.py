"""Conflicts of LDS's banks that are read off a lowered program."""

from __future__ import annotations

import pytest

from schedules.build.builder import build
from schedules.build.conflicts import conflicts
from schedules.core.arch import parse_arch
from tests.conftest import problem_of

PROGRAM = """
class Module:
    def main_kernel(data_ptr: T.handle("float32", "global")):
        with T.launch_thread("blockIdx.x", 4) as blockIdx_x:
            first = T.alloc_shared((64,))
            shared = T.alloc_shared((4096,), "float32")
            cursor = T.alloc_local((1,), "int32")
            with T.launch_thread("threadIdx.x", 16) as threadIdx_x:
                threadIdx_y = T.launch_thread("threadIdx.y", T.int64(8))
                cursor[0] = threadIdx_y * 16 + threadIdx_x
                for i in range(3):
                    BODY
"""
GFX942 = parse_arch("gfx942")


@pytest.mark.parametrize(
    ("body", "taken", "least"),
    [
        ("shared[cursor[0]] = data[0]", 3 * 4, 3 * 4),  # two waves of two phases
        ("shared[(threadIdx_y * 16 + threadIdx_x) * 2] = data[0]", 3 * 8, 3 * 4),
        ("shared[blockIdx_x * 7 + i + 32 * threadIdx_x] = data[0]", 3 * 64, 3 * 4),
        ("if threadIdx_x < 4 and not threadIdx_y % 4:\n                        shared[64 * threadIdx_x] = data[0]",
         3 * 2 * 4, 3 * 2),
        ("data[0] = shared[T.Ramp(cursor[0] * 4, 1, 4)]", 3 * 16, 3 * 16),
        ("shared[cursor[0] * 4:cursor[0] * 4 + 4] = data[0]", 3 * 16, 3 * 16),
        # neighbours' elements go together, in any order, and twice counts once
        ("data[0] = shared[cursor[0] * 2 + 1] + shared[cursor[0] * 2] + shared[cursor[0] * 2]", 3 * 8, 3 * 8),
        ("data[0] = shared[cursor[0] * 4 + 1] + shared[cursor[0] * 4 + 2]", 3 * 2 * 16, 3 * 2 * 4),
        ("data[0] = data[cursor[0] * 2]", 0, 0),
    ],
)  # fmt: skip
def test_of_accesses(body: str, taken: int, least: int) -> None:
    found = conflicts(PROGRAM.replace("BODY", body), GFX942)
    assert (found.taken, found.least) == (taken, least)
    assert found.share == pytest.approx(1 - least / taken if taken else 0)


@pytest.mark.parametrize(
    ("name", "operator"),
    [("gfx942", "conv2d_nhwc"), ("gfx942", "conv2d_nchw32"), ("gfx950", "conv2d_nhwc"), ("gfx1200", "conv2d_nchw32")],
)
def test_main_loops_on_matrix_cores_have_none(name: str, operator: str) -> None:
    """What is left are exchanges of results, once a block."""
    arch, fields = parse_arch(name), dict(n=2, h=16, w=16, ci=256, co=128, kh=3, kw=3, pad=1)
    problem = problem_of(operator, **fields, **({} if operator == "conv2d_nchw32" else {"dtype": "float16"}))
    found = conflicts(build(problem, arch, "mma", device_code=False).lowered, arch)
    assert found.least > 1000 and found.share < 0.01
