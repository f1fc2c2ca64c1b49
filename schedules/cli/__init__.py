"""The command line: ``schedules COMMAND ...``.  One module for each command; heavy imports wait until they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from schedules.cli.arguments import Parser, parse
from schedules.core import interrupts
from schedules.core.errors import SchedulesError, UnknownNameError, UsageError
from schedules.core.process import import_tvm_alone
from schedules.core.text import printable
from schedules.core.versions import version_of


@dataclass(frozen=True)
class Command:
    """A command: its module below ``schedules.cli``, and what it does in a line."""

    module: str  # with add_arguments(parser) and run(args) -> exit code
    summary: str


COMMANDS = {
    "list": Command("listing", "operators, schedules, presets and targets"),
    "show": Command("show", "an operator, or one problem: definition, arguments, schedule, config"),
    "build": Command("build", "build a problem and export it as a bundle"),
    "verify": Command("verify", "compare a built problem with its reference"),
    "bench": Command("bench", "verify, then time a problem on its device"),
    "tune": Command("tune", "search for the fastest config of a problem, or of every problem of a plan"),
    "resume": Command("resume", "go on with a search that was interrupted"),
    "status": Command("status", "what the journals hold: trials, failures, best and default of each problem"),
    "best": Command("best", "the record that a build of a problem uses, and how to build it"),
    "top": Command("top", "the fastest configs of a problem"),
    "diff": Command("diff", "what differs between two configs of a problem: fields, times, generated source"),
    "export": Command("export", "write the best of a problem, or of every problem, as bundles"),
    "replay": Command("replay", "build, verify and time a record again: is it still true?"),
    "report": Command("report", "a page of what journals and bundles hold: curves, times, failures, roofline, sources"),
    "inspect": Command("inspect", "resources and texts of a bundle or a problem: TIR, CUDA, PTX, SASS, AMDGCN"),
    "explain": Command("explain", "a problem's schedule as a story: the program after each step, and what changed"),
    "cache": Command("cache", "the kernels that PyTorch's calls built before, kept on disk: how many, or remove them"),
    "doctor": Command("doctor", "what is installed, what is missing, and what can be built and run here"),
}


def usage() -> str:
    """The commands, a line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: schedules COMMAND ...",
            "",
            *lines,
            "",
            "`schedules COMMAND --help` says more.  Exit codes: 0 done, 1 wrong result or failed build, 2 bad usage.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.  Mistakes are one line on standard error.

    Without `argv` the command is this process's, which heeds signals and ends with it.
    """
    if argv is None:
        interrupts.heed()
        import_tvm_alone()
        interrupts.run(lambda: main(sys.argv[1:]))
    try:
        return _run(list(argv))
    except SchedulesError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return interrupts.answer(interrupts.LINE)
    except BrokenPipeError:
        # the reader of our output has seen enough; keep Python from saying so when it closes the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError as error:
        return _fail(f"out of memory: {error or 'nothing is left'}; give a smaller problem, or end other programs", 1)
    except Exception as error:  # a fault of this package: reported in one line like any other, with the way to see more
        if os.environ.get("SCHEDULES_DEBUG"):
            raise
        return _fail(f"internal: {type(error).__name__}: {error}; set SCHEDULES_DEBUG=1 for the traceback", 1)


def _run(argv: list[str]) -> int:
    if not argv:
        raise UsageError(f"no command given; use one of {', '.join(COMMANDS)}")
    name, rest = argv[0], argv[1:]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"te-schedules {version_of('te-schedules') or 'unknown'}")
        return 0
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise UnknownNameError(kind, name, [*COMMANDS, "--help", "--version"])
    command, parser = command_parser(name)
    try:
        code: int = command.run(parse(parser, rest))
    except SystemExit as asked:  # argparse's --help
        return int(asked.code or 0)
    sys.stdout.flush()
    return code


def command_parser(name: str) -> tuple[ModuleType, Parser]:
    """The module of a command of COMMANDS, and the parser of its arguments."""
    command = import_module(f"schedules.cli.{COMMANDS[name].module}")
    parser = Parser(prog=f"schedules {name}", description=COMMANDS[name].summary)
    command.add_arguments(parser)
    return command, parser


def _fail(message: str, code: int) -> int:
    if interrupts.asked():  # what fails after a signal may well fail by it
        return interrupts.answer(interrupts.LINE)
    print(f"schedules: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
