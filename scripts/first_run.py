#!/usr/bin/env python3
"""The whole road once: search a real problem on this machine, export the winner, run it from a fresh process, and
cross-build the tutorial's convolution for CUDA and ROCm.

    scripts/first_run.py [--trials N] [--minutes M] [--out DIR]
"""

from __future__ import annotations

if __name__ == "__main__":
    from schedules.core.interrupts import heed

    heed()  # while the imports below take their seconds, too

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from schedules.build.builder import build
from schedules.build.present import local_gpu
from schedules.bundle.bundle import write_bundle
from schedules.bundle.export import export_record
from schedules.cli.script import run_script
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import SchedulesError, TuningError
from schedules.core.presets import preset
from schedules.core.process import child
from schedules.tune.crews import CrewOptions
from schedules.tune.progress import comparison, watcher_for
from schedules.tune.session import Work, stopping_signals, tune
from schedules.tune.tuner import Limits

CPU_PRESET, GPU_PRESET = "cpu-conv", "tutorial"
CROSS = ("cuda:sm_90a", "rocm:gfx90a")
console = Console(highlight=False, soft_wrap=True)


def search_and_export(name: str, arch: Arch, limits: Limits, out: Path) -> Path:
    """The bundle of the best config; run again, the search goes on where it was."""
    console.print(f"\n[bold]Searching {name} on {arch}[/bold]")
    crew = CrewOptions().open(arch)
    try:
        with watcher_for() as view, stopping_signals(view.urgent) as stop:
            work = Work(preset(name).problem(), arch, limits)
            found = tune(work, crew, folder=out / "tuning_logs", watcher=view, stop=stop)
    finally:
        crew.close()
    if not found.best:
        raise TuningError(f"no config of {name} was correct on {arch}")
    console.print(comparison(found.best, found.default or found.status.default, found.status.peers))
    if not found.finished:
        raise KeyboardInterrupt
    return export_record(found.best, arch, out / f"{name}-{arch.kind}")


def run_from_fresh_process(bundle: Path) -> None:
    """Load the bundle and run it on random data in a new interpreter, against the reference."""
    console.print(f"\n[bold]Running {bundle} from a fresh process[/bold]")
    with child([sys.executable, "-m", "schedules", "verify", str(bundle)], stderr=subprocess.PIPE) as verifying:
        _, why = verifying.communicate()
    if verifying.returncode:
        raise SchedulesError(f"{bundle} cannot be run from a fresh process: {why}")


def cross_build(target: str, out: Path) -> None:
    problem, arch = preset(GPU_PRESET).problem(), parse_arch(target)
    console.print(f"\n[bold]Building {GPU_PRESET} for {arch}[/bold]")
    bundle = write_bundle(build(problem, arch), out, force=True)
    for file in sorted(bundle.path.iterdir()):
        if file.suffix in (".so", ".cu", ".ptx", ".cubin", ".s", ".hsaco"):
            console.print(f"  {file}  {file.stat().st_size:,} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40, help="of each search, those of earlier runs counted")
    parser.add_argument("--minutes", type=float, default=0.5, help="for each search")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    gpu = local_gpu()
    runs = [(CPU_PRESET, parse_arch("llvm"))] + ([(GPU_PRESET, gpu)] if gpu else [])
    for name, arch in runs:
        run_from_fresh_process(search_and_export(name, arch, Limits(args.trials, args.minutes), args.out))
    for target in CROSS:
        cross_build(target, args.out / f"{GPU_PRESET}-{parse_arch(target).name}")
    console.print("\nLook inside: [bold]schedules inspect out/tutorial-sm_90a[/bold]")
    return 0


if __name__ == "__main__":
    run_script(main, "stopped; the same command goes on")
