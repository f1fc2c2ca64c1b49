from __future__ import annotations

import contextlib
import random
from functools import cache
from itertools import islice, product

import pytest

from schedules.check.sweep import random_problem
from schedules.core.arch import ARCHES, Arch
from schedules.core.arithmetic import FLOAT32
from schedules.core.errors import ConfigError, UnknownNameError, UsageError
from schedules.core.operator import Operator, ScheduleSpec
from schedules.core.problem import Config, Problem
from schedules.core.registry import EXTRA, OPERATORS, operator, operator_modules, operators
from schedules.lowering.annotations import TIRX
from tests.conftest import CUDA_ARCHES, ROCM_ARCHES, problem_of

SAMPLES = {
    "conv2d_hwcn": dict(n=5, h=4, w=4, ci=3, co=6, kh=3, kw=3, pad=1),
    "conv2d_nchw": dict(n=5, h=4, w=4, ci=3, co=6, kh=3, kw=3, pad=1),
    "conv2d_nchw32": dict(n=2, h=4, w=4, ci=40, co=33, kh=3, kw=3, pad=1),
    "conv2d_nhwc": dict(n=2, h=4, w=4, ci=8, co=6, kh=3, kw=3, pad=1, dtype="float16"),
    "depthwise_conv2d": dict(n=2, h=4, w=4, ci=8, kh=3, kw=3, pad=1, layout="nhwc"),
    "depthwise_nchw32": dict(n=2, h=4, w=4, ci=40, kh=3, kw=3, pad=1),
    "pack_nchw32": dict(n=2, h=4, w=4, ci=8, layout="nhwc"),
    "pool2d": dict(n=2, h=4, w=4, ci=8, kh=3, kw=3, pad=1),
    "softmax": dict(rows=5, cols=100),
}


def test_unknown_operator_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'conv2d_hwcn'"):
        operator("conv2d_hwcnn")


def test_operators_of_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXTRA, "rows=schedules.operators.softmax,empty=schedules.core.errors,gone=no.such.module")
    assert list(operator_modules()) == [*OPERATORS, "rows", "empty", "gone"]
    with pytest.raises(UsageError, match="calls itself softmax; use one name"):
        operator("rows")
    with pytest.raises(UsageError, match="module schedules.core.errors has no OPERATOR"):
        operator("empty")
    with pytest.raises(UsageError, match=f"operator gone of {EXTRA}: No module named 'no'"):
        operator("gone")
    monkeypatch.setenv(EXTRA, "rows")
    with pytest.raises(UsageError, match="write name=module,name=module"):
        operator_modules()


def test_names_match_folders() -> None:
    assert [found.name for found in operators()] == list(OPERATORS)


@pytest.mark.parametrize("found", operators(), ids=lambda found: found.name)
@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_the_rule_chooses_a_legal_schedule(found: Operator, arch: Arch) -> None:
    problem = problem_of(found.name, **SAMPLES[found.name])
    spec = found.schedule_for(problem, arch)
    assert spec.config_for(problem, arch).check(problem, arch) is None


def _all_schedules() -> list[tuple[Operator, ScheduleSpec]]:
    return [(found, spec) for found in operators() for spec in found.schedules]


def sample_for(found: Operator, spec: ScheduleSpec) -> Problem:
    """A small problem that the schedule takes."""
    fields = dict(SAMPLES[found.name])
    if spec.name in ("mma", "mma_channels_last", "bands") and "float16" in found.problem.dtypes:
        fields["dtype"] = "float16"
    if spec.name == "mma_windows":
        fields |= dict(n=2, ci=3, dtype="int8" if found.problem.dtypes == ("int8",) else "float16")
    if spec.name.startswith("tma_"):  # TMA moves multiples of 16 bytes
        fields |= dict(n=8, ci=32, co=32, dtype="int8" if found.problem.dtypes == ("int8",) else "float16")
    if spec.name.startswith("winograd") or spec.name == "mma_tf32":
        fields |= dict(ci=16, dtype="float32")
    if spec.name == "tf32" or spec.name.endswith(("bf16x3", "bf16x6")):
        fields |= dict(n=8, ci=32, co=32, dtype="float32")
    if spec.name.startswith("tma_wgmma") and found.name == "conv2d_nchw":
        fields |= dict(w=8, filter_layout="hwoi")
    if spec.name in ("tma_wgmma_slabs", "tma_wgmma_images"):
        fields |= dict(kh=1, kw=1, pad=0)
    return problem_of(found.name, **fields)


@cache
def first_legal(name: str, schedule: str) -> tuple[Arch, list[Config]]:
    """Two legal configs for the sample, on the oldest arch that has any."""
    found = operator(name)
    spec = found.schedule(schedule)
    problem = sample_for(found, spec)
    tried = ((arch, islice(spec.legal_space(problem, arch), 2)) for arch in ARCHES.values() if arch.kind in spec.kinds)
    return next((arch, configs) for arch, legal in tried if (configs := list(legal)))


@pytest.mark.parametrize(("found", "spec"), _all_schedules(), ids=lambda item: item.name)
def test_spaces_hold_legal_configs(found: Operator, spec: ScheduleSpec) -> None:
    arch, legal = first_legal(found.name, spec.name)
    assert len(legal) == 2
    tried = list(spec.space(sample_for(found, spec), arch))
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize(("found", "spec"), _all_schedules(), ids=lambda item: item.name)
def test_a_program_in_tirx_says_why_and_names_te_schedules_for_the_same(found: Operator, spec: ScheduleSpec) -> None:
    problem = sample_for(found, spec)
    arch, (config, *_) = first_legal(found.name, spec.name)
    written_in_tirx = TIRX in spec.apply(problem, config, arch)["main"].attrs
    assert (spec.language == "TIRx") == written_in_tirx == (spec.tirx is not None) == ("serial" in spec.no_routes)
    if spec.tirx is None:
        return
    assert len(spec.tirx.reason.split()) > 10 and "\n" not in spec.tirx.reason
    siblings = [found.schedule(name) for name in spec.tirx.siblings]
    assert siblings and all(sibling.language == "TE" and "cuda" in sibling.kinds for sibling in siblings)
    assert siblings[0].serves(problem, arch)


@pytest.mark.parametrize(("found", "spec"), _all_schedules(), ids=lambda item: item.name)
def test_less_exact_schedules_are_used_by_name_only(found: Operator, spec: ScheduleSpec) -> None:
    assert not (spec.arithmetic.error > FLOAT32.error and any(spec in found.offered(arch) for arch in ARCHES.values()))


def test_a_schedule_of_another_kind_is_refused() -> None:
    problem = problem_of("softmax", **SAMPLES["softmax"])
    with pytest.raises(ConfigError, match="runs on cuda and rocm, not on llvm"):
        operator("softmax").schedule_for(problem, ARCHES["llvm"], "warp")
    with pytest.raises(UnknownNameError, match="did you mean 'warp'"):
        operator("softmax").schedule("wrap")


@pytest.mark.parametrize(("found", "spec"), _all_schedules(), ids=lambda item: item.name)
def test_whether_a_schedule_serves_is_an_answer_not_an_error(found: Operator, spec: ScheduleSpec) -> None:
    samples = [problem_of(found.name, **{**SAMPLES[found.name], "dtype": dtype}) for dtype in found.problem.dtypes]
    r = random.Random(0)
    arches = [ARCHES["llvm"], *CUDA_ARCHES, *ROCM_ARCHES]
    for problem, arch in product([*samples, *(random_problem(found, r) for _ in range(5))], arches):
        served = spec.serves(problem, arch)
        with contextlib.nullcontext() if served else pytest.raises(ConfigError):
            spec.config_for(problem, arch)
        reason = spec.config.unfit(problem, arch)
        if reason:  # it holds for every config, and no space of them need be looked at
            assert spec.default(problem, arch).check(problem, arch) == reason
            assert not spec.numbered_space(problem, arch)
            assert all(config.check(problem, arch) == reason for config in islice(spec.space(problem, arch), 20))
