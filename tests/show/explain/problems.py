"""A small problem for every schedule of every operator."""

from __future__ import annotations

from typing import Any

from schedules.core.arch import Arch, parse_arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Problem
from schedules.core.registry import operators
from tests.conftest import problem_of

TARGETS = {"cuda": ("cuda:sm_90a", "cuda:sm_100a"), "rocm": ("rocm:gfx942",), "llvm": ("llvm",)}
CONV = dict(h=4, w=8, kh=3, kw=3, pad=1)
# tried in this order; a schedule takes the first that it serves
PROBLEMS: dict[str, tuple[dict[str, Any], ...]] = {
    "conv2d_hwcn": (
        dict(CONV, n=8, ci=16, co=32),
        dict(CONV, n=16, ci=16, co=32, dtype="float16"),
        dict(CONV, n=64, ci=16, co=64, dtype="float16"),
        dict(CONV, n=2, ci=4, co=32, dtype="float16"),
    ),
    "conv2d_nchw": (
        dict(CONV, n=2, ci=4, co=4, bias=False),
        dict(CONV, n=2, ci=16, co=32, dtype="float16"),
        dict(CONV, n=2, ci=16, co=8, dtype="float16", filter_layout="hwoi"),
        dict(CONV, n=2, ci=16, co=16, kh=1, kw=1, pad=0, dtype="float16"),
        dict(CONV, n=2, ci=16, co=64, dtype="float16", filter_layout="hwoi"),
        dict(CONV, n=2, ci=16, co=8),
    ),
    "conv2d_nchw32": (dict(CONV, n=2, ci=64, co=64), dict(CONV, n=2, ci=3, co=32)),
    "conv2d_nhwc": (dict(CONV, n=2, ci=16, co=16), dict(CONV, n=2, ci=16, co=16, dtype="float16")),
    "pack_nchw32": (dict(n=2, h=4, w=8, ci=40),),
    "pool2d": (dict(CONV, n=2, ci=4),),
    "depthwise_conv2d": (dict(CONV, n=2, ci=4), dict(CONV, n=2, ci=8, dtype="float16")),
    "depthwise_nchw32": (dict(CONV, n=2, ci=40),),
    "softmax": (dict(rows=4, cols=264, dtype="float16"),),
}
SCHEDULES = [(op.name, spec.name) for op in operators() for spec in op.schedules]


def small_problem(name: str, spec: ScheduleSpec) -> tuple[Problem, Arch]:
    """The first small problem of the operator called `name` that `spec` serves, and its target."""
    for arch in map(parse_arch, TARGETS[spec.kinds[0]]):
        for words in PROBLEMS[name]:
            problem = problem_of(name, **words)
            if spec.serves(problem, arch):
                return problem, arch
    raise AssertionError(f"no small problem of {name} for {spec.name}; add one to PROBLEMS")
