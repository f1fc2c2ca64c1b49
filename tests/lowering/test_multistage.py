"""The main loop: what it refuses, and that the emulator sees every wait and barrier that it needs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.check.verify import emulated_runs, judge, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import EmulationError
from schedules.core.operator import Operator
from schedules.core.registry import operator
from tests.conftest import problem_of

SHAPE: dict[str, Any] = dict(n=2, h=6, w=6, ci=96, co=32, kh=2, kw=2, dtype="float16")
TILE: dict[str, Any] = dict(block_m=32, block_n=32, block_k=32, warps_m=2, warps_n=2)


def built_for(arch: str, stages: int, **shape: Any) -> Built:
    problem = problem_of("conv2d_nhwc", **{**SHAPE, **shape})
    return build(problem, parse_arch(arch), "mma", {**TILE, "stages": stages}, device_code=False)


def is_correct(built: Built, source: str) -> bool:
    """Whether `source` in place of the generated one is right in every mode of the emulator."""
    owner: Operator = operator("conv2d_nhwc")
    inputs = owner.inputs(built.problem, np.random.default_rng(0))
    for _, run in emulated_runs(built, source):
        try:
            outputs = run([*inputs, *poisoned(built.problem)])
        except EmulationError:
            return False
        if not judge(built.problem, inputs, outputs).passed:
            return False
    return True


@pytest.mark.parametrize(("arch", "stages"), [("sm_75", 2), ("sm_80", 2), ("sm_80", 3), ("sm_80", 4), ("sm_80", 5)])
@pytest.mark.parametrize("ci", [32, 96])
def test_any_number_of_stages(emulation: None, arch: str, stages: int, ci: int) -> None:
    """Also more stages than there are tiles to load: a 1x1 kernel over 32 channels is one."""
    for taps in (1, 2):
        built = built_for(arch, stages, ci=ci, kh=taps, kw=1)
        assert is_correct(built, str(built.sources["cu"]))


def test_the_wait_is_needed(emulation: None) -> None:
    built = built_for("sm_80", 3)
    source = str(built.sources["cu"])
    mutant, count = re.subn(r"cp\.async\.wait_group 1;", "cp.async.wait_group 2;", source)
    assert count == 1
    assert not is_correct(built, mutant)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_each_barrier_of_the_loop_is_needed(emulation: None, arch: str) -> None:
    """The one before the loop, the one in it, and the epilogue's.  The one after the loop only guards fragments that
    the last iteration loads in vain, unless the loop is too short to have one of its own."""
    built = built_for(arch, 2)
    source = str(built.sources["cu"])
    kernel = source.index("{", source.rindex("__launch_bounds__"))
    barriers = [match.start() for match in re.finditer(r"__syncthreads\(\);", source) if match.start() > kernel]
    assert len(barriers) == 4
    caught = [not is_correct(built, source[:at] + source[at + len("__syncthreads();") :]) for at in barriers]
    assert caught[0] and caught[1] and caught[3]


def test_one_barrier_an_iteration(sm_90a: Arch) -> None:
    source = str(built_for("sm_80", 3).sources["cu"])
    loop = source[source.index("for (int tile") : source.index("cp_async_wait_0();", source.index("for (int tile"))]
    assert loop.count("__syncthreads") == 1
    assert loop.count("cp_async_commit();") == 1


def test_the_loop_does_not_divide(cuda_compiler: None, sm_90a: Arch) -> None:
    """Pixels of 14 x 14 images, 3 taps and 3 chunks: nothing that a shift could do."""
    problem = problem_of("conv2d_nhwc", n=16, h=14, w=14, ci=96, co=128, kh=3, kw=3, pad=1, dtype="float16")
    ptx = str(
        build(problem, sm_90a, "mma", {"block_m": 128, "block_n": 128, "warps_m": 2, "warps_n": 2}).sources["ptx"]
    )
    labels = {match[1]: match.start() for match in re.finditer(r"^(\$L__BB\w+):", ptx, re.M)}
    loops = [
        ptx[labels[match[1]] : match.start()]
        for match in re.finditer(r"bra(?:\.uni)?\s+(\$L__BB\w+);", ptx)
        if labels[match[1]] < match.start()
    ]
    main = next(loop for loop in loops if "mma.sync" in loop)
    assert "cp.async" in main
    assert not re.search(r"\b(div|rem|mul\.hi)\.", main)


def test_refusals() -> None:
    from schedules.lowering.multistage import Options, _Nest

    nest = object.__new__(_Nest)
    for stages, asynchronous in ((1, True), (3, False)):
        with pytest.raises(ValueError, match="do not fit this pipeline"):
            nest.emit(Options(stages, asynchronous, ahead=True, skip=False))
