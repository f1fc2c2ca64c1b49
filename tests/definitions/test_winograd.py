"""Transforms are exact in whole arithmetic, cut every axis, and bound the error by the largest data of an image."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.check.verify import MODES, emulated_runs, poisoned
from schedules.core.arch import Arch
from schedules.core.arithmetic import FLOAT32
from schedules.core.operator import Array
from schedules.core.registry import operator
from schedules.definitions.winograd import Matrix, Split, gain, points_of, transform
from schedules.definitions.winograd_errors import CHAIN, TRANSFORMS, UNIT, chain, error
from tests.conftest import problem_of

FORMS = [(2, 3), (3, 3), (4, 3), (5, 3), (6, 3), (2, 5), (3, 5), (4, 5), (2, 7), (2, 2), (4, 2), (1, 1), (4, 1)]
STRIDED = [(4, 3, 2), (3, 5, 2), (2, 7, 3), (6, 1, 2), (2, 2, 3)]  # of taps in phases, of phases without any


def times(matrix: Matrix, vector: Sequence[Any]) -> list[Any]:
    return [sum((a * b for a, b in zip(row, vector, strict=True)), start=Fraction(0)) for row in matrix]


def convolved(data: Sequence[Any], taps: Sequence[Any], outputs: int, stride: int = 1) -> list[Any]:
    return [sum(data[i * stride + j] * tap for j, tap in enumerate(taps)) for i in range(outputs)]


@pytest.mark.parametrize(("outputs", "taps", "stride"), [*((*form, 1) for form in FORMS), *STRIDED])
def test_a_transform_is_exact(outputs: int, taps: int, stride: int) -> None:
    found = transform(outputs, taps, stride)
    data = [Fraction(i * i % 7 - 3) for i in range(stride * (outputs - 1) + taps)]
    weights = [Fraction(3 * i % 5 - 2, 3) for i in range(taps)]
    products = [a * b for a, b in zip(times(found.filter, weights), times(found.data, data), strict=True)]
    assert times(found.inverse, products) == convolved(data, weights, outputs, stride)
    assert len(products) == points_of(outputs, taps, stride)
    # what data and sums are multiplied by is no matter of rounding
    assert all(
        Fraction(float(np.float32(float(x)))) == x
        for matrix in (found.data, found.inverse)
        for row in matrix
        for x in row
    )


def test_unequal_tiles_take_fewer_products() -> None:
    split = Split((6, 4, 4), 3, 14)
    assert (split.period, split.points, split.reach, split.repeats, len(split.filter)) == (14, 20, 16, 1, 14)
    data, weights = [Fraction(i * i % 11) for i in range(16)], [Fraction(2), Fraction(-1), Fraction(5)]
    filters = times(split.filter, weights)
    rows = [*range(14), *range(8, 14)]  # both tiles of four have one filter
    products = [filters[row] * value for row, value in zip(rows, times(split.data, data), strict=True)]
    assert times(split.inverse, products) == convolved(data, weights, 14)


def test_tiles_of_a_stride_share_inputs() -> None:
    split = Split((4, 3), 3, 7, stride=2)
    assert (split.period, split.points, split.reach, split.repeats, len(split.filter)) == (7, 16, 15, 1, 16)
    data, weights = [Fraction(i * i % 11) for i in range(15)], [Fraction(2), Fraction(-1), Fraction(5)]
    products = [a * b for a, b in zip(times(split.filter, weights), times(split.data, data), strict=True)]
    assert times(split.inverse, products) == convolved(data, weights, 7, 2)
    assert split.at(3, 2, inputs=True) == 44  # type: ignore[arg-type,comparison-overlap]


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(2,), (4,), (6, 4)])
@pytest.mark.parametrize("out", [1, 5, 13])
def test_every_output_is_in_one_tile(sizes: tuple[int, ...], out: int, dilation: int) -> None:
    split = Split(sizes, 3, out, dilation)
    found = [split.at(period, i) for period in range(split.periods) for i in range(split.period)]  # type: ignore[arg-type]
    assert sorted(y for y in found if y < out) == list(range(out))  # type: ignore[type-var,operator]


def amplification(outputs: int, taps: int) -> float:
    """What the largest datum times the sum of a filter's weights may become on its way through both axes."""
    found = transform(outputs, taps)
    of_filter = [max(map(abs, row)) for row in found.filter]
    of_data = [sum(map(abs, row)) for row in found.data]
    return (
        float(
            max(sum(abs(a) * b * c for a, b, c in zip(row, of_filter, of_data, strict=True)) for row in found.inverse)
        )
        ** 2
    )


def sums(first: Array, second: Array) -> Array:
    """Of each point (point, ci, tile) and (point, ci, filter), one channel after the other, rounded after each."""
    found = np.zeros((len(first), first.shape[2], second.shape[2]), np.float32)
    for channel in range(first.shape[1]):
        found = (found + first[:, channel, :, None].astype(float) * second[:, channel, None, :]).astype(np.float32)
    return found


def both(matrix: Matrix, array: Array) -> Array:
    """`matrix` along both of the first axes, each a chain of rounded multiply-adds."""
    for _ in range(2):
        rows = []
        for row in matrix:
            total = np.zeros(array.shape[1:], np.float32)
            for factor, value in zip(row, array, strict=True):
                total = (total + float(np.float32(float(factor))) * value.astype(float)).astype(np.float32)
            rows.append(total)
        array = np.swapaxes(np.stack(rows), 0, 1)
    return array


@pytest.mark.parametrize(("outputs", "stride"), [(2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (2, 2), (4, 2), (6, 2)])
@pytest.mark.parametrize(("ci", "part"), [(16, 16), (128, 128), (128, 32)])
def test_the_worst_output_is_off_by_what_is_said(outputs: int, stride: int, ci: int, part: int) -> None:
    rng, made = np.random.default_rng(ci), transform(outputs, 3, stride)
    side, points_of_side = stride * (outputs - 1) + 3, len(made.data)
    data = rng.standard_normal((side, side, ci, 40)).astype(np.float32)
    weights = rng.standard_normal((3, 3, ci, 24)).astype(np.float32)
    square = points_of_side**2
    points = [both(m, x).reshape(square, ci, -1) for m, x in ((made.data, data), (made.filter, weights))]
    total = np.zeros((square, 40, 24), np.float32)
    for first in range(0, ci, part):
        total += sums(*(array[:, first : first + part] for array in points))
    got = both(made.inverse, total.reshape(points_of_side, points_of_side, 40, 24))
    windows = np.lib.stride_tricks.sliding_window_view(data.astype(float), (3, 3), (0, 1))[::stride, ::stride]
    off = got - np.einsum("yxctij,ijcf->yxtf", windows, weights, optimize=True)
    seen = np.sqrt((off**2).mean((2, 3))).max() / np.sqrt(9 * ci) / UNIT
    length = chain(ci, part if part < ci else 0)
    assert seen == pytest.approx(gain(outputs, 3, stride) * np.sqrt(CHAIN * length + TRANSFORMS), rel=0.15)


def test_large_errors_are_not_as_rare_as_of_normal_numbers() -> None:
    """At the corner of an image with a border of one, where a window sees four of nine pixels."""
    ci, rng, made = 64, np.random.default_rng(0), transform(4, 3)
    data = rng.standard_normal((6, 6, ci, 200)).astype(np.float32)
    data[0], data[:, 0] = 0, 0
    weights = rng.standard_normal((3, 3, ci, 800)).astype(np.float32)
    found = np.zeros((36, 200, 800), np.float32)
    points, filters = (both(m, x).reshape(36, ci, -1) for m, x in ((made.data, data), (made.filter, weights)))
    for channel in range(ci):
        found += points[:, channel, :, None] * filters[:, channel, None, :]
    got = both(made.inverse, found.reshape(6, 6, 200, 800))[0, 0]
    seen, taps = (array.astype(float).reshape(-1, array.shape[-1]) for array in (data[1:3, 1:3], weights[1:, 1:]))
    off = np.abs(got - seen.T @ taps) / (np.abs(seen).T @ np.abs(taps))
    assert np.quantile(off, 0.999) > 3.6 * np.sqrt((off**2).mean())  # of a normal number 3.29
    problem = problem_of("conv2d_nchw", n=200, h=4, w=4, ci=ci, co=800, kh=3, kw=3, pad=1, dtype="float32")
    assert FLOAT32.error < off.max() < error(problem, gain(4, 3) ** 2, ci)


def test_an_image_of_a_pixel_is_seen_by_one_tap() -> None:
    fields = dict(n=8, ci=120, co=64, kh=5, kw=5, pad=2, dtype="float32")
    large, pixel = (problem_of("conv2d_nhwc", h=size, w=size, **fields) for size in (14, 1))
    each = [error(problem, gain(2, 5) ** 2, problem.ci) for problem in (large, pixel)]
    assert each[0] <= FLOAT32.error < 4 * FLOAT32.error < each[1]


def kinds(problem: Any, rng: np.random.Generator) -> dict[str, tuple[Array, Array]]:
    """Data and filter: normal; without negative ones; of sums that nearly cancel; over 24 powers of two; all in one tap
    and one pixel; with signs by which both transforms of F(4, 3) add up all that they see."""
    data, weights = (array.astype(np.float32) for array in operator("conv2d_nhwc").inputs(problem, rng)[:2])
    opposite, same = data.copy(), weights.copy()
    opposite[..., 1::2], same[..., 1::2] = -opposite[..., ::2] * np.float32(1.001), same[..., ::2]
    wide = [array * np.exp2(rng.integers(-12, 13, array.shape)).astype(np.float32) for array in (data, weights)]
    lone, tap = np.zeros_like(data), np.zeros_like(weights)
    lone[:, 4, 4], tap[:, 0, 0] = data[:, 4, 4], weights[:, 0, 0]
    made = transform(4, 3)
    row = max(range(6), key=lambda point: sum(map(abs, made.data[point])))
    signs, taps = (np.array([-1 if x < 0 else 1 for x in matrix[row]]) for matrix in (made.data, made.filter))
    y, x = ((np.arange(size) + 1) % 4 + 1 for size in data.shape[1:3])
    worst = np.abs(data) * (signs[y][:, None] * signs[x])[..., None].astype(np.float32)
    return {
        "normal": (data, weights),
        "positive": (np.abs(data), np.abs(weights)),
        "cancelling": (opposite, same),
        "wide": (wide[0], wide[1]),
        "lone": (lone, tap),
        "signs": (worst, np.abs(weights) * (taps[:, None] * taps)[..., None].astype(np.float32)),
    }


@pytest.mark.parametrize(
    ("ci", "tile", "part"), [(24, "2", None), (24, "3", None), (80, "4", None), (80, "6", None), (128, "4", 32)]
)
def test_errors(emulation: None, host: Arch, sm_90a: Arch, ci: int, tile: str, part: int | None) -> None:
    """Of the CPU, or with `part` of the GPU's kernels."""
    problem = problem_of("conv2d_nhwc", n=4, h=9, w=9, ci=ci, co=32, kh=3, kw=3, pad=1)
    config: dict[str, Any] = {"tile_h": tile, "tile_w": tile}
    if part is None:
        built = build(problem, host, "winograd_cpu", config)
    else:
        built = build(problem, sm_90a, "winograd", config | {"part": part}, device_code=False)
    arithmetic = built.schedule.arithmetic_of(problem, built.config)
    assert (arithmetic == FLOAT32) == (tile in "23" or part is not None) and arithmetic.error < 2.0**-16
    # sums over channels, the two transforms of data, of the filter and back, each of at most `points` terms
    proven = (ci + 6 * (int(tile) + 2)) * UNIT * amplification(int(tile), 3)
    missed = {}
    for name, (data, weights) in kinds(problem, np.random.default_rng(1)).items():
        got = poisoned(problem)[0]
        if part is None:
            built(data, weights, got)
        else:
            ((_, run),) = emulated_runs(built, str(built.sources["cu"]), MODES[:1])
            got = run([data, weights, got])[0]
        (expected,) = built.operator.reference(problem, [data, weights])
        error = np.abs(got - expected.values)
        largest = np.abs(data).max((1, 2)).astype(float) @ np.abs(weights).astype(float).sum((1, 2)).T
        assert (error <= proven * largest[:, None, None]).all(), name
        assert name == "signs" or (error <= arithmetic.error * largest[:, None, None]).all(), name
        missed[name] = bool((error > arithmetic.error * np.broadcast_to(expected.magnitude, error.shape)).any())
    assert not missed["normal"] and not missed["cancelling"]
    # not so where an output's own products are far smaller than its neighbours': that no tile can promise
    assert missed["wide"]
