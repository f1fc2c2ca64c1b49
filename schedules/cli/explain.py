"""``schedules explain``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules.cli.arguments import add_json, add_problem, job
from schedules.cli.output import code, emit_json, heading
from schedules.core.errors import UsageError
from schedules.core.text import printable

if TYPE_CHECKING:
    from schedules.show.explain import Step, Story

CALLS, LINES = 12, 30  # of a step that are shown, if not all
_LEXERS = {"cuda": "cuda", "amdgcn": "gas", "llvm": "llvm"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser)
    parser.add_argument("--html", metavar="FILE", help="write the story as one HTML file instead, without scripts")
    parser.add_argument("--step", metavar="N", type=int, help="only step N, with the whole program after it")
    parser.add_argument("--full", action="store_true", help="every call, every changed line and the whole source")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.html and (args.step is not None or args.json):
        raise UsageError("--html writes the whole story; leave out --step and --json")
    work = job(args)
    from schedules.show.explain import story

    told = story(work.problem, work.arch, work.spec.name, work.config)
    if args.html:
        return _write(told, Path(args.html))
    steps = told.steps if args.step is None else [_picked(told, args.step)]
    if args.json:
        source = {"kind": told.source_kind, "text": told.source}
        emit_json(
            {"title": told.title, "config": told.config.to_json(), "steps": list(map(_data, steps)), "source": source}
        )
        return 0
    print(f"{told.title}\nconfig: {told.config}")
    if work.chosen:
        print(printable(str(work.chosen)))
    for step in steps:
        _print(step, args.full, alone=args.step is not None)
    if args.step is None:
        heading(f"What comes out: {told.source_kind}")
        _cut(told.source.splitlines(), args.full, _LEXERS[told.source_kind])
    return 0


def _write(told: Story, path: Path) -> int:
    from schedules.show.explain.html import page, story_html

    title = f"{told.operator.name}, {told.schedule.name}: from the definition to the kernel"
    try:
        path.write_text(page(title, [story_html(told)]))
    except OSError as error:
        raise UsageError(f"--html {path} cannot be written: {error.strerror}; name another file") from None
    print(f"{len(told.steps)} steps in {path}")
    return 0


def _picked(told: Story, number: int) -> Step:
    if not 0 <= number < len(told.steps):
        raise UsageError(f"--step {number}: the story has steps 0 to {len(told.steps) - 1}")
    return told.steps[number]


def _data(step: Step) -> dict[str, Any]:
    names = ("number", "phase", "title", "primitives", "changes", "script")
    return {name: getattr(step, name) for name in names}


def _print(step: Step, full: bool, alone: bool) -> None:
    heading(f"{step.number}. {step.title}")
    for change in step.changes:
        print(f"- {change}")
    print()
    if step.primitives:
        _cut(step.primitives, full or alone, "python", CALLS, "calls")
        print()
    if step.before:
        _cut(step.diff(), full or alone, "diff")
    if alone or not step.before:
        if step.before:
            print()
        _cut(step.script.splitlines(), full or alone, "python")


def _cut(lines: Sequence[str], full: bool, lexer: str, most: int = LINES, what: str = "lines") -> None:
    """`lines`, the first of them if they are many and not all are asked for."""
    shown = lines if full or len(lines) <= most else lines[:most]
    code("\n".join(shown), lexer)
    if len(shown) < len(lines):
        print(f"... {len(lines) - len(shown)} more {what}; --step N or --full shows all")
