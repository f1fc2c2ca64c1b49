"""Large tensors: indices that reach their last element, in every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.build.builder import build_scheduled
from schedules.core.arch import Arch, parse_arch
from schedules.core.operator import Operator, ScheduleSpec
from schedules.core.problem import Problem
from schedules.core.registry import operator, operator_of, operators
from schedules.definitions import program
from schedules.operators.conv2d_nhwc import cpu
from tests.conftest import assert_correct, of_problem, problem_of

LARGE: dict[str, Any] = dict(
    n=2**13 + 8, h=63, w=67, ci=66, co=68, kh=1, kw=2
)  # data and output of over 2**31 elements
SCHEDULES = [
    (op, spec)
    for op in operators()
    for spec in op.schedules
    if op.name != "softmax" and not spec.tirx and not spec.opt_in and not spec.name.startswith("winograd")
]  # whose workspaces would be larger than indices reach


def narrow_accesses(mod: tvm.IRModule) -> list[str]:
    """Accesses to elements of more than 2**31 by 32-bit indices."""
    found: list[str] = []

    def visit(node: Any) -> None:
        buffer = node.source if isinstance(node, ir.TensorLoad) else node.buffer
        large = any(not isinstance(extent, tirx.IntImm) or int(extent) > 2**31 for extent in buffer.shape)
        index = node.indices[0]  # of one axis now; a constant is where an offset of its own begins
        if buffer.scope() == "global" and large and not isinstance(index, tirx.IntImm) and "int64" not in str(index.ty):
            found.append(f"{buffer.name}[{index}]")

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


def narrow(problem: Problem, arch: Arch, spec: ScheduleSpec) -> list[str]:
    """What a build with the default config accesses by indices that do not reach all of it."""
    watch, config = Flattened(), spec.default(problem, arch)
    mod = spec.apply(problem, config, arch)
    build_scheduled(operator_of(problem), problem, spec, config, arch, mod, device_code=False, instruments=[watch])
    assert watch.seen
    return watch.narrow


@pytest.mark.parametrize(("op", "spec"), SCHEDULES, ids=lambda item: item.name)
def test_every_element_is_reached(op: Operator, spec: ScheduleSpec) -> None:
    arch = arch_for(spec)
    problems = [of_problem(op.name, {**LARGE, "dtype": dtype}) for dtype in op.problem.dtypes]
    assert not narrow(next(problem for problem in problems if spec.serves(problem, arch)), arch, spec)


@pytest.mark.parametrize(
    ("name", "schedule", "dtype"),
    [
        ("conv2d_nhwc", "mma", "float16"),
        ("conv2d_nchw", "mma_channels_last", "float16"),
        ("conv2d_hwcn", "simt", "float32"),
        ("conv2d_nchw32", "mma", "int8"),
        ("depthwise_conv2d", "windows", "float16"),
    ],
)
def test_wide_indices_compute_the_same(
    emulation: None, monkeypatch: pytest.MonkeyPatch, name: str, schedule: str, dtype: str
) -> None:
    monkeypatch.setattr(program, "WIDE", 1)
    problem = of_problem(name, dict(dtype=dtype, n=3, h=6, w=5, ci=20, co=36, kh=3, kw=2, pad=1))
    assert_correct(problem, parse_arch("sm_80"), schedule, routes=["emulated"])


def test_the_limit(host: Arch) -> None:
    def index(channels: int, tap: int = 1) -> str:
        problem = problem_of("conv2d_nhwc", dtype="float32", n=2**10, h=2**5, w=2**5, ci=channels, co=1, kh=tap, kw=tap)
        config = cpu.SCHEDULE.default(problem, host)
        return str(cpu.SCHEDULE.graph(problem, config, host).params[0].shape[0].ty)  # type: ignore[misc]

    assert index(2**10 - 1) == "int32" and index(2**10) == "int64"


@pytest.mark.parametrize("cols", [1, 2**31 - 1, 2**31, 2**31 + 7, 2**33])
def test_long_rows_of_softmax(sm_90a: Arch, cols: int) -> None:
    problem = problem_of("softmax", rows=2**10, cols=cols)
    assert not narrow(problem, sm_90a, operator("softmax").schedule_for(problem, sm_90a))


def test_extents_of_run_time_have_64_bits_themselves() -> None:
    func = program.program_of(operator("softmax").definition(problem_of("softmax", rows=4, cols=40)))
    assert "x: T.Buffer((rows, T.int64(40))" in func.script()
