#!/usr/bin/env python3
"""Train the trees that the choice is made by on recorded trials, and score a choice, or each schedule, on them.

    python -m scripts.fit_choice fit tuning_logs/nvidia-h200 tuning_logs/nvidia-h100-80gb-hbm3  # predict/trees.npz
    python -m scripts.fit_choice score tuning_logs/nvidia-h200    # replays the trials with the shipped trees
    python -m scripts.fit_choice restate tuning_logs/nvidia-h200  # of the same trees, with trials of a later measure
    python -m scripts.fit_choice worth tuning_logs/nvidia-h200    # what layers would take longer without each schedule

Each folder, of a device of the arch, has files of trials, ``layers/*.xz``, and what ``python -m
benchmarks.compare_layers`` measured last, ``layers.json``: what that has of configs that no trial was of is first kept
as another file of trials, for the next measure replaces it.

Regret is the time of what is chosen of a layer's trials by that of the fastest of them.  `fit` first trains on four
fifths of the networks and families and scores the rest, each fifth in turn; that is the score it states, and what it
writes into the table's header.  Needs xgboost; `score` and `worth` do not.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from schedules.core.operator import Array
from schedules.predict import trees
from schedules.predict.configs import columns_of
from schedules.predict.estimate import work
from schedules.predict.features import OWN, features, table
from schedules.predict.rank import by_default, kind_of
from scripts.grown import from_xgboost, save
from scripts.trials import Layer, measured, read

FOLDS = 5
REPLAYED = 4  # one layer of as many is replayed by the suite
FEWEST = 400  # trials of a kind of problem; of fewer, configs that no trial was near are misjudged
SHOWN = 8  # layers with the most regret that are named
PARAMETERS = {
    "objective": "reg:squarederror",
    "max_depth": 6,
    "eta": 0.06,
    "min_child_weight": 3,
    "subsample": 0.8,
    "colsample_bytree": 0.6,
    "lambda": 2.0,
    "tree_method": "hist",
    "nthread": 1,  # several wait for each other longer than they compute, beside other work
    "verbosity": 0,
}
SEEDS = 2  # trainings whose mean decides
ROUNDS = 320
# Trees that put a layer's configs in order, grown on top of those of their times from pairs at the head of the order
# (LambdaMART).  PER_LOG of a sum of leaves is one of a time's logarithm.
SORTED = {"objective": "rank:pairwise", "lambdarank_pair_method": "topk", "lambdarank_num_pair_per_sample": 6}
SORTED_ROUNDS, PER_LOG = 400, 6.0
GRADES, WORST = 31, 2.0  # of the fastest, and how many times slower a config of grade 0 is
LESS, LESS_ROUNDS = {"max_depth": 5, "eta": 0.15}, 90  # of the coarse trees


class Rows:
    """All trials of layers as rows: features by parts, logarithms of (us / estimate), and where layers begin."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = list(layers)
        self.parts: list[Any] = []
        self.counts: list[int] = []
        self.us: list[float] = []
        self.bounds = [0]
        totals = []
        for layer in self.layers:
            for name in sorted({name for name, *_ in layer.trials}):
                spec = layer.operator.schedule(name)
                own = [(config, us) for schedule, config, us in layer.trials if schedule == name]
                columns = columns_of([config for config, _ in own])
                made = work(layer.problem, spec, columns, layer.arch)
                self.parts.append(features(layer.operator.name, layer.problem, spec, columns, made, layer.arch))
                self.counts.append(len(own))
                self.us += [us for _, us in own]
                totals.append(made.total)
            self.bounds.append(len(self.us))
        self.total = np.concatenate(totals)
        self.target = np.log(np.array(self.us) / self.total)

    def names(self) -> list[str]:
        return sorted({name for part in self.parts for name in part})

    def table(self, names: Sequence[str]) -> Array:
        return table(self.parts, self.counts, names)

    def weights(self) -> Array:
        """Fast configs matter, slow ones only need to be known as such; layers count alike."""
        found = np.ones(len(self.us))
        us = np.array(self.us)
        for start, stop in zip(self.bounds, self.bounds[1:], strict=False):
            found[start:stop] = (us[start:stop].min() / us[start:stop]) ** 1.5 + 0.05
        return found

    def grades(self) -> Array:
        """How good each config is beside the layer's fastest, from 0 to GRADES."""
        us = np.array(self.us)
        best = np.minimum.reduceat(us, self.bounds[:-1])
        share = np.repeat(best, np.diff(self.bounds)) / us
        return np.round(GRADES * np.maximum(0.0, (share - 1 / WORST) / (1 - 1 / WORST)))

    def regrets(self, scores: Array, among: int = 1) -> Array:
        """Of each layer, the fastest of the `among` best by `scores` (us, less is better) over the fastest."""
        us, found = np.array(self.us), []
        for start, stop in zip(self.bounds, self.bounds[1:], strict=False):
            order = start + np.argsort(scores[start:stop], kind="stable")[:among]
            found.append(us[order].min() / us[start:stop].min())
        return np.array(found)


def fold_of(layer: Layer) -> int:
    return zlib.crc32(layer.network.encode()) % FOLDS


def train(rows: Rows, header: dict[str, Any], rounds: int = ROUNDS, coarse: bool = False) -> trees.Trees:
    """Trees of `rows`: of times, and unless `coarse` more that put them in order."""
    import xgboost

    names = [name for name in rows.names() if not (coarse and name == OWN)]
    base = float(np.mean(rows.target))
    table = rows.table(names)
    data = xgboost.DMatrix(table, rows.target - base, weight=rows.weights())
    order = xgboost.DMatrix(table, rows.grades())
    order.set_group(np.diff(rows.bounds))
    grown, seeds = [], 1 if coarse else SEEDS
    for seed in range(seeds):
        parameters = {**PARAMETERS, **(LESS if coarse else {}), "base_score": 0.0, "seed": seed}
        times = xgboost.train(parameters, data, LESS_ROUNDS if coarse else rounds)
        grown.append((times.get_dump(dump_format="json"), 1 / seeds))
        if not coarse:
            order.set_base_margin(-PER_LOG * (np.log(rows.total) + times.predict(data)))
            sorter = xgboost.train({**PARAMETERS, **SORTED, "seed": seed}, order, SORTED_ROUNDS * rounds // ROUNDS)
            grown.append((sorter.get_dump(dump_format="json"), -1 / PER_LOG / seeds))
    return from_xgboost(grown, base, names, header)


def mean(regrets: Array) -> float:
    return math.exp(float(np.log(regrets).mean()))


def replayed(model: trees.Trees, layers: Sequence[Layer]) -> Array:
    """Regrets on every REPLAYED-th layer with the trees as they are shipped, a check that takes a second."""
    rows = Rows([layer for layer in layers if len(layer.trials) > 1][::REPLAYED])
    return rows.regrets(rows.total * np.exp(model.predict(rows.table(model.names))))


def told(what: str, regrets: Array) -> str:
    p90, p95, worst = np.percentile(regrets, (90, 95, 100))
    text = f"{what:34s} {len(regrets):5d} layers  mean {mean(regrets):.3f}"
    return f"{text}  p90 {p90:.2f}  p95 {p95:.2f}  worst {worst:.2f}"


def report(layers: Sequence[Layer], chosen: Array, eight: Array) -> None:
    kinds = [kind_of(layer.operator, layer.problem) for layer in layers]
    for kind in sorted(set(kinds)):
        at = np.array([each == kind for each in kinds])
        print(told(kind, chosen[at]), f" best of 8: {mean(eight[at]):.3f}")
    print(told("all", chosen), f" best of 8: {mean(eight):.3f}")
    for row in np.argsort(-chosen)[:SHOWN]:
        print(f"  {chosen[row]:.2f} {kinds[row]} {layers[row].network}: {layers[row].problem}")


def fit(layers: Sequence[Layer], header: dict[str, Any], out: Path, rounds: int) -> None:
    folds = [fold_of(layer) for layer in layers]
    order, chosen, eight = [], [], []
    for fold in range(FOLDS):
        # of a layer with one trial there is nothing to choose
        held = [layer for layer, own in zip(layers, folds, strict=True) if own == fold and len(layer.trials) > 1]
        if not held or len(held) == len(layers):
            continue
        model = train(Rows([layer for layer, place in zip(layers, folds, strict=True) if place != fold]), {}, rounds)
        rows = Rows(held)
        scores = rows.total * np.exp(model.predict(rows.table(model.names)))
        order += held
        chosen.append(rows.regrets(scores))
        eight.append(rows.regrets(scores, 8))
    print("networks that were held out:")
    held_out = np.concatenate(chosen)
    report(order, held_out, np.concatenate(eight))
    rows, kinds = Rows(layers), {}
    for kind in sorted({kind_of(layer.operator, layer.problem) for layer in order}):
        at = np.array([kind_of(layer.operator, layer.problem) == kind for layer in order])
        ruled = np.array([layer.trials[0][2] / layer.best for layer in order])[at]
        print(told(f"the rule, {kind}", ruled))
        count = sum(len(layer.trials) for layer, own in zip(order, at, strict=True) if own)
        if count >= FEWEST and mean(held_out[at]) < mean(ruled):  # else the rule goes on deciding
            kinds[kind] = count
    more = {
        "kinds": kinds,
        "trials": len(rows.us),
        "layers": len(layers),
        "held_out": {"mean": round(mean(held_out), 4), "worst": round(float(held_out.max()), 3)},
    }
    model = train(rows, {**header, **more}, rounds)
    save(train(rows, {"target": header["target"]}, coarse=True), out.with_name(trees.COARSE.name))
    restate(model, layers, out)
    print(f"{out}: {out.stat().st_size} bytes, {len(model.roots)} trees, {len(model.feature)} nodes")
    scores = rows.total * np.exp(model.predict(rows.table(model.names)))
    print(told("trained on", rows.regrets(scores)))


def restate(model: trees.Trees, layers: Sequence[Layer], out: Path) -> None:
    """Write trees with what a replay of `layers` scores them at."""
    again = replayed(model, layers)
    stated = {"mean": round(mean(again), 4), "worst": round(float(again.max()), 3)}
    save(replace(model, header={**model.header, "replayed": stated}), out)


def score(layers: Sequence[Layer], file: Path) -> None:
    model = trees.load(file)
    assert model is not None
    start = time.time()
    rows = Rows(layers)
    scores = rows.total * np.exp(model.predict(rows.table(model.names)))
    report(layers, rows.regrets(scores), rows.regrets(scores, 8))
    print(f"{time.time() - start:.1f} s")


@dataclass(frozen=True)
class Worth:
    """Of how many of a kind's layers a schedule's trial is the fastest, of those that several schedules were tried of;
    and the mean and the worst of the other schedules' fastest times by the fastest of all."""

    kind: str
    schedule: str
    best: int
    layers: int
    mean: float
    worst: float


def worths(layers: Sequence[Layer]) -> list[Worth]:
    """What each schedule is worth, kind by kind; one that is worth nothing need not be kept."""
    kinds: dict[str, list[dict[str, float]]] = {}
    for layer in layers:
        fastest: dict[str, float] = {}
        for name, _, us in layer.trials:
            fastest[name] = min(us, fastest.get(name, us))
        if len(fastest) > 1:
            kinds.setdefault(kind_of(layer.operator, layer.problem), []).append(fastest)
    found = []
    for kind, tried in sorted(kinds.items()):
        for schedule in sorted({name for fastest in tried for name in fastest}):
            without = np.array(
                [
                    min(us for name, us in fastest.items() if name != schedule) / min(fastest.values())
                    for fastest in tried
                ]
            )
            found.append(
                Worth(kind, schedule, int((without > 1).sum()), len(tried), mean(without), float(without.max()))
            )
    return found


def known(*folders: Path) -> tuple[dict[str, Any], list[Layer]]:
    """What the trees' header says of the trials of `folders`, and their layers."""
    header, layers = read(*(file for folder in folders for file in sorted(folder.glob("layers/*.xz"))))
    return {name: header[name] for name in ("target", "device", "versions", "date")}, layers


def learned(layers: Sequence[Layer]) -> list[Layer]:
    """`layers` with the trials that trees are asked of: not those of schedules that speak for themselves."""
    found = []
    for layer in layers:
        trials = tuple(trial for trial in layer.trials if not by_default(layer.operator.schedule(trial[0])))
        if trials:
            found.append(replace(layer, trials=trials))
    return found


def keep_measured(folder: Path) -> None:
    """Write what the last measure tells beyond the trials of `folder` beside them."""
    text = measured(folder / "layers.json", known(folder)[1])
    if text:
        date = json.loads(text.partition("\n")[0])["date"]
        file = folder / "layers" / f"{date.replace(':', '')}.jsonl.xz"
        file.write_bytes(lzma.compress(text.encode(), preset=9))
        print(f"{file}: {text.count(chr(10)) - 1} trials")


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("what", choices=("fit", "restate", "score", "worth"))
    words.add_argument("folders", type=Path, nargs="+")
    words.add_argument("--out", type=Path, default=trees.SHIPPED)
    words.add_argument("--rounds", type=int, default=ROUNDS)
    asked = words.parse_args()
    if asked.what in ("fit", "restate"):
        for folder in asked.folders:
            keep_measured(folder)
    header, layers = known(*asked.folders)
    if asked.what == "worth":
        for each in worths(layers):
            of = f"{each.best:4d} of {each.layers:4d} layers"
            print(f"{each.kind:22s} {each.schedule:20s} {of}  mean {each.mean:.3f}  worst {each.worst:.2f}")
        return 0
    layers = learned(layers)
    if asked.what == "fit":
        fit(layers, header, asked.out, asked.rounds)
    elif asked.what == "restate":
        shipped = trees.load()
        assert shipped is not None
        restate(shipped, layers, asked.out)
    else:
        score(layers, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
