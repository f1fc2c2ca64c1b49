"""A clock that is told what to report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class FakeTimer:
    """Reports for each call the microseconds that it is said to take, and who was called, in order."""

    flush_us, fewest, most = 10.0, 3, 100

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.current = ("", 0.0)
        self.before: Callable[[], object] = lambda: None

    def function(self, name: str, us: float) -> Callable[[], Sequence[Any]]:
        def call() -> Sequence[Any]:
            self.current = (name, us)
            return [name]

        return call

    def times(self, call: Callable[[], None], count: int) -> list[float]:
        call()
        self.turns.append(self.current[0])
        return [self.current[1]] * count

    def __enter__(self) -> FakeTimer:
        return self

    def __exit__(self, *_: object) -> None:
        pass
