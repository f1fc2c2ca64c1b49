"""The code for AMD GPUs of every schedule that there is for them, run by the emulator."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.check.emulate import EmulationMode
from schedules.check.sweep import cases
from schedules.check.verify import device_source, emulated_runs, poisoned
from schedules.core.arch import ARCHES, parse_arch
from schedules.core.arithmetic import TF32
from schedules.core.errors import EmulationError
from schedules.core.operator import Operator, ScheduleSpec
from schedules.core.registry import operators
from tests.conftest import assert_correct, caught, is_right, problem_of

# one of each size of a wave, and the one whose matrix cores have TF32
WAVES = {arch.wave: arch for arch in ARCHES.values() if arch.kind == "rocm" and arch.features}
WITH_TF32 = parse_arch("gfx942")
SCHEDULES = [(op, spec) for op in operators() for spec in op.schedules if "rocm" in spec.kinds]
FLOPS, COLS = 2**20, 1024  # of a case: LLVM gets what a thread has of a row of softmax written out

BARRIER = r"call void @llvm\.amdgcn\.s\.barrier\(\)"


@pytest.mark.parametrize(("op", "spec"), SCHEDULES, ids=lambda each: each.name)
def test_every_schedule(emulation: None, op: Operator, spec: ScheduleSpec) -> None:
    """The first small cases of its sweep: a default, in waves of 32 if it runs there, and a config of the space."""
    wide = WITH_TF32 if spec.arithmetic == TF32 else WAVES[64]
    small = (case for case in cases(op, spec, wide) if case.problem.flops <= FLOPS)
    first, second = islice((case for case in small if getattr(case.problem, "cols", 0) <= COLS), 2)
    default = spec.default(first.problem, WAVES[32])
    if default.check(first.problem, WAVES[32]) is None:
        assert_correct(first.problem, WAVES[32], spec.name, default, ["emulated"])
    else:
        assert_correct(first.problem, wide, spec.name, first.config, ["emulated"])
    assert_correct(second.problem, wide, spec.name, second.config, ["emulated"])


MUTATED: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "mma": ("conv2d_nhwc", "mma", "gfx942", dict(n=2, h=7, w=6, ci=64, co=64, kh=3, kw=3, pad=1, dtype="float16")),
    "tutorial": ("conv2d_hwcn", "tutorial", "gfx1100", dict(n=3, h=5, w=7, ci=5, co=9, kh=3, kw=3, pad=1)),
    "softmax": ("softmax", "block_registers", "gfx942", dict(rows=3, cols=3000)),
}


@pytest.fixture(scope="module", params=MUTATED)
def mutated(request: pytest.FixtureRequest, emulation: None) -> Built:
    operator, schedule, arch, fields = MUTATED[request.param]
    return build(problem_of(operator, **fields), parse_arch(arch), schedule, device_code=False)


def test_barriers_that_are_deleted_are_noticed(mutated: Built) -> None:
    """All at once, and the last."""
    source = device_source(mutated)
    arrays = list(mutated.operator.inputs(mutated.problem, np.random.default_rng(0)))
    assert not caught(mutated, source, arrays)
    without, count = re.subn(BARRIER, "fence acquire", source)
    assert count and caught(mutated, without, arrays)
    last = [match.span() for match in re.finditer(rf"(?:tail )?{BARRIER}", source)][-1]
    assert caught(mutated, source[: last[0]] + "fence acquire" + source[last[1] :], arrays)


def test_an_index_out_of_bounds_is_noticed(mutated: Built) -> None:
    """The first vector that is loaded from global memory lies beyond what there is."""
    source = device_source(mutated)
    arrays = list(mutated.operator.inputs(mutated.problem, np.random.default_rng(0)))
    load = re.search(r"( = load [^%@\n]*ptr addrspace\(1\) )(%[\w.]+)", source)
    far = "getelementptr i8, ptr addrspace(1) {}, i64 1000000"
    if not load:
        load = re.search(r"(raw\.ptr\.buffer\.load\.\w+\(ptr addrspace\(8\) %[\w.]+, i32 )(%[\w.]+)", source)
        far = "add i32 {}, 1000000"
    assert load
    begin = source.rindex("\n", 0, load.start())
    far = f"\n  %far = {far.format(load[2])}"
    changed = source[:begin] + far + source[begin : load.start(2)] + "%far" + source[load.end(2) :]
    with pytest.raises(EmulationError, match=r"past the end of a device buffer of \d+ bytes \(kernel line \d+"):
        _, run = next(emulated_runs(mutated, changed, [EmulationMode()]))
        run([*arrays, *poisoned(mutated.problem)])


@pytest.mark.parametrize("wave", WAVES)
def test_rows_given_at_run_time(emulation: None, wave: int) -> None:
    for schedule, cols in (("warp", 72), ("split", 3000)):
        built = build(problem_of("softmax", rows=8, cols=cols), WAVES[wave], schedule, device_code=False)
        assert all(is_right(built, rows, mode) for mode, rows in enumerate((1, 7, 33)))


def test_several_launches_and_their_workspace(emulation: None) -> None:
    built = build(problem_of("softmax", rows=2, cols=5000, keep=0.9), parse_arch("gfx90a"), "split", device_code=False)
    assert device_source(built).count(" amdgpu_kernel ") == 2
    assert is_right(built, 2, 0)
