#!/usr/bin/env python3
"""Fit the constants by which schedules of softmax are chosen to recorded trials, and score the choice.

    python -m scripts.fit_softmax keep softmax_map.json CASES.jsonl ...  # trials, kept as a file
    python -m scripts.fit_softmax fit     # prints constants for operators/softmax/cost.py
    python -m scripts.fit_softmax score   # replays the trials with those that are there

Trials are kept as `scripts.trials` says, with ``copy``, us of a copy of as many bytes.  `keep` takes them from results
of ``benchmarks.compare_softmax``, and from lines of JSON with ``problem``, ``us`` of each "schedule config" and
``copy``; the first file is a result, which says where all were measured.  Regret is the time of what is chosen of a
problem's trials by that of the fastest of them.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.softmax_tables import GOALS
from schedules.core.errors import SchedulesError
from schedules.core.operator import Array
from schedules.core.problem import Config
from schedules.core.registry import operator
from schedules.operators.softmax.cost import COSTS, Costs, Work, estimate, work
from schedules.operators.softmax.definition import SoftmaxProblem
from scripts.fit_depthwise import command, loss
from scripts.trials import TARGET, Layer, read

FOLDER = Path(__file__).parents[1] / "tuning_logs/nvidia-h200/softmax_trials"
SHARP, RIGHT, HELD = 60, 0.1, 2e-5  # configs differ by little
SHOWN = 12


def keep(results: Sequence[Path], folder: Path = FOLDER) -> Path:
    """Write the trials of `results`, of one device and day, as a file of `folder`."""
    head = json.loads(results[0].read_text())
    kept: dict[SoftmaxProblem, tuple[float, list[Any]]] = {}
    fields: dict[str, list[str]] = {}
    for result in results:
        for problem, copy, trials in _trials(result):
            for name, config, us in trials:
                words = config.to_json(True)
                fields[f"softmax.{name}"] = list(words)
                kept.setdefault(problem, (copy, []))[1].append([name, list(words.values()), us])
    lines = [
        json.dumps(
            {"op": "softmax", "p": str(problem), "set": "softmax", "cudnn": None, "copy": round(copy, 3), "t": trials},
            separators=(",", ":"),
        )
        for problem, (copy, trials) in kept.items()
        if len(trials) > 1
    ]
    first = {"device": head["device"], "versions": head["versions"], "date": head["date"][:16], "target": TARGET}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{first['date'].replace(':', '')}.jsonl.xz"
    text = "\n".join([json.dumps({**first, "fields": fields}), *lines, ""])
    file.write_bytes(lzma.compress(text.encode(), preset=9))
    return file


def _trials(result: Path) -> Iterator[tuple[SoftmaxProblem, float, list[tuple[str, Config, float]]]]:
    """(problem, us of a copy, trials) of schedules that may be chosen on CUDA."""

    def parsed(name: str, words: Any) -> Config | None:
        try:
            return operator("softmax").schedule(name).config.parse(words)
        except SchedulesError:
            return None

    if result.suffix == ".json":
        for case in json.loads(result.read_text())["cases"]:
            ours, copy = case["ours"], case["copies"].get("torch", {})
            if "us" in ours and "us" in copy:
                config = parsed(ours["schedule"], ours["config"])
                us = copy["us"] * case["bytes"] / case["copy_bytes"]
                found = [(ours["schedule"], config, ours["us"])] if config else []
                yield SoftmaxProblem.parse(case["problem"]), us, found
        return
    for line in map(json.loads, result.read_text().splitlines()):
        rows, cols, function, dtype = line["problem"]
        trials = []
        for label, us in line["us"].items():
            name, _, config = label.split(" (")[0].partition(" ")
            if "=" in config:
                made = parsed(name, dict(word.split("=", 1) for word in config.split()))
                trials += [(name, made, round(us, 3))] if made else []
        yield SoftmaxProblem(rows, cols, function, dtype), line["copy_scaled"], trials


def estimates(layer: Layer, costs: Costs = COSTS) -> Array:
    """Of each trial of a problem, in us."""
    return np.asarray(estimate(_work(layer), costs))


@lru_cache(maxsize=4096)
def _work(layer: Layer) -> Work:
    problem: Any = layer.problem
    each = [asdict(work(problem, name, config, layer.arch)) for name, config, _ in layer.trials]
    return Work(**{name: np.array([words[name] for words in each]) for name in each[0]})


def times(layer: Layer) -> Array:
    return np.array([us for *_, us in layer.trials])


def regret(layer: Layer, costs: Costs = COSTS) -> float:
    us = times(layer)
    return float(us[np.argmin(estimates(layer, costs))] / us.min())


def balanced(layers: Sequence[Layer]) -> list[Layer]:
    """Those of groups with few problems several times, so that each counts for something."""
    groups = [group_of(layer) for layer in layers]
    most = max(groups.count(group) for group in groups)
    return [
        layer for layer, group in zip(layers, groups, strict=True) for _ in range(min(4, most // groups.count(group)))
    ]


def group_of(layer: Layer) -> str:
    problem: Any = layer.problem
    return next(goal.name for goal in GOALS if goal.holds(problem.rows, problem.cols))


def apart(costs: Costs, before: Costs) -> float:
    """How far constants are from what they were, which those that no trial tells of are to stay at."""
    pairs = zip(asdict(costs).values(), asdict(before).values(), strict=True)
    return float(sum(np.log(value / old) ** 2 for value, old in pairs))


def report(layers: Sequence[Layer], costs: Costs = COSTS) -> None:
    found = np.array([regret(layer, costs) for layer in layers])
    groups = [group_of(layer) for layer in layers]
    for name in ("all", *(goal.name for goal in GOALS)):
        of = found[[name in ("all", group) for group in groups]]
        if len(of):
            print(f"{name:40s} {len(of):4d} problems  mean {np.exp(np.log(of).mean()):.4f}  worst {of.max():.3f}")
    for at in np.argsort(-found)[:SHOWN]:
        layer, chosen = layers[at], int(np.argmin(estimates(layers[at], costs)))
        (name, config, us), (other, best, least) = layer.trials[chosen], min(layer.trials, key=lambda trial: trial[2])
        print(f"  {found[at]:.3f} {layer.problem}: {name} {config} {us}, {other} {best} {least}")


def known(folder: Path = FOLDER) -> list[Layer]:
    """Problems with several trials."""
    layers = read(*sorted(folder.glob("*.xz")))[1] if folder.is_dir() else []
    return [layer for layer in layers if len(layer.trials) > 1]


def objective(layers: list[Layer]) -> Callable[[Costs], float]:
    some = balanced(layers)
    return lambda tried: loss(some, tried, estimates, SHARP, RIGHT) + HELD * apart(tried, COSTS)


def main() -> int:
    return command(__doc__, keep, known, COSTS, objective, report)


if __name__ == "__main__":
    sys.exit(main())
