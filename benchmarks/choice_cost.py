"""What the choice of a layer costs: the processor's time until its schedule and config are known.

    python -m benchmarks.choice_cost                     # every ninth of the layers that were measured last

Milliseconds of `predict.rank.ranked` for layers of `benchmarks.compare_layers` that the process has not seen, one after
the other, as those of a network come: of each the median of several processes, one after the other.  Kept in
``tuning_logs/<device>/choice_cost.json``; `python -m benchmarks.readme_tables` makes RESULTS.md's table of it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from benchmarks.peers.choice_cost import KIND, choice_table
from benchmarks.peers.kept import keep_costs
from benchmarks.peers.layer_case import layer_named
from schedules.build.present import cpu_name
from schedules.cli.script import run_script
from schedules.core.arch import parse_arch
from schedules.core.versions import versions
from schedules.measure.journal import DEFAULT_FOLDER
from schedules.predict.rank import ranked

EVERY, PASSES = 9, 5
LAYERS = DEFAULT_FOLDER / "nvidia-h200" / "layers.json"


def costs(layers: Sequence[Sequence[str]]) -> list[float]:
    """The milliseconds that the choice of each layer takes, in a process that has chosen for another."""
    arch, found = parse_arch("cuda:sm_90a"), []
    for words in (layers[-1], *layers):
        problem = layer_named(*words).problem
        start = time.process_time()
        ranked.__wrapped__(problem, arch)
        found.append(1e3 * (time.process_time() - start))
    return found[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=DEFAULT_FOLDER, help="the folder of tuning logs")
    parser.add_argument("--every", type=int, default=EVERY, help="take every so manyth layer (default %(default)s)")
    args = parser.parse_args()
    rows = json.loads(LAYERS.read_text())["layers"][:: args.every]
    layers = [{name: row[name] for name in ("set", "operator", "dtype", "layer")} for row in rows]
    words = [tuple(layer.values()) for layer in layers]
    times = []
    for _ in range(PASSES):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            times.append(process.submit(costs, words).result())
    medians = map(median, zip(*times, strict=True))
    content = {"layers": [{**layer, "ms": round(ms, 2)} for layer, ms in zip(layers, medians, strict=True)]}
    file = keep_costs(args.logs, KIND, cpu_name(), versions(), content)
    print(choice_table([json.loads(file.read_text())]))
    print(file)
    return 0


if __name__ == "__main__":
    run_script(main)
