"""Large tensors: indices that reach their last element, in every schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.build.builder import build, build_scheduled
from schedules.core.arch import Arch, parse_arch
from schedules.core.operator import Operator, ScheduleSpec
from schedules.core.problem import Problem
from schedules.core.registry import operator, operators
from schedules.definitions import program
from tests.conftest import assert_correct, problem_of

# odd and even extents; data and output of 2**31 elements and more, but for the last, whose filter is
LARGE: dict[str, dict[str, Any]] = {
    "whole": dict(n=2**13, h=64, w=64, ci=64, co=64, kh=3, kw=3, pad=1),
    "odd": dict(n=2**13 + 1, h=63, w=67, ci=65, co=67, kh=3, kw=3, pad=1),
}
SCHEDULES = [
    (op, spec)
    for op in operators()
    for spec in op.schedules
    if op.name.startswith("conv") and not spec.tirx and not spec.opt_in
]


def narrow_accesses(mod: tvm.IRModule) -> list[str]:
    """Accesses to elements of more than 2**31 by 32-bit indices."""
    found: list[str] = []

    def visit(node: Any) -> None:
        buffer = node.source if isinstance(node, ir.TensorLoad) else node.buffer
        elements = np.prod([float(extent) for extent in buffer.shape])
        if buffer.scope() == "global" and elements > 2**31 and "int64" not in str(node.indices[0].ty):
            found.append(f"{buffer.name}[{node.indices[0]}]")

    for function in mod.functions.values():
        if isinstance(function, tirx.PrimFunc):
            tvm_ffi.structural_walk(function.body, ((ir.TensorLoad, tirx.BufferStore), visit))
    return found


@tvm.ir.instrument.pass_instrument
class Flattened:
    """Looks at every program after its buffers have one axis each."""

    def __init__(self) -> None:
        self.narrow: list[str] = []
        self.seen = 0

    def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if str(info.name) == "tirx.NarrowDataType":
            self.seen += 1
            self.narrow += narrow_accesses(mod)


def arch_for(spec: ScheduleSpec) -> Arch:
    return parse_arch({"llvm": "llvm", "cuda": "cuda:sm_90a", "rocm": "rocm:gfx942"}[spec.kinds[0]])


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize(("op", "spec"), SCHEDULES, ids=lambda item: item.name)
def test_every_element_is_reached(op: Operator, spec: ScheduleSpec, shape: str) -> None:
    arch = arch_for(spec)
    served = 0
    for dtype in op.problem.dtypes[:2]:
        problem = problem_of(op.name, dtype=dtype, **LARGE[shape])
        if not spec.serves(problem, arch):
            continue
        config = spec.default(problem, arch)
        watch = Flattened()
        scheduled = spec.apply(problem, config, arch)
        build_scheduled(op, problem, spec, config, arch, scheduled, device_code=False, instruments=[watch])
        assert watch.seen and not watch.narrow
        served += 1
        break
    assert served


@pytest.mark.parametrize(
    ("name", "schedule", "dtype"),
    [
        ("conv2d_nhwc", "mma", "float16"),
        ("conv2d_nchw", "mma_channels_last", "float16"),
        ("conv2d_hwcn", "simt", "float32"),
        ("conv2d_nchw32", "mma", "int8"),
    ],
)
def test_wide_indices_compute_the_same(
    emulation: None, monkeypatch: pytest.MonkeyPatch, name: str, schedule: str, dtype: str
) -> None:
    monkeypatch.setattr(program, "WIDE", 1)
    problem = problem_of(name, dtype=dtype, n=3, h=6, w=5, ci=20, co=36, kh=3, kw=2, pad=1)
    assert_correct(problem, parse_arch("sm_80"), schedule, routes=["emulated"])


def test_a_small_tensor_keeps_narrow_indices(host: Arch) -> None:
    def text(problem: Problem) -> str:
        return build(problem, host).lowered

    shape = dict(n=2, h=9, w=9, ci=8, co=8, kh=3, kw=3)
    assert "int64" not in text(problem_of("conv2d_nhwc", dtype="float32", **shape))


@pytest.mark.parametrize("rows", [3, 2**31 + 5])
@pytest.mark.parametrize("cols", [2**31 - 1, 2**31, 2**31 + 7, 2**33])
def test_long_rows_of_softmax(sm_90a: Arch, rows: int, cols: int) -> None:
    op = operator("softmax")
    if rows * cols > 2**44:
        rows = 2**10
    problem = problem_of("softmax", rows=rows, cols=cols)
    spec = op.schedule_for(problem, sm_90a)
    watch = Flattened()
    config = spec.default(problem, sm_90a)
    scheduled = spec.apply(problem, config, sm_90a)
    build_scheduled(op, problem, spec, config, sm_90a, scheduled, device_code=False, instruments=[watch])
    assert watch.seen and not watch.narrow
