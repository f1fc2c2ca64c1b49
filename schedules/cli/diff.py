"""``schedules diff``."""

from __future__ import annotations

import argparse
import difflib
from typing import Any

from schedules.build.inspect import VIEWS, view
from schedules.cli.arguments import add_json
from schedules.cli.output import code, emit_json, fields, table
from schedules.cli.records import WHICH, Picked, add_selection, pick
from schedules.core.errors import UnknownNameError, UsageError

WIDEST = 60  # letters of a value in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, f"a problem, then A and B, each {WHICH}")
    parser.add_argument(
        "--view", metavar="VIEW", help="the text to compare (default: cuda; lowered where there is none)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if len(args.words) < 2:
        raise UsageError("name two records: schedules diff NAME [field=value ...] A B; each is " + WHICH)
    *words, first, second = args.words
    a, b = pick(first, args, words), pick(second, args, words)
    name = args.view or ("cuda" if a.arch.kind == b.arch.kind == "cuda" else "lowered")
    if name not in VIEWS:
        raise UnknownNameError("view", name, VIEWS)
    before, after = (_text(each, name).splitlines(keepends=True) for each in (a, b))
    changed = "".join(difflib.unified_diff(before, after, f"{a.label}/{name}", f"{b.label}/{name}"))
    different = _different(a, b)
    if args.json:
        emit_json({"a": _as_json(a), "b": _as_json(b), "different": different, "view": name, "diff": changed})
        return 0
    fields({each.label: _line(each) for each in (a, b)})
    if a.record and b.record:
        print(f"{a.label} takes {a.record.us / b.record.us:.3f} times as long as {b.label}")
    print()
    if different:
        table(("field", a.label, b.label), [(field, *map(_value, pair)) for field, pair in different.items()])
    else:
        print("the same schedule and config")
    print()
    if changed:
        code(changed, "diff")
    else:
        print(f"no difference in the text {name}")
    return 0


def _text(picked: Picked, view_name: str) -> str:
    from schedules.build.builder import build

    return view(build(picked.problem, picked.arch, picked.schedule, picked.config), view_name)


def _different(a: Picked, b: Picked) -> dict[str, list[Any]]:
    """What differs: schedule, problem's and config's fields, what was measured beside the time."""
    pairs = [_facts(each) for each in (a, b)]
    names = list(dict.fromkeys(name for facts in pairs for name in facts))
    found = {name: [facts.get(name) for facts in pairs] for name in names}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def _facts(picked: Picked) -> dict[str, Any]:
    more = picked.record.more if picked.record else {}
    used = {name: more[name] for name in ("registers", "spilled") if name in more}
    return {
        "schedule": picked.schedule,
        "target": str(picked.arch),
        **{f"problem {name}": value for name, value in picked.problem.to_json().items()},
        **picked.config.to_json(),
        **used,
    }


def _value(value: Any) -> str:
    if value is None:
        return ""
    text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= WIDEST else f"{text[:WIDEST]}..."


def _line(picked: Picked) -> str:
    record = picked.record
    time = f"{record.us:.2f} us on {record.device}, {record.date[:10]}" if record else "not measured"
    return f"{picked.schedule}: {picked.config}; {time}" + (f" ({picked.place})" if picked.place else "")


def _as_json(picked: Picked) -> dict[str, Any]:
    return {
        "label": picked.label,
        "place": picked.place,
        "problem": picked.problem.to_json(),
        "schedule": picked.schedule,
        "config": picked.config.to_json(),
        "us": picked.record.us if picked.record else None,
    }
