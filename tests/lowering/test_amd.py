"""Barriers, reductions and bfloat16 of kernels for AMD GPUs: in the assembly, and run in the emulator."""

from __future__ import annotations

import re

import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.check.verify import device_source, emulated_runs, poisoned
from schedules.core.arch import parse_arch
from schedules.core.problem import Argument
from tests.conftest import assert_correct, problem_of
from tests.steps.test_intrinsics import build_kernel

NHWC = dict(n=1, h=5, w=7, ci=72, co=40, kh=3, kw=3, pad=1)

# (arch, schedule, fields, its barriers, exchanges between lanes for each of two reductions)
REDUCTIONS = {
    "a quarter of a wave of 64": ("gfx942", "warp", dict(cols=200), dict(threads=16, groups=4), 0, 4),
    "half a wave of 64": ("gfx942", "warp", dict(cols=1000), dict(threads=32, groups=2), 0, 5),
    "a wave of 64": ("gfx90a", "warp", dict(cols=1000), dict(threads=64, groups=1), 0, 6),
    "a wave of 32": ("gfx1100", "warp", dict(cols=1000), dict(threads=32, groups=2), 0, 5),
    "three waves of 64": ("gfx942", "block_registers", dict(cols=999), dict(threads=192, vector=1), 2, 6),
    "four waves of 32": ("gfx1200", "block_registers", dict(cols=1000), dict(threads=128), 2, 5),
}


@pytest.mark.parametrize("case", REDUCTIONS)
def test_rows_are_reduced_in_registers(emulation: None, amd_linker: None, case: str) -> None:
    arch, schedule, fields, config, barriers, steps = REDUCTIONS[case]
    problem = problem_of("softmax", rows=5, dtype="float16", **fields)
    built = build(problem, parse_arch(arch), schedule, config)
    assembly = str(built.sources["s"])
    assert len(re.findall(r"s_barrier(?:_signal)?\b", assembly)) == barriers
    lanes = re.findall(r"(?:quad_perm|row_half_mirror|row_mirror|row_bcast|v_permlanex16|ds_swizzle)", assembly)
    assert len(lanes) == 2 * steps and "ds_bpermute" not in assembly
    assert_correct(problem, parse_arch(arch), schedule, config, routes=["emulated"])


@pytest.mark.parametrize("threads", [64, 256])
def test_rows_that_follow_each_other_are_not_mixed_up(emulation: None, amd_linker: None, threads: int) -> None:
    """Several waves take no shortcut where the next row may come before all have read this one's."""
    from tvm import te
    from tvm.s_tir import Schedule

    x, k = te.placeholder((6, threads), name="x"), te.reduce_axis((0, threads))
    sch = Schedule(te.create_prim_func([x, te.compute((6,), lambda i: te.sum(x[i, k], axis=k), name="y")]))
    row, column = sch.get_loops("y")
    block, row = sch.split(row, [None, 3])
    for loop, axis in ((block, "blockIdx.x"), (column, "threadIdx.x")):
        sch.bind(loop, axis)
    given = Argument("x", (6, threads), "float32"), Argument("y", (6,), "float32", output=True)
    built = build_kernel(sch, parse_arch("gfx942"), *given)
    assert ("update.dpp" in device_source(built)) == (threads == 64)
    numbers = np.random.default_rng(0).integers(-9, 9, (6, threads)).astype("float32")
    for _, run in emulated_runs(built):
        (found,) = run([numbers, *poisoned(built.problem)])
        assert (found == numbers.sum(axis=1)).all()


def test_every_barrier_stands_after_the_stores_to_lds(amd_linker: None) -> None:
    """LLVM waits for LDS before each barrier, and for nothing from global memory there."""
    for arch in ("gfx90a", "gfx942", "gfx1100", "gfx1200"):
        built = build(problem_of("softmax", rows=8, cols=4096), parse_arch(arch), "block_registers")
        lines = [line.strip() for line in str(built.sources["s"]).splitlines()]
        places = [i for i, line in enumerate(lines) if re.match(r"s_barrier(_signal)?\b", line)]
        assert places
        for place in places:
            assert re.match(r"s_waitcnt lgkmcnt\(0\)|s_wait_dscnt 0x0", lines[place - 1]), lines[place - 3 : place + 1]


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_the_main_loop_has_one_barrier(amd_linker: None, dtype: str) -> None:
    lowered = build(problem_of("conv2d_nhwc", **NHWC, dtype=dtype), parse_arch("gfx942"), "mma").lowered
    loop = lowered[lowered.index("for tile in") :]
    assert loop.count("tvm_storage_sync") == 3  # the loop's own, one behind it, one of the tile on its way out
    int8 = build(problem_of("conv2d_nchw32", **NHWC), parse_arch("gfx942"), "mma").lowered
    assert int8[int8.index("for tile in") :].count("tvm_storage_sync") == 1


@pytest.mark.parametrize("operator", ["conv2d_nhwc", "conv2d_nchw32"])
def test_one_barrier_fewer_is_wrong(emulation: None, amd_linker: None, operator: str) -> None:
    fields = dict(n=1, h=4, w=5, ci=90, co=40, kh=3, kw=1, pad=1)
    problem = problem_of(operator, **fields, **({"dtype": "float16"} if operator == "conv2d_nhwc" else {}))
    built = build(problem, parse_arch("gfx942"), "mma")
    source = device_source(built)
    barriers = [match.span() for match in re.finditer(r"(?m)^.*call void @llvm\.amdgcn\.s\.barrier\(\).*$", source)]
    unnoticed = [(start, end) for start, end in barriers if not _is_noticed(built, source[:start] + source[end:])]
    # another follows the last iteration's where the tile leaves through LDS
    assert len(unnoticed) == (operator == "conv2d_nhwc")


def _is_noticed(built: Built, source: str) -> bool:
    rng = np.random.default_rng(1)
    given = built.operator.inputs(built.problem, rng)
    wanted = built.operator.reference(built.problem, given)[0].values
    arrays = [*given, *poisoned(built.problem)]
    for _, run in emulated_runs(built, source):
        (found,) = run(arrays)
        if not np.allclose(found.astype(np.float64), wanted, rtol=1e-2, atol=1e-2):
            return True
    return False


def test_bfloat16_takes_16_bits_of_lds(amd_linker: None) -> None:
    sizes = {}
    for dtype in ("float16", "bfloat16"):
        built = build(problem_of("conv2d_nhwc", **NHWC, dtype=dtype), parse_arch("gfx942"), "mma")
        found = re.search(r"\.group_segment_fixed_size:\s+(\d+)", str(built.sources["s"]))
        assert found
        sizes[dtype] = int(found[1])
    assert sizes["bfloat16"] == sizes["float16"]


@pytest.mark.parametrize("schedule", ["block_registers", "warp"])
def test_bfloat16_rows_are_right(emulation: None, amd_linker: None, schedule: str) -> None:
    assert_correct(
        problem_of("softmax", rows=3, cols=120, dtype="bfloat16"), parse_arch("gfx942"), schedule, routes=["emulated"]
    )
