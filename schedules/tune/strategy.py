"""What a search strategy is: it is asked for candidates and told how they did.  It builds and measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from schedules.core.problem import Config
from schedules.measure.records import Record


@dataclass(frozen=True)
class Candidate:
    """A schedule's name and a legal config of it."""

    schedule: str
    config: Config

    @cached_property
    def key(self) -> tuple[str, str]:
        """The same as `Record.key`."""
        return self.schedule, str(self.config)


class Strategy(Protocol):
    """The state of one search for one problem on one arch.

    Deterministic: the same seed and the same records told in the same order give the same candidates.
    """

    name: str
    size: int | None  # candidates in the space; None if it cannot be counted

    def tell(self, records: Sequence[Record]) -> None:
        """Learn from trials of this problem: earlier ones on resume, then each batch.  None of them is asked again."""

    def learn(self, records: Sequence[Record]) -> None:
        """Learn from trials of other problems of the operator, on the same device."""

    def ask(self, count: int) -> list[Candidate]:
        """Up to `count` candidates, none asked or told before; fewer, or none, when the space is exhausted."""
