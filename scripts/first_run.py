#!/usr/bin/env python3
"""The whole road once: search a real problem on this machine, export the winner, run it from a fresh process, and
cross-build the tutorial's convolution for CUDA and ROCm.

    scripts/first_run.py [--trials N] [--seconds S] [--out DIR]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from schedules.arch import Arch, parse_arch
from schedules.build import build
from schedules.bundle import Bundle, write_bundle
from schedules.errors import SchedulesError
from schedules.measure import local_gpu
from schedules.presets import preset
from schedules.records import record
from schedules.tune.search import Trial, search

CPU_PRESET, GPU_PRESET = "cpu-conv", "tutorial"
CROSS = ("cuda:sm_90a", "rocm:gfx90a")
console = Console(highlight=False, soft_wrap=True)


def search_and_export(name: str, arch: Arch, trials: int, seconds: float, out: Path) -> Bundle:
    problem = preset(name).problem()
    console.print(f"\n[bold]Searching {name} on {arch}[/bold]: {problem}")

    def show(trial: Trial, best: Trial | None) -> None:
        time = f"{trial.measured.median_us:10.1f} us" if trial.measured else trial.outcome
        mark = " *" if trial is best else ""
        console.print(f"  {time}  {trial.config}{mark}")

    found = search(problem, arch, trials=trials, seconds=seconds, progress=show)
    speedup = found.default.measured.median_us / found.measured.median_us if found.default.measured else float("nan")
    console.print(
        f"best of {len(found.trials)}: {found.measured.median_us:.1f} us, "
        f"{problem.flops / found.measured.median_us / 1e3:.0f} GFLOP/s, {speedup:.2f}x the default, "
        f"worst error {found.error:.2f} of what is allowed, on {found.measured.device}"
    )
    return write_bundle(found.best, out, force=True, measured=record(found.best, found.measured, found.error).to_json())


def run_from_fresh_process(bundle: Path) -> None:
    """Load the bundle and run it on random data in a new interpreter, against the reference."""
    console.print(f"\n[bold]Running {bundle} from a fresh process[/bold]")
    subprocess.run([sys.executable, "-m", "schedules", "verify", str(bundle)], check=True)


def cross_build(target: str, out: Path) -> None:
    problem, arch = preset(GPU_PRESET).problem(), parse_arch(target)
    console.print(f"\n[bold]Building {GPU_PRESET} for {arch}[/bold]")
    bundle = write_bundle(build(problem, arch), out, force=True)
    for file in sorted(bundle.path.iterdir()):
        if file.suffix in (".so", ".cu", ".ptx", ".cubin", ".s", ".hsaco"):
            console.print(f"  {file}  {file.stat().st_size:,} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the search")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    gpu = local_gpu()
    runs = [(CPU_PRESET, parse_arch("llvm"))] + ([(GPU_PRESET, gpu)] if gpu else [])
    for name, arch in runs:
        folder = args.out / f"{name}-{arch.kind}"
        search_and_export(name, arch, args.trials, args.seconds, folder)
        run_from_fresh_process(folder)
    for target in CROSS:
        cross_build(target, args.out / f"{GPU_PRESET}-{parse_arch(target).name}")
    console.print("\nLook inside: [bold]schedules inspect out/tutorial-sm_90a[/bold]")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SchedulesError as error:
        sys.exit(f"error: {error}")
