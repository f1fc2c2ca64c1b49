"""PyTorch's benchmark mode: what is asked for, which kernel wins, and that it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

import schedules.torch as kernels  # noqa: E402
from schedules.core.errors import BuildError, ConfigError, DeviceError  # noqa: E402
from schedules.core.problem import Argument  # noqa: E402
from schedules.operators.conv2d_nchw.definition import NchwProblem as ConvProblem  # noqa: E402
from schedules.store import kernels as store  # noqa: E402
from schedules.torch import benchmark  # noqa: E402
from schedules.torch import kernels as dispatch  # noqa: E402

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SLOW, FAST = 2e-3, 1e-3  # seconds


@dataclass
class Clock:
    """One that fakes alone move: a busy machine makes none of them slower."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = Clock()


@dataclass
class Fake:
    """A kernel that takes so many seconds of CLOCK."""

    made: str
    seconds: float
    function: Callable[[Any], Any] = torch.neg
    dtype: str = "float16"

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return Argument("data", (5, 7), self.dtype), Argument("output", (5, 7), self.dtype)

    def launch(self, device: Any, *outputs: Any) -> Any:
        assert outputs == (((5, 7), getattr(torch, self.dtype)),)

        def run(x: Any) -> Any:
            CLOCK.seconds += self.seconds
            return self.function(x)

        return run


def failing(x: Any) -> Any:
    raise DeviceError("no such kernel")


def fastest(fakes: list[Fake]) -> benchmark.Fastest:
    return benchmark.fastest(fakes, CPU, CLOCK)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "int8", "uint8", "int32"])
def test_the_fastest_wins(dtype: str) -> None:
    fakes = [Fake("first", SLOW, dtype=dtype), Fake("other", 2 * SLOW, dtype=dtype), Fake("third", FAST, dtype=dtype)]
    found = fastest(fakes)
    assert found.number == 2 and "the fastest of 3 that were timed here" in found.why
    assert fastest(fakes[:2]).number == 0
    assert fastest(fakes[:1]).number == 0


@pytest.mark.parametrize(
    "dtype, function",
    [
        ("float16", lambda x: -x * 1.01),
        ("float16", lambda x: -x + 0.01),
        ("float16", lambda x: torch.full_like(x, torch.nan)),
        ("float32", lambda x: torch.cat([-x[:-1], x[-1:]])),
        ("int8", lambda x: 1 - x),
    ],
)
def test_what_differs_is_left_out(dtype: str, function: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = fastest([Fake("first", SLOW, dtype=dtype), Fake("other", FAST, function, dtype)])
    assert found.number == 0 and "other is left out: its results are not those of first" in caplog.text


def test_roundings_do_not_differ() -> None:
    near = Fake("other", FAST, lambda x: -x * (1 + 2.0**-11))
    assert fastest([Fake("first", SLOW), near]).number == 1
    undefined = [Fake(name, seconds, lambda x: x / 0 * 0) for name, seconds in (("first", SLOW), ("other", FAST))]
    assert fastest(undefined).number == 1
    infinite = [Fake(name, seconds, lambda x: x / 0) for name, seconds in (("first", SLOW), ("other", FAST))]
    assert fastest(infinite).number == 1


def test_what_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    found = fastest([Fake("first", SLOW), Fake("bad", FAST, failing), Fake("third", FAST)])
    assert found.number == 2 and "bad is left out: no such kernel" in caplog.text and "of 2 that" in found.why
    with pytest.raises(DeviceError, match="no such kernel"):
        fastest([Fake("first", FAST, failing), Fake("other", FAST)])


def test_a_programs_random_numbers_stay_as_they_are() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    fastest([Fake("first", FAST), Fake("other", FAST)])
    assert torch.equal(torch.rand(4), wanted)


def test_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", False)
    assert not benchmark.is_asked(GPU)
    monkeypatch.setattr(cudnn, "benchmark", True)
    assert benchmark.is_asked(GPU) and not benchmark.is_asked(CPU)
    monkeypatch.setattr(cudnn, "deterministic", True)
    assert not benchmark.is_asked(GPU)
    monkeypatch.setattr(cudnn, "deterministic", False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not benchmark.is_asked(GPU)


def test_no_more_are_timed_than_pytorch_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, count in ((0, benchmark.MOST), (2, 2), (100, benchmark.MOST)):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark_limit", limit, raising=False)
        assert benchmark.most() == count


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The mode is on for the CPU, and every convolution has two kernels, of which the second wins; the configs that
    were timed."""
    timed: list[list[str]] = []

    def two(chosen: store.Chosen, count: int) -> list[store.Chosen]:
        config = {**chosen.config, "block_y": 3 if chosen.config["block_y"] != 3 else 2}
        assert count == benchmark.most() and config != chosen.config
        return [chosen, replace(chosen, config=config, made="the other")]

    def second(found: Any, device: Any) -> benchmark.Fastest:
        timed.append([each.made for each in found])
        return benchmark.Fastest(len(found) - 1, "it won")

    monkeypatch.setenv("SCHEDULES_CACHE", str(tmp_path))
    monkeypatch.setattr(benchmark, "is_asked", lambda device: True)
    monkeypatch.setattr(dispatch, "contenders", two)
    monkeypatch.setattr(benchmark, "fastest", second)
    dispatch._kernels.clear()
    dispatch._alone.clear()
    kernels.use_bundles()
    return timed


def convolved(channels: int = 5) -> dispatch.TorchKernel:
    data, filter = torch.randn(1, 3, 9, 8), torch.randn(channels, 3, 3, 3)
    torch.testing.assert_close(kernels.conv2d(data, filter), torch.conv2d(data, filter), rtol=1e-4, atol=1e-4)
    (found,) = [each for each in dispatch._kernels.values() if each.arguments[-1].shape[1] == channels]
    return found


def test_the_winner_serves_and_is_kept(asked: list[list[str]], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "schedules"):
        assert convolved().made == "the other" and "it won" in caplog.text
    assert len(asked) == 1 and len(asked[0]) == 2
    dispatch._kernels.clear()
    kernels.use_bundles()
    assert convolved().made == "the other" and len(asked) == 1


def test_without_the_mode_the_first_serves(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    convolved()
    dispatch._kernels.clear()
    kernels.use_bundles()
    monkeypatch.setattr(benchmark, "is_asked", lambda device: False)
    assert convolved().made != "the other"


def test_nothing_is_timed_while_a_graph_is_captured(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_is_capturing", lambda: True)
    monkeypatch.setattr(dispatch, "_ready", lambda key, problem, make, why: make())
    data, filter = torch.randn(1, 3, 9, 8), torch.randn(5, 3, 3, 3)
    torch.testing.assert_close(kernels.conv2d(data, filter), torch.conv2d(data, filter), rtol=1e-4, atol=1e-4)
    assert not asked


def test_nothing_is_timed_that_no_folder_keeps(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SCHEDULES_CACHE", str(tmp_path / "file"))
    assert convolved().made != "the other" and not asked


def test_only_convolutions_are_timed(asked: list[list[str]]) -> None:
    x = torch.randn(3, 1091)
    torch.testing.assert_close(kernels.softmax(x), torch.softmax(x, -1))
    assert not asked


def test_what_is_not_built_is_not_timed(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build = dispatch.build_contenders

    def refuse(wanted: Any, device: Any, kept: Any) -> dict[str, Any]:
        return {**build(wanted[:1], device, kept), wanted[1].key: BuildError("refused")}

    monkeypatch.setattr(dispatch, "build_contenders", refuse)
    assert convolved().made != "the other" and len(asked[0]) == 1 and "is not timed: refused" in caplog.text


def test_what_cannot_be_loaded_is_not_timed(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = dispatch._made

    def refuse(chosen: store.Chosen, kept: Any) -> dispatch.TorchKernel:
        if chosen.made == "the other":
            raise DeviceError("no room for it")
        return make(chosen, kept)

    monkeypatch.setattr(dispatch, "_made", refuse)
    assert convolved().made != "the other" and len(asked[0]) == 1 and "is not timed: no room for it" in caplog.text


def test_what_has_no_choice_is_told_when_it_is_prepared(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose = dispatch.chosen_for

    def refuse(problem: Any, *rest: Any) -> store.Chosen:
        if problem.co == 7:
            raise ConfigError("no such config")
        return choose(problem, *rest)

    monkeypatch.setattr(dispatch, "chosen_for", refuse)
    monkeypatch.setattr(dispatch, "build_all", lambda *given: {})
    kernels.prepare([ConvProblem(n=1, h=9, w=8, ci=3, co=co, kh=3, kw=3) for co in (7, 6)], CPU)
    assert len(asked) == 1 and "no kernel for n=1" in caplog.text and "no such config" in caplog.text


def test_without_room_the_first_serves(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(found: Any, device: Any) -> Any:
        raise torch.OutOfMemoryError("2 GiB")

    monkeypatch.setattr(benchmark, "fastest", no_room)
    assert convolved().made != "the other" and "do not fit beside" in caplog.text


def test_a_models_kernels_are_built_at_once(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all layers; each is then timed."""
    counts: list[int] = []
    build = dispatch.build_contenders
    monkeypatch.setattr(
        dispatch, "build_contenders", lambda wanted, *rest: counts.append(len(wanted)) or build(wanted, *rest)
    )
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Conv2d(5, 6, 3)).eval()
    x = torch.randn(1, 3, 9, 8)
    with torch.no_grad():
        torch.testing.assert_close(kernels.optimize(model, x)(x), model(x), rtol=1e-4, atol=1e-4)
    assert counts[0] == 4 and len(asked) == 2
