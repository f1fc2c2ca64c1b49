"""``schedules resume``."""

from __future__ import annotations

import argparse

from schedules.build.present import device_name
from schedules.cli.arguments import add_json
from schedules.cli.output import emit_json, note, table
from schedules.cli.records import matcher, read_once
from schedules.cli.searching import (
    CREW,
    STOPPED,
    add_crew,
    add_limits,
    add_log,
    check_log,
    crew_options,
    limits,
    search,
)
from schedules.core.arch import parse_arch
from schedules.core.errors import SchedulesError, UsageError
from schedules.core.presets import short
from schedules.core.text import printable
from schedules.measure.lookup import Campaign, campaigns, journal_files
from schedules.tune.crews import CrewOptions
from schedules.tune.session import Work
from schedules.tune.tuner import Limits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="NAME [field=value ...]", help="only searches of this problem")
    add_limits(parser, " (default: those that it was started with)")
    add_log(parser)
    parser.add_argument("--all", action="store_true", help="every unfinished search, not the last one only")
    parser.add_argument("--list", action="store_true", help="show the searches and do nothing")
    add_crew(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.all and args.json and not args.list:
        raise UsageError("--json is for one search; leave out --all")
    wanted = matcher(args.words)
    check_log(args)
    options, given = crew_options(args), limits(args)
    from schedules.build.builder import operator_of

    known = campaigns(read_once(journal_files([args.log], args.journal), args))
    found = [c for c in known if wanted(operator_of(c.problem).name, c.problem) and (args.ray or _is_here(c))]
    if not found:
        what = f" of {' '.join(args.words)}" if args.words else ""
        raise UsageError(f"no search{what} on a device of this machine is in the journals; start one: schedules tune")
    if args.list:
        _show(found, args.json)
        return 0
    chosen = [c for c in found if not c.ended] if args.all else [_last(found, given)]
    if not chosen or (chosen[0].ended and not _goes_further(chosen[0], given)):
        if args.json:
            emit_json({"finished": True, "trials": found[0].trials})
        else:
            text = f"finished: {_text(found[0])}, {found[0].trials} trials in {found[0].file}"
            print(printable(f"{text}; give larger --trials or --minutes"))
        return 0
    worst = 0
    for campaign in chosen:
        try:
            worst = max(worst, _continue(campaign, given, options, args))
        except SchedulesError as error:  # one that cannot go on costs that one
            if not args.all:
                raise
            worst = max(worst, 1)
            note(f"{_text(campaign)} in {campaign.file}: {error}")
        if worst == STOPPED:
            break
    return worst


def _last(found: list[Campaign], given: Limits) -> Campaign:
    """The most recent one that is unfinished; if none is, the most recent."""
    return next((campaign for campaign in found if not campaign.ended or _goes_further(campaign, given)), found[0])


def _goes_further(campaign: Campaign, given: Limits) -> bool:
    """Whether the limits that were given let a finished search go on."""
    return bool(
        (given.trials and given.trials > campaign.trials)
        or (given.minutes and 60 * given.minutes > campaign.seconds)
        or (given.patience and given.patience > (campaign.search.patience or 0))
    )


def _continue(campaign: Campaign, given: Limits, options: object, args: argparse.Namespace) -> int:
    from schedules.build.builder import operator_of

    assert isinstance(options, CrewOptions)
    asked = campaign.search
    bounds = given if given != Limits() else Limits(asked.trials, asked.minutes, asked.patience)
    arch = parse_arch(campaign.target)
    work = Work(campaign.problem, arch, bounds, asked.strategy, asked.schedules, asked.seed, asked.space)
    args.journal = str(campaign.file)
    # with the words, since the journal may hold searches of other problems
    again = ["resume", operator_of(campaign.problem).name, *str(campaign.problem).split(" "), "--journal", args.journal]
    asked_for = {name: getattr(args, name) for name in ("trials", "minutes", "patience", *CREW)}
    again += [word for name, value in asked_for.items() if value is not None for word in (f"--{name}", str(value))]
    return search(work, options, args, again)


def _is_here(campaign: Campaign) -> bool:
    return device_name(parse_arch(campaign.target)) == campaign.device


def _text(campaign: Campaign) -> str:
    from schedules.build.builder import operator_of

    return f"{campaign.search.strategy} search of {operator_of(campaign.problem).name} {campaign.problem}"


def _show(found: list[Campaign], as_json: bool) -> None:
    from schedules.build.builder import operator_of

    rows = [
        {
            "operator": operator_of(c.problem).name,
            "problem": c.problem.to_json() if as_json else short(operator_of(c.problem).name, c.problem),
            "target": c.target,
            "search": c.search.strategy,
            "campaign": c.search.campaign,
            "trials": c.trials,
            "of": c.search.trials,
            "minutes": round(c.seconds / 60, 2),
            "ended": c.ended,
            "last": c.last,
            "journal": str(c.file),
        }
        for c in found
    ]
    if as_json:
        emit_json(rows)
        return
    names = ("operator", "problem", "target", "search", "trials", "of", "last", "journal")
    cells = [["" if row[name] is None else row[name] for name in names] for row in rows]
    table((*names, ""), [(*cell, "finished" if row["ended"] else "") for cell, row in zip(cells, rows, strict=True)])
