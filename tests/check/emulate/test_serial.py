"""Programs for a GPU as loops on the CPU: right where the kernel is, and wrong where it is.

SUMS=200 pytest tests/check/emulate/test_serial.py -k exact  # that many problems for each target, in place of six
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir.stmt import SBlock

from schedules.build.builder import build_scheduled
from schedules.check.emulate.serial import serialize
from schedules.check.verify import Check, verify, verify_function
from schedules.core.arch import Arch, parse_arch
from schedules.core.registry import operator
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem
from tests.conftest import problem_of

SUMS = int(os.environ.get("SUMS", 6))


def kinds(mod: tvm.IRModule) -> set[Any]:
    found = set()
    tvm_ffi.structural_map(mod["main"].body, (tirx.For, lambda loop: found.add(loop.kind) or loop))
    return found


def test_threads_and_vectors_become_loops(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", n=64, h=4, w=4, ci=16, co=64, kh=3, kw=3, pad=1)
    spec = operator("conv2d_hwcn").schedule("tutorial")
    mod = spec.apply(problem, spec.config_for(problem, sm_90a, dict(unroll=64)), sm_90a)
    assert tirx.ForKind.THREAD_BINDING in kinds(mod)
    assert kinds(serialize(mod)) == {tirx.ForKind.SERIAL}
    assert "pragma" not in serialize(mod).script()


def test_a_wrong_program_is_found(sm_90a: Arch, host: Arch) -> None:
    """A program whose border test is one pixel off must not pass."""
    problem = problem_of("conv2d_hwcn", n=8, h=4, w=6, ci=4, co=8, kh=3, kw=3, pad=1)
    op = operator("conv2d_hwcn")
    spec = op.schedule("tutorial")
    config = spec.config_for(problem, sm_90a)
    text = serialize(spec.apply(problem, config, sm_90a)).script()
    # Each change reads less: what lies beyond a buffer may be zeros, as the border is.
    for border, wrong in (("v0 < 5", "v0 < 5"), ("v0 < 5", "v0 < 4"), ("1 <= v1", "2 <= v1")):
        assert text.count(border) == 1
        mod = tvm.script.from_source(text.replace(border, wrong))
        built = build_scheduled(op, problem, spec, config, host, mod)
        (check,) = verify_function(problem, host, built)
        assert check.passed is (wrong == border), check.detail


@pytest.mark.parametrize("target", ["cuda:sm_90a", "rocm:gfx942"])
def test_sums_of_long_rows_are_as_exact_as_on_a_gpu(target: str) -> None:
    """One chain of float32 additions is off by more than the tolerance from about a thousand columns on."""
    arch, r = parse_arch(target), Random(18)
    widths = [16384, 1000, *(round(2 ** r.uniform(9, 14)) for _ in range(SUMS - 2))]
    for seed, cols in enumerate(widths):
        function = FUNCTIONS[seed % 4]
        problem = SoftmaxProblem(24, cols, function, "float32", r.choice((1.0, -0.5)), keep=r.choice((1.0, 0.8)))
        if not problem.is_grad:
            problem = replace(problem, mask=r.choice(SoftmaxProblem.masks))
        schedule = r.choice(["warp", "block_registers", "block_streaming", "split"])
        if not operator("softmax").schedule(schedule).serves(problem, arch):
            schedule = "block_registers"
        (check,) = verify(problem, arch, schedule, routes=["serial"], seeds=[seed])
        assert check.error < 0.5, (schedule, check)


def sum_with(element: Callable[[Any, Any], Any], schedule: str, problem: SoftmaxProblem, arch: Arch) -> Check:
    """A check of softmax whose sum adds  element(block, number so far + element)  in place of that."""

    def mutate(block: Any) -> Any:
        if block.name_hint != "total":
            return block
        store = block.body
        body = tirx.BufferStore(store.buffer, element(block, store.value), store.indices)
        return SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init, block.alloc_buffers
        )

    op, host = operator("softmax"), parse_arch("llvm")
    spec = op.schedule(schedule)
    config = spec.config_for(problem, arch)
    mod = spec.apply(problem, config, arch)
    mod["main"] = mod["main"].with_body(tvm_ffi.structural_map(mod["main"].body, (SBlock, mutate)))
    (check,) = verify_function(problem, host, build_scheduled(op, problem, spec, config, host, serialize(mod)))
    return check


def without(lost: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A sum without the elements whose (pack, thread, place in the pack) are `lost`."""

    def element(block: Any, total: Any) -> Any:
        p, t, v = (axis.var for axis in block.iter_vars[-3:])
        return total.a + tirx.Select(lost(p, t, v), tirx.const(0, "float32"), total.b)

    return element


def in_half(block: Any, total: Any) -> Any:
    return (total.a.astype("float16") + total.b.astype("float16")).astype("float32")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_wrong_sum_is_found(function: str, sm_90a: Arch) -> None:
    """Without a lane, without a single element, or with halves."""
    schedule, problem = "block_registers", SoftmaxProblem(3, 16384, function, "float32")
    assert sum_with(lambda _, total: total, schedule, problem, sm_90a).passed
    lane = without(lambda p, t, v: t == 31)
    one = without(lambda p, t, v: tirx.all(p == 1, t == 77, v == 2))
    for mutant in (lane, one, in_half):
        check = sum_with(mutant, schedule, problem, sm_90a)
        assert not check.passed and np.isfinite(check.error), check


def shared_sum(rows: int, cols: int, threads: int) -> tvm.IRModule:
    """Sums of rows that `threads` threads share, with a last round that is ragged and an axis inside of the sum's."""
    from tvm import te

    x = te.placeholder((rows, 3, cols), "float32", name="x")
    k = te.reduce_axis((0, cols), name="k")
    y = te.compute((rows, 3), lambda i, j: te.sum(x[i, j, k], axis=k), name="y")
    sch = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    i, j, k_ = sch.get_loops(sch.get_sblock("y"))
    chunk, thread = sch.split(k_, [None, threads])
    sch.reorder(i, thread, j, chunk)
    sch.bind(i, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return sch.mod


@pytest.mark.parametrize("threads", [1, 5, 32])
def test_threads_share_a_ragged_sum(threads: int) -> None:
    mod = serialize(shared_sum(3, 101, threads))
    function = tvm.compile(mod, target="llvm")
    x, y = np.random.default_rng(0).random((3, 3, 101), np.float32), np.full((3, 3), np.nan, np.float32)
    found = tvm.runtime.tensor(y)
    function(tvm.runtime.tensor(x), found)
    np.testing.assert_allclose(found.numpy(), x.sum(axis=-1, dtype=np.float64), rtol=1e-6)
