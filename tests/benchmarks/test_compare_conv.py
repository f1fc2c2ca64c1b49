"""The script's own part: arguments, and a run with a case that is a fake."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import bench, ceilings, convolution_case, cudnn, runs
from benchmarks.peers.comparison import Times
from benchmarks.peers.convolution_case import case_result
from benchmarks.peers.tables import tables
from schedules.core.arch import Arch
from schedules.core.errors import ConfigError, DeviceError, SchedulesError, TuningError, UsageError
from schedules.core.presets import presets
from schedules.core.problem import Conv2dProblem
from schedules.measure.choice import Choice
from schedules.measure.journal import append
from schedules.measure.results import read_results
from schedules.tune import crew, session
from tests.benchmarks.peers import fake_cudnn, fake_torch
from tests.benchmarks.peers.fake_device import Clock
from tests.conftest import problem_of
from tests.fake import record_of


@pytest.fixture(scope="module")
def compare_conv() -> ModuleType:
    return import_module("benchmarks.compare_conv")


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "name presets"),
        ("k100-nhwc-22", "did you mean 'k100-nhwc-2'"),
        ("k200-*", "'k200-\\*' fits no preset of a convolution"),
        ("oneflow-*", "fits no preset of a convolution"),
        ("oneflow-32", "oneflow-32 is not a convolution; python -m benchmarks.compare_softmax"),
        ("k100-1 --set n", "--set n is not FIELD=VALUE"),
        ("k100-1 --set n=many", "is not a whole number"),
        ("k100-1 --set images=4", "unknown problem field 'images'"),
        ("k100-* --schedule mna", "did you mean 'mma'"),
        ("k100-1 --peers cublas*", "unknown peer 'cublas\\*'"),
        ("k100-1 --search 5 --default", "leave out --default"),
        ("k100-1 --search-minutes 1", "give that too"),
        ("k100-1 --missing --fresh", "give one of them"),
        ("k100-1 --seconds 0", "--seconds must be over 0"),
    ],
)
def test_mistakes_are_one_line(compare_conv: ModuleType, words: str, message: str) -> None:
    with pytest.raises(SchedulesError, match=message) as raised:
        compare_conv.main(words.split())
    assert "\n" not in str(raised.value)


def test_without_a_gpu(compare_conv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_conv, "local_gpu", lambda: None)
    with pytest.raises(UsageError, match="no CUDA GPU here"):
        compare_conv.main(["k100-1"])


def test_patterns_of_presets(compare_conv: ModuleType) -> None:
    several = compare_conv.problems_of(["k100-nhwc-[2-5]", "k100-nhwc-2"], {})
    assert several == [presets()[f"k100-nhwc-{i}"].problem() for i in (2, 3, 4, 5)]  # each once
    every = compare_conv.problems_of(["*"], {})
    assert {type(problem).__module__ for problem in every} == {
        f"schedules.operators.{name}.definition"
        for name in ("conv2d_hwcn", "conv2d_nchw", "conv2d_nhwc", "conv2d_nchw32")
    }
    assert all(problem.n == 256 for problem in compare_conv.problems_of(["resnet50-*"], {"n": "256"}))


class Device:
    """What is set for a problem's input channels is raised by its case; `runs` are the choices that were run."""

    def __init__(self) -> None:
        self.faults: dict[int, Exception] = {}
        self.runs: list[tuple[Choice, dict[str, Any]]] = []


@pytest.fixture
def device(compare_conv: ModuleType, monkeypatch: pytest.MonkeyPatch, host: Arch) -> Device:
    """This CPU in place of a GPU."""
    found = Device()

    def run_case(problem: Conv2dProblem, arch: Arch, choice: Choice, *given: Any, **named: Any) -> dict[str, Any]:
        if problem.ci in found.faults:
            raise found.faults[problem.ci]
        found.runs.append((choice, {"peers": given[0], "seconds": given[2], **named}))
        ours = (Times(1.0, 1.0, 1.0, 9), {"schedule": choice.schedule, "chosen": choice.source})
        return case_result(problem, {"ours": ours}, named["launch"])

    monkeypatch.setattr(compare_conv, "local_gpu", lambda: host)
    monkeypatch.setattr(compare_conv, "CudaTimer", nullcontext)
    monkeypatch.setattr(convolution_case, "run_case", run_case)
    monkeypatch.setattr(bench, "versions_here", lambda arch: {"torch": "2"})
    monkeypatch.setattr(runs, "torch_module", lambda: fake_torch.module)
    return found


def test_a_run_that_the_device_ends_goes_on_where_it_was(
    compare_conv: ModuleType, device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    words = ["k100-nhwc-[1-4]", "--out", str(out), "--log", str(tmp_path), "--seconds", "0.5", "--peers", "*nhwc*"]
    device.faults[256] = fake_torch.OutOfMemoryError("no room")  # the second
    device.faults[64] = ConfigError("illegal config: block_k=7")  # the third
    device.faults[1920] = RuntimeError("illegal access\nand a trace")  # the fourth
    with pytest.raises(
        DeviceError, match="conv2d_nhwc 2x32x32 1920->640 3x3 float16: RuntimeError: illegal access; --m"
    ):
        compare_conv.main(words)
    kept = read_results(out)
    assert kept["kind"] == "convolution" and [case["problem"]["ci"] for case in kept["cases"]] == [128, 256, 64]
    assert kept["cases"][1]["ours"] == {"failed": "OutOfMemoryError: no room"}
    assert kept["cases"][2]["ours"] == {"failed": "illegal config: block_k=7"}
    assert "FAILED: OutOfMemoryError: no room" in capsys.readouterr().out
    device.faults.clear()
    assert compare_conv.main([*words, "--missing"]) == 0
    assert all("us" in case["ours"] for case in read_results(out)["cases"])
    assert "3 cases compared, 4 in" in capsys.readouterr().out
    assert device.runs[-1][1] == {"peers": ["*nhwc*"], "seconds": 0.5, "seed": 0, "launch": "stream"}
    # launched from graphs they are other cases
    assert compare_conv.main([*words, "--missing", "--graph"]) == 0
    assert "4 cases compared, 8 in" in capsys.readouterr().out and device.runs[-1][1]["launch"] == "graph"


def test_which_of_ours_is_run(compare_conv: ModuleType, device: Device, tmp_path: Path) -> None:
    problem = presets()["cpu-conv"].problem()
    append(tmp_path, record_of(problem, 3.0))
    words = ["cpu-conv", "--out", str(tmp_path / "x.json"), "--log", str(tmp_path)]
    for more, source in ([], "record"), (["--default"], "default"), (["--schedule", "cpu"], "record"):
        assert compare_conv.main([*words, *more]) == 0
        assert device.runs[-1][0].source == source
        assert source == "default" or device.runs[-1][0].schedule == "cpu"
    # a schedule that does not run here is a case that failed, for the next may
    assert compare_conv.main([*words, "--schedule", "mma"]) == 0
    assert "runs on cuda" in read_results(tmp_path / "x.json")["cases"][0]["ours"]["failed"]


def test_ceilings_are_kept_with_the_cases(
    compare_conv: ModuleType, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {"float16": {"us": 1600.0, "tflops": 686.0}}
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda timer, seconds: measured)
    words = ["--out", str(tmp_path / "x.json"), "--log", str(tmp_path)]
    assert compare_conv.main(["--ceilings", *words]) == 0
    assert compare_conv.main(["k100-1", *words]) == 0
    kept = read_results(tmp_path / "x.json")
    assert kept["ceilings"] == measured and len(kept["cases"]) == 1


def test_a_search_comes_first_and_its_best_is_used(
    compare_conv: ModuleType, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    def tune(work: session.Work, crew: object, *, folder: Path) -> object:
        assert work.limits.trials == 7 and work.limits.minutes == 2 and work.schedules == ("cpu",)
        if isinstance(work.problem, Conv2dProblem) and work.problem.ci == 256:
            raise TuningError("nothing that was tried is correct")
        append(folder, record_of(work.problem, 3.0))
        return SimpleNamespace(status=SimpleNamespace(done=7, outcomes={"correct": 7}))

    monkeypatch.setattr(crew, "LocalCrew", lambda arch, **_: SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(session, "tune", tune)
    out = tmp_path / "result.json"
    words = ["k100-nhwc-[12]", "--search", "7", "--search-minutes", "2", "--schedule", "cpu"]
    assert compare_conv.main([*words, "--out", str(out), "--log", str(tmp_path)]) == 0
    first, second = read_results(out)["cases"]
    assert first["ours"]["chosen"] == "record" and first["search"] == {"trials": 7, "outcomes": {"correct": 7}}
    assert second["search"] == {"failed": "nothing that was tried is correct"}
    assert closed == [True]


def test_results_of_softmax_are_not_added_to(compare_conv: ModuleType, device: Device, tmp_path: Path) -> None:
    from benchmarks.peers.comparison import Results, head_of

    file = tmp_path / "x.json"
    problem = problem_of("softmax", rows=4, cols=8)
    Results(file, "CPU", {"torch": "2"}).put({**head_of(problem, "stream"), "ours": {"us": 1.0}})
    with pytest.raises(UsageError, match="results of other kind"):
        compare_conv.main(["k100-1", "--out", str(file), "--log", str(tmp_path)])


def test_from_presets_to_tables(
    compare_conv: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: Arch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Everything but PyTorch, cuDNN and the GPU is real."""
    fake_torch.install(monkeypatch)
    fake_cudnn.install(monkeypatch)
    monkeypatch.setattr(bench, "versions_here", lambda arch: {"torch": "2"})
    monkeypatch.setattr(ceilings, "matmul", lambda arithmetic: lambda: None)
    monkeypatch.setattr(compare_conv, "local_gpu", lambda: host)
    monkeypatch.setattr(compare_conv, "CudaTimer", Clock)
    out = tmp_path / "x.json"
    small = ["--set", "n=2", "h=6", "w=6", "ci=32", "co=32", "--seconds", "0.001", "--ceilings"]
    words = ["k100-nhwc-2", "resnet50-7*", *small, "--out", str(out), "--log", str(tmp_path)]
    assert compare_conv.main(words) == 0
    text = tables(read_results(out))
    assert "`conv2d_nhwc`, float16\n" in text and "cudnn nchw fp16 us" in text and "| 2x6x6 32->32 3x3 |" in text
    assert "`conv2d_nchw32`, int8\n" in text and "| failed |" in text and "of the matmul" in text
    assert text.count("Geometric mean of the ratios") == 2
    assert "2 cases compared, 2 in" in capsys.readouterr().out
    cudnn._handle.cache_clear()
