"""``schedules inspect``."""

from __future__ import annotations

import argparse
import dataclasses

from schedules.build.inspect import VIEWS, Material, Summary, available, material, summary, view
from schedules.bundle.bundle import Bundle
from schedules.cli.arguments import add_json, add_problem, bundle_path, job, print_choice
from schedules.cli.output import code, dimensions, emit_json, fields, heading
from schedules.core.errors import UnknownNameError

SUMMARY = "summary"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser, "a bundle's folder; or an operator or a preset, then its fields")
    parser.add_argument(
        "--view",
        action="append",
        default=[],
        metavar="VIEW,...",
        help="summary (default), definition, scheduled, lowered, cuda, ptx, sass, llvm, amdgcn, asm, or all",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    names = [name for text in args.view for name in text.split(",") if name] or [SUMMARY]
    for name in names:
        if name not in (*VIEWS, SUMMARY, "all"):
            raise UnknownNameError("view", name, [*VIEWS, SUMMARY, "all"])
    kernel = _kernel(args)
    if "all" in names:
        names = [SUMMARY, *available(kernel)]
    overview = summary(kernel) if SUMMARY in names else None
    texts = {name: view(kernel, name) for name in names if name != SUMMARY}
    if args.json:
        emit_json({SUMMARY: overview and dataclasses.asdict(overview), "views": texts})
        return 0
    if overview:
        _print_summary(overview)
    for name, text in texts.items():
        if len(names) > 1:
            heading(f"{name}: {VIEWS[name].summary}")
        code(text, VIEWS[name].lexer)
    return 0


def _kernel(args: argparse.Namespace) -> Material:
    """The bundle or the freshly built problem that the words name."""
    bundle = bundle_path(args)
    if bundle:
        return Bundle.open(bundle).material()
    work = job(args)
    from schedules.build.builder import build

    if not args.json:
        print_choice(work)
    return material(build(work.problem, work.arch, work.spec.name, work.config))


def _print_summary(found: Summary) -> None:
    print(found.title)
    occupancy = None
    if found.occupancy is not None:
        occupancy = f"{found.occupancy:.0%}: {found.blocks_sm} blocks on a multiprocessor, limited by {found.limit}"
        occupancy += f"; {found.waves} waves a SIMD" if found.waves else ""
    fields(
        {
            "threads": found.block and f"{found.threads} ({dimensions(found.block)})",
            "grid": found.grid and dimensions(found.grid),
            "registers": found.registers,
            "accumulators": found.accumulators,
            "scalars": found.scalars,
            "shared": None if found.shared is None else f"{found.shared} bytes",
            "spills": None if found.spills is None else f"{found.spills} bytes",
            "scratch": f"{found.scratch} bytes" if found.scratch else None,
            "occupancy": occupancy,
            "LDS conflicts": None if found.conflicts is None else f"{found.conflicts:.0%} of LDS's time, by its banks",
            "products": None
            if found.busy is None
            else f"{found.busy:.0%} of the time at most (by AMD's cycles), limited by {found.busy_limit}",
        }
    )
    if found.counts:
        print(f"instructions in the {found.counted_in}:")
        width = max(map(len, found.counts))
        for name, count in found.counts.items():
            print(f"  {name:{width}}  {count}")
    for note in found.notes:
        print(f"note: {note}")
