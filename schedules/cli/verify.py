"""``schedules verify``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules.bundle.bundle import Bundle
from schedules.bundle.package.loader import MANIFEST
from schedules.bundle.signature import public_key
from schedules.cli.arguments import add_json, add_problem, bundle_path, job, print_choice, seeds
from schedules.cli.output import emit_json, table
from schedules.core.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from schedules.check.verify import Check

ROUTES = ("device", "emulated", "serial")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser, "an operator or a preset, then its fields; or the folder of a bundle or a library")
    known = f"{', '.join(ROUTES)} (default: the device, else what is here)"
    parser.add_argument("--route", metavar="ROUTE,...", help=known)
    parser.add_argument("--seeds", default="0", metavar="N,...", help="a run with the random data of each (default: 0)")
    parser.add_argument(
        "--key",
        metavar="KEY",
        help="refuse a bundle or a library that the owner of this public key, a PEM file, did not sign",
    )
    add_json(parser)


def as_json(check: Check) -> dict[str, Any]:
    """A check as plain data."""
    return {
        "route": check.route,
        "problem": check.problem.to_json(),
        "seed": check.seed,
        "error": check.error,
        "passed": check.passed,
        "detail": check.detail,
        "seconds": check.seconds,
    }


def print_checks(checks: list[Check]) -> None:
    """Checks as a table."""
    rows = [
        (c.route, c.seed, "passed" if c.passed else "FAILED", f"{c.error:.3g}", f"{c.seconds:.2f}", c.problem, c.detail)
        for c in checks
    ]
    table(("route", "seed", "result", "error / allowed", "s", "problem", "worst"), rows)


def run(args: argparse.Namespace) -> int:
    numbers = seeds(args.seeds)
    routes = args.route.split(",") if args.route else None
    for route in routes or ():
        if route not in ROUTES:
            raise UnknownNameError("route", route, ROUTES)
    folder = bundle_path(args)
    if args.key and not folder:
        raise UsageError("--key is for a bundle or a library; give its folder")
    if folder:
        title, checks = _folder_checks(folder, args.key, routes, numbers)
    else:
        title, checks = _problem_checks(args, routes, numbers)
    passed = bool(checks) and all(check.passed for check in checks)
    if args.json:
        emit_json({**title, "passed": passed, "checks": [as_json(check) for check in checks]})
    else:
        print_checks(checks)
    return 0 if passed else 1


def _problem_checks(
    args: argparse.Namespace, routes: list[str] | None, numbers: tuple[int, ...]
) -> tuple[dict[str, Any], list[Check]]:
    work = job(args)
    from schedules.check.verify import verify

    checks = verify(work.problem, work.arch, work.spec.name, work.config, routes=routes, seeds=numbers)
    if not args.json:
        print_choice(work)
    return {"target": str(work.arch), "schedule": work.spec.name, "config": work.config.to_json()}, checks


def _folder_checks(
    path: Path, key: str | None, routes: list[str] | None, numbers: tuple[int, ...]
) -> tuple[dict[str, Any], list[Check]]:
    """A bundle, or every bundle of a library, is compiled: the device is the only route.

    Nothing of it is loaded before all of it was found intact and, with a `key`, signed.
    """
    from schedules.bundle.library.write import Library
    from schedules.check.verify import verify_function

    owner = public_key(key) if key else None
    if (path / MANIFEST).exists() or not Library.is_at(path):
        bundles = [Bundle.open(path, owner)]
        told = {name: bundles[0].manifest[name] for name in ("schedule", "config")}
    else:
        bundles = [Bundle.open(folder) for folder in Library.open(path, owner).bundles]
        told = {"bundles": [str(bundle.path) for bundle in bundles]}
    if routes not in (None, ["device"]):
        raise UsageError(f"{path} is a bundle and runs on its device only; leave out --route")
    checks = [
        check
        for bundle in bundles
        for check in verify_function(
            bundle.problem, bundle.arch, bundle.load(), numbers, str(bundle.manifest["schedule"]), bundle.config
        )
    ]
    return {"target": str(bundles[0].arch), "signed": owner is not None, **told}, checks
