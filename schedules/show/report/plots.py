"""The plots of a report: SVG for the page, where CSS chooses the colours; those of a whole device as PNG too."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from schedules.core.errors import ToolchainError
from schedules.show.report.data import DEFAULT, JOURNAL, OURS, PEER, Comparison, Study, Timing
from schedules.show.report.importance import Importance
from schedules.show.report.roofline import Roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL = "pip install 'te-schedules[plot]'"
DPI = 144
# name in the style sheet to the colour on white and on black; series are told apart by those with a number
COLOURS: Mapping[str, tuple[str, str]] = {
    "ink": ("#1c2128", "#e6e9ee"),
    "soft": ("#6a737f", "#98a2b0"),
    "grid": ("#dfe3e8", "#333b45"),
    "paper": ("#fefefe", "#14181d"),
    "series-0": ("#1a66b8", "#6cb0f5"),
    "series-1": ("#c8501c", "#f59562"),
    "series-2": ("#23824a", "#62c98c"),
    "series-3": ("#7d48b5", "#bd97ec"),
    "series-4": ("#987011", "#d9b454"),
    "series-5": ("#b92c66", "#f087b3"),
}
SERIES = [name for name in COLOURS if name.startswith("series-")]
SMALL, WIDE = (4.6, 2.9), (9.4, 4.6)  # inches of a plot beside others, and of one alone
LEGEND, WIDE_LEGEND = 3, 5  # names in a line of the legend above a plot
BOTTOM = 0.45  # inches for the axis under a plot
SHOWN_FIELDS = 10


@dataclass(frozen=True)
class Plot:
    """`name` is the file's, `title` and `caption` say what is seen; `svg` is a fragment for a page.

    `png` is the same as a picture, empty where the plot is one of many.
    """

    name: str
    title: str
    caption: str
    svg: str
    png: bytes = b""

    @property
    def wide(self) -> bool:
        """Whether it stands alone."""
        return bool(self.png)


def style_rules() -> str:
    """The variables that the SVGs take their colours from, for light and dark."""
    light, dark = ("".join(f"--plot-{name}:{pair[dark]};" for name, pair in COLOURS.items()) for dark in (0, 1))
    lines = "svg[role=img] *{stroke-linejoin:round;stroke-linecap:butt}"
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{lines}"


def require_matplotlib() -> None:
    """Raise ToolchainError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ToolchainError(f"matplotlib, which draws the report's plots, is not installed; {INSTALL}") from None


def study_plots(study: Study, importances: Sequence[Importance]) -> list[Plot]:
    """The plots of one problem: progress over trials and time, importance."""
    made = []
    if any(len(curve.us) > 1 and math.isfinite(min(curve.us)) for curve in study.curves):
        made += [_progress(study, "trials"), _progress(study, "time")]
    return made + [_importance(study, item) for item in importances if item.fields]


def _progress(study: Study, over: str) -> Plot:
    """The fastest so far over the trials, with each of them, or over the seconds of each search."""
    timed = over == "time"

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        axes.set_yscale("log")
        lowest = min(us for curve in study.curves for us in curve.us)
        for curve, colour in zip(study.curves, _cycle(len(study.curves)), strict=True):
            x = curve.seconds if timed else range(1, len(curve.us) + 1)
            failed = [at for at, us in zip(x, curve.us, strict=True) if math.isinf(us)]
            if not timed:
                axes.scatter(x, curve.us, s=4, color=colour, alpha=0.35, linewidths=0)
            axes.step(x, curve.best, where="post", color=colour, linewidth=1.8, label=curve.name)
            top = axes.get_xaxis_transform()
            axes.plot(failed, [0.985] * len(failed), "x", color=_hex("series-1"), markersize=3, transform=top)
        for timing in _marks(study):
            colour = _hex("ink" if timing.kind == OURS else "soft")
            axes.axhline(
                timing.us or 0.0, color=colour, linewidth=0.9, linestyle=_DASHES[timing.kind], label=timing.name
            )
            lowest = min(lowest, timing.us or lowest)
        highest = max(us for curve in study.curves for us in curve.us if math.isfinite(us))
        marks = [timing.us for timing in _marks(study) if timing.us]
        axes.set_ylim(0.93 * lowest, 1.08 * max(min(highest, 12 * lowest), *marks, 1.2 * lowest))
        _plain_log(axes.yaxis, axes.get_ylim())
        axes.set_ylabel("microseconds")
        axes.set_xlabel("seconds of the search" if timed else "trials")
        axes.set_xlim(left=0)
        if not timed:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=LEGEND, fontsize=7, frameon=False)

    lines = -(-(len(study.curves) + len(_marks(study))) // LEGEND)
    clock = ""
    if timed and any(curve.dated for curve in study.curves):
        clock = "  The journal keeps no seconds of this search: dates of the trials, pauses included."
    return _plot(
        f"{study.key}-{over}",
        f"Best so far over {over}",
        f"Lines: the fastest so far;{'' if timed else ' dots: every trial;'} crosses: failures.{clock}",
        draw,
        (SMALL[0], SMALL[1] + 0.16 * lines),
        top=0.12 + 0.16 * lines,
    )


_DASHES = {DEFAULT: (0, (4, 2)), OURS: (0, (1, 0)), PEER: (0, (1, 1.5))}


def _marks(study: Study) -> list[Timing]:
    """The times that a search is seen against: default, best of all, and the best peer."""
    found = [timing for run in study.beside for timing in run.timings if run.source == JOURNAL and timing.us]
    marks = [timing for timing in found if timing.kind in (DEFAULT, OURS)]
    peers = [run.best_peer for run in study.beside if run.best_peer]
    return marks + sorted(peers, key=lambda timing: timing.us or math.inf)[:1]


def _words(labels: Iterable[str]) -> float:
    """Inches that the longest of `labels` takes left of the axes."""
    return 0.2 + 0.061 * max(map(len, labels))


def _importance(study: Study, item: Importance) -> Plot:
    shown = item.fields[:SHOWN_FIELDS]

    def draw(axes: Axes) -> None:
        values = [max(0.0, loss) for _, loss in shown]
        axes.barh(range(len(shown)), values, height=0.7, color=_hex("series-2"))
        for y, value in enumerate(values):
            axes.text(value, y, f" {value:.2f}", fontsize=6.5, va="center")
        axes.set_yticks(range(len(shown)), [name for name, _ in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0, 1.15 * max(*values, 1e-9))
        axes.set_xlabel("loss of fit when shuffled")
        axes.grid(axis="y", visible=False)

    return _plot(
        f"{study.key}-importance-{item.schedule}",
        f"What {item.schedule} hangs on",
        f"Permutation importance in boosted trees of {item.trials} trials; the trees explain {item.r2:.0%} of what "
        f"they had not seen.",
        draw,
        (SMALL[0], 0.6 + 0.2 * len(shown)),
        left=_words(name for name, _ in shown),
    )


def _spread(values: Sequence[float], apart: float = 1.3) -> list[float]:
    """Rising `values`, moved up where one is less than `apart` times the one before, so that labels do not overlap."""
    found: list[float] = []
    for value in values:
        found.append(max(value, found[-1] * apart) if found else value)
    return found


def of_roofline(roofline: Roofline) -> Plot | None:
    """The roofline of a device, a point for each kernel; None if there is no kernel."""
    if not roofline.points:
        return None
    name = f"roofline-{_slug(roofline.device)}"
    operators = list(dict.fromkeys(point.operator for point in roofline.points))
    used = list(dict.fromkeys(point.arithmetic for point in roofline.points))
    found = [roofline.ceiling(arithmetic) for arithmetic in used]
    ceilings = sorted((ceiling for ceiling in found if ceiling), key=lambda ceiling: ceiling.tflops)
    told: list[str] = []  # a title for each link, in the order in which they are drawn

    def draw(axes: Axes) -> None:
        ridges = [ceiling.tflops / roofline.bandwidth * 1e3 for ceiling in ceilings if roofline.bandwidth]
        low = min(*(point.intensity / 2 for point in roofline.points), *(ridge / 8 for ridge in ridges), math.inf)
        high = max(*(point.intensity * 3 for point in roofline.points), *(ridge * 8 for ridge in ridges), 0.0)
        if roofline.bandwidth:
            slope = roofline.bandwidth / 1e3
            top = max((ceiling.tflops for ceiling in ceilings), default=slope * high)
            ends = [low, min(high, top / slope)]
            axes.plot(ends, [slope * x for x in ends], color=_hex("ink"), linewidth=1.1)
            axes.annotate(
                f"fastest copy, {roofline.bandwidth:.0f} GB/s",
                (ends[1], slope * ends[1]),
                textcoords="offset points",
                xytext=(-8, 3),
                ha="right",
                fontsize=7,
            )
        for ceiling in ceilings:
            begin = ceiling.tflops / roofline.bandwidth * 1e3 if roofline.bandwidth else low
            if begin < high:
                axes.plot([begin, high], [ceiling.tflops] * 2, color=_hex("ink"), linewidth=1.1)
            if ceiling.measured and ceiling.datasheet:
                at = ceiling.datasheet / roofline.bandwidth * 1e3 if roofline.bandwidth else low
                if at < high:
                    axes.plot([at, high], [ceiling.datasheet] * 2, color=_hex("soft"), linewidth=0.8, linestyle=":")
        for ceiling, at in zip(ceilings, _spread([ceiling.tflops for ceiling in ceilings]), strict=True):
            axes.text(high * 1.05, at, f"{ceiling.arithmetic} {ceiling.tflops:.0f}", fontsize=6.5, va="center")
        markers = dict(zip(used, "osD^vPX*<>" * len(used), strict=False))
        for owner, colour in zip(operators, _cycle(len(operators)), strict=True):
            for arithmetic in used:
                points = [p for p in roofline.points if (p.operator, p.arithmetic) == (owner, arithmetic)]
                if not points:
                    continue
                told.extend(f"{p.operator} {p.name}: {p.us:.4g} us, {p.tflops:.3g} T(FL)OP/s" for p in points if p.key)
                dots = axes.scatter(
                    [p.intensity for p in points],
                    [p.tflops for p in points],
                    s=20,
                    marker=markers[arithmetic],
                    color=colour,
                    alpha=0.8,
                    linewidths=0,
                    label=f"{owner} {arithmetic}",
                )
                dots.set_urls([f"#{p.key}" if p.key else None for p in points])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        _plain_log(axes.xaxis, axes.get_xlim())
        _plain_log(axes.yaxis, axes.get_ylim())
        axes.set_xlabel("operations for a byte (intensity)")
        axes.set_ylabel("T(FL)OP/s")
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=WIDE_LEGEND, fontsize=7, frameon=False)

    kinds = {(point.operator, point.arithmetic) for point in roofline.points}
    bounds = (
        "solid lines were measured here (matrix products of 8192, plain copies), dotted ones are the datasheet's"
        if roofline.ceilings or roofline.bandwidth
        else "what bounds this device was not measured"
    )
    made = _plot(
        name,
        f"Roofline of {roofline.device}",
        f"Every kernel's best time; {bounds}.  Points lead to their problem.",
        draw,
        WIDE,
        right=1.0,
        top=0.12 + 0.16 * -(-len(kinds) // WIDE_LEGEND),
    )
    return _with_titles(made, told)


def of_comparisons(device: str, comparisons: Sequence[Comparison]) -> Plot | None:
    """Ours beside the best peer, a dot for each case of the results files; None if none has both."""
    groups: dict[str, list[float]] = {}
    for comparison in comparisons:
        for case in comparison.cases:
            if case.beside.ratio is not None:
                dtype = getattr(case.problem, "dtype", "")
                used = f"{dtype} in {case.beside.arithmetic}" if case.beside.arithmetic else dtype
                groups.setdefault(f"{case.operator} {used} ({case.beside.launch})", []).append(case.beside.ratio)
    if not groups:
        return None
    return of_ratios(
        f"peers-{_slug(device)}",
        "Ours beside the best peer",
        "A dot for each problem that was timed in turn with its peers; the bar is the geometric mean.",
        dict(sorted(groups.items())),
    )


SHARES = ((0.97, "series-2", 1.0), (0.92, "series-2", 0.45), (0.85, "series-4", 0.9), (0.7, "series-1", 0.9))


def of_shares(device: str, comparisons: Sequence[Comparison]) -> Plot | None:
    """Rows and columns as a map: a square for each shape that was timed beside a plain copy; None if there is none."""
    found: dict[tuple[int, int], float] = {}
    for case in (case for comparison in comparisons for case in comparison.cases):
        shape, ours = (getattr(case.problem, "rows", 0), getattr(case.problem, "cols", 0)), case.beside.ours
        if all(shape) and ours and ours.us and case.copy_gbytes_per_s:
            share = case.problem.min_bytes / ours.us / 1e3 / case.copy_gbytes_per_s
            found[shape] = min(share, found.get(shape, math.inf))
    if not found:
        return None

    def draw(axes: Axes) -> None:
        most = math.inf
        for least, colour, alpha in (*SHARES, (0.0, "series-5", 1.0)):
            shapes = [shape for shape, share in found.items() if least <= share < most]
            above = f"{most:.0%}" if most < 1 else ""
            label = f"under {above}" if not least else f"{least:.0%} to {above}" if above else f"{least:.0%} and more"
            axes.scatter(
                [cols for _, cols in shapes],
                [rows for rows, _ in shapes],
                s=22,
                marker="s",
                color=_hex(colour),
                alpha=alpha,
                linewidths=0,
                label=f"{label}: {len(shapes)}",
            )
            most = least
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            _plain_log(axis, limits)
        axes.set_xlabel("columns")
        axes.set_ylabel("rows")
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=len(SHARES) + 1, fontsize=7, frameon=False)

    return _plot(
        f"copies-{_slug(device)}",
        "Ours as a share of a copy's rate",
        "A square for each shape, of the function and dtype furthest behind; bytes that must move, each once.",
        draw,
        WIDE,
        top=0.28,
    )


def of_ratios(name: str, title: str, caption: str, groups: Mapping[str, Sequence[float]]) -> Plot:
    """For each group a dot for each time of the best peer as a multiple of ours, and a bar at the geometric mean."""
    labels = [f"{group}, {len(ratios)}" for group, ratios in groups.items()]

    def draw(axes: Axes) -> None:
        axes.axvline(1.0, color=_hex("ink"), linewidth=1.0)
        for y, ratios in enumerate(groups.values()):
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            lifts = [0.16 * ((index % 5) - 2) / 2 for index in range(len(ratios))]
            axes.scatter(
                sorted(ratios), [y + lift for lift in lifts], s=14, color=_hex("series-0"), alpha=0.6, linewidths=0
            )
            axes.plot([mean, mean], [y - 0.36, y + 0.36], color=_hex("ink"), linewidth=1.8)
        axes.set_yticks(range(len(groups)), labels)
        axes.set_ylim(len(groups) - 0.4, -0.6)
        axes.set_xscale("log")
        _plain_log(axes.xaxis, axes.get_xlim())
        axes.set_xlabel("time of the best peer as a multiple of ours: right of 1 ours is faster")
        axes.grid(axis="y", visible=False)

    return _plot(name, title, caption, draw, (WIDE[0], 0.7 + 0.36 * len(groups)), left=_words(labels))


def _plot(
    name: str,
    title: str,
    caption: str,
    draw: Callable[[Axes], None],
    size: tuple[float, float] = SMALL,
    *,
    left: float = 0.62,
    right: float = 0.12,
    top: float = 0.1,
) -> Plot:
    """Draw into a figure of `size` inches with margins of `left`, `right` and `top` inches for the words there.

    Raises ToolchainError if matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_style(name)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a name in a journal: a box stands for it
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        draw(axes)
        axes.set_axisbelow(True)
        width, height = size
        figure.subplots_adjust(left / width, BOTTOM / height, 1 - right / width, 1 - top / height)
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        if size[0] == WIDE[0]:
            figure.savefig(png, format="png", dpi=DPI)
    return Plot(name, title, caption, _fragment(svg.getvalue(), title), png.getvalue())


def _style(name: str) -> dict[str, Any]:
    return {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 8.0,
        "axes.edgecolor": _hex("soft"),
        "axes.labelcolor": _hex("ink"),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": _hex("paper"),
        "axes.grid": True,
        "figure.facecolor": _hex("paper"),
        "grid.color": _hex("grid"),
        "grid.linewidth": 0.6,
        "text.color": _hex("ink"),
        "xtick.color": _hex("soft"),
        "ytick.color": _hex("soft"),
        "xtick.labelcolor": _hex("ink"),
        "ytick.labelcolor": _hex("ink"),
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
    }


def _fragment(svg: str, title: str) -> str:
    """Matplotlib's file as part of a page: colours by name, the page's font, no identifiers but those it refers to."""
    body = svg[svg.index("<svg") :]
    for name, (light, _) in COLOURS.items():
        body = body.replace(light, f"var(--plot-{name})")
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", body)
    body = re.sub(r"font-family: [^;\"]*;? ?|transform=\"rotate\(-0 [^)]*\)\"", "", body)
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", body))
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", body)
    # a style in one drawing is one of the whole page: `style_rules` has it once
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.S)
    body = re.sub(r"\n\s*", "\n", body)
    body = re.sub(r"(\d\.\d{2})\d+", r"\1", body)  # a hundredth of a point is not seen
    head = re.match(r"<svg[^>]*>", body)
    assert head
    box = re.search(r'viewBox="[^"]*"', head[0])
    assert box
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg role="img" aria-label="{escape(title)}" {namespaces} {box[0]}>' + body[head.end() :]


def _with_titles(plot: Plot, told: Sequence[str]) -> Plot:
    """`plot` with what a pointer shows over each of its links, in their order."""
    texts = iter(told)

    def titled(link: re.Match[str]) -> str:
        return f"{link[0]}<title>{escape(next(texts, ''))}</title>"

    svg = re.sub(r"<a xlink:href=\"#[^\"]*\"[^>]*>", titled, plot.svg)
    return replace(plot, svg=svg)


def _hex(name: str) -> str:
    return COLOURS[name][0]


def _cycle(count: int) -> list[str]:
    return [_hex(SERIES[index % len(SERIES)]) for index in range(count)]


def _plain_log(axis: Any, limits: tuple[float, float]) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5, or closer where it is short, as plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    low, high = limits
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), [1 + 0.1 * tenth for tenth in range(90)]):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) >= 3:
            break
    axis.set_major_locator(FixedLocator(ticks[:: math.ceil(len(ticks) / 8)]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _slug(device: str) -> str:
    from schedules.core.device import slug

    return slug(device)
