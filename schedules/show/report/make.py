"""Everything of a report, gathered and drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from schedules.bundle.bundle import Bundle
from schedules.core.errors import ToolchainError
from schedules.core.versions import versions
from schedules.measure.journal import BadLine, Located, told
from schedules.measure.lookup import summaries
from schedules.measure.records import now
from schedules.show.report import kernels, plots
from schedules.show.report.data import Comparison, Study, comparisons, studies
from schedules.show.report.importance import Importance, importances
from schedules.show.report.kernels import ReportedKernel
from schedules.show.report.plots import Plot
from schedules.show.report.roofline import Point, Roofline, roofline


@dataclass(frozen=True)
class Entry:
    """One problem on one device; `kernel` is its best, None where nothing was correct."""

    study: Study
    importances: tuple[Importance, ...]
    kernel: ReportedKernel | None
    point: Point | None
    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class Device:
    """One device: its problems, and what compares them."""

    name: str
    entries: tuple[Entry, ...]
    comparisons: tuple[Comparison, ...]
    roofline: Roofline
    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class Report:
    """`bundles` are those that belong to no entry; `notes` say what could not be read or told."""

    date: str
    versions: dict[str, str]
    devices: tuple[Device, ...]
    bundles: tuple[ReportedKernel, ...]
    notes: tuple[str, ...]


def make_report(
    found: Sequence[Located],
    *,
    bad: Sequence[BadLine] = (),
    folders: Sequence[Path] = (),
    bundles: Sequence[Bundle] = (),
    sources: bool = True,
    meant: Callable[[Comparison], Comparison] = lambda comparison: comparison,
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """The report of the records `found`, the results files in `folders` and `bundles`.

    `bad` are lines of the journals that were not read; `meant` leaves of a comparison the cases that are wanted.  With
    `sources` each best kernel is built, for its resources and its story; `tell` hears of each.  Raises ToolchainError
    if matplotlib is not installed.
    """
    plots.require_matplotlib()
    read, unread = comparisons(folders)
    compared = [meant(comparison) for comparison in read]
    summed = summaries(found)
    unused = told([*bad, *(line for summary in summed for line in summary.refused)])
    notes = [*([unused] if unused else []), *unread]
    known = studies(summed, compared)
    names = dict.fromkeys(
        [*(study.summary.device for study in known), *(each.device for each in compared if each.cases)]
    )
    roofs = {name: roofline(name, known, read, meant) for name in names}
    made: dict[str, list[Entry]] = {name: [] for name in names}
    used: set[str] = set()
    for number, study in enumerate(known, 1):
        tell(f"{number} of {len(known)}: {study.summary.operator} {study.name}")
        kernel = kernels.study_kernel(study, bundles, sources)
        used.add(kernel.origin if kernel else "")
        device = study.summary.device
        made[device].append(_entry(study, kernel, roofs[device], notes))
    devices = [_device(name, entries, compared, roofs[name]) for name, entries in made.items()]
    loose = [kernels.bundle_kernel(bundle, sources) for bundle in bundles if f"bundle {bundle.path}" not in used]
    return Report(now(), versions(), tuple(devices), tuple(loose), tuple(dict.fromkeys(notes)))


def _entry(study: Study, kernel: ReportedKernel | None, roof: Roofline, notes: list[str]) -> Entry:
    try:
        found = importances(study.summary.records)
    except ToolchainError as error:  # a report without it is a report
        found = []
        notes.append(str(error))
    point = next((point for point in roof.points if point.key == study.key), None)
    return Entry(study, tuple(found), kernel, point, tuple(plots.study_plots(study, found)))


def _device(name: str, entries: Sequence[Entry], compared: Sequence[Comparison], roof: Roofline) -> Device:
    here = tuple(comparison for comparison in compared if comparison.device == name)
    drawn = (plots.of_roofline(roof), plots.of_comparisons(name, here), plots.of_shares(name, here))
    return Device(name, tuple(entries), here, roof, tuple(plot for plot in drawn if plot))
