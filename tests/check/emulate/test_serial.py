from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from schedules.build.builder import build_scheduled
from schedules.check.emulate.serial import serialize
from schedules.check.verify import verify_function
from schedules.core.arch import Arch
from schedules.core.registry import operator
from tests.conftest import problem_of


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
    assert text.count("v0 < 5") == 1
    for change, passes in (("v0 < 5", True), ("v0 < 4", False), ("v0 < 6", False)):
        mod = tvm.script.from_source(text.replace("v0 < 5", change))
        built = build_scheduled(op, problem, spec, config, host, mod)
        (check,) = verify_function(problem, host, built)
        assert check.passed is passes, check.detail
