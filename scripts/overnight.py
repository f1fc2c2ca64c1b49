#!/usr/bin/env python3
"""Search every problem of a plan through the night; in the morning: verified kernels as bundles, and a report.

    scripts/overnight.py scripts/plans/h200.toml [--log DIR] [--out DIR] [--ray ADDRESS]

Whatever ends it, the same command goes on where it was.  The same as `schedules tune --plan`.
"""

from __future__ import annotations

import argparse
import sys

from schedules.cli import main as schedules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help="a TOML file; scripts/plans/ has examples")
    parser.add_argument("--log", metavar="DIR", help="journals (default: tuning_logs)")
    parser.add_argument("--out", metavar="DIR", help="bundles and report (default: as the plan says)")
    parser.add_argument("--ray", metavar="ADDRESS", help="use the Ray cluster there")
    parser.add_argument("--device", metavar="NAME", help="of several kinds of device in the cluster, the one to use")
    args = parser.parse_args()
    given = {"--log": args.log, "--out": args.out, "--ray": args.ray, "--device": args.device}
    options = [word for option, value in given.items() if value for word in (option, value)]
    return schedules(["tune", "--plan", args.plan, *options])


if __name__ == "__main__":
    sys.exit(main())
