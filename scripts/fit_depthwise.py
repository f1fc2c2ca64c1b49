#!/usr/bin/env python3
"""Fit the constants by which configs of depthwise convolutions are chosen to recorded trials, and score the choice.

    python -m scripts.fit_depthwise keep RESULT.jsonl ... # trials of ``benchmarks.compare_depthwise``, kept as a file
    python -m scripts.fit_depthwise fit                   # prints constants for operators/depthwise_conv2d/cost.py
    python -m scripts.fit_depthwise score                 # replays the trials with those that are there

Trials are kept as `scripts.trials` says, with ``copy``, us of a copy of as many bytes, for each layer.  Regret is the
time of what is chosen of a layer's trials by that of the fastest of them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from schedules.core.operator import Array
from schedules.operators.depthwise_conv2d import estimate
from schedules.operators.depthwise_conv2d.cost import COSTS, Costs
from scripts.trials import Layer, read

C = TypeVar("C", bound=Any)  # a frozen dataclass of constants
LOGS = Path(__file__).parents[1] / "tuning_logs/nvidia-h200"
OPERATORS = ("depthwise_conv2d", "depthwise_nchw32")
ROUNDS, TRIES, SEED = 9, 100, 0  # of the search
SHOWN = 8


def keep(results: Sequence[Path], logs: Path = LOGS) -> Path:
    """Write the trials of `results`, of one operator, device and day, as a file of `logs`."""
    lines, fields, head, name = [], {}, {}, OPERATORS[0]
    for result in results:
        first, *rows = map(json.loads, result.read_text().splitlines())
        head = {name: first[name] for name in ("device", "versions", "date", "target")}
        for row in rows:
            name, trials = row.get("op", name), []
            for trial in row["configs"]:
                if trial.get("error", math.inf) <= 1.01:
                    fields[f"{name}.{trial['schedule']}"] = list(trial["config"])
                    trials.append([trial["schedule"], list(trial["config"].values()), trial["us"]])
            told = {"op": name, "p": row["problem"], "set": row["net"], "cudnn": row["cudnn"]}
            lines.append(json.dumps({**told, "copy": row["copy"], "t": trials}, separators=(",", ":")))
    text = "\n".join([json.dumps({**head, "fields": fields}), *lines, ""])
    file = logs / name / f"{head['date']}.jsonl.xz"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lzma.compress(text.encode(), preset=9))
    return file


def estimates(layer: Layer, costs: Costs = COSTS) -> Array:
    """Of each trial of a layer, in us."""
    problem: Any = layer.problem
    return np.array([estimate(problem, config, layer.arch, costs) for _, config, _ in layer.trials])


def times(layer: Layer) -> Array:
    return np.array([us for *_, us in layer.trials])


def regret(layer: Layer, costs: Costs = COSTS) -> float:
    us = times(layer)
    return float(us[np.argmin(estimates(layer, costs))] / us.min())


def loss(
    layers: Sequence[Layer], costs: C, of: Callable[[Layer, C], Array], sharp: float = 8, right: float = 0.3
) -> float:
    """What is lost by the choice on average, in logarithms, and `right` times how wrong the estimate is where it
    matters.  The choice is a soft one, which small changes of a constant tell on, the softer the less `sharp`."""
    total = 0.0
    for layer in layers:
        us, told = times(layer), of(layer, costs)
        wrong = np.abs(np.log(told / us))
        weight = (us.min() / us) ** 2
        odds = np.exp(-sharp * np.log(told / told.min()))
        lost = (odds * np.log(us / us.min())).sum() / odds.sum()
        total += float(lost + right * (weight * wrong).sum() / weight.sum())
    return total / len(layers)


def fitted(costs: C, of_loss: Callable[[C], float]) -> C:
    """Change some of the constants at random, and keep what helps, by less and less."""
    rng, least, step = np.random.default_rng(SEED), of_loss(costs), 0.3
    names = list(asdict(costs))
    for turn in range(ROUNDS):
        for _ in range(TRIES):
            some = rng.choice(names, rng.integers(1, 5), replace=False)
            tried = replace(costs, **{name: getattr(costs, name) * float(np.exp(rng.normal() * step)) for name in some})
            found = of_loss(tried)
            if found < least:
                costs, least = tried, found
        print(f"{turn}: {least:.5f} {costs}", flush=True)
        step = max(0.05, 0.8 * step)
    return replace(costs, **{name: float(f"{value:.3g}") for name, value in asdict(costs).items()})


def report(layers: Sequence[Layer], costs: Costs = COSTS) -> None:
    found = np.array([regret(layer, costs) for layer in layers])
    kinds = [f"{getattr(layer.problem, 'layout', 'nchw32')} {layer.problem.dtype}" for layer in layers]  # type: ignore[attr-defined]
    for what in ("all", *dict.fromkeys(kinds)):
        own = np.array([what in ("all", kind) for kind in kinds])
        if own.any():
            of = found[own]
            print(f"{what:16s} {len(of):4d} layers  mean {np.exp(np.log(of).mean()):.3f}  worst {of.max():.2f}")
    for at in np.argsort(-found)[:SHOWN]:
        print(f"  {found[at]:.2f} {layers[at].problem}")


def known(logs: Path = LOGS) -> list[Layer]:
    files = [sorted((logs / name).glob("*.xz")) for name in OPERATORS]
    return [layer for found in files if found for layer in read(*found)[1]]


def command(
    about: str,
    keep: Callable[[Sequence[Path]], Any],
    known: Callable[[], list[Layer]],
    costs: Any,
    objective: Callable[[list[Layer]], Callable[[Any], float]],
    report: Callable[[list[Layer], Any], None],
) -> int:
    """What the words of the command line ask for; `fit` makes `objective` of the layers least, from `costs` on."""
    words = argparse.ArgumentParser(description=about.splitlines()[0])
    words.add_argument("what", choices=("keep", "fit", "score"))
    words.add_argument("results", type=Path, nargs="*")
    asked = words.parse_args()
    if asked.what == "keep":
        print(keep(asked.results))
    layers = known()
    if asked.what == "fit":
        costs = fitted(costs, objective(layers))
        print(costs)
    report(layers, costs)
    return 0


def main() -> int:
    return command(__doc__, keep, known, COSTS, lambda layers: lambda tried: loss(layers, tried, estimates), report)


if __name__ == "__main__":
    sys.exit(main())
