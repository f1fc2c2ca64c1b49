"""A device's roofline: what each kernel reaches of what its arithmetic and its memory allow.

The model of Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures" (2009).  Intensity counts the textbook method's operations over the fewest bytes (each input read once,
each output written once).  The roof is what was measured on the device: matrix products of its own library, and the
fastest plain copy; the datasheet's peak only where no product was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from schedules.core.arithmetic import BF16X3, BF16X6, FLOAT32
from schedules.core.device import GENERIC, MIB, find_device
from schedules.core.presets import short
from schedules.core.problem import Problem
from schedules.core.registry import operator
from schedules.show.report.data import Comparison, Study

# an arithmetic that makes one product of several: whose ceiling bounds it, and how many
PARTLY = 4  # times the L2 cache: of so many bytes a part is still there
PRODUCTS: Mapping[str, tuple[str, int]] = {each.name: (each.of, each.products) for each in (BF16X3, BF16X6)}


@dataclass(frozen=True)
class Ceiling:
    """T(FL)OP/s of one arithmetic: measured as a matrix product, and the datasheet's; None where it is not known."""

    arithmetic: str
    measured: float | None
    datasheet: float | None

    @property
    def tflops(self) -> float:
        """The one that counts."""
        return self.measured or self.datasheet or float("inf")


@dataclass(frozen=True)
class Point:
    """One kernel: operations for a byte, T(FL)OP/s reached, and the roof there (None where none is known).

    `key` is that of its study, "" if it is known from a comparison only; `source` says where its time is from, `read`
    and `written` how many bytes it must.
    """

    operator: str
    name: str
    key: str
    arithmetic: str
    schedule: str
    us: float
    intensity: float
    tflops: float
    roof: float | None
    source: str
    read: int
    written: int

    @property
    def share(self) -> float | None:
        """Of the roof."""
        return self.tflops / self.roof if self.roof else None


@dataclass(frozen=True)
class Roofline:
    """`bandwidth` is the fastest copy in GB/s, None if there is none; `points` in the order of the studies."""

    device: str
    ceilings: tuple[Ceiling, ...]
    bandwidth: float | None
    points: tuple[Point, ...]

    def ceiling(self, arithmetic: str) -> Ceiling | None:
        """What bounds `arithmetic`, if anything is known."""
        name, products = PRODUCTS.get(arithmetic, (arithmetic, 1))
        found = next((ceiling for ceiling in self.ceilings if ceiling.arithmetic == name), None)
        if not found or products == 1:
            return found
        parts = (found.measured, found.datasheet)
        return Ceiling(arithmetic, *(value / products if value else None for value in parts))

    def reason(self, point: Point) -> str:
        """Why `point` is above its roof; "" if it is not."""
        if not point.share or point.share <= 1:
            return ""
        ceiling = self.ceiling(point.arithmetic)
        if ceiling and point.roof == ceiling.tflops:
            peak = ceiling.datasheet
            told = f"; this is {point.tflops / peak:.0%} of the datasheet's {peak:.4g}" if peak else ""
            return f"the library's product reaches {ceiling.tflops:.4g}{told}"
        moved, l2_bytes = point.read + point.written, (find_device(self.device) or GENERIC).l2_bytes or 0
        if moved <= l2_bytes:
            return f"its {moved / MIB:.3g} MiB fit the L2 cache of {l2_bytes / MIB:.0f}, the copy's do not"
        if moved <= PARTLY * l2_bytes:
            return f"part of its {moved / MIB:.0f} MiB stays in the L2 cache of {l2_bytes / MIB:.0f}"
        if point.read > point.written:
            return f"it reads {point.read / point.written:.2g} bytes for each that it writes, a copy 1"
        return f"the copy was timed in another run; by {point.share - 1:.1%}"

    def roof(self, arithmetic: str, intensity: float) -> float | None:
        """T(FL)OP/s that `arithmetic` may reach at `intensity` operations for a byte; None if nothing is known."""
        ceiling = self.ceiling(arithmetic)
        slopes = [self.bandwidth * intensity / 1e3] if self.bandwidth else []
        return min([*slopes, *([ceiling.tflops] if ceiling else [])], default=None)


def roofline(
    device: str,
    studies: Sequence[Study],
    comparisons: Sequence[Comparison],
    meant: Callable[[Comparison], Comparison] = lambda comparison: comparison,
) -> Roofline:
    """The roofline of `device` with the best kernel of each of its problems, and of each arithmetic: of the study's
    best record, else of the newest comparison.

    `meant` leaves of a comparison the cases that are wanted; the roof is of all of them, whichever are.
    """
    here = [comparison for comparison in comparisons if comparison.device == device]
    empty = Roofline(device, tuple(_ceilings(device, here)), _bandwidth(device, studies, here), ())
    points: dict[tuple[str, Problem, str], Point] = {}

    def put(point: Point, problem: Problem) -> None:
        points[point.operator, problem, point.arithmetic] = point

    cases = [case for comparison in map(meant, here) for case in comparison.cases if case.beside.ours]
    for case in sorted(cases, key=lambda case: case.beside.date):
        assert case.beside.ours and case.beside.ours.us
        us, place = case.beside.ours.us, case.beside.place
        arithmetic = case.beside.arithmetic
        put(_point(empty, case.operator, case.problem, case.schedule, arithmetic, us, "", place), case.problem)
    for study in studies:
        best = study.summary.best
        if study.summary.device == device and best:
            declared = operator(best.operator).schedule(best.schedule).arithmetic
            arithmetic = "" if declared == FLOAT32 else declared.name
            made = _point(empty, best.operator, best.problem, best.schedule, arithmetic, best.us, study.key, "journal")
            put(made, best.problem)
    return Roofline(device, empty.ceilings, empty.bandwidth, tuple(points.values()))


def _point(
    roofline: Roofline, owner: str, problem: Problem, schedule: str, declared: str, us: float, key: str, source: str
) -> Point:
    """`declared` is the arithmetic that the schedule says it computes in; "" where that is the problem's dtype."""
    arithmetic = declared or str(getattr(problem, "dtype", FLOAT32.name))
    intensity = problem.flops / problem.min_bytes
    written = sum(argument.nbytes for argument in problem.arguments() if argument.output)
    return Point(
        operator=owner,
        name=short(owner, problem),
        key=key,
        arithmetic=arithmetic,
        schedule=schedule,
        us=us,
        intensity=intensity,
        tflops=problem.flops / us / 1e6,
        roof=roofline.roof(arithmetic, intensity),
        source=source,
        read=problem.min_bytes - written,
        written=written,
    )


def _ceilings(device: str, comparisons: Sequence[Comparison]) -> list[Ceiling]:
    measured: dict[str, float] = {}
    for comparison in comparisons:
        measured |= comparison.ceilings
    peaks = (find_device(device) or GENERIC).peaks
    names = dict.fromkeys([*peaks, *measured])
    return [Ceiling(name, measured.get(name), peaks.get(name)) for name in names]


def _bandwidth(device: str, studies: Sequence[Study], comparisons: Sequence[Comparison]) -> float | None:
    """The fastest copy beside the device's comparisons, else beside the records that are shown."""
    here = [study for study in studies if study.summary.device == device]
    beside = (comparison.bandwidth for comparison in comparisons)
    noted = (record.more.get("copy_gbytes_per_s") for study in here for record in study.summary.records)
    return max(filter(None, beside), default=None) or max(filter(None, noted), default=None)
