"""Worker processes, one candidate at a time.  What they hold out for a whole search is in test_faults."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedules.core import child as child_module
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ToolchainError, TuningError
from schedules.core.problem import Problem
from schedules.core.process import BACKGROUND, SCRATCH
from schedules.core.registry import EXTRA, operator
from schedules.measure import timer
from schedules.measure.contest import FIRST
from schedules.tune import evaluate, workers
from schedules.tune.crew import Job, LocalCrew, visible_devices
from schedules.tune.evaluate import Artifact, Failure, Timing
from schedules.tune.strategy import Candidate
from schedules.tune.workers import Setup
from tests.conftest import problem_of
from tests.tune.faulty import GPU_OUTCOMES, FaultyConfig, FaultyGpuConfig


@pytest.fixture(scope="module")
def faulty() -> Iterator[Problem]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EXTRA, "faulty=tests.tune.faulty")
        yield problem_of("faulty", n=1000)


@pytest.fixture(scope="module")
def crew(faulty: Problem) -> Iterator[LocalCrew]:
    crew = LocalCrew(parse_arch("llvm"), builders=1, measure_timeout=20.0)
    yield crew
    crew.close()


def measured(crew: LocalCrew, problem: Problem, candidate: Candidate, best_us: float = float("inf")) -> Any:
    built = crew.build(problem, candidate).result()
    if isinstance(built, Failure):
        return built
    return crew.measure(Job(evaluate.measure_candidate, problem, (built, 0, best_us), (0,))).result()


def test_a_candidate_is_built_compared_and_timed(crew: LocalCrew, faulty: Problem) -> None:
    assert crew.device and {"apache-tvm", "compiler", "python"} <= set(crew.versions)
    built = crew.build(faulty, Candidate("cpu", FaultyConfig())).result()
    assert isinstance(built, Artifact) and built.library.startswith(b"\x7fELF") and len(built.program) == 64
    found = measured(crew, faulty, Candidate("cpu", FaultyConfig()))
    assert isinstance(found, Timing) and 0 < found.p10_us <= found.median_us <= found.p90_us
    assert found.verified == ("seed 0",) and 0 <= found.error <= 1


def test_right_answers_left_by_another_do_not_count(crew: LocalCrew, faulty: Problem) -> None:
    """Measured straight after a good one, on the same buffers."""
    assert isinstance(measured(crew, faulty, Candidate("cpu", FaultyConfig())), Timing)
    for fault in ("stale", "partly"):
        found = measured(crew, faulty, Candidate("cpu", FaultyConfig(fault=fault)))
        assert isinstance(found, Failure) and found.outcome == "correctness" and "got nan" in found.reason


def test_one_that_damages_its_input_does_not_hurt_the_next(crew: LocalCrew, faulty: Problem) -> None:
    assert isinstance(measured(crew, faulty, Candidate("cpu", FaultyConfig(fault="clobber"))), Timing)
    assert isinstance(measured(crew, faulty, Candidate("cpu", FaultyConfig())), Timing)


def test_a_slow_one_is_given_up_early(crew: LocalCrew, faulty: Problem) -> None:
    found = measured(crew, faulty, Candidate("cpu", FaultyConfig()), best_us=1e-3)
    assert isinstance(found, Timing) and found.runs == 3


def test_a_best_is_confirmed_on_other_data_and_an_odd_shape(crew: LocalCrew) -> None:
    problem = problem_of("softmax", rows=64, cols=64)
    odd = next(problem.odd())
    spec = operator("softmax").schedule("cpu")
    arch = parse_arch("llvm")
    candidate = Candidate("cpu", spec.default(problem, arch))
    built, built_odd = crew.build(problem, candidate).result(), crew.build(odd, candidate).result()

    def confirm(artifact: Any, other: Any) -> Any:
        return crew.measure(Job(evaluate.confirm_candidate, problem, (artifact, (1,), (odd, other)), (1,))).result()

    assert confirm(built, built_odd) == ("seed 1", str(odd))
    wrong = confirm(built, built)  # the code of the other shape
    assert isinstance(wrong, Failure) and wrong.outcome in ("runtime", "correctness")


def test_a_reference_is_computed_once_for_all(tmp_path: Path, faulty: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first of the processes with one scratch folder; alone, a process computes its own and writes nothing."""
    count = 0
    real = operator("faulty").inputs

    def inputs(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return real(*arguments)

    monkeypatch.setattr(evaluate, "operator_of", lambda problem: replace(operator("faulty"), inputs=inputs))
    monkeypatch.delenv(SCRATCH, raising=False)
    alone = [evaluate._reference(faulty, 0) for _ in range(2)]
    assert count == 2
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    shared = [evaluate._reference(faulty, seed) for seed in (0, 0, 1)]
    assert count == 4 and len(list(tmp_path.glob("reference-*"))) == 4  # a file and a lock for each seed
    for (inputs_a, expected_a), (inputs_b, expected_b) in zip(alone, shared, strict=False):
        assert (inputs_a[0] == inputs_b[0]).all() and (expected_a[0].values == expected_b[0].values).all()
    assert (shared[0][0][0] != shared[2][0][0]).any()
    monkeypatch.setenv(SCRATCH, str(tmp_path / "gone"))  # no room, or no folder: computed all the same
    evaluate._reference(faulty, 0)
    assert count == 5


def test_finalists_are_timed_in_turn(crew: LocalCrew, faulty: Problem) -> None:
    built = [crew.build(faulty, Candidate("cpu", FaultyConfig(number))).result() for number in (0, 1)]
    rounds = crew.measure(Job(evaluate.measure_in_turn, faulty, (tuple(built), 0, 0, (1,), 0.1), (0,))).result()
    found = rounds.contest
    assert [len(scores) for scores in found.scores] == [found.rounds] * 2 and found.rounds >= FIRST
    assert all(us > 0 for calls in found.calls for us in calls) and rounds.busy >= 0


def test_a_trial_that_is_noise_is_measured_once_more(monkeypatch: pytest.MonkeyPatch, faulty: Problem) -> None:
    """And the quieter of the two is kept; one that is too slow anyway is not worth it."""
    rounds = [[80.0, 9000.0, 9853.0], [60.0, 61.0, 62.0], [50.0, 50.0, 50.0]]
    monkeypatch.setattr(timer, "timed_until", lambda *_: rounds.pop(0))
    monkeypatch.setattr(evaluate, "_load", lambda artifact, arch: lambda x, y: y.copyfrom(x.numpy() + 1))
    artifact, host = Artifact(b"", "", "", 0, 0, 0.0), parse_arch("llvm")
    found = evaluate.measure_candidate(faulty, host, artifact, 0, float("inf"))
    assert isinstance(found, Timing) and found.median_us == 61.0 and len(rounds) == 1 and found.busy >= 0
    rounds[:] = [[80.0, 9000.0, 9853.0], [60.0, 61.0, 62.0]]
    slow = evaluate.measure_candidate(faulty, host, artifact, 0, 20.0)
    assert isinstance(slow, Timing) and slow.median_us == 9000.0 and len(rounds) == 1


def test_an_illegal_config_is_a_matter_of_constraints(crew: LocalCrew, faulty: Problem) -> None:
    found = crew.build(faulty, Candidate("cpu", FaultyConfig(fault="unheard-of"))).result()
    assert found == Failure("constraints", "illegal config: fault=unheard-of is not known")


def test_what_is_no_candidates_fault_is_raised(crew: LocalCrew, faulty: Problem) -> None:
    job = Job(_no_compiler, faulty, (), ())
    future: Future[Any] = crew.measure(job)
    with pytest.raises(ToolchainError, match="no compiler at all"):
        future.result()


def _no_compiler(problem: Problem, arch: Arch) -> None:
    raise ToolchainError("no compiler at all")


def test_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from schedules.build.toolchain import devices

    monkeypatch.setattr(devices, "cuda", lambda: (None, None, None))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(None) == ["0", "1", "2"]
    assert visible_devices([2, 0]) == ["2", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert visible_devices([1]) == ["6"]
    with pytest.raises(TuningError, match="there is no GPU 3; this machine shows 3"):
        visible_devices([3])


def _environment_at_start(name: str) -> str:
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    return next((e.partition(b"=")[2].decode() for e in entries if e.startswith(name.encode() + b"=")), "")


def test_a_process_sees_its_device_from_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only after an initializer: by then the driver may have looked."""
    monkeypatch.setattr(child_module, "subprocess", subprocess)  # not forks
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    children = [Setup(str(tmp_path), None, {"CUDA_VISIBLE_DEVICES": name}).child() for name in ("3", "5")]
    found = [child.call(_environment_at_start, ("CUDA_VISIBLE_DEVICES",), 60) for child in children]
    for child in children:
        child.kill()
    assert found == ["3", "5"] and "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_crew_ends_at_once_whatever_its_processes_are_at(faulty: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is stopped, which no signal but one ends, one busy, one was just killed; none is started in their place."""
    monkeypatch.setattr(workers.Order, "build", lambda *_: workers.Order(time.sleep, (60,), 90.0, "compile"))
    crew = LocalCrew(parse_arch("llvm"), builders=2)
    for _ in range(2):
        crew.build(faulty, Candidate("cpu", FaultyConfig()))
    while any(worker.state != "building" for worker in crew._building):
        time.sleep(0.05)
    children = [worker._child for worker in (*crew._building, *crew._measuring)]
    pids = [child.pid for child in children if child]
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[2], signal.SIGKILL)
    start = time.monotonic()
    crew.close()
    assert time.monotonic() - start < 10 and len(pids) == 3
    assert not any(worker._child for worker in (*crew._building, *crew._measuring))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not Path(crew._folder.path).exists()


def test_builders_leave_the_cores_to_those_that_measure(tmp_path: Path) -> None:
    niceness = []
    for background in (False, True):
        child = Setup(str(tmp_path), None, {}, background).child()
        niceness.append(child.call(os.nice, (0,), 60))
        child.kill()
    assert niceness == [os.nice(0), min(19, os.nice(0) + BACKGROUND)]


@pytest.mark.gpu
def test_each_process_has_a_gpu_of_its_own(gpu: Arch) -> None:
    from schedules.build.toolchain import devices

    if len(devices.cuda()) < 2:
        pytest.skip("needs two GPUs")
    crew = LocalCrew(gpu, builders=1)
    try:
        assert crew.slots == len(devices.cuda())  # it raises if two of them share one
    finally:
        crew.close()


@pytest.mark.gpu
def test_kernels_that_go_wrong_cost_only_themselves(gpu: Arch, faulty: Problem) -> None:
    crew = LocalCrew(gpu, builders=2, measure_timeout=10.0, devices=[0])
    try:
        for fault, outcome in GPU_OUTCOMES.items():
            found = measured(crew, faulty, Candidate("gpu", FaultyGpuConfig(fault=fault)))
            assert (found.outcome if isinstance(found, Failure) else "correct") == outcome, (fault, found)
            good = measured(crew, faulty, Candidate("gpu", FaultyGpuConfig()))
            assert isinstance(good, Timing), (fault, good)
    finally:
        crew.close()
