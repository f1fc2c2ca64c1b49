"""Trials of many layers in few bytes: what the trees are trained on, and the choice is scored by.

A file is JSON lines, compressed by xz.  The first is a header: device, versions, date, target, and ``fields``, the
names of the config's fields of each schedule ("operator.schedule").  Each other is a layer: ``op``, ``p`` its problem,
``set`` the network or family it is of, ``cudnn`` us of the faster of cuDNN's layouts, and ``t``, lists of a schedule,
the values of its config's fields, us (median), us (lowest tenth; may be left out).  All
were verified.  A trial whose median lies far over its lowest tenth was disturbed, and is not read.

A launch takes up to 2 us more on one host than on another, whatever the kernel: so much as the short kernels that files
of a device share differ, cuDNN's first of all, all are brought to the first one's host (`launches`).  Trials of several
devices stand side by side, each layer with an arch that has its own.  Where a kernel became faster and its configs
stayed, trials of before count so much less as those of the same configs did that were timed again (`REVISIONS`).
"""

from __future__ import annotations

import json
import lzma
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.layer_case import layer_named
from benchmarks.peers.layers import UNSEEN, read_layers
from schedules.core.arch import Arch, parse_arch
from schedules.core.device import find_device
from schedules.core.errors import SchedulesError
from schedules.core.operator import Operator
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator
from schedules.hopper.config import WARPGROUP
from schedules.hopper.images import Images, why_no_images
from schedules.hopper.lanes import QuadOrder
from schedules.hopper.lines import Lines
from schedules.hopper.pixels import flattened
from schedules.operators.conv2d_nchw.positions import simplest
from schedules.operators.conv2d_nchw.tma_wgmma_boxes import VECTOR, apart, in_rows

SHORT, SHARED = 20.0, 5  # us of kernels by which hosts are compared, and how many of them two files must share
CALM = 1.3  # times the lowest tenth: the highest median of a trial that nothing disturbed
Key = tuple[str, Problem, str]  # of a layer: operator, problem, device


@dataclass(frozen=True)
class Revision:
    """A kernel that has changed: of the trials of an `operator`'s `schedule` that files `before` a time (as their names
    begin) have, those of problems which it `concerns` count `factor` of their us."""

    operator: str
    schedule: str
    before: str
    factor: float
    concerns: Callable[[Any], bool]

    def of(self, layer: Layer) -> Layer:
        """The layer's trials, as the kernel now is."""
        if layer.operator.name != self.operator or not self.concerns(layer.problem):
            return layer
        trials = ((name, config, us * self.factor ** (name == self.schedule)) for name, config, us in layer.trials)
        return replace(layer, trials=tuple(trials))


def _read_apart(problem: Any) -> bool:
    """Whether `tma_wgmma_lines` reads pixels one by one."""
    return not Lines("data", simplest(problem), WARPGROUP, WARPGROUP).paired


def _skips_rows(problem: Any) -> bool:
    """Whether `tma_wgmma_boxes` leaves out rows of the image."""
    return apart(flattened(problem, batch=False)) > 1


def _skips_aligned_rows(problem: Any) -> bool:
    """The same where rows were loaded in boxes before."""
    return _skips_rows(problem) and problem.w % VECTOR == 0


def _skips_other_rows(problem: Any) -> bool:
    """And where they were loaded line by line."""
    return _skips_rows(problem) and problem.w % VECTOR > 0


def _strided_words(problem: Any) -> bool:
    """Whether it turns words whose halves are of different lines."""
    return problem.stride[1] > 1 and in_rows(problem) and not _skips_rows(problem)


def _read_in_order(problem: Any) -> bool:
    """Whether threads of `tma_wgmma_images` read in an order with few bank conflicts."""
    p = simplest(problem)
    order = Images("data", p, 1, WARPGROUP).order if why_no_images(p) is None else QuadOrder(False, False)
    return order.odd_first or order.spread


def _adds(problem: Any) -> bool:
    """Whether threads read what is added to each result from memory."""
    return bool(problem.epilogue.of_axis("element"))


def _adds_apart(problem: Any) -> bool:
    """The same of `tma_wgmma_boxes`."""
    return _adds(problem) and problem.out_w % VECTOR > 0


def _long(problem: Any) -> bool:
    """Whether blocks of `mma_windows` took long to put filters in order."""
    return bool(problem.kh * problem.kw * problem.ci >= LONG)


REVISIONS = (
    # rows whose pixels are read one by one no longer are neighbours: 226 trials of 132 layers (2026-11-30T1115)
    Revision("conv2d_nchw", "tma_wgmma_lines", "2026-11-30T1110", 0.983, _read_apart),
    # rows that no one looks at are not loaded: 20 and 53 trials (2026-11-30T1412); the host's launch as 50 trials of
    # kernels that did not change tell it
    Revision("conv2d_nchw", "tma_wgmma_boxes", "2026-11-30T1412", 0.912, _skips_aligned_rows),
    Revision("conv2d_nchw", "tma_wgmma_boxes", "2026-11-30T1412", 0.715, _skips_other_rows),
    # there are fewer bank conflicts: 200 trials of 103 layers (2026-11-30T1419), of that host
    Revision("conv2d_nchw", "tma_wgmma_boxes", "2026-11-30T1412", 0.952, _strided_words),
    # threads read in another order: 86 trials without a residual, of the old and the new kernels in turn on one host;
    # those of odd planes had slower stores, since dropped: 23 layers of layers.json whose config stayed tell 0.959
    Revision("conv2d_nchw", "tma_wgmma_images", "2026-11-30T1650", 0.967, _read_in_order),
    # residuals come into L2 before they are read, and are read before others are stored: 65 trials of 46 layers, of
    # the old and the new kernels in turn on one host
    Revision("conv2d_nchw", "tma_wgmma_boxes", "2026-11-30T1735", 0.944, _adds_apart),
    *(
        Revision("conv2d_nchw", f"tma_wgmma_{name}", "2026-11-30T1735", 0.944, _adds)
        for name in ("images", "lines", "runs", "spans", "turned")
    ),
    # filters are put in order at once, fragments lie as mma.sync takes them, patches wait in registers: 182 trials of
    # 137 problems, of the old and the new kernels in turn on one host
    Revision("conv2d_nchw", "mma_windows", "2026-12-01T0330", 0.915, lambda problem: True),
    Revision("conv2d_nhwc", "mma_windows", "2026-12-01T0330", 0.755, _long),
    Revision("conv2d_nhwc", "mma_windows", "2026-12-01T0330", 0.961, lambda problem: not _long(problem)),
    Revision("conv2d_nchw32", "mma_windows", "2026-12-01T0330", 0.978, lambda problem: True),
)
LONG = 400  # elements of a filter
TARGET = "cuda:sm_90a"  # of what ``benchmarks.compare_layers`` measures


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

    def later(self, us: float) -> Layer:
        """The same where a launch takes `us` longer."""
        trials = tuple((name, config, time + us) for name, config, time in self.trials)
        return replace(self, cudnn=self.cudnn and self.cudnn + us, trials=trials)


def read(*files: Path) -> tuple[Mapping[str, Any], list[Layer]]:
    """The header of the first of `files`, and the layers of all, each once with all of its trials, of which the last
    time of a config counts, all as on the first file's host; configs that no longer are of their schedule are left
    out."""
    headers: list[Mapping[str, Any]] = []
    of_files: list[dict[Key, Layer]] = []
    for file in files:
        with lzma.open(file, "rt") if file.suffix == ".xz" else file.open() as lines:
            headers.append(json.loads(next(lines)))
            here: dict[Key, Layer] = {}
            for layer in _layers(lines, headers[-1]):
                for revision in REVISIONS:
                    layer = revision.of(layer) if file.name < revision.before else layer
                _add(here, layer)
        of_files.append(here)
    found: dict[Key, Layer] = {}
    devices = [header.get("device", "") for header in headers]
    for here, launch in zip(of_files, launches(devices, of_files), strict=True):
        for layer in here.values():
            _add(found, layer.later(-launch))
    return headers[0], list(found.values())


def _add(found: dict[Key, Layer], layer: Layer) -> None:
    """Put `layer` among those that were `found`, with the trials that it has there already."""
    key = layer.operator.name, layer.problem, layer.arch.device.name
    old = found.get(key, layer)
    trials = {trial[:2]: trial for trial in (*old.trials, *layer.trials)}
    found[key] = replace(old, cudnn=old.cudnn or layer.cudnn, trials=tuple(trials.values()))


def launches(devices: Sequence[str], files: Sequence[Mapping[Key, Layer]]) -> list[float]:
    """By how many us a launch takes longer where each of `files` was measured than where the first of its device was.

    Told by the short kernels that a file shares with others: cuDNN's, or else ours too.  A file waits for those that it
    shares enough with; one that shares too few with any is taken to be of the same host as the file before it.
    """
    found: dict[int, float] = {}
    peers: dict[Any, float] = {}  # us there of what is known, cuDNN's kernels and ours
    ours: dict[Any, float] = {}
    for device in dict.fromkeys(devices):
        waiting = [number for number, each in enumerate(devices) if each == device]
        first = waiting[0]
        while waiting:
            for number in waiting:
                here = files[number]
                differences = _differences(_peers(here), peers)
                if len(differences) < SHARED:
                    differences += _differences(_ours(here), ours)
                if number == first or len(differences) >= SHARED:
                    break
            else:
                for number in waiting:
                    found[number] = next(
                        found[before]
                        for before in reversed(range(number))
                        if devices[before] == device and before in found
                    )
                break
            waiting.remove(number)
            found[number] = 0.0 if number == first else statistics.median(differences)
            for all_of, own in ((peers, _peers(here)), (ours, _ours(here))):
                for key, us in own.items():
                    all_of.setdefault(key, us - found[number])
    return [found[number] for number in range(len(files))]


def _peers(layers: Mapping[Key, Layer]) -> dict[Any, float]:
    return {key: layer.cudnn for key, layer in layers.items() if layer.cudnn}


def _ours(layers: Mapping[Key, Layer]) -> dict[Any, float]:
    return {(key, *trial[:2]): trial[2] for key, layer in layers.items() for trial in layer.trials}


def _differences(here: Mapping[Any, float], there: Mapping[Any, float]) -> list[float]:
    return [us - there[key] for key, us in here.items() if key in there and max(us, there[key]) < SHORT]


def measured(file: Path, known: Iterable[Layer]) -> str:
    """What a result of ``benchmarks.compare_layers`` has of legal configs that `known` has no trial of, as the text of
    a file of trials, without those of UNSEEN; "" if there is none."""
    have = {(layer.operator.name, layer.problem, *trial[:2]) for layer in known for trial in layer.trials}
    told, lines, unseen = read_layers(file), [], json.loads(UNSEEN.read_text())["sets"]
    arch = _arch(TARGET, told["device"])
    fields: dict[str, list[str]] = {}
    for row in told["layers"]:
        if "us" not in row or "config" not in row or row["set"] in unseen:
            continue
        problem = layer_named(row["set"], row["operator"], row["dtype"], row["layer"]).problem
        config = operator(row["operator"]).schedule(row["schedule"]).config.parse(row["config"])
        if (row["operator"], problem, row["schedule"], config) not in have and config.check(problem, arch) is None:
            words = config.to_json(True)
            fields[f"{row['operator']}.{row['schedule']}"] = list(words)
            trial = [row["schedule"], list(words.values()), row["us"]]
            line = {"op": row["operator"], "p": str(problem), "set": row["set"], "cudnn": row.get("cudnn")}
            lines.append(json.dumps({**line, "t": [trial]}, separators=(",", ":")))
    head = {"device": told["device"], "versions": told["versions"], "date": told["date"][:16], "target": TARGET}
    return "\n".join([json.dumps({**head, "fields": fields}), *lines, ""]) if lines else ""


def problem_of(op: Operator, text: str) -> Any:
    """The problem that is written as its fields, ``name=value`` with spaces between."""
    return op.problem.parse(dict(word.split("=", 1) for word in text.split()))


def _arch(target: str, name: str) -> Arch:
    """That of a target, on the device of the name if it is known."""
    arch, device = parse_arch(target), find_device(name)
    return arch.on(device) if device else arch


def _layers(lines: Iterator[str], header: Mapping[str, Any]) -> Iterator[Layer]:
    arch = _arch(header["target"], header.get("device", ""))
    for line in lines:
        words = json.loads(line)
        op = operator(words["op"])
        problem = problem_of(op, words["p"])
        trials = []
        for name, values, us, *low in words["t"]:
            if low and us > CALM * low[0]:
                continue
            try:
                given = dict(zip(header["fields"][f"{op.name}.{name}"], values, strict=True))
                config = op.schedule(name).config.parse(given)
            except (SchedulesError, KeyError, ValueError):
                continue
            if config.check(problem, arch) is None:
                trials.append((name, config, float(us)))
        if trials:
            yield Layer(op, problem, words["set"], words["cudnn"], tuple(trials), arch)
