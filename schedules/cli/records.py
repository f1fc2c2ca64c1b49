"""What the commands that read journals share: which records are meant."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from schedules.build.present import device_name
from schedules.build.toolchain.devices import on_named
from schedules.cli.arguments import split_words
from schedules.cli.output import note
from schedules.core.arch import Arch, parse_arch
from schedules.core.device import slug
from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.presets import operator_named, presets, resolve
from schedules.core.problem import Config, Problem
from schedules.measure.choice import default_choice, legal_best, log_folders
from schedules.measure.journal import read_journals, told
from schedules.measure.lookup import Located, journal_files, latest_comparable, ranked
from schedules.measure.records import Record

WHICH = "a record: its rank (1 is the fastest), FILE:LINE, `default`, or SCHEDULE:field=value,..."


def add_selection(parser: argparse.ArgumentParser, subject: str = "an operator or a preset, and fields") -> None:
    """Which records are meant: a problem's words, ``--target``, ``--device``, and where journals are."""
    parser.add_argument("words", nargs="*", metavar="NAME [field=value ...]", help=subject)
    parser.add_argument("--target", help="records of this target (default: the only one there is)")
    parser.add_argument("--device", metavar="NAME", help="records of this device (default: this machine's)")
    add_logs(parser)


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Where journals are: ``--journal``, ``--logs``."""
    parser.add_argument("--journal", metavar="FILE", help="look only in this journal")
    parser.add_argument(
        "--logs",
        action="append",
        default=[],
        metavar="DIR",
        help="look for journals here; may be repeated (default: SCHEDULES_LOGS, else tuning_logs)",
    )


def gather(args: argparse.Namespace, words: Sequence[str] | None = None) -> list[Located]:
    """The records that the words, --target and --device leave; what is not used of the journals is said.

    Raises UsageError, JournalError.
    """
    folders, wanted = folders_of(args), selector(args, words)
    found = read_once(journal_files(folders, args.journal), args)
    return [item for item in found if meant(item.record, wanted)]


def read_once(files: Sequence[Path], args: argparse.Namespace) -> list[Located]:
    """The records of journals, which are read, and what is not used of them said, once in a command.

    Raises JournalError if none can be read.
    """
    read: dict[tuple[Path, ...], list[Located]] = vars(args).setdefault("read", {})
    key = tuple(files)
    if key not in read:
        read[key], bad = read_journals(files)
        _say(told(bad), args)
    return read[key]


def _say(text: str, args: argparse.Namespace) -> None:
    """A note, once in a command."""
    said: set[str] = vars(args).setdefault("said", set())
    if text not in said:
        said.add(text)
        note(text)


Selector = Callable[[str, Problem, str, str], bool]  # of operator, problem, target, device


def meant(record: Record, wanted: Selector) -> bool:
    """Whether `record` is one of those that are `wanted`."""
    return wanted(record.operator, record.problem, record.target, record.device)


def folders_of(args: argparse.Namespace) -> list[Path]:
    """Where --logs says that journals are, else where they are looked for.  Raises UsageError."""
    for folder in args.logs:
        if not os.path.isdir(folder):
            raise UsageError(f"--logs {folder} is not a folder")
    return [Path(folder) for folder in args.logs] or log_folders()


def selector(args: argparse.Namespace, words: Sequence[str] | None = None) -> Selector:
    """Whether an operator's problem, measured for a target on a device, is meant by the words, --target and --device.

    Raises UsageError.
    """
    wanted = matcher(args.words if words is None else words)
    target = args.target and str(parse_arch(args.target))
    device = args.device and slug(args.device)
    return lambda operator, problem, of, on: (
        wanted(operator, problem) and target in (None, of) and device in (None, slug(on))
    )


def matcher(words: Sequence[str]) -> Callable[[str, Problem], bool]:
    """Whether a problem of an operator is meant: no words are any, an operator's with the fields that are given, or a
    preset's.  Raises UsageError."""
    if not words:
        return lambda operator, problem: True
    name, fields = words[0], split_words(words[1:])
    owner = operator_named(name)
    if name in presets():
        wanted = resolve(name, fields)[1]
        return lambda operator, problem: problem == wanted
    return lambda operator, problem: (
        operator == owner.name and owner.problem.parse({**problem.to_json(), **fields}) == problem
    )


@dataclass(frozen=True)
class Candidates:
    """The comparable records of one problem on one device, the fastest first."""

    problem: Problem
    arch: Arch
    ranked: tuple[Located, ...]
    everything: tuple[Located, ...]  # failures and earlier times too
    best: Record | None  # what a build uses


def one_problem(args: argparse.Namespace, words: Sequence[str] | None = None) -> Candidates:
    """The records of the one problem, target and device that are meant.  Raises UsageError if that is not one."""
    words = args.words if words is None else words
    if not words:
        raise UsageError("name an operator or a preset; `schedules status` shows what was measured")
    found = gather(args, words)
    if not found:
        raise UsageError(f"no records of {' '.join(words)} here; `schedules status` shows what was measured")
    (problem, *more) = dict.fromkeys(item.record.problem for item in found)
    if more:
        with contextlib.suppress(UsageError):  # the words may name a whole problem, its other fields at their defaults
            whole = resolve(words[0], split_words(words[1:]))[1]
            found = [item for item in found if item.record.problem == whole] or found
        (problem, *more) = dict.fromkeys(item.record.problem for item in found)
    if more:
        raise UsageError(f"{problem} and {more[0]} both fit; give more fields")
    (target, *others) = dict.fromkeys(item.record.target for item in found)
    if others:
        raise UsageError(f"there are records for {target} and {others[0]}; choose with --target")
    arch = parse_arch(target)
    devices = list(dict.fromkeys(item.record.device for item in found))
    here = device_name(arch)
    if len(devices) > 1 and here not in devices:
        raise UsageError(f"there are records of {' and '.join(devices)}; choose with --device")
    device = here if here in devices else devices[0]
    kept = latest_comparable([item for item in found if item.record.device == device])
    best, refused = legal_best(kept)
    _say(told(refused), args)
    illegal = {(line.file, line.number) for line in refused}
    legal = tuple(item for item in ranked(kept) if (item.file, item.line) not in illegal)
    return Candidates(problem, on_named(arch, device, devices), legal, tuple(kept), best)


@dataclass(frozen=True)
class Picked:
    """A schedule and config that a person pointed at; `record` unless it was never measured."""

    label: str
    problem: Problem
    arch: Arch
    schedule: str
    config: Config
    record: Record | None
    place: str = ""


def pick(text: str, args: argparse.Namespace, words: Sequence[str] | None = None) -> Picked:
    """What `text` (see WHICH) points at, among the records of the problem that the words name.  Raises UsageError."""
    if at := re.fullmatch(r"(.+):(\d+)", text):
        if Path(at[1]).is_file():
            return _at_line(text, Path(at[1]), int(at[2]), args)
        if "/" in at[1] or at[1].endswith(".jsonl"):
            raise UsageError(f"{at[1]} is not a file")
    known = one_problem(args, words)
    if rank := re.fullmatch(r"#?(\d+)", text):
        number = int(rank[1])
        if not 1 <= number <= len(known.ranked):
            raise UsageError(f"there is no #{number}; {len(known.ranked)} configs were correct")
        return _picked(f"#{number}", known.ranked[number - 1])
    if text == "default":
        return _default(known)
    return _described(text, known)


def _at_line(text: str, file: Path, line: int, args: argparse.Namespace) -> Picked:
    for item in read_once([file], args):
        if item.line == line:
            return _picked(text, item)
    raise UsageError(f"{file} has no record in line {line}")


def _default(known: Candidates) -> Picked:
    made = default_choice(known.problem, known.arch)
    key = (made.schedule, str(made.config))
    item = next((item for item in known.ranked if item.record.key == key), None)
    if item:
        return _picked("default", item)
    return Picked("default", known.problem, known.arch, made.schedule, made.config, None)


def _described(text: str, known: Candidates) -> Picked:
    """The fastest record of the schedule whose config has the given fields."""
    schedule, _, rest = text.partition(":")
    names = sorted({item.record.schedule for item in known.everything})
    if schedule not in names:
        raise UnknownNameError("schedule among the records", schedule, [*names, "default"])
    fields = split_words([part for part in rest.split(",") if part], "config item")
    for item in known.ranked:
        config = item.record.config
        if item.record.schedule == schedule and type(config).parse({**config.to_json(), **fields}) == config:
            return _picked(text, item)
    raise UsageError(f"no correct record of {schedule} has {rest or 'any config'}; `schedules top` shows them")


def _picked(label: str, item: Located) -> Picked:
    record = item.record
    return Picked(label, record.problem, parse_arch(record.target), record.schedule, record.config, record, item.place)
