"""What the choice of a layer costs: the processor's time until its schedule and config are known.

    python -m benchmarks.choice_cost                     # every ninth of the layers that compare_layers measures

Milliseconds of `predict.rank.ranked` for layers of `benchmarks.compare_layers` that the process has not seen, one after
the other, as those of a network come: of each the median of several processes, one after the other.  Kept in
``tuning_logs/<device>/choice_cost.json``; `python -m benchmarks.readme_tables` makes RESULTS.md's table of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from benchmarks.compare_layers import arguments, chosen_layers
from benchmarks.peers.choice_cost import KIND, choice_table, read_choices
from benchmarks.peers.kept import keep_costs
from benchmarks.peers.layer_case import Layer
from schedules.build.present import cpu_name
from schedules.cli.script import run_script
from schedules.core.arch import parse_arch
from schedules.core.versions import versions
from schedules.measure.journal import DEFAULT_FOLDER
from schedules.predict.rank import ranked

EVERY, PASSES = 9, 5


def costs(layers: Sequence[Layer]) -> list[float]:
    """The milliseconds that the choice of each layer takes, in a process that has chosen for another."""
    arch, found = parse_arch("cuda:sm_90a"), []
    for layer in (layers[-1], *layers):
        start = time.process_time()
        ranked.__wrapped__(layer.problem, arch)
        found.append(1e3 * (time.process_time() - start))
    return found[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=DEFAULT_FOLDER, help="the folder of tuning logs")
    parser.add_argument("--every", type=int, default=EVERY, help="take every so manyth layer (default %(default)s)")
    args = parser.parse_args()
    layers, times = chosen_layers(arguments([]))[:: args.every], []
    for _ in range(PASSES):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            times.append(process.submit(costs, layers).result())
    medians = map(median, zip(*times, strict=True))
    rows = [{**layer.to_json(), "ms": round(ms, 2)} for layer, ms in zip(layers, medians, strict=True)]
    file = keep_costs(args.logs, KIND, cpu_name(), versions(), {"layers": rows})
    print(choice_table([read_choices(file)]))
    print(file)
    return 0


if __name__ == "__main__":
    run_script(main)
