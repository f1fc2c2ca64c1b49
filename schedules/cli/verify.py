"""``schedules verify``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules.cli.arguments import add_json, add_problem, bundle_path, job, print_choice, seeds
from schedules.cli.output import emit_json, table
from schedules.core.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from schedules.check.verify import Check

ROUTES = ("device", "emulated", "serial")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser, "an operator or a preset, then its fields; or a bundle's folder")
    known = f"{', '.join(ROUTES)} (default: the device, else what is here)"
    parser.add_argument("--route", metavar="ROUTE,...", help=known)
    parser.add_argument("--seeds", default="0", metavar="N,...", help="a run with the random data of each (default: 0)")
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
    bundle = bundle_path(args)
    title, checks = _bundle_checks(bundle, routes, numbers) if bundle else _problem_checks(args, routes, numbers)
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


def _bundle_checks(
    path: Path, routes: list[str] | None, numbers: tuple[int, ...]
) -> tuple[dict[str, Any], list[Check]]:
    """A bundle is compiled: the device is the only route."""
    from schedules.bundle.bundle import Bundle
    from schedules.check.verify import verify_function

    bundle = Bundle.open(path)
    if routes not in (None, ["device"]):
        raise UsageError(f"{path} is a bundle and runs on its device only; leave out --route")
    checks = verify_function(bundle.problem, bundle.arch, bundle.load(), numbers, str(bundle.manifest["schedule"]))
    told = {name: bundle.manifest[name] for name in ("schedule", "config")}
    return {"target": str(bundle.arch), **told}, checks
