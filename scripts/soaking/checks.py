"""What must be true after a run, however it ended, and once every search came to its end."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from schedules.cli import main as command_line
from schedules.core.interrupts import INTERRUPTED
from schedules.measure.records import Record
from scripts.soaking.episode import BROKEN, FAULTY, PROBLEMS, Episode
from scripts.soaking.scene import Scene, is_record

MOMENT = 30.0  # seconds in which what is left of a run has to go
TIMES = ("median_us", "p10_us")  # of a record: what is said of it is one of these


def after_run(scene: Scene, episode: Episode) -> None:
    """What must be true after a run, however it ended."""
    said, code, wrong = scene.text("stderr"), episode.codes[-1], scene.wrong
    for word in ("Traceback", "internal:", "Exception ignored", "leaked", "terminate called", "LLVM ERROR"):
        # what Python's own helper process says when it outlives one that was killed is not ours
        if word not in said or (word == "leaked" and code == -signal.SIGKILL):
            continue
        wrong.append(f"said {word!r}: {next(line for line in said.splitlines() if word in line)}")
    errors = [line for line in said.splitlines() if line.startswith("schedules: error:")]
    if len(errors) > 1 or (errors and code == 0) or (code in (1, 2) and not episode.plan and not errors):
        wrong.append(f"exit {code} with {len(errors)} errors: {errors[:2]}")
    # a search that ended because of its journal has said what it could not keep
    told = code == 1 and any(".jsonl" in line for line in errors)
    present = set(scene.lines())
    lost = [line for line in scene.seen if line not in present]
    if lost and not told:
        wrong.append(f"{len(lost)} of {len(scene.seen)} records are gone: {lost[0][:200].decode(errors='replace')}")
    scene.excuse(lost if told else [])
    records = scene.records()
    wrong += [*doubled(records), *announced(said, [*records, *map(json.loads, scene.excused)]), *blamed(records)]
    left: list[Any] = []
    deadline = time.monotonic() + MOMENT
    while (left := scene.processes() + list(scene.temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        wrong.append(f"left behind: {', '.join(map(str, left[:3]))}")
    if not scene.abrupt:
        wrong += [f"left behind: {path}" for path in (*scene.logs.rglob("*"), *scene.out.rglob("*")) if is_litter(path)]
    if said.count("paused: ") > len(episode.strikes):
        wrong.append(f"said {said.count('paused: ')} times that it paused")
    wrong += misread(scene)


def misread(scene: Scene) -> Iterator[str]:
    """What `status` gets wrong of the journals: it must serve what is good, and say in a line what it does not use."""
    if not scene.journals():
        return
    code, _, error = cli("status", "--logs", str(scene.logs), "--json")
    lines = [line for file in scene.journals() for line in file.read_bytes().split(b"\n") if line.strip()]
    unused = len(lines) - len({line for line in lines if line not in scene.strange and is_record(line)})
    if code or (error.count("\n"), ".jsonl line " in error) != (unused > 0, unused > 0):
        yield f"status: exit {code}, with {unused} lines that are no records: {error or 'no word'}"


def is_litter(path: Path) -> bool:
    """Whether a file or folder is one that should have got another name, or none."""
    return path.name.startswith(".") or path.suffix in (".new", ".tmp") or "tmp" in path.name


def is_trial(record: dict[str, Any]) -> bool:
    return record.get("stage") == "trial"


def tried(record: dict[str, Any]) -> str:
    """The candidate of a record."""
    return json.dumps([record[name] for name in ("operator", "problem", "target", "schedule", "config")])


def doubled(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The candidates that one campaign has tried twice."""
    count = Counter((tried(r), r["search"]["strategy"], r["search"]["campaign"]) for r in records if is_trial(r))
    for (candidate, *_), times in count.items():
        if times > 1:
            yield f"tried {times} times: {candidate[:300]}"


def announced(said: str, records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The times that were said of a new best and that are in no record."""
    times = {f"{record.get(name, 0.0):{form}}" for record in records for name in TIMES for form in (".1f", ".2f")}
    for trial, us in re.findall(r"  trial (\d+): ([\d.]+) us", said):
        if us not in times:
            yield f"trial {trial} of {us} us is in no journal"


def blamed(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The candidates that failed and are right, or failed in another way than they must."""
    for record in records:
        fault = record["config"].get("fault", "none")
        if record["outcome"] != BROKEN.get(fault, "correct"):
            yield f"{record['outcome']} ({record.get('reason')}): {tried(record)[:300]}"


def at_end(scene: Scene, episode: Episode) -> None:
    """What must be true once every search came to its end."""
    said = json.loads(scene.text("stdout"))
    for index, (name, operator, kind, trials) in enumerate(episode.searches()):
        records = [record for record in scene.records() if record["operator"] == operator]
        count = len(
            [r for r in records if is_trial(r) and r["search"]["strategy"] == kind and r["operator"] == operator]
        )
        told = said["entries"][index]["trials"] if episode.plan else said["trials"]
        if not count == told == min(trials, len(BROKEN) + 7 if operator == FAULTY else trials):
            scene.wrong.append(f"{name}: {count} trials in the journal, {told} told, {trials} asked for")
        best = best_of(records)
        found = cli(
            "best", operator, *PROBLEMS[operator].split(), "--target", "llvm", "--logs", str(scene.logs), "--json"
        )
        chosen = json.loads(found[1])["record"] if found[0] == 0 else None
        if chosen != best:
            scene.wrong.append(f"the best is {best}, `best` says {chosen or found[2]}")
        bundle = scene.out / "exported"
        if episode.plan:
            bundle = Path(said["entries"][index]["bundle"] or "none")
        else:
            export = ["export", operator, *PROBLEMS[operator].split(), "--logs", str(scene.logs), "--out", str(bundle)]
            if (found := cli(*export))[0]:
                scene.wrong.append(f"export: exit {found[0]}: {found[2]}")
                continue
        if (found := cli("verify", str(bundle)))[0]:
            scene.wrong.append(f"verify {bundle}: exit {found[0]}: {found[2] or found[1]}")
        elif best and json.loads((bundle / "kernel.json").read_text())["config"] != best["config"]:
            scene.wrong.append(f"{bundle} is not of the best")
        episode.bundles += 1


def best_of(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The winner of the last finals, unless a later trial was faster; each config by its latest time."""
    right = [record for record in records if record["outcome"] == "correct"]
    won = max((at for at, record in enumerate(right) if record.get("winner")), default=-1)
    # who else was in the finals has lost them, however fast
    rivals = right if won < 0 else [right[won], *(record for record in right[won + 1 :] if is_trial(record))]
    latest = {tried(record): record for record in rivals}
    return min(latest.values(), default=None, key=judged)


def judged(record: dict[str, Any]) -> float:
    """The microseconds that a record is judged by: no matter of this script."""
    return Record.from_json(record).us


def cli(*words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line(words)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code, out.getvalue(), err.getvalue()
