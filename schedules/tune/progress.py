"""What a person sees of a search: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import IO, Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from schedules.core.problem import Problem
from schedules.core.registry import operator_of
from schedules.core.text import printable
from schedules.measure.records import Record, over_default, speedup
from schedules.tune.tuner import Result, Status, Watcher

EVERY = 30.0  # seconds between two status lines
FRAMES = 5.0  # of the live view in a second at most
MEMORY_BOUND = 16  # operations for each byte, below which GB/s say more than TFLOP/s
RECENT = 60.0  # seconds that the shown rate looks back


class View(Watcher, Protocol):
    """A watcher for people, to be closed at the end; `status` is that of the last search it was shown."""

    status: Status | None

    def heading(self, text: str) -> None:
        """Say what comes next: one of several searches."""

    def urgent(self, text: str) -> None:
        """Say something from a signal handler."""

    def close(self) -> None: ...


@contextlib.contextmanager
def watcher_for(stream: IO[str] | None = None) -> Iterator[View]:
    """The view that fits `stream`, by default standard output; closed at the end."""
    stream = stream or sys.stdout
    live = stream.isatty() and not Console(file=stream).is_dumb_terminal
    view: View = LiveView(stream) if live else PlainView(stream)
    try:
        yield view
    finally:
        view.close()


class PlainView:
    """A line for each new best and each new kind of failure, and one that sums up every `every` seconds."""

    def __init__(self, stream: IO[str], every: float = EVERY) -> None:
        self.status: Status | None = None
        self._stream, self._every = stream, every
        self._last = time.monotonic()
        self._kinds: set[tuple[str, str]] = set()
        self._pace = Pace()

    def heading(self, text: str) -> None:
        self._say(f"== {text}")

    def urgent(self, text: str) -> None:
        # not through the stream: the handler may have interrupted a write to it
        os.write(2, f"{_after_echo()}{text}\n".encode())

    def start(self, status: Status) -> None:
        self.status = status
        self._last, self._pace, self._kinds = time.monotonic(), Pace(), set()
        for line in opening(status):
            self._say(line)

    def trial(self, record: Record, status: Status) -> None:
        self._pace.count(status)
        if status.best is record:
            self._say(f"trial {status.done}: {best_text(status)}  {candidate_text(record)}")
        kind = (record.outcome, record.reason[:40])
        if not record.correct and kind not in self._kinds:
            self._kinds.add(kind)
            self._say(f"trial {status.done}: {record.outcome}: {record.reason}  {candidate_text(record)}")
        self.tick(status)

    def tick(self, status: Status) -> None:
        if status.phase != "searching":
            self._say(status.phase)
        elif time.monotonic() - self._last >= self._every:
            self._say(self._line(status))
            self._last = time.monotonic()

    def note(self, text: str) -> None:
        self._say(text)

    def finish(self, result: Result) -> None:
        self._say(closing(result))

    def close(self) -> None: ...

    def _line(self, status: Status) -> str:
        left = eta(status, self._pace.rate(status))
        parts = [
            counts(status),
            best_text(status),
            f"{self._pace.rate(status):.2g} trials/s",
            left and f"about {left} left",
            devices_text(status) and f"device {devices_text(status)}",
        ]
        return ", ".join(part for part in parts if part)

    def _say(self, text: str) -> None:
        print(f"{datetime.now():%H:%M:%S}  {printable(text)}", file=self._stream, flush=True)


def _after_echo() -> str:
    """A terminal has written ^C by itself."""
    return "\n" if os.isatty(2) else ""


class LiveView:
    """A view that is redrawn in place; what happens once scrolls by above it."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream, highlight=False)
        self.status: Status | None = None
        self._live: Live | None = None
        self._drawn = 0.0
        self._pace = Pace()
        self._recent: deque[str] = deque(maxlen=3)

    def heading(self, text: str) -> None:
        self._print(Text(text, style="bold"))

    def urgent(self, text: str) -> None:
        # at once, since there may be no redraw for a while; and with a cursor, since the process may end
        cursor = "\x1b[?25h" if os.isatty(2) else ""
        os.write(2, f"{cursor}{_after_echo()}{text}\n".encode())

    def start(self, status: Status) -> None:
        self.status = status
        self._pace = Pace()
        self._recent.clear()
        for line in opening(status):
            self._print(Text(line))
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._draw(status, force=True)

    def trial(self, record: Record, status: Status) -> None:
        self._pace.count(status)
        if not record.correct:
            self._recent.append(f"{record.outcome}: {record.reason}")
        elif status.best is record:
            self._print(Text(f"trial {status.done}: {best_text(status)}  {candidate_text(record)}"))
        self._draw(status)

    def tick(self, status: Status) -> None:
        self._draw(status, force=status.phase != "searching")

    def note(self, text: str) -> None:
        self._print(Text(text, style="yellow"))

    def finish(self, result: Result) -> None:
        self.close()
        self._print(Text(closing(result)))

    def close(self) -> None:
        live, self._live = self._live, None
        if live:
            live.stop()

    def _print(self, text: Text) -> None:
        self._console.print(Text(printable(text.plain), text.style), soft_wrap=True)

    def _draw(self, status: Status, force: bool = False) -> None:
        if self._live and (force or time.monotonic() - self._drawn >= 1 / FRAMES):
            self._drawn = time.monotonic()
            self._live.update(self._table(status), refresh=True)

    def _table(self, status: Status) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        total = total_of(status)
        if total:
            grid.add_row("trials", ProgressBar(total=total, completed=min(status.done, total), width=40))
        grid.add_row("" if total else "trials", Text(counts(status)))
        if status.best:
            grid.add_row("best", Text(f"{best_text(status)}\n{candidate_text(status.best)}", style="bold"))
        rate = self._pace.rate(status)
        left = eta(status, rate)
        grid.add_row("speed", Text(f"{rate:.2g} trials/s" + (f", about {left} left" if left else "")))
        if status.devices:
            grid.add_row("device", Text(devices_text(status)))
        for reason in self._recent:
            grid.add_row("failed", Text(reason, style="red", no_wrap=True, overflow="ellipsis"))
        if status.phase != "searching":
            grid.add_row("", Text(status.phase, style="yellow"))
        return grid


class Pace:
    """Trials a second over the last while: the mean of a long search says little about now."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, int]] = deque()

    def count(self, status: Status) -> None:
        now = time.monotonic()
        self._times.append((now, status.done))
        while now - self._times[0][0] > RECENT:
            self._times.popleft()

    def rate(self, status: Status) -> float:
        if len(self._times) < 5:
            return status.rate
        (then, before), (_, done) = self._times[0], self._times[-1]
        return (done - before) / max(time.monotonic() - then, 1e-9)


def opening(status: Status) -> list[str]:
    """What is known before the first trial, a line each."""
    space = f"{status.space} candidates" if status.space is not None else "a space that cannot be counted"
    known = f"; going on after {status.resumed} trials" if status.resumed else ""
    lines = [
        f"{operator_name(status.problem)} {status.problem}, {status.arch} on {status.device}",
        f"{status.strategy} search of {space}, until {limits_text(status)}{known}",
    ]
    if status.best:
        lines.append(f"best so far: {best_text(status)}  {candidate_text(status.best)}")
    return lines


def closing(result: Result) -> str:
    """Why it ended, and what was tried."""
    status = result.status
    return f"{status.phase}{f' ({result.why})' if result.finished else ''}: {counts(status)}"


def operator_name(problem: Problem) -> str:
    """The operator's name."""
    return operator_of(problem).name


def limits_text(status: Status) -> str:
    """The limits of a search, in words."""
    limits = status.limits
    parts = [
        limits.trials is not None and f"{limits.trials} trials",
        limits.minutes is not None and f"{limits.minutes:g} minutes",
        limits.patience is not None and f"{limits.patience} trials without a new best",
        limits.until is not None and f"{duration(max(0.0, limits.until - time.monotonic()))} from now",
    ]
    return " or ".join(part for part in parts if part) or "every candidate is tried"


def total_of(status: Status) -> int | None:
    """The trials that the search will come to at most, if that is known."""
    totals = [total for total in (status.limits.trials, status.space) if total is not None]
    return min(totals) if totals else None


def counts(status: Status) -> str:
    """``57 of 200 trials, 3 failed (2 compile, 1 timeout)``."""
    total = total_of(status)
    done = f"{status.done} of {total} trials" if total else f"{status.done} trials"
    return done + failures_text(status.outcomes)


def failures_text(outcomes: Mapping[str, int]) -> str:
    """``, 3 failed (2 compile, 1 timeout)``, or nothing."""
    failed = {name: count for name, count in outcomes.items() if name != "correct" and count}
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(failed.items(), key=lambda item: -item[1]))
    return f", {sum(failed.values())} failed ({kinds})" if failed else ""


def best_text(status: Status) -> str:
    """The best so far: time, rate, beside the default and the best peer."""
    if not status.best:
        return ""
    return comparison(status.best, status.default, status.peers)


def comparison(best: Record, default: Record | None, peers: Mapping[str, float]) -> str:
    """``10.1 us, 45.2 TFLOP/s, 1.22 x the default [1.18, 1.27], 0.81 x cudnn``; over 1 is faster, and in brackets is
    what finals found it to lie between."""
    parts = [f"{us_text(best.us)}", rate_text(best)]
    if default and (ratio := speedup(best, default)):
        between = over_default(best, default)
        parts.append(f"{ratio:.2f} x the default" + (f" [{between[1]:.2f}, {between[2]:.2f}]" if between else ""))
    if peers:
        name = min(peers, key=lambda peer: peers[peer])
        parts.append(f"{peers[name] / best.us:.2f} x {name}")
    return ", ".join(parts)


def us_text(us: float) -> str:
    """Microseconds, with two decimals below 1000 and one above."""
    return f"{us:.2f} us" if us < 1000 else f"{us:.1f} us"


def rate_text(record: Record) -> str:
    """Operations a second, or bytes where the problem is bound by memory."""
    problem = record.problem
    if problem.flops < MEMORY_BOUND * problem.min_bytes:
        return f"{record.gbytes_per_s:.4g} GB/s"
    unit = "OP/s" if str(getattr(problem, "dtype", "")).startswith("int") else "FLOP/s"
    rate, prefix = (record.tflops, "T") if record.tflops >= 1 else (1e3 * record.tflops, "G")
    return f"{rate:.0f} {prefix}{unit}" if rate >= 100 else f"{rate:.3g} {prefix}{unit}"


def candidate_text(record: Record) -> str:
    """The schedule and config of a record."""
    return f"{record.schedule}: {record.config}"


def eta(status: Status, rate: float) -> str:
    """The time left by the limits, whichever ends first; "" if that cannot be said."""
    found: list[float] = []
    total = total_of(status)
    if total is not None and rate > 0:
        found.append(max(0, total - status.done) / rate)
    if status.limits.minutes is not None:
        found.append(max(0.0, 60 * status.limits.minutes - status.spent))
    if status.limits.until is not None:
        found.append(max(0.0, status.limits.until - time.monotonic()))
    return duration(min(found)) if found else ""


def duration(seconds: float) -> str:
    """``1 h 05 min``, ``3 min 20 s``, ``8 s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"


def devices_text(status: Status) -> str:
    """``measuring`` for one device, ``0 measuring, 1 idle`` for several."""
    if len(status.devices) == 1:
        return status.devices[0]
    return ", ".join(f"{number} {state}" for number, state in enumerate(status.devices))


def as_json(result: Result) -> dict[str, Any]:
    """What a search came to, as plain values."""
    status, best = result.status, result.best
    default = result.default or status.default
    return {
        "operator": operator_name(status.problem),
        "problem": status.problem.to_json(),
        "target": str(status.arch),
        "device": status.device,
        "search": status.strategy,
        "space": status.space,
        "trials": status.done,
        "resumed": status.resumed,
        "outcomes": dict(status.outcomes),
        "seconds": status.seconds,
        "why": result.why,
        "finished": result.finished,
        "default": default.to_json() if default else None,
        "best": best.to_json() if best else None,
        "speedup": result.speedup,
        "verdict": result.verdict,
        "peers": status.peers,
    }
