"""``schedules best``."""

from __future__ import annotations

import argparse

from schedules.cli.arguments import add_dispatch, add_json, arch_of, best, split_words, subject
from schedules.cli.output import emit_json, fields
from schedules.cli.searching import build_command
from schedules.core.presets import operator_named, resolve
from schedules.tune.progress import rate_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="NAME [field=value ...]", help="an operator or a preset")
    parser.add_argument("--target", default="llvm", help="llvm, cuda:sm_90a, rocm:gfx942, ... (default: llvm)")
    parser.add_argument("--schedule", help="the best of this schedule only")
    add_dispatch(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    name = subject(args)
    operator_named(name)
    operator, problem = resolve(name, split_words(args.words[1:]))
    arch = arch_of(args, operator)
    found = best(args, problem, arch)
    command = build_command(operator.name, problem, str(arch), found.schedule, found.config)
    record = found.record
    if args.json:
        emit_json(
            {
                "operator": operator.name,
                "problem": problem.to_json(),
                "target": str(arch),
                "source": found.source,
                "note": found.passed_over,
                "schedule": found.schedule,
                "config": found.config.to_json(),
                "record": record and record.to_json(),
                "command": command,
            }
        )
        return 0
    fields(
        {
            "problem": f"{operator.name} {problem}, {arch}",
            "source": found,
            "schedule": f"{found.schedule}: {found.config}",
            "rate": record and rate_text(record),
            "spread": record and record.p10_us and f"{record.p10_us:.2f} to {record.p90_us:.2f} us",
            "verified": record
            and record.error is not None
            and f"worst error {record.error:.3g} of what is allowed, on {', '.join(record.verified) or 'one seed'}",
            "build it": command,
        }
    )
    return 0
