"""The tables of a report as rows of plain values, for CSV and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from schedules.show.report.kernels import ReportedKernel
from schedules.show.report.make import Device, Entry, Report

Row = dict[str, Any]


def tables(report: Report) -> dict[str, list[Row]]:
    """All tables by name; a table without rows is there too.  Times in microseconds."""
    return {name: list(rows(report)) for name, rows in TABLES.items()}


def _entries(report: Report) -> Iterator[tuple[Device, Entry]]:
    return ((device, entry) for device in report.devices for entry in device.entries)


def _key(entry: Entry) -> Row:
    """What tells problems apart, for long tables: `problems` has the rest."""
    summary = entry.study.summary
    return {"device": summary.device, "operator": summary.operator, "name": entry.study.name}


def _head(entry: Entry) -> Row:
    summary = entry.study.summary
    return {**_key(entry), "target": summary.target, "problem": str(summary.problem)}


def problems(report: Report) -> Iterator[Row]:
    """One row for each problem: default, best, rates, searches."""
    for _, entry in _entries(report):
        summary, point = entry.study.summary, entry.point
        best, ratio = summary.best, entry.study.ratio
        yield {
            **_head(entry),
            "schedule": best.schedule if best else None,
            "config": best.config.to_json() if best else None,
            "default_us": summary.default.us if summary.default else None,
            "best_us": best.us if best else None,
            "p10_us": best.p10_us if best else None,
            "p90_us": best.p90_us if best else None,
            "speedup": summary.speedup,
            "of_best_peer": ratio[0] if ratio else None,
            "best_peer": ratio[1] if ratio else None,
            "tflops": best.tflops if best else None,
            "gbytes_per_s": best.gbytes_per_s if best else None,
            "of_roof": point.share if point else None,
            "error": best.error if best else None,
            "verified": list(best.verified) if best else [],
            "trials": summary.trials,
            "failed": summary.trials - summary.outcomes["correct"],
            "searches": len(summary.searches),
            "last": summary.last,
            "versions": dict(best.versions) if best else None,
        }


def times(report: Report) -> Iterator[Row]:
    """Every implementation of every problem, run by run."""
    for _, entry in _entries(report):
        for run in entry.study.beside:
            where = {"source": run.source, "launch": run.launch, "arithmetic": run.arithmetic, "date": run.date}
            for timing in run.timings:
                yield {**_key(entry), **where, **dataclasses.asdict(timing)}


def comparisons(report: Report) -> Iterator[Row]:
    """Every case of the results files, of problems without a journal too: ours and the best peer."""
    for device in report.devices:
        for comparison in device.comparisons:
            for case in comparison.cases:
                beside = case.beside
                yield {
                    "device": case.device,
                    "operator": case.operator,
                    "name": case.name,
                    "problem": str(case.problem),
                    "source": beside.source,
                    "launch": beside.launch,
                    "arithmetic": beside.arithmetic,
                    "date": beside.date,
                    "schedule": case.schedule,
                    "config": dict(case.config),
                    "us": beside.ours.us if beside.ours else None,
                    "best_peer": beside.best_peer.name if beside.best_peer else None,
                    "best_peer_us": beside.best_peer.us if beside.best_peer else None,
                    "of_best_peer": beside.ratio,
                    "copy_gbytes_per_s": case.copy_gbytes_per_s,
                }


def trials(report: Report) -> Iterator[Row]:
    """The curves: every trial of every search, and the fastest so far."""
    for _, entry in _entries(report):
        for curve in entry.study.curves:
            rows = zip(curve.us, curve.seconds, curve.best, strict=True)
            for number, (us, seconds, best) in enumerate(rows, 1):
                yield {
                    **_key(entry),
                    "search": curve.name,
                    "trial": number,
                    "seconds": seconds,
                    "us": us if math.isfinite(us) else None,
                    "best_us": best if math.isfinite(best) else None,
                }


def failures(report: Report) -> Iterator[Row]:
    """A row for each kind of failure of each problem."""
    for _, entry in _entries(report):
        for item in entry.study.failures:
            yield {**_head(entry), **dataclasses.asdict(item)}


def importance(report: Report) -> Iterator[Row]:
    """A row for each field; one without a field for trees that explain too little."""
    for _, entry in _entries(report):
        for item in entry.importances:
            told = {**_head(entry), "schedule": item.schedule, "trials": item.trials, "r2": item.r2}
            for name, loss in item.fields or ((None, None),):
                yield {**told, "field": name, "loss": loss}


def roofline(report: Report) -> Iterator[Row]:
    """A row for each point of each device's roofline."""
    for device in report.devices:
        for point in device.roofline.points:
            yield {"device": device.name, **dataclasses.asdict(point), "share": point.share}


def ceilings(report: Report) -> Iterator[Row]:
    """T(FL)OP/s of arithmetic, and the copy's GB/s."""
    for device in report.devices:
        for ceiling in device.roofline.ceilings:
            yield {"device": device.name, **dataclasses.asdict(ceiling), "gbytes_per_s": None}
        if device.roofline.bandwidth:
            copy = {"arithmetic": "copy", "measured": None, "datasheet": None}
            yield {"device": device.name, **copy, "gbytes_per_s": device.roofline.bandwidth}


def kernels(report: Report) -> Iterator[Row]:
    """Resources and occupancy of what was built or read from bundles."""
    for _, entry in _entries(report):
        if entry.kernel:
            yield {**_head(entry), **_kernel(entry.kernel)}
    for kernel in report.bundles:
        head = {"device": None, "target": str(kernel.arch), "operator": kernel.operator, "name": None}
        yield {**head, "problem": str(kernel.problem), **_kernel(kernel)}


def _kernel(kernel: ReportedKernel) -> Row:
    found = kernel.resources
    names = ("threads", "grid", "block", "registers", "shared", "spills", "blocks_sm", "occupancy", "limit", "counts")
    return {
        "schedule": kernel.schedule,
        "config": dict(kernel.config),
        "origin": kernel.origin,
        **{name: getattr(found, name) if found else None for name in names},
        "notes": list(kernel.notes),
    }


TABLES: Mapping[str, Callable[[Report], Iterator[Row]]] = {
    "problems": problems,
    "times": times,
    "comparisons": comparisons,
    "trials": trials,
    "failures": failures,
    "importance": importance,
    "roofline": roofline,
    "ceilings": ceilings,
    "kernels": kernels,
}


def cell(value: Any) -> Any:
    """A value for CSV: what is no number or text as JSON, nothing as an empty cell."""
    return json.dumps(value) if isinstance(value, dict | list | tuple) else value
