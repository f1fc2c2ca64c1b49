#!/usr/bin/env python3
"""Every preset built for one target, as a Python package that needs neither this one nor a compiler.

    scripts/export_all.py --target cuda:sm_90a --wheel           # out/te-kernels-cuda-sm_90a-<version>/, and its wheel
    scripts/export_all.py 'oneflow-*' tutorial --target llvm     # some presets
    scripts/export_all.py --wheel --keep tuning_logs             # sizes and load times to tuning_logs/<device>/, too

Each kernel is what `schedules build` would take: the best record of the device, else the default; the index says which.
A preset that is not for the target is skipped, one that fails is reported; neither costs another.  Exit code 1 if any
failed.
"""

from __future__ import annotations

if __name__ == "__main__":
    from schedules.core.interrupts import heed

    heed()  # while the imports below take their seconds, too

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where `benchmarks` is

from benchmarks.peers.kept import keep_costs
from schedules.build.builder import compiler_of
from schedules.build.present import device_name
from schedules.build.toolchain.devices import on_local
from schedules.bundle.library.collect import Made, Order, collect
from schedules.bundle.library.write import Library, build_wheel, write_library
from schedules.bundle.package.__main__ import summary
from schedules.cli.arguments import add_sign, key_to_sign
from schedules.cli.output import table
from schedules.cli.script import run_script
from schedules.core.arch import parse_arch
from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.presets import presets
from schedules.core.versions import versions
from schedules.measure.records import environment

KIB = 1024

KIND = "export_all"  # of the file that --keep writes


def wanted(words: Sequence[str]) -> list[str]:
    """The presets that the words, names or patterns, stand for; all without any.  Raises UnknownNameError."""
    names = list(presets())
    for word in words:
        if not fnmatch.filter(names, word):
            raise UnknownNameError("preset", word, names)
    return [name for name in names if not words or any(fnmatch.fnmatch(name, word) for word in words)]


def report(made: Made) -> None:
    """What became of a preset, in a line."""
    if made.entry:
        print(f"{made.preset}: {made.entry['schedule']}, {made.entry['why']}; {made.entry['bytes'] / KIB:.0f} KiB")
    else:
        print(f"{made.preset}: {'skipped' if made.skipped else 'FAILED'}: {made.why}")
    sys.stdout.flush()


def times_of(library: Library) -> dict[str, object]:
    """How long the library's kernels take to load here, as it says itself."""
    # -B: what lies in a signed library is signed
    command = [sys.executable, "-B", "-m", library.package, "--times", "--json"]
    done = subprocess.run(command, cwd=library.path, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def show(library: Library, times: dict[str, object]) -> None:
    """Sizes and load times as a table."""
    loaded = times["kernels_ms"]
    assert isinstance(loaded, dict)
    rows = []
    for name, entry in library.index["kernels"].items():
        binary = entry["files"][entry["library"]]["bytes"]
        took = f"{loaded[name]:.1f}" if name in loaded else ""
        rows.append(
            (name, entry["schedule"], entry["source"], f"{entry['bytes'] / KIB:.0f}", f"{binary / KIB:.0f}", took)
        )
    table(("kernel", "schedule", "config from", "KiB", "of it .so", "load ms"), rows)
    print(summary(times))


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="names or patterns (default: all)")
    parser.add_argument("--target", default="llvm", help="as of schedules build (default llvm)")
    parser.add_argument("--out", default="out", metavar="DIR", help="folder to write the library's into (default out)")
    parser.add_argument("--version", default=versions()["te-schedules"], help="default: that of te-schedules")
    parser.add_argument("--wheel", action="store_true", help="a wheel beside the folder, too")
    parser.add_argument("--force", action="store_true", help="replace a library that is there")
    add_sign(parser)
    parser.add_argument("--default", action="store_true", help="default configs, whatever was measured")
    parser.add_argument("--device", metavar="NAME", help="build for this device (default: the one that is here)")
    parser.add_argument("--logs", action="append", metavar="DIR", help="look for records here; may be repeated")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help=f"write sizes and load times to DIR/<device>/{KIND}.json"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="processes (default: all cores)")
    args = parser.parse_args(words)
    if args.workers < 1:
        raise UsageError("--workers must be at least 1")
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    arch, names = on_local(parse_arch(args.target)), wanted(args.presets)
    compiler = compiler_of(arch)  # without a compiler every preset would fail
    device = device_name(arch)
    if args.keep and device is None:
        raise UsageError(f"--keep is for a machine that {arch} runs on, where kernels can be loaded")
    found: list[Made] = []

    def make(folder: Path) -> list[Made]:
        logs = tuple(args.logs) if args.logs else None
        orders = [Order(name, arch, folder / name, args.device, logs, args.default) for name in names]
        for made in collect(orders, args.workers):
            report(made)
            found.append(made)
        return found

    key = key_to_sign(args)
    start = time.monotonic()
    library = write_library(args.out, arch, args.version, make, force=args.force, key=key)
    took = time.monotonic() - start
    times = times_of(library)
    (library.path / "load_times.json").write_text(json.dumps(times, indent=1) + "\n")
    print()
    show(library, times)
    total = sum(entry["bytes"] for entry in library.index["kernels"].values())
    built, skipped = len(library.index["kernels"]), sum(made.skipped for made in found)
    failed = len(found) - built - skipped
    print(
        f"{library.path}: {built} kernels, {total / KIB**2:.1f} MiB, {took:.0f} s; {skipped} skipped, {failed} failed"
    )
    wheel_nbytes = None
    if args.wheel:
        wheel = build_wheel(library, args.out)
        wheel_nbytes = wheel.stat().st_size
        print(f"{wheel}: {wheel_nbytes / KIB**2:.1f} MiB")
    if args.keep:
        sizes = {"target": str(arch), "nbytes": total, "wheel_nbytes": wheel_nbytes, "seconds": round(took, 1)}
        print(keep_costs(args.keep, KIND, str(device), environment(arch, compiler), {**sizes, **times}))
    return 1 if failed else 0


if __name__ == "__main__":
    run_script(main)
