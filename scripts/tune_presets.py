#!/usr/bin/env python3
"""Search every schedule of the named presets on this machine's device and log the best of each.

    scripts/tune_presets.py tutorial oneflow-1024 --target cuda:sm_90a --trials 24 --log tuning_logs

Writes one line a schedule to LOG/<device>/<operator>.jsonl: the best config, its time, and the default's.
"""

from __future__ import annotations

import argparse
import sys

from schedules.arch import parse_arch
from schedules.build import operator_of
from schedules.errors import SchedulesError, UsageError
from schedules.measure import copy_bandwidth, device_name
from schedules.presets import preset
from schedules.records import append, record
from schedules.tune.search import search


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--trials", type=int, default=24, help="configs of each schedule")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each schedule")
    parser.add_argument("--log", help="folder of the logs; without it nothing is written")
    args = parser.parse_args()
    arch = parse_arch(args.target)
    if device_name(arch) is None:
        raise UsageError(f"no device for {arch} here; choose another --target")
    for name in args.presets:
        problem = preset(name).problem()
        copy = copy_bandwidth(max(2**20, problem.min_bytes // 2)) if arch.kind == "cuda" else None
        for spec in operator_of(problem).schedules:
            if arch.kind not in spec.kinds or next(spec.legal_space(problem, arch), None) is None:
                continue
            found = search(problem, arch, spec.name, trials=args.trials, seconds=args.seconds)
            us, default = found.measured.median_us, found.default.measured
            line = f"{name:14} {spec.name:16} {us:10.2f} us  {problem.flops / us / 1e6:8.2f} TFLOP/s"
            line += f"  {problem.min_bytes / us / 1e3:7.0f} GB/s"
            line += f" ({100 * problem.min_bytes / us / 1e3 / copy:5.1f}% of a copy)" if copy else ""
            print(f"{line}  {len(found.trials)} trials  {found.best.config}", flush=True)
            if args.log:
                extra = {"copy_gbytes_per_s": copy, "trials": len(found.trials), "preset": name}
                extra["default_us"] = default.median_us if default else None
                append(args.log, record(found.best, found.measured, found.error, **extra))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SchedulesError as error:
        sys.exit(f"error: {error}")
