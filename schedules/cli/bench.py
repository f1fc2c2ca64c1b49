"""``schedules bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from schedules.build.present import device_name
from schedules.cli.arguments import add_json, add_problem, job, positive, print_choice
from schedules.cli.output import emit_json
from schedules.cli.verify import as_json, print_checks
from schedules.core.errors import UsageError
from schedules.measure.journal import append
from schedules.measure.records import record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser)
    parser.add_argument("--seconds", type=float, default=0.5, help="about how long to measure (default: 0.5)")
    parser.add_argument("--seed", type=int, default=0, help="of the random data (default: 0)")
    parser.add_argument("--log", metavar="DIR", help="append the result to DIR/<device>/<operator>.jsonl")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    work = job(args)
    positive("--seconds", args.seconds)
    if args.seed < 0:
        raise UsageError(f"--seed {args.seed} must not be negative")
    if args.log and Path(args.log).exists() and not Path(args.log).is_dir():
        raise UsageError(f"--log {args.log} is a file; it needs a folder")
    from schedules.measure.timer import copy_bandwidth, measure

    if device_name(work.arch) is None:
        raise UsageError(f"no device for {work.arch} here; bench where there is one, or `schedules verify` on the CPU")
    from schedules.build.builder import build
    from schedules.check.verify import verify

    checks = verify(work.problem, work.arch, work.spec.name, work.config, routes=["device"], seeds=[args.seed])
    if not all(check.passed for check in checks):
        if args.json:
            emit_json({"passed": False, "checks": [as_json(check) for check in checks]})
        else:
            print_checks(checks)
        return 1
    built = build(work.problem, work.arch, work.spec.name, work.config)
    found = measure(built, seconds=args.seconds, seed=args.seed)
    # the ceiling of work that moves memory, in the same run
    copy = copy_bandwidth(max(2**20, work.problem.min_bytes // 2)) if work.arch.kind == "cuda" else None
    more = {"copy_gbytes_per_s": copy} if copy else {}
    result = record(built, found, max(check.error for check in checks), more=more)
    log = append(args.log, result) if args.log else None
    if args.json:
        rates = {"tflops": result.tflops, "gbytes_per_s": result.gbytes_per_s}
        emit_json({**result.to_json(), **rates, "passed": True, "log": log and str(log)})
        return 0
    print_choice(work)
    print(f"{work.operator.name} {work.problem}, {work.spec.name} for {work.arch} on {found.device}")
    print(f"verified: worst error {result.error:.3g} of what is allowed")
    print(f"{found.median_us:.2f} us ({found.p10_us:.2f} to {found.p90_us:.2f} over {found.runs} runs)", end="")
    share = f" ({result.gbytes_per_s / copy:.1%} of a device copy)" if copy else ""
    print(f"  {result.tflops:.4g} TFLOP/s  {result.gbytes_per_s:.4g} GB/s{share}")
    if log:
        print(f"appended to {log}")
    return 0
