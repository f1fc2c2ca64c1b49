"""``schedules build``."""

from __future__ import annotations

import argparse
import dataclasses

from schedules.bundle.bundle import check_destination, write_bundle
from schedules.cli.arguments import add_code_object, add_json, add_problem, add_sign, choice, job, key_to_sign
from schedules.cli.output import dimensions, emit_json, fields
from schedules.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser)
    parser.add_argument("--default", action="store_true", help="the default config, whatever was measured")
    parser.add_argument("--out", metavar="DIR", help="write a bundle into this folder")
    parser.add_argument("--force", action="store_true", help="replace the bundle that --out holds")
    add_sign(parser)
    add_code_object(parser)
    parser.add_argument("--measure", action="store_true", help="time it on its device, and keep the time in the bundle")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.force and not args.out:
        raise UsageError("--force replaces the bundle in --out; give --out DIR")
    if args.sign and not args.out:
        raise UsageError("--sign signs the bundle in --out; give --out DIR")
    if args.default and args.config:
        raise UsageError("--config replaces fields of the default config already; leave out --default")
    work = job(args, heeds_records=True)
    key = key_to_sign(args)
    if args.out:
        check_destination(args.out, force=args.force)
    from schedules.build.builder import build

    chosen = choice(args, work, default=args.default)
    built = build(work.problem, work.arch, chosen.schedule, chosen.config, code_object=args.code_object)
    measured = None
    if args.measure:
        from schedules.measure.timer import measure

        measured = dataclasses.asdict(measure(built))
    bundle = write_bundle(built, args.out, force=args.force, measured=measured, key=key) if args.out else None
    resources = bundle.resources if bundle else built.resources
    if args.json:
        result = {
            "operator": built.operator.name,
            "problem": built.problem.to_json(),
            "schedule": built.schedule.name,
            "config": built.config.to_json(),
            "source": chosen.source,
            "record": chosen.record and chosen.record.to_json(),
            "target": str(built.arch),
            "compiler": built.compiler,
            "seconds": built.seconds,
            "launch": built.launch and dataclasses.asdict(built.launch),
            "resources": [dataclasses.asdict(used) for used in resources],
            "measured": measured,
            "bundle": bundle and str(bundle.path),
            "files": sorted([*bundle.manifest["files"], "kernel.json"]) if bundle else [],
        }
        emit_json(result)
        return 0
    launch = built.launch
    fields(
        {
            "operator": f"{built.operator.name} {built.problem}",
            "schedule": f"{built.schedule.name}: {built.config}",
            "config": chosen,
            "target": f"{built.arch}, {built.compiler}, {built.seconds:.2f} s",
            "launch": launch and f"grid {dimensions(launch.grid)}, block {dimensions(launch.block)}",
        }
    )
    for used in resources:
        print(f"{used.name}: {used.registers} registers, {used.shared} bytes shared, {used.spilled} bytes spilled")
    if measured:
        print(f"{measured['median_us']:.1f} us on {measured['device']}")
    if bundle:
        print(f"bundle in {bundle.path}: {', '.join(sorted([*bundle.manifest['files'], 'kernel.json']))}")
    return 0
