"""Random problems: legal, the same for a seed, and many; the script that verifies them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from schedules.check import sweep
from schedules.check.sweep import Case, all_cases, cases, random_problem, rule_cases
from schedules.core.arch import ARCHES, Arch, parse_arch
from schedules.core.child import Overdue
from schedules.core.draws import one_of
from schedules.core.errors import BuildError, ConfigError, ProblemError, UsageError
from schedules.core.presets import presets
from schedules.core.problem import Argument, Pair, Problem
from schedules.core.registry import operator, operator_of, operators
from scripts import sweep as script
from tests.documents import ROOT
from tests.test_readme import ASKED

ONE_VALUE = {(name, "dtype") for name in ("conv2d_nchw32", "depthwise_nchw32", "pool2d")}  # int8 is its only one


@pytest.mark.parametrize("name", [op.name for op in operators()])
def test_problems_of_every_operator(name: str) -> None:
    """Every field is drawn, and takes more than one value if it has more."""
    r = random.Random(0)
    problems = [random_problem(operator(name), r) for _ in range(40)]
    assert len(set(problems)) >= 39
    for word in problems[0].to_json():
        values = {getattr(problem, word) for problem in problems}
        assert (len(values) == 1) == ((name, word) in ONE_VALUE), word


@dataclass(frozen=True)
class NewProblem(Problem):
    """Of an operator that nobody knows yet."""

    kinds: ClassVar[tuple[str, ...]] = ("a", "b")

    rows: int
    window: Pair
    kind: str
    fast: bool = False
    note: str = ""
    dtype: str = "float32"

    @property
    def flops(self) -> int:
        return self.rows

    def arguments(self) -> tuple[Argument, ...]:
        return (Argument("x", (self.rows,), self.dtype),)


@dataclass(frozen=True)
class SlopedProblem(NewProblem):
    slope: float = field(kw_only=True)


@dataclass(frozen=True)
class RefusedProblem(NewProblem):
    def __post_init__(self) -> None:
        raise ProblemError("rows=1 are too few")


@dataclass(frozen=True)
class HugeProblem(NewProblem):
    @property
    def flops(self) -> int:
        return sweep.FLOPS + 1


def new(problem: type[Problem]) -> Any:
    return SimpleNamespace(name="new", problem=problem)


def test_fields_are_drawn_by_what_they_are() -> None:
    r = random.Random(0)
    problems: list[Any] = [random_problem(new(NewProblem), r) for _ in range(60)]
    rows = sorted(problem.rows for problem in problems)
    assert 1 <= rows[0] < 10 < rows[30] < 100 < rows[-1] <= 1000
    assert {problem.kind for problem in problems} == {"a", "b"} and {problem.fast for problem in problems} == {
        False,
        True,
    }
    assert {type(side) for problem in problems for side in problem.window} == {int}
    assert {(problem.note, problem.dtype) for problem in problems} == {("", "float32")}


def test_what_cannot_be_drawn_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "TRIES", 5)
    r = random.Random(0)
    with pytest.raises(UsageError, match=r"^SlopedProblem.slope has no default, .* add one to SlopedProblem.draws$"):
        random_problem(new(SlopedProblem), r)
    with pytest.raises(UsageError, match=r"^none of 5 .* of new \(rows=1 are too few\); refine RefusedProblem.draws$"):
        random_problem(new(RefusedProblem), r)
    with pytest.raises(UsageError, match=r"takes more than .* operations"):
        random_problem(new(HugeProblem), r)


@pytest.mark.parametrize(
    ("name", "schedule"), [("conv2d_nhwc", "tma_wgmma"), ("conv2d_nchw", "direct"), ("softmax", "frames")]
)
def test_cases_are_legal_and_depend_on_the_seed_alone(sm_90a: Arch, name: str, schedule: str) -> None:
    op = operator(name)
    spec = op.schedule(schedule)
    drawn = list(islice(cases(op, spec, sm_90a), 12))
    assert drawn == list(islice(cases(op, spec, sm_90a), 12))
    assert drawn != list(islice(cases(op, spec, sm_90a, seed=1), 12))
    assert all(case.config.check(case.problem, sm_90a) is None for case in drawn)
    defaults = [case.config == spec.default(case.problem, sm_90a) for case in drawn]
    assert all(defaults[::2]) and not all(defaults)


def test_all_schedules_that_take_a_problem_have_it(sm_90a: Arch) -> None:
    drawn = list(islice(all_cases(operators(), sm_90a), 120))
    assert drawn[:60] == list(islice(all_cases(operators(), sm_90a), 60))
    assert drawn[0] != next(all_cases(operators(), parse_arch("sm_80")))
    of_each: dict[Problem, list[str | None]] = {}
    for case in drawn:
        assert case.config and case.config.check(case.problem, sm_90a) is None
        of_each.setdefault(case.problem, []).append(case.schedule)
    for problem, names in list(of_each.items())[:-1]:  # the last one's may be cut off
        op = operator_of(problem)
        assert len(names) == len(set(names)) or len(set(names)) < 3  # a small problem may be drawn again
        assert set(names) == {spec.name for spec in op.schedules if spec.serves(problem, sm_90a)}
    assert len({(type(case.problem), case.schedule) for case in drawn}) > 25
    (subject,) = script.wanted(["all"], sm_90a, 0, False)
    assert subject.name == "all verified for cuda:sm_90a" and next(subject.cases) == drawn[0]


def test_routes_are_those_that_are_asked_for(host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def verify(*_: Any, routes: Any) -> Any:
        asked.append(routes)
        return [SimpleNamespace(passed=True, error=0.5, detail="")]

    monkeypatch.setattr(script, "verify", verify)
    case = next(cases(operator("softmax"), operator("softmax").schedule("cpu"), host))
    assert script.verified(case, host, ["emulated"]) == (0.5, "")
    assert asked == [["emulated"]] and script.conditions(host, 0, ["emulated"])["routes"] == ["emulated"]
    assert script.arguments(["all", "--route", "emulated"]).route == ["emulated"]


GPUS = [name for name, arch in ARCHES.items() if arch.is_gpu]


def test_what_is_kept_is_right_and_builds_are_of_every_target() -> None:
    built, verified = (
        json.loads((ROOT / "tuning_logs" / name).read_text()) for name in ("builds.json", "verified.json")
    )
    assert {f"presets built for {target}" for target in GPUS} <= set(built)
    assert {f"all verified for {target}" for target in GPUS} >= set(verified)
    assert {ARCHES[found["target"]].kind for found in verified.values()} == {"cuda", "rocm"}
    for name, found in {**built, **verified}.items():
        assert found["asked"] == found["cases"] == found["right"] >= 20 and not found["bad"], name


@pytest.mark.slow
@pytest.mark.parametrize("target", [name for name in GPUS if ARCHES[name].kind == "rocm"])
def test_waves_of_every_preset_are_what_llvm_says(amd_linker: None, target: str) -> None:
    if not os.environ.get(ASKED):
        pytest.skip(f"it builds every preset; set {ASKED}=1 to run it")
    for preset in presets().values():
        if preset.available:
            assert script.compiled(Case(preset.problem()), parse_arch(target)) == (0.0, ""), preset.name


@pytest.mark.parametrize(
    ("target", "names", "rounds"),
    [
        ("cuda:sm_80", ["conv2d_nchw"], (19, 20)),  # pixels of a vector in two rows of the image
        ("cuda:sm_80", [], (0, 1)),
        ("cuda:sm_90a", [], (0, 1)),
        ("rocm:gfx942", [], (0, 1)),
        ("llvm", [], (0, 1)),
    ],
)
def test_what_a_user_gets_builds(
    cuda_compiler: None, amd_linker: None, target: str, names: list[str], rounds: tuple[int, int]
) -> None:
    """Problems as layers have, and odd ones: scripts/sweep.py --build-only builds thousands."""
    named = [operator(name) for name in names] or operators()
    for case in islice(rule_cases(named), *(number * len(named) for number in rounds)):
        assert script.compiled(case, parse_arch(target)) == (0.0, ""), case


def test_large_problems_are_as_layers_are() -> None:
    drawn = [case.problem for case in islice(rule_cases([operator("conv2d_nhwc")]), 400)]
    plain = [p for p in drawn if p.kh == p.kw == 1 and p.stride == (1, 1) and p.pad == (0, 0)]  # type: ignore[attr-defined]
    assert len(plain) > 12 and len(set(drawn)) == 400
    assert max(p.ci for p in drawn) > 1500 and max(p.h for p in drawn) > 700  # type: ignore[attr-defined]
    assert drawn == [case.problem for case in islice(rule_cases([operator("conv2d_nhwc")]), 400)]


def test_a_schedule_that_takes_nothing(sm_90a: Arch, host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "REFUSED", 3)
    op = operator("conv2d_nhwc")
    draws = {**op.problem.draws(), "ci": one_of(7)}
    monkeypatch.setattr(op.problem, "draws", lambda large: draws)
    with pytest.raises(UsageError, match="tma_wgmma takes none of 3 random problems of conv2d_nhwc"):
        next(cases(op, op.schedule("tma_wgmma"), sm_90a))
    with pytest.raises(ConfigError, match="runs on cuda"):
        next(cases(op, op.schedule("tma_wgmma"), host))


def test_what_is_verified_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "sweep.json"
    assert script.main(["softmax:cpu", "--count", "2", "--workers", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["softmax cpu"]
    assert (found["cases"], found["right"], found["bad"]) == (2, 2, []) and 0 < found["error"] < 1
    assert "softmax cpu: 2 of 2 right" in capsys.readouterr().out


def test_what_is_wrong_is_told_with_its_command(host: Arch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = operator("softmax").schedule("cpu")
    found = list(islice(cases(operator("softmax"), spec, host), 3))
    ends: list[Any] = [((0.4, "", 1.0), ""), ((7.0, "y[0, 1] is 2, not 1", 2.0), ""), Overdue(300)]

    class Task:
        def __init__(self, end: Any) -> None:
            self.end = end

        def result(self) -> Any:
            if isinstance(self.end, Exception):
                raise self.end
            return self.end

    pool = SimpleNamespace(schedule=lambda *_, **__: Task(ends.pop(0)))
    tally = script.Tally(3)
    counted = [tally.cases for _ in script.sweep(found, host, pool, tally, script.verified)]
    assert counted == [1, 2, 3]
    assert (tally.cases, tally.right, tally.error, tally.slowest) == (3, 1, 0.4, 2.0)
    assert [bad["wrong"] for bad in tally.bad] == ["y[0, 1] is 2, not 1", "took longer than 300 s"]
    assert f"cols={found[1].problem.cols} " in capsys.readouterr().out  # type: ignore[attr-defined]
    assert tally.bad[0]["command"].startswith("schedules verify softmax rows=")


def test_what_was_verified_is_kept_and_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    words = [sys.executable, script.__file__, "softmax:cpu", "--workers", "1", "--out", str(out), "--count"]
    running = subprocess.Popen([*words, "5000"], stderr=subprocess.PIPE, text=True)
    while running.poll() is None and not out.exists():
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130 and said.startswith("stopped; --out has") and said.count("\n") == 1
    first = json.loads(out.read_text())["softmax cpu"]
    assert first["asked"] == 5000 and 1 <= first["cases"] == first["right"] < 5000
    wanted = first["cases"] + 2
    assert script.main([*words[2:], str(wanted), "--resume"]) == 0
    found = json.loads(out.read_text())["softmax cpu"]
    assert (found["asked"], found["cases"], found["right"]) == (wanted, wanted, wanted)
    with pytest.raises(UsageError, match="cases of another seed; leave out --resume"):
        script.main([*words[2:], str(wanted), "--resume", "--seed", "1"])
    assert script.main([*words[2:], "1", "--resume"]) == 0  # there are more already
    assert json.loads(out.read_text())["softmax cpu"] == found


@pytest.mark.parametrize("verb", ["build", "verify"])
def test_what_makes_a_case_again_is_a_command(verb: str) -> None:
    from schedules.cli import command_parser
    from schedules.cli.arguments import parse

    host = parse_arch("llvm")
    for case in (Case(presets()["tutorial"].problem()), Case(presets()["tutorial"].problem(), "cpu")):
        _, name, *words = script.command(case, host, verb).split()
        assert parse(command_parser(name)[1], words).target == "llvm"


def test_builds_are_counted_with_the_slowest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.json"
    assert script.main(["all", "--build-only", "--count", "6", "--workers", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["all built for llvm"]
    assert (found["cases"], found["right"], found["target"], found["seed"]) == (6, 6, "llvm", 0)
    assert found["slowest"] > 0 and found["slowest_command"].endswith("--target llvm --default")
    assert "all built for llvm: 6 of 6 right, " in capsys.readouterr().out


def test_what_does_not_build_is_told_with_its_command(
    host: Arch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> Any:
        raise BuildError("NVRTC refused the generated source")

    class Pool:
        def schedule(self, function: Any, args: Any, timeout: float) -> Any:
            return SimpleNamespace(result=lambda: function(*args))

    monkeypatch.setattr(script, "build", refused)
    tally = script.Tally(2)
    assert len(list(script.sweep(islice(rule_cases(operators()), 2), host, Pool(), tally, script.compiled))) == 2
    assert (tally.cases, tally.right) == (2, 0)
    assert [bad["wrong"] for bad in tally.bad] == ["BuildError: NVRTC refused the generated source"] * 2
    assert tally.bad[1]["command"].startswith("schedules build conv2d_nchw n=")
    assert tally.bad[1]["command"] in capsys.readouterr().out


def test_resuming_draws_the_cases_after(host: Arch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, drawn = tmp_path / "sweep.json", []

    def verified(found: Any, arch: Arch, pool: Any, tally: script.Tally, work: Any) -> Any:
        for case in found:
            drawn.append(case)
            tally.add(0.1, "" if len(drawn) != 2 else "wrong", 1.0, "command")
            yield case

    monkeypatch.setattr(script, "sweep", verified)
    words = ["softmax:cpu", "--workers", "1", "--out", str(out), "--resume", "--count"]
    assert script.main([*words, "3"]) == 1  # nothing to go on with is no mistake
    assert script.main([*words, "5"]) == 1  # what was wrong before still is
    assert drawn == list(islice(cases(operator("softmax"), operator("softmax").schedule("cpu"), host), 5))
    with pytest.raises(UsageError, match="give --out"):
        script.main(["softmax:cpu", "--resume"])


def test_a_gpu_that_failed_serves_its_process_no_more(
    sm_90a: Arch, host: Arch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an illegal memory\naccess")

    class Ended(BaseException):
        pass

    def ended(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(script, "verify", fails)
    monkeypatch.setattr(script, "device_name", lambda arch: "NVIDIA H200")
    monkeypatch.setattr(os, "_exit", ended)
    op = operator("softmax")
    with pytest.raises(Ended):
        script.verified(next(cases(op, op.schedule("warp"), sm_90a)), sm_90a)
    assert capsys.readouterr().err == "  RuntimeError: an illegal memory access\n"
    with pytest.raises(RuntimeError):
        script.verified(next(cases(op, op.schedule("cpu"), host)), host)
