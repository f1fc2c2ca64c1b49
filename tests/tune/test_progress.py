from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

import pytest

from schedules.core.arch import Arch
from schedules.tune import progress
from schedules.tune.progress import LiveView, PlainView, View, watcher_for
from schedules.tune.tuner import Limits, Result, Status
from tests.conftest import problem_of
from tests.fake import record_of

PROBLEM = problem_of("conv2d_hwcn", n=32, h=6, w=6, ci=16, co=32, kh=3, kw=3, pad=1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def status_of(host: Arch, **changed: object) -> Status:
    found = Status(PROBLEM, host, "Some CPU", "template", Limits(trials=40, patience=20), 540)
    for name, value in changed.items():
        setattr(found, name, value)
    return found


def play(view: View, status: Status) -> None:
    """A short search: a default, a failure, the same again, a new best, finals."""
    view.start(status)
    default, failed = record_of(PROBLEM, 400.0), record_of(PROBLEM, None, {"chunk": 1})
    best = record_of(PROBLEM, 200.0, {"chunk": 16})
    for record in (default, failed, failed, best):
        status.done += 1
        status.outcomes[record.outcome] += 1
        if record.correct:
            status.best = record
            status.default = status.default or record
        view.trial(record, status)
    view.tick(status)
    view.note("a torn line was set aside")
    status.phase = "timing the finalists again"
    view.tick(status)
    status.phase = "done"
    view.finish(Result(status, best, (), "40 trials", True))


def test_plain_lines(host: Arch) -> None:
    stream = io.StringIO()
    view = PlainView(stream, every=0.0)
    play(view, status_of(host, peers={"cudnn": 150.0, "slow": 900.0}, devices=["measuring"]))
    lines = [line[10:] for line in stream.getvalue().splitlines()]
    assert lines[0].startswith("conv2d_hwcn n=32 h=6") and lines[0].endswith("llvm on Some CPU")
    assert lines[1] == "template search of 540 candidates, until 40 trials or 20 trials without a new best"
    assert lines[2].startswith("trial 1: 400.00 us, 26.5 GFLOP/s, 1.00 x the default, 0.38 x cudnn  cpu: vector=")
    assert sum("TVM refused the program" in line for line in lines) == 1  # a kind of failure is told once
    assert any(line.startswith("trial 4: 200.00 us") and "2.00 x the default, 0.75 x cudnn" in line for line in lines)
    summary = next(line for line in lines if line.startswith("4 of 40 trials, 2 failed (2 compile), 200.00 us"))
    assert "trials/s" in summary and "left" in summary and "device measuring" in summary
    assert lines[-3:] == [
        "a torn line was set aside",
        "timing the finalists again",
        "done (40 trials): 4 of 40 trials, 2 failed (2 compile)",
    ]
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_are_few(host: Arch) -> None:
    stream = io.StringIO()
    view, status = PlainView(stream), status_of(host)
    view.start(status)
    slow = record_of(PROBLEM, 400.0)
    for _ in range(50):
        view.trial(slow, status)
    assert len(stream.getvalue().splitlines()) == 2


def test_a_terminal_that_cannot_move_its_cursor(host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with watcher_for(Terminal()) as view:
        assert isinstance(view, PlainView)


def test_the_live_view(host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    with watcher_for(terminal) as view:
        assert isinstance(view, LiveView)
        play(view, status_of(host, devices=["measuring", "idle"]))
    shown = terminal.getvalue()
    for text in ("4 of 40 trials, 2 failed (2 compile)", "2.00 x the default", "trials/s", "0 measuring, 1 idle"):
        assert text in shown
    assert "compile: TVM refused the program" in shown and "timing the finalists again" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is back


def test_the_terminal_is_restored_after_an_error(host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    with pytest.raises(RuntimeError), watcher_for(terminal) as view:
        view.start(status_of(host))
        raise RuntimeError
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_a_signal_handler_says(stream: io.StringIO, capfd: pytest.CaptureFixture[str]) -> None:
    with watcher_for(stream) as view:
        view.urgent("SIGINT: finishing")
    assert "SIGINT: finishing\n" in capfd.readouterr().err


def test_resumed_searches_say_so(host: Arch) -> None:
    first, second, best = progress.opening(status_of(host, resumed=12, done=12, best=record_of(PROBLEM, 10.0)))
    assert second.endswith("; going on after 12 trials") and best.startswith("best so far: 10.00 us")


def test_time_left(host: Arch) -> None:
    status = status_of(host, done=20)
    assert progress.eta(status, 2.0) == "10 s" and progress.eta(status, 0.0) == ""
    status.limits = Limits(trials=40, minutes=1.0)
    assert progress.eta(status, 0.1) == "1 min 00 s"
    status.earlier = 30.0
    assert progress.eta(status, 0.1) == "30 s"
    status.limits = Limits()
    assert progress.total_of(status) == 540
    assert [progress.duration(seconds) for seconds in (8, 200, 3900)] == ["8 s", "3 min 20 s", "1 h 05 min"]


def test_rates() -> None:
    assert progress.rate_text(record_of(PROBLEM, 1.0)) == "10.6 TFLOP/s"
    assert progress.rate_text(record_of(problem_of("softmax", rows=64, cols=64), 1.0)) == "16.38 GB/s"
    int8 = problem_of("conv2d_nchw32", n=1, h=8, w=8, ci=32, co=32, kh=3, kw=3, dtype="int8")
    assert progress.rate_text(record_of(int8, 100.0)).endswith(" GOP/s")
    assert progress.failures_text(Counter(correct=3)) == ""


def test_as_json(host: Arch) -> None:
    status = status_of(host, done=1, outcomes=Counter(correct=1), default=record_of(PROBLEM, 20.0))
    found = progress.as_json(Result(status, record_of(PROBLEM, 10.0), (), "40 trials", True))
    assert found["speedup"] == 2.0 and found["best"]["median_us"] == 10.0 and found["outcomes"] == {"correct": 1}
    beside = replace(record_of(PROBLEM, 11.0), stage="final")
    assert progress.as_json(Result(status, record_of(PROBLEM, 10.0), (), "", True, beside))["speedup"] == 1.1
