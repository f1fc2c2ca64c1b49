"""What a search of few trials finds of layers that nobody recorded, beside one of many trials.

    python -m benchmarks.few_trials                        # 12 layers, 8 and 200 trials, kept in LOG/<device>/
    python -m benchmarks.few_trials networks.json --layers 40 --few 8 --many 400
    python -m benchmarks.few_trials --only 'conv2d_nhwc float16' --target llvm --few 4 --many 8

Both begin where the choice ends, with an empty journal; the longer search goes on where the short one ended.  What a
search found is timed again when it ends, its finalists and the default in turn: these times are compared.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare_layers import chosen_layers
from benchmarks.peers.few_trials import KIND, told
from benchmarks.peers.kept import keep_costs
from benchmarks.peers.layer_case import Layer
from schedules.build.present import local_gpu
from schedules.cli.script import run_script
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import TuningError, UsageError
from schedules.measure.journal import DEFAULT_FOLDER
from schedules.tune.crew import LocalCrew
from schedules.tune.session import Work, tune
from schedules.tune.tuner import Limits


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of sets, as compare_layers takes them (default: all)")
    parser.add_argument(
        "--only", nargs="+", default=["*float16"], metavar="PATTERN", help="runs (default: all in float16)"
    )
    parser.add_argument("--layers", type=int, default=12, help="layers at most, a fair sample of all (default 12)")
    parser.add_argument("--few", type=int, default=8, help="trials of the short search (default 8)")
    parser.add_argument("--many", type=int, default=200, help="trials of the long one (default 200)")
    parser.add_argument("--target", help="default: the GPU of this machine")
    parser.add_argument("--log", type=Path, default=DEFAULT_FOLDER, help="folder of the results")
    args = parser.parse_args(words)
    if not 1 <= args.few < args.many or args.layers < 1:
        raise UsageError("--few must be at least 1 and less than --many, --layers at least 1")
    # what else `chosen_layers` asks
    return argparse.Namespace(**vars(args), every=None, runs=None, start=0, step=1)


def searched(layer: Layer, arch: Arch, crew: LocalCrew, few: int, many: int) -> dict[str, Any]:
    """A row of the result: the microseconds of the default and of what `few` and `many` trials found."""
    row: dict[str, Any] = layer.to_json()
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "trials.jsonl"
        for name, trials in (("few", few), ("many", many)):
            found = tune(Work(layer.problem, arch, Limits(trials=trials)), crew, journal=journal)
            if found.best is None or found.default is None:
                raise TuningError(f"{layer}: nothing that was tried is correct; see {journal}")
            row[f"default_{name}_us"], row[f"{name}_us"] = round(found.default.us, 2), round(found.best.us, 2)
            row[f"{name}_trials"], row[f"{name}_schedule"] = found.status.done, found.best.schedule
    return row


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    arch = parse_arch(args.target) if args.target else local_gpu()
    if arch is None:
        raise UsageError("no CUDA GPU here to search on; name a --target")
    rows = []
    crew = LocalCrew(arch)
    try:
        for layer in chosen_layers(args)[: args.layers]:
            rows.append(searched(layer, arch, crew, args.few, args.many))
            print(told(rows[-1]), flush=True)
            file = keep_costs(args.log, KIND, crew.device, crew.versions, {"searches": rows})
    finally:
        crew.close()
    print(file)
    return 0


if __name__ == "__main__":
    run_script(main, "stopped; the layers that were finished are kept")
