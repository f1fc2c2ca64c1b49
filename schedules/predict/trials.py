"""Trials of many layers in few bytes: what the trees are trained on, and the choice is scored by.

A file is JSON lines, compressed by xz.  The first is a header: device, versions, date, target, and ``fields``, the
names of the config's fields of each schedule ("operator.schedule").  Each other is a layer: ``op``, ``p`` its problem,
``set`` the network or family it is of, ``cudnn`` us of the faster of cuDNN's layouts, and ``t``, lists of a schedule,
the values of its config's fields, us (median), us (lowest tenth).  All were verified.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import SchedulesError
from schedules.core.operator import Operator
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator


@dataclass(frozen=True)
class Layer:
    """The trials of one problem: schedules, configs, us."""

    operator: Operator
    problem: Problem
    network: str
    cudnn: float | None
    trials: tuple[tuple[str, Config, float], ...]
    arch: Arch

    @property
    def best(self) -> float:
        return min(us for *_, us in self.trials)


def read(file: Path) -> tuple[Mapping[str, Any], list[Layer]]:
    """The header and the layers of `file`; configs that no longer are of their schedule are left out."""
    with lzma.open(file, "rt") if file.suffix == ".xz" else file.open() as lines:
        header = json.loads(next(lines))
        found = list(_layers(lines, header))
    return header, found


def _layers(lines: Iterator[str], header: Mapping[str, Any]) -> Iterator[Layer]:
    arch = parse_arch(header["target"])
    for line in lines:
        words = json.loads(line)
        op = operator(words["op"])
        problem = op.problem.parse(dict(word.split("=", 1) for word in words["p"].split()))
        trials = []
        for name, values, us, *_ in words["t"]:
            try:
                given = dict(zip(header["fields"][f"{op.name}.{name}"], values, strict=True))
                config = op.schedule(name).config.parse(given)
            except (SchedulesError, KeyError, ValueError):
                continue
            if config.check(problem, arch) is None:
                trials.append((name, config, float(us)))
        if trials:
            yield Layer(op, problem, words["set"], words["cudnn"], tuple(trials), arch)
