"""Random data for a softmax, and its outputs in float64 (`definition` says what is computed)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedules.core.operator import Array, Expected
from schedules.core.philox import threshold, words
from schedules.core.problem import numpy_dtype
from schedules.core.tolerance import LARGEST
from schedules.operators.softmax.definition import SoftmaxProblem

DISTINCT_ELEMENTS = 2**23


def distinct_rows(problem: SoftmaxProblem) -> int:
    """How many different rows `inputs` makes; the rest repeat them, so that a reference of a large problem stays
    small."""
    return min(problem.rows, max(64, DISTINCT_ELEMENTS // problem.cols))


def inputs(problem: SoftmaxProblem, rng: np.random.Generator) -> list[Array]:
    """Fresh data for the inputs in order.

    x: of each three rows the first is normal (deviation 2), the second shifted by 200 up or down, the third has its
    last quarter raised by 100; without the spread a wrong maximum would not show, since softmax does not depend on it.
    With it a row's maximum is about 90 or more from the next's, which exp in float32 does not bear.  For a logarithm
    one column is as large as the others together: its result is near 0, and an error of the sum shows in it.

    y: the function's output for such x.  dy: normal, around 1 where the sum of y * dy would else be near 0 and its
    errors too.  mask: 0 or, for one in five, -inf.  drop: 1 with probability `keep`.  philox: any seed and offset.
    lengths: from 1 to all columns.  temperature: from 0.5 to 2.  target: one in eight is to be ignored.  dloss and
    dlse: normal.
    """
    p = problem
    rows = distinct_rows(p)

    def data() -> Array:
        x = rng.standard_normal((rows, p.cols), dtype=np.float32) * 2
        kind = np.arange(rows)[:, np.newaxis] % 3
        x += np.where(kind == 1, rng.choice([-200.0, 200.0], size=(rows, 1)), 0).astype(np.float32)
        x[:, 3 * p.cols // 4 :] += np.where(kind == 2, 100, 0).astype(np.float32)
        if p.is_log:
            peak = x.max(axis=-1)
            total = np.exp(x - peak[:, np.newaxis]).sum(axis=-1)
            x[np.arange(rows), rng.integers(p.cols, size=rows)] = peak + np.log(total)
        return x

    arrays: list[Array] = []
    for argument in p.arguments():
        if argument.output:
            continue
        if argument.name == "philox":
            array: Array = rng.integers(2**63, size=2)
        elif argument.name == "drop":
            array = rng.random((rows, p.cols), dtype=np.float32) < p.keep
        elif argument.name == "mask":
            array = np.where(rng.random((rows, p.cols) if p.mask == "full" else p.cols) < 0.2, -np.inf, 0.0)
            array[..., 0] = 0.0  # no row without a column left
        elif argument.name == "lengths":
            array = rng.integers(1, p.cols + 1, size=rows)
        elif argument.name == "temperature":
            array = rng.uniform(0.5, 2, size=rows)
        elif argument.name == "target":
            array = np.where(rng.random(rows) < 0.125, p.ignore_index, rng.integers(p.cols, size=rows))
        elif argument.name in ("dloss", "dlse"):
            array = rng.standard_normal(rows)
        elif argument.name == "y":
            x = data().astype(np.float64)
            shifted = x - x.max(axis=-1, keepdims=True)
            log_y = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
            array = log_y if p.is_log else np.exp(log_y)
        elif argument.name == "dy":
            array = rng.standard_normal((rows, p.cols), dtype=np.float32) + (0 if p.is_log else 1)
        else:
            array = data()
        array = array.astype(numpy_dtype(argument.dtype))
        arrays.append(array if array.shape == argument.shape else np.resize(array, argument.shape))
    return arrays


def reference(problem: SoftmaxProblem, arrays: Sequence[Array]) -> list[Expected]:
    """The outputs in float64, for the rows that are distinct.

    Rows that are all -inf, or hold +inf or NaN, are NaN throughout, as in PyTorch.
    """
    p = problem
    names = [argument.name for argument in p.arguments() if not argument.output]
    rows = distinct_rows(p)
    of_rows = [array.ndim == 2 or name in p.of_rows for name, array in zip(names, arrays, strict=True)]
    if (
        p.mask == "causal"
        or (p.is_drawn and p.is_grad)
        or any(many and not _repeats(array, rows) for many, array in zip(of_rows, arrays, strict=True))
    ):
        rows = p.rows  # not from `inputs`, or of other lengths
    given = {
        name: (array[:rows] if many else array).astype(np.int64 if name in ("target", "philox") else np.float64)
        for name, many, array in zip(names, of_rows, arrays, strict=True)
    }
    drop = None
    if p.has_dropout:
        drop = (_drawn(p, *given["philox"].tolist()) if p.is_drawn else given["drop"]) / p.keep
    factor = np.full((rows, 1), abs(p.scale))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if p.temperature:
            temperature = given["temperature"][:, np.newaxis]
            factor = np.where(temperature > 0, factor / temperature, np.nan)
        signed = np.copysign(factor, p.scale)
        if p.is_grad:
            dy = given["dy"] if drop is None else given["dy"] * drop
            return [_gradient(p, given["y"], dy, given.get("dlse", np.zeros(rows))[:, np.newaxis], signed)]
        # as `row_program` does, with float32's infinities where its numbers end
        apart = p.mask == "none" or p.is_cut
        if apart:
            v = given["x"] if p.scale > 0 else -given["x"]
            if p.is_cut:
                causal = np.arange(rows) % max(1, p.queries) + p.cols - p.queries + 1
                lengths = given["lengths"] if p.mask == "lengths" else causal
                v = np.where(np.arange(p.cols) < lengths[:, np.newaxis], v, -np.inf)
        else:
            v, factor = _beyond(signed * given["x"] + given["mask"], "float32"), np.ones((rows, 1))
        peak = v.max(axis=-1, keepdims=True)
        shifted = _beyond(v - peak, "float32") * factor
        total = np.exp(shifted).sum(axis=-1, keepdims=True)
        # what float32 rounds before exp magnifies it: the difference, and v itself where a mask is added
        depth = 1 + np.abs(shifted) + (0 if apart else np.abs(signed * given["x"]) + np.abs(peak))
        height = np.where(np.isneginf(peak), -np.inf, peak * factor)
        lse = (height + np.log(total))[:, 0]
        if p.is_loss:
            return _losses(p, given, shifted, total, height, signed)
        values = shifted - np.log(total) if p.is_log else np.exp(shifted) / total
        magnitude = depth + np.log(p.cols) if p.is_log else values * depth
        magnitude = np.where(np.isinf(shifted), 0, magnitude)  # a masked column is exact
        outputs = [Expected(values, magnitude)]
        if drop is not None:
            # y repeats where its rows do, what is drawn does not
            rounded = np.resize(_beyond(values, p.element_outputs[0].dtype), drop.shape) * drop
            errors = np.resize(magnitude, drop.shape) * drop
            outputs.append(Expected(rounded, errors, roundings=1 + 1 / p.keep))  # y is rounded first
        if p.lse:
            # all -inf has the logarithm -inf, though no softmax
            lse = np.where(np.isneginf(peak[:, 0]), -np.inf, lse)
            mean = np.abs(np.nan_to_num(depth)).min(axis=-1)  # where the sum's weight lies
            outputs.append(Expected(lse, np.where(np.isinf(lse), 0, mean + np.abs(lse) + np.log(p.cols))))
        return outputs


def _drawn(p: SoftmaxProblem, seed: int, offset: int) -> Array:
    """Whether each element of all rows is kept."""
    kept = np.empty(-(-p.rows * p.cols // 4) * 4, bool)
    for start in range(0, len(kept), DISTINCT_ELEMENTS):
        part = np.arange(start, min(start + DISTINCT_ELEMENTS, len(kept)))
        kept[part] = words(seed, offset, part) < threshold(p.keep)
    return kept[: p.rows * p.cols].reshape(p.rows, p.cols)


def _losses(
    p: SoftmaxProblem, given: dict[str, Array], shifted: Array, total: Array, height: Array, signed: Array
) -> list[Expected]:
    """dx if it is asked for, and the loss."""
    target, lse = given["target"][:, np.newaxis], height + np.log(total)
    ignored, inside = target == p.ignore_index, (target >= 0) & (target < p.cols)
    apart = np.where(inside, np.take_along_axis(shifted, target.clip(0, p.cols - 1), axis=-1), np.nan)
    loss = np.log(total) - (1 - p.smoothing) * apart + p.z * lse**2
    size = 1 + np.abs(apart) + np.log(p.cols) + p.z * (np.abs(lse) + 1) * (np.abs(height) + np.log(p.cols) + 1) * 2
    if p.smoothing:
        loss = loss - p.smoothing * shifted.mean(axis=-1, keepdims=True)
        size = size + p.smoothing * (np.abs(height) + np.abs(shifted).mean(axis=-1, keepdims=True)) * 2
    outputs = [Expected(np.where(ignored, 0, loss)[:, 0], np.where(ignored, 0, size)[:, 0])]
    if p.function == "cross_entropy":
        return outputs
    probability = np.exp(shifted) / total
    more = 1 + 2 * p.z * lse
    taken = (np.arange(p.cols) == target) * (1 - p.smoothing)
    weight = np.where(ignored, 0, np.where(inside, given["dloss"][:, np.newaxis] * signed, np.nan))
    values = (probability * more - p.smoothing / p.cols - taken) * weight
    size = probability * (1 + np.abs(shifted)) * (1 + 2 * p.z * (np.abs(lse) + np.abs(height) + np.log(p.cols)))
    return [Expected(values, (size + p.smoothing / p.cols + taken) * np.abs(weight)), *outputs]


def _beyond(values: Array, dtype: str) -> Array:
    """`values`, infinite where `dtype` holds none so large."""
    return np.where(np.abs(values) > LARGEST[dtype], np.copysign(np.inf, values), values)


def _repeats(array: Array, rows: int) -> bool:
    """Whether row i equals row i % rows, bit for bit."""
    bits = array.reshape(len(array), -1).view(np.uint8)
    return all(
        np.array_equal(bits[start : start + rows], bits[: min(rows, len(bits) - start)])
        for start in range(rows, len(bits), rows)
    )


def _gradient(p: SoftmaxProblem, y: Array, dy: Array, dlse: Array, factor: Array) -> Expected:
    if p.is_log:
        power = np.exp(y)
        values = dy - power * (dy.sum(axis=-1, keepdims=True) - dlse)
        depth = np.where(np.isinf(y), 1, 1 + np.abs(y))
        magnitude = np.abs(dy) + power * (np.abs(dy).sum(axis=-1, keepdims=True) + np.abs(dlse)) * depth
    else:
        values = y * (dy - (y * dy).sum(axis=-1, keepdims=True) + dlse)
        magnitude = np.abs(y) * (np.abs(dy) + np.abs(y * dy).sum(axis=-1, keepdims=True) + np.abs(dlse))
    return Expected(factor * values, np.abs(factor) * magnitude)
