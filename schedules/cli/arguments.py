"""What commands share: options, and reading a problem from words."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from schedules.build.toolchain.devices import on_local
from schedules.bundle.signature import signing_key
from schedules.cli.output import note
from schedules.core.arch import Arch, parse_arch
from schedules.core.bounds import excess
from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.operator import Operator, ScheduleSpec
from schedules.core.presets import operator_named, presets, resolve
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator_modules
from schedules.core.text import printable
from schedules.measure.choice import Choice, choose, default_choice, for_device
from schedules.measure.journal import told
from schedules.predict.start import started

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

BEST = "best"  # as --config: the best that was measured


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of ending the process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Options and words in any order; no number of an option is beyond its bound.

    Raises UsageError; UnknownNameError with the nearest option.
    """
    known = [option for action in parser._actions for option in action.option_strings]
    for word in argv:
        if word == "--":
            break
        if word.startswith("--") and word.split("=")[0] not in known:
            raise UnknownNameError("option", word.split("=")[0], known)
    args, extra = parser.parse_known_intermixed_args(list(argv))
    if extra:
        parser.error(f"unexpected {extra[0]!r}")
    for name, value in vars(args).items():
        if isinstance(value, int | float) and (wanted := excess(name, value)):
            raise UsageError(f"--{name} {value} {wanted}")
    return args


@dataclass(frozen=True)
class Job:
    """What a command is to work on, checked before anything heavy starts."""

    operator: Operator
    problem: Problem
    arch: Arch
    spec: ScheduleSpec
    config: Config
    chosen: Choice | None = None  # with --config best: where it comes from


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def add_problem(parser: argparse.ArgumentParser, subject: str = "an operator or a preset, then its fields") -> None:
    """What `job` reads: the problem's words, the target, the schedule, its config, and which records to heed."""
    parser.add_argument("words", nargs="*", metavar="NAME [field=value ...]", help=subject)
    parser.add_argument("--target", default="llvm", help="llvm, cuda:sm_90a, rocm:gfx942, ... (default: llvm)")
    parser.add_argument("--schedule", help="the schedule's name (default: of what is predicted to be fastest)")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FIELD=VALUE,...",
        help="fields of the schedule's config in place of its defaults, pairs as 8x4; or `best`, as records have it",
    )
    add_dispatch(parser)


def add_dispatch(parser: argparse.ArgumentParser) -> None:
    """Which device is meant, and which records to heed: ``--device``, ``--logs``."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="build for this device: its records, defaults for it (default: the one that is here)",
    )
    parser.add_argument(
        "--logs",
        action="append",
        default=[],
        metavar="DIR",
        help="look for records here; may be repeated (default: SCHEDULES_LOGS, else tuning_logs)",
    )


def add_sign(parser: argparse.ArgumentParser) -> None:
    """``--sign``."""
    parser.add_argument("--sign", metavar="KEY", help="sign with this private Ed25519 key, a PEM file (docs/trust.md)")


def add_code_object(parser: argparse.ArgumentParser) -> None:
    """``--code-object``."""
    what = "version of an AMD GPU's code object: 5 (default) for ROCm from 6.0 on, 6 from 6.3 on, 4 from 4.1 on"
    parser.add_argument("--code-object", type=int, choices=(4, 5, 6), default=5, metavar="VERSION", help=what)


def key_to_sign(args: argparse.Namespace) -> Ed25519PrivateKey | None:
    """The key of --sign, asked for before anything is built.  Raises UsageError, ToolchainError."""
    return signing_key(args.sign) if args.sign else None


def seeds(text: str) -> tuple[int, ...]:
    """``0,1,2`` as numbers."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--seeds {text!r} is not a list of whole numbers; write 0,1,2") from None
    if min(found) < 0:
        raise UsageError(f"--seeds {text!r} has a negative number; write 0,1,2")
    if wanted := excess("seed", max(found)):
        raise UsageError(f"--seeds {max(found)} {wanted}")
    return found


def positive(option: str, value: float) -> float:
    """`value`.  Raises UsageError, naming the option, unless it is over 0."""
    if not value > 0:
        raise UsageError(f"{option} {value} must be over 0")
    return value


def split_words(words: Sequence[str], what: str = "word") -> dict[str, str]:
    """``name=value`` words as a dict.  Raises UsageError."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{what} {word!r} is not name=value")
        if name in found:
            raise UsageError(f"{name} is given twice: {found[name]} and {value}; give it once")
        found[name] = value
    return found


def subject(args: argparse.Namespace) -> str:
    """The operator's or preset's name."""
    if not args.words:
        raise UsageError("name an operator or a preset; `schedules list` shows them")
    return str(args.words[0])


def bundle_path(args: argparse.Namespace) -> Path | None:
    """The bundle's folder that the words name instead of a problem; an operator's name wins over a folder's.

    Raises UsageError if options come with it that only a build can heed.
    """
    name = subject(args)
    if name in operator_modules() or name in presets() or not (os.sep in name or Path(name).exists()):
        return None
    options = args.schedule or args.config or args.device or args.logs
    if split_words(args.words[1:]) or options or args.target != "llvm":
        raise UsageError(
            f"{name} is a bundle, already built; leave out fields, --target, --schedule, --config, --device, --logs"
        )
    return Path(name)


def config_words(args: argparse.Namespace) -> dict[str, str]:
    """``--config tile=8x4,step=8`` as a dict."""
    items = [item for text in args.config for item in text.split(",") if item]
    if BEST in items:
        raise UsageError(f"--config {BEST} is a whole config; give no fields beside it")
    try:
        return split_words(items, "--config item")
    except UsageError as error:
        raise UsageError(f"{error}; write tile=8x4,step=8") from None


def choice(args: argparse.Namespace, work: Job, *, default: bool = False) -> Choice:
    """What dispatch takes for `work`: with --config what it says, else the best that was measured unless `default`.

    Raises UsageError, JournalError.
    """
    if work.chosen:
        return work.chosen
    if args.config:
        return Choice(work.problem, work.spec.name, work.config, None, given=True)
    if default:
        return default_choice(work.problem, work.arch, args.schedule)
    return best(args, work.problem, work.arch)


def best(args: argparse.Namespace, problem: Problem, arch: Arch) -> Choice:
    """The best that was measured, as `add_dispatch` asked for it; what is not used of the journals is said.

    Raises UsageError, JournalError.
    """
    for folder in args.logs:
        if not os.path.isdir(folder):
            raise UsageError(f"--logs {folder} is not a folder")
    chosen = choose(problem, arch, args.schedule, folders=args.logs or None, device=args.device)
    note(told(chosen.unused))
    return chosen


def job(args: argparse.Namespace, *, heeds_records: bool = False) -> Job:
    """Everything that `add_problem` asked for; `heeds_records` says that the command does so without --config best.

    Raises the UsageError that fits.
    """
    name = subject(args)
    operator_named(name)  # an unknown operator is named first, whatever else is wrong
    operator, problem = resolve(name, split_words(args.words[1:]))
    arch = arch_of(args, operator)
    if args.config == [BEST]:
        chosen = best(args, problem, arch)
        return Job(operator, problem, arch, operator.schedule(chosen.schedule), chosen.config, chosen)
    if (args.logs or args.device and not arch.is_gpu) and not heeds_records:
        raise UsageError(f"--device and --logs say which records to heed; give --config {BEST} with them")
    return Job(operator, problem, arch, *started(problem, arch, args.schedule, config_words(args)))


def arch_of(args: argparse.Namespace, operator: Operator) -> Arch:
    """The arch of --target, for the device of --device, else the one that is here.  Raises UsageError."""
    arch = parse_arch(args.target)
    if args.device is None:
        return on_local(arch)
    return for_device(arch, args.device, operator.name, args.logs or None)


def print_choice(work: Job) -> None:
    """With --config best, which config that is and where it comes from."""
    if work.chosen:
        print(f"{work.spec.name}: {work.config}\n{printable(str(work.chosen))}")
