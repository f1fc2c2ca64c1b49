"""What the kernels of every preset are made of on an AMD GPU, and of an earlier version beside them: no GPU is needed.

    python -m benchmarks.instruction_mix --target rocm:gfx942
    git worktree add ../before v0.1 && python -m benchmarks.instruction_mix --target rocm:gfx942 --before ../before

Each preset is built as `schedules build` does, by this version and by that of the folder --before.  The assembly of
both is counted by the same rules, those of `schedules inspect`.  Kept in ``tuning_logs/<GPU>/instruction_mix.json``,
from which `python -m benchmarks.readme_tables` makes the table of docs/inspect.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.instruction_mix import KIND
from benchmarks.peers.kept import keep_costs
from schedules.build.builder import compiler_of
from schedules.build.inspect import Material, amdgcn_resources, summary
from schedules.build.library import Launch
from schedules.cli.script import run_script
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import UsageError
from schedules.core.presets import presets
from schedules.measure.journal import DEFAULT_FOLDER
from schedules.measure.records import environment

ROOT = Path(__file__).resolve().parents[1]
# run beside the package of either version: only what both have
BUILD = """
import json, sys
from schedules.build.builder import build
from schedules.core.arch import parse_arch
from schedules.core.errors import SchedulesError
from schedules.core.presets import preset

arch = parse_arch(sys.argv[1])
for name in sys.argv[2:]:
    chosen = preset(name)
    made = {"preset": name, "operator": chosen.operator}
    try:
        built = build(chosen.problem(), arch)
        made |= {"dtype": getattr(built.problem, "dtype", "int8"), "schedule": built.schedule.name}
        made |= {"launch": [built.launch.grid, built.launch.block], "lowered": built.lowered}
        made |= {"assembly": built.sources["s"]}
    except SchedulesError as error:
        made |= {"refused": str(error)}
    print(json.dumps(made), flush=True)
"""


def made_by(folder: Path, arch: Arch, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What the version in `folder` makes of each preset: schedule, launch, lowered program and assembly, or why it
    refuses.  Raises UsageError if its process fails."""
    command = [sys.executable, "-c", BUILD, str(arch), *names]
    # not the folder alone: an interpreter may have its packages from there
    places = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": places}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise UsageError(f"the build in {folder} ended with {process.returncode}; give a checkout of this project")


def counted(made: dict[str, Any], arch: Arch) -> dict[str, Any]:
    """A row of the file: what one kernel uses and its instructions by kind."""
    row = {name: made[name] for name in ("preset", "operator", "dtype", "schedule", "refused") if name in made}
    if "refused" in made:
        return row
    grid, block = made["launch"]
    sources = {"s": made["assembly"]}
    resources = amdgcn_resources(made["assembly"], arch)
    found = summary(Material(made["preset"], arch, Launch(grid, block), resources, "", "", made["lowered"], sources))
    used = {
        "threads": found.threads,
        "registers": found.registers,
        "accumulators": found.accumulators,
        "scalars": found.scalars,
        "scratch": found.scratch,
        "lds": found.shared,
        "waves": found.waves,
        "products": found.busy and round(found.busy, 3),
        "limit": found.busy_limit,
        "conflicts": found.conflicts and round(found.conflicts, 3),
    }
    return {**row, **{name: value for name, value in used.items() if value is not None}, **found.counts}


def commit(folder: Path) -> str:
    """The commit that is checked out in `folder`, shortened; empty if it is none."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="default: all")
    parser.add_argument("--target", required=True, help="an AMD GPU, as rocm:gfx942")
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of an earlier version, counted too")
    parser.add_argument("--logs", type=Path, default=DEFAULT_FOLDER, help="the folder of tuning logs")
    args = parser.parse_args(words)
    arch, names = parse_arch(args.target), args.presets or list(presets())
    if arch.kind != "rocm":
        raise UsageError(f"--target {arch} is no AMD GPU; give one, as rocm:gfx942")
    found: dict[str, Any] = {}
    for when, folder in {"before": args.before, "now": ROOT}.items():
        if folder:
            found |= {f"commit_{when}": commit(folder), when: []}
            for made in made_by(folder.resolve(), arch, names):
                found[when].append(row := counted(made, arch))
                print(f"{when} {row['preset']}: {row.get('schedule') or row['refused']}", flush=True)
    print(keep_costs(args.logs, KIND, f"AMD {arch.name}", environment(arch, compiler_of(arch)), found))
    return 0


if __name__ == "__main__":
    run_script(main)
