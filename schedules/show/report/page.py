"""A report as a page of HTML, and one for each kernel that was built: nothing is loaded, nothing needs a script."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from schedules.core.device import GENERIC, find_device, slug
from schedules.measure.records import Record
from schedules.show.explain.html import page, story_html
from schedules.show.report.data import OTHER, Study
from schedules.show.report.kernels import ReportedKernel
from schedules.show.report.make import Device, Entry, Report
from schedules.show.report.plots import Plot, style_rules
from schedules.show.report.roofline import Roofline
from schedules.tune.progress import failures_text, rate_text

TITLE = "What was measured"
STYLE = """
main{max-width:78rem}
h2{overflow-wrap:anywhere}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:1rem 1.5rem}
.plots figure{margin:0;min-width:0;align-self:start}
.plots figure.wide{grid-column:1/-1}
.scroll,.plots figure.wide{overflow-x:auto;background:
linear-gradient(to right,var(--paper) 40%,transparent) 0/2.5rem 100% no-repeat local,
linear-gradient(to left,var(--paper) 40%,transparent) 100%/2.5rem 100% no-repeat local,
linear-gradient(to right,var(--line),transparent) 0/.8rem 100% no-repeat scroll,
linear-gradient(to left,var(--line),transparent) 100%/.8rem 100% no-repeat scroll}
.plots figure svg{display:block;width:100%;height:auto;max-width:34rem}
.plots figure.wide svg{max-width:70rem;min-width:36rem}
.plots h3{margin:.6rem 0 .2rem;font-size:.95rem}
.plots figcaption{font-size:.8rem;color:var(--quiet);max-width:44rem}
.scroll{margin:.5rem 0}
.scroll table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
.scroll th,.scroll td{padding:.2rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
.scroll th{white-space:nowrap;font-weight:600}
.scroll .n{text-align:right;white-space:nowrap}
.scroll .changed{font-weight:600}
.scroll td.reason{min-width:16rem}
.bar{display:inline-block;height:.7em;min-width:1px;background:var(--plot-grid)}
.bar.default{background:var(--plot-soft)}
.bar.ours{background:var(--plot-series-0)}
.bar.peer{background:var(--plot-series-1)}
.lead{font-size:1.05rem}
.problem{margin-top:2.5rem;padding-top:.5rem;border-top:1px solid var(--line)}
.quiet{color:var(--quiet);font-size:.85rem}
main>section details>summary{cursor:pointer;padding:.25rem 0}
pre.source{overflow-x:auto;font-size:.8rem;line-height:1.35}
"""


@dataclass(frozen=True)
class Html:
    """Text that is HTML already."""

    text: str


def page_of(report: Report) -> str:
    """The page."""
    parts = [_head(report)]
    for device in report.devices:
        parts += [_device(device), *(_entry(entry) for entry in device.entries)]
    if report.bundles:
        parts.append("<h2>Bundles</h2>" + "".join(_bundle(kernel) for kernel in report.bundles))
    return page(TITLE, parts, style=style_rules() + STYLE)


def _head(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    links = " · ".join(f'<a href="#{slug(device.name)}">{escape(device.name)}</a>' for device in report.devices)
    return (
        f'<p class="quiet">{escape(report.date[:16].replace("T", " "))} UTC; made with '
        f"{escape(versions)}.  Beside this page are the devices' plots as PNG, and the tables as CSV and JSON.</p>"
        + (f"<p>{links}</p>" if len(report.devices) > 1 else "")
        + (f"<details open><summary>Not read</summary><ul>{notes}</ul></details>" if notes else "")
    )


def _device(device: Device) -> str:
    shares = _overview(device.entries) if device.entries else "<p>No journal of this device: comparisons only.</p>"
    return (
        f'<section id="{slug(device.name)}"><h2>{escape(device.name)}</h2>{_plots(device.plots)}{shares}'
        f"{_ceilings(device.roofline)}{_points(device.roofline)}{_cases(device)}</section>"
    )


def _overview(entries: Sequence[Entry]) -> str:
    headers = ("operator", "problem", "schedule", *OVERVIEW)
    rows = []
    for entry in entries:
        summary = entry.study.summary
        best, ratio = summary.best, entry.study.ratio
        rows.append(
            (
                summary.operator,
                Html(f'<a href="#{entry.study.key}">{escape(entry.study.name)}</a>'),
                best.schedule if best else "none was correct",
                _us(summary.default.us if summary.default else None),
                _us(best.us if best else None),
                _times(summary.speedup),
                _times(ratio[0] if ratio else None),
                rate_text(best) if best else "",
                _percent(entry.point.share if entry.point else None),
                str(summary.trials) + failures_text(summary.outcomes).partition(" (")[0],
            )
        )
    return _table(headers, rows, numbers=OVERVIEW)


OVERVIEW = ("default us", "best us", "speedup", "of best peer", "rate", "of roof", "trials")


def _ceilings(roof: Roofline) -> str:
    if not roof.ceilings and not roof.bandwidth:
        return (
            '<p class="quiet">What this device can do at most was not measured: the comparisons with peers '
            "(python -m benchmarks.compare_conv, python -m benchmarks.compare_softmax) do that.</p>"
        )
    rows = [
        (f"{ceiling.arithmetic} product of 8192", _number(ceiling.measured), _number(ceiling.datasheet), "T(FL)OP/s")
        for ceiling in roof.ceilings
    ]
    if roof.bandwidth:
        nominal = (find_device(roof.device) or GENERIC).bandwidth
        rows.append(("fastest plain copy", _number(roof.bandwidth), _number(nominal), "GB/s"))
    return _details(
        "What bounds it", _table(("", "measured", "datasheet", ""), rows, numbers=("measured", "datasheet"))
    )


def _points(roof: Roofline) -> str:
    headers = ("operator", "problem", "arithmetic", "schedule", *POINTS, "from", "above its roof because")
    rows = [
        (
            point.operator,
            Html(f'<a href="#{point.key}">{escape(point.name)}</a>') if point.key else point.name,
            point.arithmetic,
            point.schedule,
            _us(point.us),
            _number(point.intensity),
            _number(point.tflops),
            _number(point.tflops / point.intensity * 1e3),
            _percent(point.share),
            point.source,
            roof.reason(point),
        )
        for point in roof.points
    ]
    return (
        _details(f"Under the roof: {_count(len(rows), 'kernel')}", _table(headers, rows, numbers=POINTS))
        if rows
        else ""
    )


POINTS = ("us", "intensity", "T(FL)OP/s", "GB/s", "of roof")


def _cases(device: Device) -> str:
    headers = ("operator", "problem", "schedule", "us", "best peer", "us", "times ours", "from")
    rows = [
        (
            case.operator,
            case.name,
            case.schedule,
            _us(case.beside.ours.us),
            case.beside.best_peer.name,
            _us(case.beside.best_peer.us),
            _times(case.beside.ratio),
            case.beside.place,
        )
        for comparison in device.comparisons
        for case in comparison.cases
        if case.beside.ours and case.beside.best_peer
    ]
    return (
        _details(f"Beside peers: {_count(len(rows), 'case')}", _table(headers, rows, numbers=("us", "times ours")))
        if rows
        else ""
    )


def _entry(entry: Entry) -> str:
    study, best = entry.study, entry.study.summary.best
    parts = [
        f"<h2>{escape(study.summary.operator)} {escape(study.name)}</h2>",
        f'<p class="quiet">{escape(str(study.summary.problem))}; {escape(study.summary.target)} on '
        f"{escape(study.summary.device)}, last {escape(study.summary.last[:10])}</p>",
        f'<p class="lead">{escape(_lead(entry))}</p>',
        _plots(entry.plots),
        _importance_notes(entry),
        _times_table(study),
        _failures(study),
        _config(best, study.summary.default) if best else "",
        _kernel(entry.kernel, study.key, best) if entry.kernel else "",
    ]
    return f'<section class="problem" id="{study.key}">{"".join(parts)}</section>'


def _lead(entry: Entry) -> str:
    """The problem in a sentence or two."""
    summary = entry.study.summary
    best, ratio = summary.best, entry.study.ratio
    searched = (
        f"{_count(summary.trials, 'trial')}{failures_text(summary.outcomes)}" if summary.trials else "no trials kept"
    )
    if summary.running:
        searched += ", a search is running"
    if summary.older:
        searched += f"; {summary.older} records of other versions are left out"
    if best is None:
        return f"Nothing was correct: {searched}."
    parts = [f"{best.us:.2f} us, {rate_text(best)}"]
    if summary.speedup:
        parts.append(f"{summary.speedup:.2f} x the default")
    if ratio:
        parts.append(f"{ratio[0]:.2f} x {ratio[1]}")
    if entry.point and entry.point.share:
        parts.append(f"{entry.point.share:.0%} of the roof")
    error = f"  Worst error {best.error:.2g} of what is allowed" if best.error is not None else ""
    seeds = f", on {', '.join(best.verified)}" if error and best.verified else ""
    return f"{', '.join(parts)}.  {searched}.{error}{seeds}{'.' if error else ''}"


def _importance_notes(entry: Entry) -> str:
    weak = [item for item in entry.importances if not item.fields]
    return "".join(
        f'<p class="quiet">What {escape(item.schedule)} hangs on cannot be told: trees of its {item.trials} trials '
        f"explain {max(0.0, item.r2):.0%} of what they had not seen.</p>"
        for item in weak
    )


def _failures(study: Study) -> str:
    if not study.failures:
        return ""
    headers = ("stage", "schedule", "count", "reason of the first", "its config")
    rows = [
        (
            item.outcome,
            item.schedule,
            str(item.count),
            Html(f'<div class="reason">{escape(item.example)}</div>'),
            item.config,
        )
        for item in study.failures
    ]
    return _details(
        f"Failures: {sum(item.count for item in study.failures)}", _table(headers, rows, numbers=("count",))
    )


def _times_table(study: Study) -> str:
    """What was timed; only times under one heading were measured in one run, and their bars are to one scale."""
    headers = ("timed in", "what", "us", "10% to 90%", "times ours", "", "")
    rows: list[tuple[str | Html, ...]] = []
    for run in study.beside:
        ours = run.ours.us if run.ours else None
        longest = max((timing.us for timing in run.timings if timing.us), default=math.inf)
        for timing in run.timings:
            spread = f"{_us(timing.p10_us)} to {_us(timing.p90_us)}" if timing.p10_us and timing.p90_us else ""
            over = timing.us / ours if timing.us and ours and timing.us is not ours else None
            note = timing.note if timing.us or timing.kind == OTHER else f"failed: {timing.note}"
            place = f"{run.place}, {run.date[:10]}"
            bar = f'<span class="bar {timing.kind}" style="width:{12 * (timing.us or 0.0) / longest:.2f}rem"></span>'
            rows.append((place, timing.name, _us(timing.us), spread, _times(over), Html(bar), note))
    return (
        _details("Times", _table(headers, rows, numbers=("us", "10% to 90%", "times ours")), opened=True)
        if rows
        else ""
    )


def _config(best: Record, default: Record | None) -> str:
    same = default is not None and default.schedule == best.schedule
    plain: Mapping[str, Any] = default.config.to_json() if default and same else {}
    rows: list[tuple[str | Html, ...]] = []
    for name, value in best.config.to_json().items():
        text = _value(value)
        if same and name in plain and plain[name] != value:
            rows.append((name, Html(f'<span class="changed">{escape(text)}</span>'), _value(plain[name])))
        else:
            rows.append((name, text, _value(plain[name]) if name in plain else ""))
    headers = ("field", best.schedule, "default")
    other = (
        f"<p>The default is {escape(default.schedule)}: {escape(str(default.config))}</p>"
        if default and not same
        else ""
    )
    return _details(f"Config of {best.schedule}", _table(headers, rows) + other)


def _kernel(kernel: ReportedKernel, key: str, best: Record | None = None) -> str:
    parts = [_resources(kernel, best)]
    parts += [f'<p class="quiet">{escape(note)}</p>' for note in kernel.notes]
    if kernel.story or kernel.source:
        what = "From the definition to the source, step by step" if kernel.story else "Generated source"
        parts.append(f'<p><a href="{kernel_file(key)}">{what}</a></p>')
    return "".join(parts)


def kernel_file(key: str) -> str:
    """Where the page of a kernel lies, beside the report's."""
    return f"kernels/{key}.html"


def kernel_pages(report: Report) -> Iterator[tuple[str, str]]:
    """The names of files and the pages of the kernels that have a story or a source."""
    studies = ((entry.study.key, entry.kernel) for device in report.devices for entry in device.entries)
    loose = ((bundle_key(kernel), kernel) for kernel in report.bundles)
    for key, kernel in (*studies, *loose):
        if kernel and kernel.story:
            yield kernel_file(key), page(str(kernel.problem), [story_html(kernel.story, brief=True)])
        elif kernel and kernel.source:
            source = f'<pre class="source">{escape(kernel.source)}</pre>'
            yield kernel_file(key), page(str(kernel.problem), [source], style=STYLE)


def bundle_key(kernel: ReportedKernel) -> str:
    """A name for files: no other bundle of a report has it."""
    digest = hashlib.sha256(f"{kernel.origin} {kernel.problem}".encode()).hexdigest()[:8]
    return f"{slug(f'{kernel.operator} {kernel.schedule}')[:80]}-{digest}"


def _resources(kernel: ReportedKernel, best: Record | None) -> str:
    found = kernel.resources
    if found is None:
        more = best.more if best else {}
        if "registers" not in more:
            return ""
        spilled = f", {more['spilled']} bytes spilled" if more.get("spilled") is not None else ""
        return f"<p>{more['registers']} registers a thread{spilled}, by the journal.</p>"
    facts: list[tuple[str, str]] = []
    if found.threads is not None and found.grid is not None:
        facts.append(("threads of a block", str(found.threads)))
        facts.append(("blocks", " x ".join(map(str, found.grid))))
    if found.registers is not None:
        facts.append(("registers of a thread", str(found.registers)))
    if found.shared is not None:
        facts.append(("shared memory of a block", f"{found.shared} bytes"))
    if found.spills is not None:
        facts.append(("spilled by a thread", f"{found.spills} bytes"))
    if found.occupancy is not None:
        facts.append(("occupancy", f"{found.occupancy:.0%}, limited by {found.limit}"))
        facts.append(("blocks on a multiprocessor", str(found.blocks_sm)))
    rows = [*facts, *((f"{name} ({found.counted_in})", str(count)) for name, count in found.counts.items())]
    notes = "".join(f'<p class="quiet">{escape(note)}</p>' for note in found.notes)
    title = f"Resources ({kernel.origin})"
    if found.occupancy is not None:
        title = f"Resources: occupancy {found.occupancy:.0%}, {found.registers} registers, {found.shared} bytes shared"
    return _details(title, _table(("", ""), rows) + f'<p class="quiet">{escape(kernel.origin)}</p>' + notes)


def _bundle(kernel: ReportedKernel) -> str:
    us = (kernel.measured or {}).get("median_us")
    device = (kernel.measured or {}).get("device", "")
    timed = f"{us:.2f} us on {escape(str(device))}" if us else "Not measured"
    config = _table(("field", kernel.schedule), [(name, _value(value)) for name, value in kernel.config.items()])
    return (
        f'<section class="problem"><h2>{escape(kernel.operator)} {escape(str(kernel.problem))}</h2>'
        f'<p class="quiet">{escape(kernel.schedule)} for {escape(str(kernel.arch))}</p><p class="lead">{timed}.</p>'
        f"{_details(f'Config of {kernel.schedule}', config)}{_kernel(kernel, bundle_key(kernel))}</section>"
    )


def _plots(plots: Sequence[Plot]) -> str:
    figures = "".join(
        f"<figure{' class=wide' if plot.wide else ''}><h3>{escape(plot.title)}</h3>{plot.svg}"
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
        for plot in plots
    )
    return f'<div class="plots">{figures}</div>' if figures else ""


def _details(title: str, body: str, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{body}</details>"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str | Html]], numbers: Sequence[str] = ()) -> str:
    """A table that scrolls within its own box; columns whose header is in `numbers` are set to the right."""
    kinds = [' class="n"' if header in numbers else "" for header in headers]
    head = "".join(f"<th{kind}>{escape(header)}</th>" for header, kind in zip(headers, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{_text(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(cell: str | Html) -> str:
    return cell.text if isinstance(cell, Html) else escape(cell)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _us(value: float | None) -> str:
    return "" if value is None or math.isinf(value) else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _value(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
