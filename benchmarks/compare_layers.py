"""Layers at their first call beside cuDNN, on this GPU: the default choice, whatever was measured, no search.

    python -m benchmarks.compare_layers                        # every file of sets in benchmarks/layers, about 900
    python -m benchmarks.compare_layers hwcn.json --every 1    # one file, all of its layers
    python -m benchmarks.compare_layers --only 'conv2d_nhwc float16' --seconds 300
    python -m benchmarks.compare_layers networks.json --runs 'conv2d_nchw float32' --schedule winograd
    python -m benchmarks.compare_layers whole/resnet50-int8.json --copy     # a network's layers, beside a copy too
    python -m benchmarks.compare_layers unseen.json --benchmark             # as PyTorch's benchmark mode serves them
    python -m benchmarks.compare_layers --start 1 --step 2 --out part-1.json     # the second of two GPUs' shares
    python -m benchmarks.compare_layers --add part-0.json part-1.json            # both into LOG/<device>/layers.json
    python -m benchmarks.compare_layers --picture docs/layers.png    # of what LOG has; needs no GPU

Kernels are chosen and built ahead in processes of their own; the seconds of that, on one core, are told as the first
call's.  Ours and cuDNN's (every algorithm of both layouts; the fastest counts) run from CUDA graphs in turn, L2 emptied
before each; every result is verified on the device.  cuDNN has int8 convolutions for NHWC data and few shapes: beside
int8 layers its float16 counts too.  Layers that are in the result already are left out, unless --fresh.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import tempfile
import time
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.peers import bench, layer_case
from benchmarks.peers.comparison import GRAPH, reason
from benchmarks.peers.cudnn import torch_module
from benchmarks.peers.layer_case import Layer, failed
from benchmarks.peers.layers import (
    BENCHMARK,
    FOLDER,
    KIND,
    Layers,
    dated,
    layers_of,
    line_of,
    lines,
    picture,
    read_layers,
    timed,
)
from schedules.build.present import device_name, local_gpu
from schedules.cli.script import run_script
from schedules.core.arch import Arch
from schedules.core.device import slug
from schedules.core.errors import DeviceError, UsageError
from schedules.core.parallel import attempt, outcome, processes
from schedules.core.registry import operator_of
from schedules.core.threads import cores
from schedules.measure.journal import DEFAULT_FOLDER
from schedules.measure.timer import CudaTimer, Timer

GOLDEN = 0.6180339887  # multiples of it, modulo 1, fall into the largest gaps that are left
BUILD_SECONDS = 120.0  # of one layer at most
TOGETHER = 40  # layers whose kernels are built at once, and stay loaded until they were measured


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help=f"files of sets, of {FOLDER.name}/ or any folder (default: all there)")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="runs, as 'conv2d_nhwc *' (default all)"
    )
    parser.add_argument("--runs", nargs="+", metavar="RUN", help="in place of the runs that the files name")
    by = parser.add_mutually_exclusive_group()
    by.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"the layers that it takes by it, not by the default choice; kept as LOG/<device>/{KIND}_NAME.json",
    )
    by.add_argument(
        "--benchmark",
        action="store_true",
        help=f"what PyTorch's benchmark mode serves the layers with; kept as LOG/<device>/{BENCHMARK}.json",
    )
    parser.add_argument("--every", type=int, help="every so many layers, in place of what the files say of each run")
    parser.add_argument("--start", type=int, default=0, help="the first of the layers that are taken")
    parser.add_argument("--step", type=int, default=1, help="and every so many after it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no layer after so many")
    parser.add_argument("--each", type=float, default=0.1, help="seconds of timing for each layer, about (default 0.1)")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (cores() or 2) - 1), help="processes that build (default cores - 1)"
    )
    parser.add_argument("--copy", action="store_true", help="beside each layer a copy of as many bytes as it must move")
    parser.add_argument("--log", type=Path, default=DEFAULT_FOLDER, help="folder of the results")
    parser.add_argument("--out", type=Path, help=f"the result (default LOG/<device>/{KIND}.json)")
    parser.add_argument("--fresh", action="store_true", help="measure layers that are in the result too")
    parser.add_argument("--add", nargs="+", type=Path, metavar="FILE", help="only add these results to LOG's")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="only draw LOG's results")
    args = parser.parse_args(words)
    if (
        min(args.step, args.jobs, 1 if args.every is None else args.every) < 1
        or args.start < 0
        or min(args.seconds, args.each) <= 0
    ):
        raise UsageError(
            "--step, --jobs and --every must be at least 1, --start not negative, --seconds and --each over 0"
        )
    return args


def chosen_layers(args: argparse.Namespace) -> list[Layer]:
    """The layers that `args` ask for, each once; the first of them are a fair sample of all, whoever ends the run."""
    files = [Path(name) if Path(name).exists() else FOLDER / name for name in args.files] or sorted(
        FOLDER.glob("*.json")
    )

    def wanted(operator: str, dtype: str) -> bool:
        return any(fnmatch.fnmatchcase(f"{operator} {dtype}", pattern) for pattern in args.only)

    found = {
        layer.problem: layer
        for file in reversed(files)
        for layer in reversed(layers_of(file, wanted, args.every, args.runs))
    }
    runs: dict[tuple[type, str], list[Layer]] = {}
    for layer in reversed(found.values()):
        runs.setdefault((type(layer.problem), layer.problem.dtype), []).append(layer)
    spread = [(place * GOLDEN % 1, layer) for run in runs.values() for place, layer in enumerate(run)]
    return [layer for _, layer in sorted(spread, key=itemgetter(0))][args.start :: args.step]


def takes(schedule: str, layer: Layer, arch: Arch) -> bool:
    """Whether the layer's operator has the schedule, and it the layer."""
    named = (spec for spec in operator_of(layer.problem).schedules if spec.name == schedule)
    return any(spec.serves(layer.problem, arch) for spec in named)


def built_ahead(
    layers: Sequence[Layer], arch: Arch, jobs: int, schedule: str | None = None
) -> Iterator[tuple[Layer, Any, str]]:
    """Each layer with its `layer_case.Prebuilt`, or None and why not, in order; all are built by `jobs` processes."""
    with tempfile.TemporaryDirectory() as folder, processes(min(jobs, len(layers))) as pool:
        built = [
            pool.schedule(
                attempt,
                (layer_case.prebuild, layer.problem, arch, Path(folder) / f"{number}.so", schedule),
                BUILD_SECONDS,
            )
            for number, layer in enumerate(layers)
        ]
        for layer, task in zip(layers, built, strict=True):
            yield layer, *outcome(task)


def served(layers: Sequence[Layer]) -> Iterator[tuple[Layer, Any, str]]:
    """Each layer with its `layer_case.Served`, or None and why not, in order; TOGETHER are built at once."""
    for start in range(0, len(layers), TOGETHER):
        some = layers[start : start + TOGETHER]
        for layer, (made, why) in zip(some, layer_case.served_in_benchmark_mode(some), strict=True):
            yield layer, made, why


def run_all(layers: Sequence[Layer], arch: Arch, results: Layers, timer: Timer, args: argparse.Namespace) -> None:
    """Measure and keep each of `layers`; a line of each is printed.  Raises DeviceError where the device is not to be
    trusted any more; the layer that came to that is kept as failed."""
    torch, end = torch_module(), time.monotonic() + args.seconds
    ahead = served(layers) if args.benchmark else built_ahead(layers, arch, args.jobs, args.schedule)
    with contextlib.closing(ahead) as built:
        for number, (layer, made, why) in enumerate(built):
            if time.monotonic() > end:
                print(f"out of time; {len(layers) - number} layers are left")
                break
            torch.cuda.empty_cache()
            fault: Exception | None = None
            try:
                row = (
                    layer_case.run_layer(layer, arch, made, timer, args.each, GRAPH, args.copy)
                    if made
                    else failed(layer, why)
                )
            except Exception as error:  # TVM's and PyTorch's many types
                row, fault = failed(layer, error), error
            results.put(row)
            print(line_of(row), flush=True)
            if fault and not isinstance(fault, torch.OutOfMemoryError):
                raise DeviceError(f"{layer}: {reason(fault)}; the same command goes on") from fault


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    if args.picture:
        found = [read_layers(file) for file in sorted(args.log.glob(f"*/{KIND}.json"))]
        if not any(timed(file["layers"]) for file in found):
            raise UsageError(f"{args.log} has no */{KIND}.json with layers that were timed; measure some first")
        args.picture.write_bytes(picture(found))
        return 0
    if args.add:
        for new in map(read_layers, args.add):
            results = Layers(
                args.out or args.log / slug(new["device"]) / f"{KIND}.json", new["device"], new["versions"]
            )
            results.put(*dated(new))
            print(f"{len(new['layers'])} layers added, {len(results.rows)} in {results.file}")
        return 0
    arch = local_gpu()
    if arch is None:
        raise UsageError("no CUDA GPU here to compare on; --add and --picture need none")
    device = str(device_name(arch))
    kind = BENCHMARK if args.benchmark else f"{KIND}_{args.schedule}" if args.schedule else KIND
    results = Layers(args.out or args.log / slug(device) / f"{kind}.json", device, bench.versions_here(arch))
    layers = [layer for layer in chosen_layers(args) if args.fresh or layer not in results]
    if args.schedule:
        layers = [layer for layer in layers if takes(args.schedule, layer, arch)]
    with CudaTimer() as timer:
        if layers:
            run_all(layers, arch, results, timer, args)
    print(*lines(results.rows), sep="\n")
    print(f"{len(results.rows)} layers in {results.file}")
    return 0


if __name__ == "__main__":
    run_script(main, "stopped; the layers that were finished are kept, the same command goes on")
