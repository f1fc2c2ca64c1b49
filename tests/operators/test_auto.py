from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tvm_ffi

from schedules.build.builder import build
from schedules.build.toolchain import cuda
from schedules.bundle.bundle import write_bundle
from schedules.check.verify import poisoned, reduced
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ArgumentError, ConfigError
from schedules.core.problem import Problem
from schedules.core.registry import operators
from schedules.measure.records import Record, record
from schedules.measure.timer import measure
from schedules.operators import auto
from schedules.operators.auto import AutoConfig
from schedules.operators.traces import pack
from schedules.tune.auto import AutoSearch
from tests.conftest import assert_correct, problem_of

pytest.importorskip("xgboost")

CONV = dict(n=8, h=6, w=5, ci=16, co=24, kh=3, kw=3, pad=1)
ODD = dict(n=3, h=5, w=4, ci=5, co=7, kh=3, kw=2, pad=1, stride=2)
INT8 = dict(n=2, h=5, w=5, ci=33, co=32, kh=3, kw=3, pad=1)
SOFTMAX = dict(rows=33, cols=100)


def configs(problem: Problem, arch: Arch, count: int, space: str | None = None) -> list[AutoConfig]:
    return [candidate.config for candidate in AutoSearch(problem, arch, 1, space).ask(count)]  # type: ignore[misc]


@pytest.fixture(scope="module")
def conv() -> Problem:
    return problem_of("conv2d_hwcn", **CONV)


@pytest.fixture(scope="module")
def config(conv: Problem) -> AutoConfig:
    return configs(conv, parse_arch("llvm"), 1)[0]


def test_every_operator_has_it_and_none_lists_it() -> None:
    for op in operators():
        assert op.schedule("auto") is auto.SCHEDULE
        assert "auto" not in [spec.name for spec in op.schedules]


def test_it_has_no_default(conv: Problem, host: Arch) -> None:
    assert list(auto.SCHEDULE.space(conv, host)) == []
    with pytest.raises(ConfigError, match="no default config; tune it first"):
        build(conv, host, "auto")


def test_the_command_line_takes_it(conv: Problem, config: AutoConfig, capsys: pytest.CaptureFixture[str]) -> None:
    from schedules.cli import main

    words = [f"{name}={value}" for name, value in CONV.items()]
    arguments = ["verify", "conv2d_hwcn", *words, "--schedule", "auto"]
    assert main([*arguments, "--config", f"space={config.space},trace={config.trace}"]) == 0
    assert main(arguments) == 2
    assert "auto has no default config" in capsys.readouterr().err


def test_a_replayed_trace_is_the_program_that_was_searched(conv: Problem, host: Arch) -> None:
    search = AutoSearch(conv, host, 1)
    found: list[AutoConfig] = [candidate.config for candidate in search.ask(4)]  # type: ignore[misc]
    for config in found:
        replayed = auto.schedule(conv, AutoConfig.parse(json.loads(json.dumps(config.to_json()))), host)
        assert tvm_ffi.structural_equal(replayed, search._open[str(config)].sch.mod)
    assert len({str(config) for config in found}) == len(found)


def test_a_record_of_it_survives_the_journal(conv: Problem, host: Arch, config: AutoConfig) -> None:
    built = build(conv, host, "auto", config)
    made = record(built, measure(built, seconds=0.01), 0.0)
    again = Record.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made and again.key == ("auto", str(config)) and len(str(config)) < 80


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        ("no base64", "trace is not one of a search"),
        (pack([[["Vanish", [], [], []]], []]), "trace is not one of a search"),
        (pack([[["GetSBlock", [], ["nothing", "main"], ["b0"]]], []]), "does not replay .*find a block"),
    ],
)
def test_a_trace_that_does_not_replay_is_refused(conv: Problem, host: Arch, trace: str, reason: str) -> None:
    damaged = AutoConfig("llvm", trace)
    with pytest.raises(ConfigError, match=f"^illegal config: .*{reason}"):
        build(conv, host, "auto", damaged)
    assert "\n" not in (damaged.check(conv, host) or "")


@pytest.mark.parametrize(
    ("space", "target", "reason"),
    [
        ("llvm", "sm_80", "space=llvm is for llvm, not for cuda:sm_80"),
        ("lvm", "llvm", "did you mean 'llvm'"),
    ],
)
def test_a_space_that_does_not_fit_is_refused(config: AutoConfig, space: str, target: str, reason: str) -> None:
    problem = problem_of("conv2d_nhwc", **CONV)
    assert reason in (AutoConfig(space, config.trace).check(problem, parse_arch(target)) or "")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("conv2d_hwcn", ODD),
        ("conv2d_nchw", ODD),
        ("conv2d_nhwc", dict(ODD, dtype="float16", bias=True, activation="relu")),
        ("conv2d_nchw32", INT8),
        ("softmax", SOFTMAX),
        ("softmax", dict(SOFTMAX, function="log_softmax_grad", dtype="float32")),
    ],
)
def test_it_is_correct_on_the_cpu(name: str, fields: dict[str, Any], host: Arch) -> None:
    problem = problem_of(name, **fields)
    for config in configs(problem, host, 2):
        assert_correct(problem, host, "auto", config)


@pytest.mark.parametrize(
    ("name", "fields", "target", "space"),
    [
        ("conv2d_hwcn", CONV, "sm_90a", "cuda"),
        ("conv2d_nchw", CONV, "sm_75", "cuda"),
        ("conv2d_nchw32", INT8, "sm_80", "cuda"),
        ("softmax", SOFTMAX, "sm_90a", "cuda"),
        ("conv2d_hwcn", dict(CONV, dtype="float16"), "gfx90a", "rocm"),
        ("softmax", SOFTMAX, "gfx1100", "rocm"),
    ],
)
def test_it_is_correct_with_its_threads_as_loops(name: str, fields: dict[str, Any], target: str, space: str) -> None:
    problem, arch = problem_of(name, **fields), parse_arch(target)
    (config,) = configs(problem, arch, 1, space)
    assert_correct(problem, arch, "auto", config, routes=["serial"])


@pytest.mark.parametrize(
    ("name", "fields", "space"),
    [("conv2d_hwcn", ODD, "cuda"), ("softmax", SOFTMAX, "cuda")],
)
def test_its_cuda_code_is_correct(name: str, fields: dict[str, Any], space: str, emulation: None) -> None:
    problem, arch = problem_of(name, **fields), parse_arch("sm_90a")
    (config,) = configs(problem, arch, 1, space)
    assert_correct(problem, arch, "auto", config, routes=["emulated"])


@pytest.mark.slow
def test_matrix_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float16 products with float32 sums: shared memory holds tiles of both."""
    monkeypatch.setattr("schedules.tune.trace_space.require_headers", lambda source: None)
    problem, arch = problem_of("conv2d_nhwc", **dict(ODD, ci=32, co=48, dtype="float16")), parse_arch("sm_80")
    search = AutoSearch(problem, arch, 1)
    assert search.space.name == "cuda-tensorcore"
    for candidate in search.ask(2):
        source = build(problem, arch, "auto", candidate.config, device_code=False).sources["cu"]
        assert isinstance(source, str) and "wmma::mma_sync" in source
        assert_correct(problem, arch, "auto", candidate.config, routes=["serial"])
    assert search.space.rejected["VerifyGPUCode"] == 0


def test_wmma_without_its_header_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from schedules.core.errors import ToolchainError

    monkeypatch.setattr(cuda, "include_dir", lambda: tmp_path)
    monkeypatch.setattr(cuda, "nvrtc_available", lambda: True)
    with pytest.raises(ToolchainError, match="crt/mma.h.*pip install"):
        AutoSearch(problem_of("conv2d_nhwc", **dict(CONV, dtype="float16")), parse_arch("sm_80"))


def test_a_smaller_problem_stands_in_for_a_large_one() -> None:
    large = problem_of("conv2d_hwcn", **dict(CONV, n=256, h=14, w=14, ci=64, co=64))
    arch = parse_arch("sm_90a")
    (config,) = configs(large, arch, 1, "cuda")
    smaller = reduced(large, arch, config, "emulated")
    assert smaller.flops < large.flops / 8
    assert_correct(smaller, arch, "auto", config, routes=["serial"])


def test_rows_are_fixed(host: Arch) -> None:
    problem = problem_of("softmax", **SOFTMAX)
    built = build(problem, host, "auto", configs(problem, host, 1)[0])
    with pytest.raises(ArgumentError, match=r"x has shape \(34, 100\), needed \(33, 100\)"):
        built(np.zeros((34, 100), np.float16), np.zeros((34, 100), np.float16))


def test_a_bundle_of_it_runs(conv: Problem, host: Arch, config: AutoConfig, tmp_path: Any) -> None:
    built = build(conv, host, "auto", config)
    bundle = write_bundle(built, tmp_path / "conv")
    inputs = built.operator.inputs(conv, np.random.default_rng(0))
    here, there = poisoned(conv), poisoned(conv)
    built(*inputs, *here)
    bundle.load()(*inputs, *there)
    np.testing.assert_array_equal(here, there)
    assert bundle.manifest["config"] == config.to_json()
