"""Layers at their first call beside cuDNN: the sets of layers, the file of their times, and its tables and picture.

A file of sets is JSON: ``sets`` has lists of layers by name, ``runs`` what they are compared as: "OPERATOR DTYPE", and
that every how many of the layers are by default.  A result is written anew after every layer, a line for each.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.peers.kept import read_costs
from benchmarks.peers.layer_case import Layer, layer_named
from benchmarks.peers.markdown import provenance, table
from schedules.core.errors import UsageError
from schedules.measure.records import now

KIND = "layers"
BENCHMARK = f"{KIND}_benchmark"  # the same in PyTorch's benchmark mode
FOLDER = Path(__file__).resolve().parents[1] / "layers"
UNSEEN = FOLDER / "unseen.json"  # sets of which no trial is learned from: how good the choice is elsewhere
WORST = 25  # layers that are told by name
MANY = 50  # layers of an operator and dtype whose sets are drawn apart
Row = Mapping[str, Any]


def layers_of(
    file: Path,
    wanted: Callable[[str, str], bool] = lambda operator, dtype: True,
    every: int | None = None,
    runs: Sequence[str] | None = None,
) -> list[Layer]:
    """The layers of a file of sets in each of its runs (or of `runs`) that is `wanted`, or `every` so many of them.

    Raises UsageError and its kinds.
    """
    try:
        words = json.loads(file.read_text())
        taken = dict.fromkeys(runs, 1) if runs else words["runs"]
        steps = [(*run.split(), every or usual) for run, usual in taken.items() if wanted(*run.split())]
        listed = [(name, text) for name, texts in words["sets"].items() for text in texts]
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f'{file} is no file of layers: {{"runs": {{OPERATOR DTYPE: 1}}, "sets": {{NAME: [LAYER]}}}}'
        ) from None
    return [
        layer_named(name, operator, dtype, text) for operator, dtype, step in steps for name, text in listed[::step]
    ]


class Layers:
    """The file of one device: its rows, and where each new one goes at once.

    What the file has of another device or of other versions is replaced.
    """

    def __init__(self, file: Path, device: str, versions: Mapping[str, str]) -> None:
        self.file, self._head = file, {"kind": KIND, "device": device, "versions": dict(versions)}
        self.rows: list[Row] = []
        if file.exists():
            old = read_layers(file)
            self.rows = dated(old) if all(old[name] == value for name, value in self._head.items()) else []

    def __contains__(self, layer: Layer) -> bool:
        return identity(layer.to_json()) in map(identity, self.rows)

    def put(self, *rows: Row) -> None:
        """Add or replace rows, of today if they have no date, and write the file.  Raises UsageError if that cannot be
        done."""
        new = {identity(row) for row in rows}
        self.rows = [*(row for row in self.rows if identity(row) not in new), *dated({"layers": rows, "date": now()})]
        head = json.dumps({**self._head, "date": now()}, indent=1).removesuffix("\n}")
        text = head + ',\n "layers": [\n' + ",\n".join(map(json.dumps, self.rows)) + "\n ]\n}\n"
        beside = self.file.with_name(self.file.name + ".new")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(text)
            os.replace(beside, self.file)
        except OSError as error:
            raise UsageError(f"cannot write {self.file}: {error.strerror}; choose another --out") from error


def read_layers(file: str | Path) -> dict[str, Any]:
    """The content of a file of python -m benchmarks.compare_layers.  Raises UsageError if it is none."""
    return read_costs(file, KIND, "layers")


def dated(file: Mapping[str, Any]) -> list[Row]:
    """The rows of a file, each with the day on which it was measured: the file's, which is the last, if it has none."""
    return [{**row, "date": row.get("date", file["date"])[:10]} for row in file["layers"]]


def measured_on(files: Iterable[Mapping[str, Any]]) -> list[str]:
    """For each file the line of device, days and versions that stands below a table."""
    return [provenance({**file, "cases": dated(file)}) for file in files]


def identity(row: Row) -> tuple[str, ...]:
    """What no two rows of a file share."""
    return row["set"], row["operator"], row["dtype"], row["layer"]


def ratio(row: Row) -> float:
    """cuDNN's best time as a multiple of ours."""
    return float(row["cudnn"] / row["us"])


def timed(rows: Iterable[Row]) -> list[Row]:
    """Those that both sides ran."""
    return [row for row in rows if "us" in row and "cudnn" in row]


def groups(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """Timed rows by these of their fields, in the order in which they come."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in timed(rows):
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def shares(rows: Sequence[Row], value: Callable[[Row], float] = ratio) -> list[str]:
    """Layers, geometric mean, least, and the share in which ours is not behind."""
    ratios = [value(row) for row in rows]
    ahead = sum(found >= 1 for found in ratios) / len(ratios)
    return [str(len(ratios)), f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", f"{ahead:.0%}"]


SHARES = ("layers", "geometric mean", "least", "ahead")


def summary(files: Sequence[Mapping[str, Any]]) -> str:
    """A row for each device, operator and dtype, and one for the sets of UNSEEN; layers that failed are counted beside
    those that were timed."""
    unseen, rows = json.loads(UNSEEN.read_text())["sets"], []
    for file in files:
        layers = [{**row, "unseen": row["set"] in unseen} for row in file["layers"]]
        failures = Counter((row["operator"], row["dtype"], row["unseen"]) for row in layers if "failed" in row)
        for key, found in sorted(groups(layers, "operator", "dtype", "unseen").items()):
            operator, dtype, apart = key
            count, *rest = shares(found)
            count += f" and {lost} failed" if (lost := failures[operator, dtype, apart]) else ""
            rows.append([file["device"], f"`{operator}`", dtype + ", unseen" * apart, count, *rest])
    return "\n\n".join([table(["device", "operator", "dtype", *SHARES], rows), *measured_on(files)])


def by_set(files: Sequence[Mapping[str, Any]]) -> str:
    """For each device and dtype a row for each set of layers, and a column for each operator: mean, least and share."""
    parts = []
    for file in files:
        for dtype in sorted({row["dtype"] for row in timed(file["layers"])}):
            cells = groups((row for row in file["layers"] if row["dtype"] == dtype), "set", "operator")
            sets, operators = (sorted({key[at] for key in cells}) for at in (0, 1))

            def cell(name: str, operator: str, cells: Mapping[tuple[str, ...], Sequence[Row]] = cells) -> str:
                found = cells.get((name, operator))
                return "{}: {}, {}, {}".format(*shares(found)) if found else ""

            rows = [[name, *(cell(name, operator) for operator in operators)] for name in sets]
            parts.append(f"{file['device']}, {dtype}; layers: geometric mean, least, ahead")
            parts.append(table(["set", *(f"`{operator}`" for operator in operators)], rows))
            if direct := [row for row in timed(file["layers"]) if row["dtype"] == dtype and "direct" in row]:
                told = "{} layers: {}, {}, {}".format(*shares(direct, lambda row: row["direct"] / row["us"]))
                parts.append(f"Beside cuDNN's implicit GEMM alone, {told}.")
    return "\n\n".join([*parts, *measured_on(files)])


def worst(files: Sequence[Mapping[str, Any]]) -> str:
    """The layers furthest behind by name, after those that failed."""
    rows = []
    for file in files:
        for row in (row for row in file["layers"] if "failed" in row):
            rows.append([*_name(row), "", "", row["failed"], ""])
        for row in sorted(timed(file["layers"]), key=ratio)[:WORST]:
            rows.append(
                [*_name(row), f"{row['us']:.1f}", f"{row['cudnn']:.1f}", f"`{row['schedule']}`", f"{ratio(row):.2f}"]
            )
    return table(["set", "operator", "layer", "us", "cuDNN us", "schedule", "ratio"], rows)


def copies(files: Sequence[Mapping[str, Any]]) -> str:
    """For each device and set of layers that a copy ran beside: each layer by name, and what all of them sum up to."""
    parts = []
    for file in files:
        for (name, operator, dtype), found in groups(file["layers"], "set", "operator", "dtype").items():
            beside = [row for row in found if "copy" in row]
            rows = [
                [row["layer"], f"`{row['schedule']}`", *(f"{row[of]:.1f}" for of in ("us", "cudnn", "copy"))]
                + [f"{ratio(row):.2f}", f"{row['copy'] / row['us']:.0%}"]
                for row in sorted(beside, key=ratio)
            ]
            if rows:
                told = "{} layers: {}, {}, {}".format(*shares(beside))
                parts.append(f"{file['device']}, {name}, `{operator}` {dtype}; {told}")
                parts.append(table(["layer", "schedule", "us", "cuDNN us", "copy us", "ratio", "of a copy"], rows))
    return "\n\n".join(parts)


def _name(row: Row) -> list[str]:
    return [row["set"], f"`{row['operator']}` {row['dtype']}", row["layer"]]


PARTS = {"summary": summary, "sets": by_set, "worst": worst, "copies": copies}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The distribution for people who watch: each set, all, and the worst by name."""
    for (operator, dtype), found in groups(rows, "operator", "dtype").items():
        for (name,), part in groups(found, "set").items():
            yield "{:14} {:8} {:22} {:>4} layers  mean {}  least {}  ahead {}".format(
                operator, dtype, name, *shares(part)
            )
        yield "{:14} {:8} {:22} {:>4} layers  mean {}  least {}  ahead {}".format(
            operator, dtype, "ALL", *shares(found)
        )
    for row in sorted(timed(rows), key=ratio)[:WORST]:
        yield line_of(row)


def line_of(row: Row) -> str:
    """A row for people who watch."""
    head = f"{row['operator']:14} {row['dtype']:8} {row['set']:18} {row['layer']:40}"
    if "failed" in row:
        return f"{head} FAILED: {row['failed']}"
    beside = f"cudnn {row['cudnn']:9.2f}  {ratio(row):.2f}" if "cudnn" in row else "cudnn -"
    direct = f"  direct {row['direct']:.2f}" if "direct" in row else ""
    return f"{head} {row['us']:9.2f} us  {beside}{direct}  {row['schedule']}, first call {row['first_s']:.1f} s"


def picture(files: Sequence[Mapping[str, Any]]) -> bytes:
    """The ratios as a PNG: a dot for each layer, a bar for the geometric mean.

    A line for each set of an operator and dtype that has MANY layers, for all of one that has fewer.
    """
    from schedules.show.report.plots import of_ratios

    ratios: dict[str, list[float]] = {}
    for file in files:
        for (operator, dtype), found in sorted(groups(file["layers"], "operator", "dtype").items()):
            for row in sorted(found, key=lambda row: str(row["set"])):
                names = [f"{operator} {dtype}", *([row["set"]] if len(found) >= MANY else [])]
                ratios.setdefault(", ".join([file["device"]] * (len(files) > 1) + names), []).append(ratio(row))
    return of_ratios("layers", "Layers at their first call beside cuDNN", "", ratios).png
