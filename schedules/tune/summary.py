"""What a plan came to, as a page to read in the morning and as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from schedules.core.arch import Arch
from schedules.core.files import write_whole
from schedules.measure.records import Record, speedup
from schedules.tune import progress
from schedules.tune.plan import Entry
from schedules.tune.tuner import Status

WAITING, SEARCHING, DONE, STOPPED, FAILED, NO_TIME = "waiting", "searching", "done", "stopped", "failed", "no time left"


@dataclass
class Outcome:
    """Where one entry stands on one target; `best` is what dispatch uses now, `default` what it is compared with."""

    entry: Entry
    arch: Arch
    state: str = WAITING
    status: Status | None = None  # of the search, if one was started
    why: str = ""  # it ended
    best: Record | None = None
    default: Record | None = None
    bundle: Path | None = None
    note: str = ""  # what went wrong, in a line
    reported: bool = True  # whether the report on the disk tells of it as it is

    @property
    def name(self) -> str:
        return self.entry.folder(self.arch)

    @property
    def speedup(self) -> float | None:
        return speedup(self.best, self.default)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        status, best = self.status, self.best
        peers = status.peers if status else {}
        return {
            "name": self.name,
            "operator": progress.operator_name(self.entry.problem),
            "problem": self.entry.problem.to_json(),
            "target": str(self.arch),
            "device": status and status.device,
            "state": self.state,
            "why": self.why,
            "note": self.note,
            "trials": status.done if status else 0,
            "resumed": status.resumed if status else 0,
            "space": status and status.space,
            "outcomes": dict(status.outcomes) if status else {},
            "minutes": round(status.spent / 60, 2) if status else 0.0,
            "default_us": self.default.us if self.default else None,
            "best_us": best.us if best else None,
            "speedup": self.speedup,
            "rate": progress.rate_text(best) if best else None,
            "peers": peers,
            "of_peer": min(peers.values()) / best.us if peers and best else None,
            "schedule": best.schedule if best else None,
            "config": best.config.to_json() if best else None,
            "error": best.error if best else None,
            "verified": list(best.verified) if best else [],
            "bundle": str(self.bundle) if self.bundle else None,
        }


def write_report(out: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """``report.md`` and ``report.json`` in `out`, each replaced in one step.  Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [outcome.to_json() for outcome in outcomes]
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    write_whole(out / "report.json", json.dumps({"plan": title, "date": date, "entries": rows}, indent=2) + "\n")
    write_whole(out / "report.md", markdown(title, date, outcomes))


HEADERS = ("problem", "state", "default us", "best us", "speedup", "of peer", "trials", "failed")


def row(outcome: Outcome) -> tuple[str, ...]:
    """One line of the overview, a cell for each of HEADERS."""
    facts = outcome.to_json()
    failed = {name: count for name, count in facts["outcomes"].items() if name != "correct"}
    return (
        outcome.name,
        outcome.state,
        _number(facts["default_us"]),
        _number(facts["best_us"]),
        _number(facts["speedup"]),
        _number(facts["of_peer"]),
        str(facts["trials"]),
        ", ".join(f"{count} {name}" for name, count in failed.items()),
    )


def markdown(title: str, date: str, outcomes: Sequence[Outcome]) -> str:
    """The report as a page."""
    faster = sum(1 for outcome in outcomes if (outcome.speedup or 0) > 1)
    done = sum(outcome.state == DONE for outcome in outcomes)
    lines = [
        f"# {title}",
        "",
        f"{date}: {done} of {len(outcomes)} searches done, {faster} faster than their defaults.  Speedup is over the"
        " default config, timed beside the best where the search came to its finals; over 1 of peer is faster than it.",
        "",
        f"| {' | '.join(HEADERS)} |",
        "|---" * len(HEADERS) + "|",
        *(f"| {' | '.join(row(outcome))} |" for outcome in outcomes),
    ]
    for outcome in outcomes:
        lines += ["", f"## {outcome.name}", "", f"{outcome.entry.problem}, {outcome.arch}", "", *_details(outcome)]
    return "\n".join(lines) + "\n"


def _details(outcome: Outcome) -> list[str]:
    facts, best = outcome.to_json(), outcome.best
    details = [f"- {outcome.state}" + (f": {facts['why']}" if facts["why"] else "")]
    if outcome.note:
        details.append(f"- {outcome.note}")
    if facts["device"]:
        spent = progress.duration(60 * facts["minutes"])
        known = f", {facts['resumed']} of them earlier" if facts["resumed"] else ""
        space = f" in a space of {facts['space']}" if facts["space"] else ""
        details.append(f"- on {facts['device']}: {facts['trials']} trials{known}, {spent}{space}")
    if best:
        details += [
            f"- best: {progress.comparison(best, outcome.default, facts['peers'])}",
            f"- worst error {best.error or 0:.2f} of what is allowed, on {', '.join(best.verified) or 'one seed'}",
            f"- `{best.schedule}`: `{best.config}`",
        ]
    if outcome.bundle:
        details.append(f"- bundle: `{outcome.bundle}`")
    return details


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
