#!/usr/bin/env python3
"""Verify and time convolution presets beside cuDNN's best algorithm for the same work, in one run on this GPU.

scripts/compare_cudnn.py k100-2 k100-3 resnet50-14-256-256-3x3 --set n=256 --log tuning_logs
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from schedules.build import build
from schedules.errors import SchedulesError, UsageError
from schedules.measure import local_gpu, measure, time_cuda
from schedules.peers import cudnn
from schedules.presets import resolve
from schedules.problem import Conv2dProblem
from schedules.records import record
from schedules.tune.journal import append
from schedules.verify import verify


def peer_us(problem: Conv2dProblem) -> dict[str, float]:
    """Microseconds of cuDNN by layout ("cudnn nhwc"); int8 also beside its float16, faster where int8 collapses."""
    if problem.dtype == "int8":
        calls = {f"int8 nhwc, algorithm {i}": call for i, call in enumerate(cudnn.int8_convolutions(problem))}
        calls["float16 nhwc"] = cudnn.convolution(problem, channels_last=True, dtype="float16")
    else:
        calls = {name: cudnn.convolution(problem, name == "nhwc") for name in ("nhwc", "nchw")}
    return {f"cudnn {name}": float(np.median(time_cuda(lambda call=call: call(), 0.3))) for name, call in calls.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields in place of the presets'")
    parser.add_argument("--schedule")
    parser.add_argument("--log")
    args = parser.parse_args()
    arch = local_gpu()
    if arch is None:
        raise UsageError("no CUDA GPU here to compare on")
    for name in args.presets:
        _, problem = resolve(name, dict(word.split("=", 1) for word in args.set))
        if not isinstance(problem, Conv2dProblem):
            raise UsageError(f"{name} is not a convolution")
        (check,) = verify(problem, arch, args.schedule, routes=["device"])
        if not check.passed:
            print(f"{name:28} WRONG: {check.detail}", flush=True)
            continue
        built = build(problem, arch, args.schedule)
        ours = measure(built)
        peers = peer_us(problem)
        best = min(peers, key=lambda peer: peers[peer])
        share = f"{peers[best] / ours.median_us:6.2f} of {best}"
        rate = problem.flops / ours.median_us / 1e6
        line = f"{name:28} {built.schedule.name:8} {ours.median_us:9.2f} us  {rate:7.1f} T/s"
        others = "  ".join(f"{peer} {us:.1f} us" for peer, us in peers.items())
        print(f"{line}  {share}  {others}  {built.config}", flush=True)
        if args.log:
            append(args.log, record(built, ours, check.error, more={"preset": name, "peers": peers}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SchedulesError as error:
        sys.exit(f"error: {error}")
