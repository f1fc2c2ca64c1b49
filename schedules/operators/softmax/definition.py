"""Softmax over the last axis of (rows, cols): what is computed.

Four functions of a row, all in float32 whatever the tensors' dtype:

=================  ==========================================  ================
softmax            exp(v - max v) / sum exp(v - max v)         x -> y
log_softmax        v - max v - log sum exp(v - max v)          x -> y
softmax_grad       y * (dy - sum y * dy)                       y, dy -> dx
log_softmax_grad   dy - exp(y) * sum dy                        y, dy -> dx
=================  ==========================================  ================

with v = scale * x + mask before, or v = scale * x of the first so many columns of a row and -inf of the others, and
dropout after: forward, output = y * drop / keep, and y is an output too, because
the gradient needs it; backward, dy * drop / keep takes the place of dy, and dx is multiplied by scale.  After OneFlow's
softmax, whose load and store functors fuse the same steps.

Special values are PyTorch's: a row with NaN or +inf in v, or with nothing but -inf (every column masked), is NaN
throughout; beside a finite column -inf gives 0, or -inf as a logarithm, and so does a difference beyond float32.  In a
gradient a NaN or an infinity in dy, kept or dropped, makes NaN or infinities of its row; y = 0, or -inf as a logarithm,
does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from schedules.core.draws import Draw, one_of, up_to
from schedules.core.errors import ProblemError
from schedules.core.operator import Array, Expected
from schedules.core.problem import Argument, Problem, numpy_dtype
from schedules.core.tolerance import LARGEST

if TYPE_CHECKING:
    from tvm import te
    from tvm.tirx import PrimExpr

FUNCTIONS = ("softmax", "log_softmax", "softmax_grad", "log_softmax_grad")
MASKS = ("none", "full", "cols", "lengths", "causal")
CUTS = ("lengths", "causal")  # masks that are no elements, but how many of a row's columns count
LOG2E = math.log2(math.e)
SMALLEST = 2.0**-126  # float32's last number that no GPU flushes to 0
DISTINCT_ELEMENTS = 2**23
SHORT = 1024  # columns up to which rows of any width may share a build


@dataclass(frozen=True)
class SoftmaxProblem(Problem):
    """A function of rows.  `rows` only sizes tests and measurements: the built function takes any number of rows.

    `scale` multiplies the input; `mask` is added to it: "full" (rows, cols) or "cols" (cols,), of x's dtype; or it
    says which columns count: with "lengths" (rows,), int32, the first so many of each row, no fewer than 0 and no more
    than `cols`; with "causal" those up to the row's own, where rows are `queries` after `queries` and the last of
    these has all columns.  A row of which none counts is NaN, as in PyTorch.  `keep` < 1 adds
    dropout: a uint8 tensor of zeros and ones (rows, cols) is given, kept values are divided by `keep`.  With
    `cols_from`, it takes any number of columns from that to `cols` too.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32")
    functions: ClassVar[tuple[str, ...]] = FUNCTIONS
    masks: ClassVar[tuple[str, ...]] = MASKS
    later: ClassVar[tuple[str, ...]] = ("cols_from", "queries")
    alone: ClassVar[int] = 2

    rows: int
    cols: int
    function: str = "softmax"
    dtype: str = "float16"
    scale: float = 1.0
    mask: str = "none"
    keep: float = 1.0
    cols_from: int = field(default=0, kw_only=True)  # 0: cols columns only
    queries: int = field(default=0, kw_only=True)  # of mask="causal": rows of a matrix

    def __post_init__(self) -> None:
        self.require_positive("rows", "cols")
        self.require_dtype()
        if self.function not in FUNCTIONS:
            raise ProblemError(f"function={self.function} is not one of {', '.join(FUNCTIONS)}")
        if self.mask not in MASKS:
            raise ProblemError(f"mask={self.mask} is not one of {', '.join(MASKS)}")
        if self.is_grad and self.mask != "none":
            raise ProblemError(f"mask={self.mask} has no part in a gradient; leave it out")
        if (self.queries > 0) != (self.mask == "causal") or self.queries < 0:
            raise ProblemError(
                f"queries={self.queries} with mask={self.mask}: causal masks have 1 or more, others none"
            )
        if self.cols_from and self.is_cut:
            raise ProblemError(f"cols_from={self.cols_from} is not for mask={self.mask}; leave it out")
        if not SMALLEST <= abs(self.scale) <= LARGEST["float32"]:
            raise ProblemError(f"scale={self.scale} must be finite and not 0, in float32 as well")
        if not SMALLEST <= self.keep <= 1:
            raise ProblemError(f"keep={self.keep} must be over 0, in float32 as well, and at most 1")
        self.require_reach({}, [(self.rows, self.cols)])
        if self.cols_from and not 1 <= self.cols_from <= self.cols:
            raise ProblemError(
                f"cols_from={self.cols_from} is not 1 to cols={self.cols}; leave it out to take cols only"
            )
        if self.cols_from == self.cols:
            object.__setattr__(self, "cols_from", 0)

    @classmethod
    def draws(cls, large: bool = False) -> dict[str, Draw]:
        return {
            **super().draws(large),
            "rows": up_to(2**20 if large else 300),
            "cols": up_to(2**20 if large else 70000),
            "scale": one_of(1.0, 1.0, 0.125, -0.5),
            "keep": one_of(1.0, 1.0, 0.8),
            "cols_from": one_of(0),
            "mask": one_of(*MASKS[:4]),
            "queries": one_of(0),
        }

    @property
    def is_grad(self) -> bool:
        return self.function.endswith("_grad")

    @property
    def is_log(self) -> bool:
        return self.function.startswith("log_")

    @property
    def is_cut(self) -> bool:
        """Whether the mask says how many columns of a row count."""
        return self.mask in CUTS

    @property
    def has_dropout(self) -> bool:
        return self.keep < 1

    @property
    def flops(self) -> int:
        """Subtract, exponential, add and divide an element; a gradient two multiplies, an add and a subtract."""
        return 4 * self.rows * self.cols

    def odd(self) -> Iterator[SoftmaxProblem]:
        """Thirteen rows, one column less if the config takes that."""
        if self.cols > 1:
            yield replace(self, rows=13, cols=self.cols - 1, cols_from=min(self.cols_from, self.cols - 1))
        yield replace(self, rows=13)

    def smaller(self) -> Iterator[SoftmaxProblem]:
        """Fewer rows, down to one; the width, which decides the code, stays."""
        problem = self
        while problem.rows > 1:
            problem = replace(problem, rows=max(1, problem.rows // 4))
            yield problem

    def any_extent(self) -> SoftmaxProblem:
        """The same of one row."""
        return replace(self, rows=1)

    @property
    def run_time(self) -> tuple[str, ...]:
        return ("rows", "cols") if self.cols_from else ("rows",)

    def widened(self) -> SoftmaxProblem:
        """The same for every short row."""
        alone = self.cols_from or self.cols > SHORT or self.is_cut
        return self if alone else replace(self, rows=1, cols=SHORT, cols_from=1)

    def covers(self, other: Problem) -> bool:
        if not self.cols_from or not isinstance(other, SoftmaxProblem) or other.cols_from:
            return super().covers(other)
        alike = replace(other, cols=self.cols, cols_from=self.cols_from)
        return self.cols_from <= other.cols <= self.cols and self in (alike, alike.any_extent())

    def representative(self) -> SoftmaxProblem:
        return replace(self, cols_from=0) if self.cols_from else self

    def instances(self) -> tuple[SoftmaxProblem, ...]:
        """Of a range of columns, its ends and the odd number between."""
        if not self.cols_from:
            return (self,)
        middle = min((self.cols_from + self.cols) // 2 | 1, self.cols)
        return tuple(replace(self, cols=cols, cols_from=0) for cols in sorted({self.cols_from, middle, self.cols}))

    def arguments(self) -> tuple[Argument, ...]:
        shape = (self.rows, self.cols)
        least = self.cols_from or None

        def rows(name: str, dtype: str = self.dtype, output: bool = False) -> Argument:
            return Argument(name, shape, dtype, output, 0, 1 if least else None, least)

        arguments = [rows("y"), rows("dy")] if self.is_grad else [rows("x")]
        if self.mask == "full":
            arguments.append(rows("mask"))
        elif self.mask == "cols":
            arguments.append(Argument("mask", (self.cols,), self.dtype, False, None, 0 if least else None, least))
        elif self.mask == "lengths":
            arguments.append(Argument("lengths", (self.rows,), "int32", runtime_axis=0))
        if self.has_dropout:
            arguments.append(rows("drop", "uint8"))
        if self.is_grad:
            arguments.append(rows("dx", output=True))
        else:
            arguments.append(rows("y", output=True))
            if self.has_dropout:
                arguments.append(rows("output", output=True))
        return tuple(arguments)


Values = dict[str, "PrimExpr"]
Output = Callable[[Values, Values], "PrimExpr"]  # (inputs of one column, results of the reductions) -> float32


@dataclass(frozen=True)
class Reduction:
    """One number a row: `kind` ("max" or "sum") over `element` of each column.

    Where a row is reduced in parts, the row's number is `kind` over `share` of each part: of (the part's results, the
    row's earlier results).  Without one it is the part's number itself.
    """

    name: str
    kind: str
    element: Output
    share: Output | None = None

    def of_part(self, part: Values, results: Values) -> PrimExpr:
        """What a part brings to the row's number."""
        return self.share(part, results) if self.share else part[self.name]


@dataclass(frozen=True)
class RowProgram:
    """A function of rows as its reductions, in order, and its outputs.  Schedules decide where each step lives.

    `fill` is what columns past the end read as, for each input: neutral in every reduction.  `dropped` makes, from the
    output (rounded to the tensors' dtype) and drop, a second output.  `from_element` makes the output of a column from
    its element of the last reduction, for schedules that keep that rather than compute it again.
    """

    fill: dict[str, float]
    reductions: tuple[Reduction, ...]
    output: Output
    derived: tuple[tuple[str, Callable[[Values], PrimExpr]], ...] = ()  # further results, made of those of reductions
    dropped: Callable[[PrimExpr, PrimExpr], PrimExpr] | None = None
    from_element: Callable[[PrimExpr, Values], PrimExpr] | None = None


@dataclass(frozen=True)
class Rounding:
    """float32 operations whose rounding the compiler leaves alone: a * b + c rounded once, and a * b rounded."""

    fma: Callable[[PrimExpr, PrimExpr, PrimExpr], PrimExpr]
    times: Callable[[PrimExpr, PrimExpr], PrimExpr]


def row_program(
    problem: SoftmaxProblem,
    exp2: Callable[[PrimExpr], PrimExpr] | None = None,
    rounding: Rounding | None = None,
) -> RowProgram:
    """Compose the input step, the function and the output step of `problem`.

    `exp2` computes 2**x of a float32 expression; TVM's by default.  With `rounding` the exponents of softmax take one
    operation in place of two, where they are small enough (from FlashAttention-2, Dao 2023, section 3.1).
    """
    from tvm import tirx

    power = exp2 or tirx.exp2
    p = problem

    def f32(value: float) -> PrimExpr:
        return tirx.const(value, "float32")

    def exp(value: PrimExpr) -> PrimExpr:
        return power(value * f32(LOG2E))

    def scaled(value: PrimExpr) -> PrimExpr:
        return value if p.scale == 1 else value * f32(p.scale)

    def dropped(value: PrimExpr, drop: PrimExpr) -> PrimExpr:
        return value * drop * f32(1 / p.keep)

    if p.is_grad:

        def gradient(inputs: Values) -> PrimExpr:
            return dropped(inputs["dy"], inputs["drop"]) if p.has_dropout else inputs["dy"]

        def output(inputs: Values, results: Values) -> PrimExpr:
            if p.is_log:
                return scaled(gradient(inputs) - exp(inputs["y"]) * results["total"])
            return scaled(inputs["y"] * (gradient(inputs) - results["total"]))

        total = Reduction(
            "total", "sum", lambda inputs, _: gradient(inputs) if p.is_log else inputs["y"] * gradient(inputs)
        )
        return RowProgram({"y": 0.0, "dy": 0.0, "drop": 0.0}, (total,), output)

    # Without a mask the peak is that of x or -x, scaled after the subtraction: GPUs fuse scale * x - peak to one
    # rounding, and less a peak that was rounded before, the largest element is far from 0 where x is large.
    late = p.mask == "none" or p.is_cut

    fill = math.copysign(math.inf, -p.scale)

    def compared(inputs: Values) -> PrimExpr:
        """What the peak is the largest of."""
        if late:
            x = inputs["x"]
            x = tirx.Select(inputs["col"] < inputs["length"], x, f32(fill)) if p.is_cut else x
            return x if p.scale > 0 else f32(0) - x
        return scaled(inputs["x"]) + inputs["mask"]

    def difference(value: PrimExpr, peak: PrimExpr) -> PrimExpr:
        """How far v is apart where `compared` is `value` and `peak`."""
        return (value - peak) * f32(abs(p.scale)) if late and abs(p.scale) != 1 else value - peak

    # 2**(x * k - peak * k): that the product with the peak is rounded divides every exponential of a row, and with them
    # their sum, by the same number; at most by 2**0.5, where the product is no larger than 2**24.  A logarithm of the
    # sum would differ
    k = abs(p.scale) * LOG2E
    fused = rounding if late and not p.is_log and k * LARGEST[p.dtype] <= 2**24 else None

    def numerator(inputs: Values, results: Values) -> PrimExpr:
        if fused:
            return power(fused.fma(compared(inputs), f32(k), fused.times(results["peak"], f32(-k))))
        return exp(shifted(inputs, results))

    def share(part: Values, results: Values) -> PrimExpr:
        if fused:
            return part["total"] * power(fused.times(part["peak"], f32(k)) - fused.times(results["peak"], f32(k)))
        return part["total"] * exp(difference(part["peak"], results["peak"]))

    def shifted(inputs: Values, results: Values) -> PrimExpr:
        return difference(compared(inputs), results["peak"])

    def softmax(inputs: Values, results: Values) -> PrimExpr:
        if p.is_log:
            return shifted(inputs, results) - results["log_total"]
        return numerator(inputs, results) * results["inverse"]

    derived = (
        ("log_total", lambda results: tirx.log(results["total"]))
        if p.is_log
        else ("inverse", lambda results: f32(1) / results["total"])
    )

    return RowProgram(
        # a column past the end must be the smallest: the sign of scale decides which infinity that is
        {"x": fill, "mask": 0.0},
        (
            Reduction("peak", "max", lambda inputs, _: compared(inputs)),
            # a part's total is relative to its own peak.  Peaks start from the lowest finite float32, not from -inf, so
            # that a part that is all -inf has the factor 0 or 1, not NaN, for its total of 0; one that holds +inf or
            # NaN has a NaN for its total, which no factor takes away
            Reduction("total", "sum", numerator, share),
        ),
        softmax,
        (derived,),
        dropped if p.has_dropout else None,
        None if p.is_log else lambda element, results: element * results["inverse"],
    )


def row_results(program: RowProgram, results: dict[str, te.Tensor], *row: PrimExpr) -> Values:
    """The results of one row (or part of one) as expressions: those of reductions read, derived ones computed from
    them."""
    values: Values = {name: tensor(*row) for name, tensor in results.items()}
    for name, formula in program.derived:
        if name not in values and len(values) == len(program.reductions):
            values[name] = formula(values)
    return values


def placeholders(problem: SoftmaxProblem) -> tuple[PrimExpr, dict[str, te.Tensor]]:
    """The run-time number of rows, and the input tensors by name.  Extents are int64: rows * cols may pass 2**31."""
    from tvm import te, tirx

    rows = te.var("rows", "int64")
    cols = te.var("cols", "int64") if problem.cols_from else tirx.IntImm("int64", problem.cols)
    inputs = {
        argument.name: te.placeholder(
            (rows,) if argument.name == "lengths" else (cols,) if argument.runtime_axis is None else (rows, cols),
            name=argument.name,
            dtype=argument.dtype,
        )
        for argument in problem.arguments()
        if not argument.output
    }
    return rows, inputs


def cut(problem: SoftmaxProblem, inputs: dict[str, te.Tensor], row: PrimExpr, col: PrimExpr) -> Values:
    """What a formula asks of column `col` of a row beside its elements: which it is, and how many count."""
    if not problem.is_cut:
        return {}
    if problem.mask == "lengths":
        return {"col": col, "length": inputs["lengths"][row].astype("int64")}
    return {"col": col, "length": row % problem.queries + (problem.cols - problem.queries + 1)}


def elements(inputs: dict[str, te.Tensor]) -> dict[str, te.Tensor]:
    """Those of the inputs that have an element for each column."""
    return {name: tensor for name, tensor in inputs.items() if name != "lengths"}


def column(tensor: te.Tensor, row: PrimExpr, col: PrimExpr) -> PrimExpr:
    """The element of a (rows, cols) or (cols,) tensor."""
    return tensor[col] if len(tensor.shape) == 1 else tensor[row, col]


def definition(problem: SoftmaxProblem) -> list[te.Tensor]:
    """The TE graph: one stage for each reduction and output.  Returns the arguments in order, outputs last."""
    from tvm import te, tirx

    rows, inputs = placeholders(problem)
    program = row_program(problem)
    cols = next(iter(inputs.values())).shape[1]
    results: dict[str, te.Tensor] = {}

    def at(i: PrimExpr, j: PrimExpr) -> tuple[Values, Values]:
        columns = {name: column(tensor, i, j).astype("float32") for name, tensor in elements(inputs).items()}
        return columns | cut(problem, inputs, i, j), row_results(program, results, i)

    def reduction(step: Reduction) -> te.Tensor:
        k = te.reduce_axis((tirx.IntImm("int64", 0), cols), name=f"{step.name}_col")
        reduce = te.max if step.kind == "max" else te.sum
        return te.compute((rows,), lambda i: reduce(step.element(*at(i, k)), axis=k), name=step.name)

    for step in program.reductions:
        results[step.name] = reduction(step)
    output = te.compute((rows, cols), lambda i, j: program.output(*at(i, j)).astype(problem.dtype), name="out")
    if program.dropped is None:
        return [*inputs.values(), output]
    dropped = te.compute(
        (rows, cols),
        lambda i, j: program.dropped(output[i, j].astype("float32"), inputs["drop"][i, j].astype("float32")).astype(
            problem.dtype
        ),
        name="dropped_out",
    )
    return [*inputs.values(), output, dropped]


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
    errors too.  mask: 0 or, for one in five, -inf.  drop: 1 with probability `keep`.
    lengths: from 1 to all columns.
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
        if argument.name == "drop":
            array: Array = rng.random((rows, p.cols), dtype=np.float32) < p.keep
        elif argument.name == "mask":
            array = np.where(rng.random((rows, p.cols) if p.mask == "full" else p.cols) < 0.2, -np.inf, 0.0)
            array[..., 0] = 0.0  # no row without a column left
        elif argument.name == "lengths":
            array = rng.integers(1, p.cols + 1, size=rows)
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
    of_rows = [array.ndim == 2 or name == "lengths" for name, array in zip(names, arrays, strict=True)]
    if p.mask == "causal" or any(
        many and not _repeats(array, rows) for many, array in zip(of_rows, arrays, strict=True)
    ):
        rows = p.rows  # not from `inputs`, or of other lengths
    given = {
        name: (array[:rows] if many else array).astype(np.float64)
        for name, many, array in zip(names, of_rows, arrays, strict=True)
    }
    drop = given["drop"] / p.keep if p.has_dropout else None
    with np.errstate(invalid="ignore", over="ignore"):
        if p.is_grad:
            return [_gradient(p, given["y"], given["dy"] if drop is None else given["dy"] * drop)]
        # as `row_program` does, with float32's infinities where its numbers end
        if p.mask == "none" or p.is_cut:
            v, factor = given["x"] if p.scale > 0 else -given["x"], abs(p.scale)
            if p.is_cut:
                causal = np.arange(rows) % max(1, p.queries) + p.cols - p.queries + 1
                lengths = given["lengths"] if p.mask == "lengths" else causal
                v = np.where(np.arange(p.cols) < lengths[:, np.newaxis], v, -np.inf)
        else:
            v, factor = _beyond(p.scale * given["x"] + given["mask"], "float32"), 1.0
        peak = v.max(axis=-1, keepdims=True)
        shifted = _beyond(v - peak, "float32") * factor
        total = np.exp(shifted).sum(axis=-1, keepdims=True)
        # what float32 rounds before exp magnifies it: the difference, and v itself where a mask is added
        depth = (
            1 + np.abs(shifted) + (0 if p.mask == "none" or p.is_cut else np.abs(p.scale * given["x"]) + np.abs(peak))
        )
        values = shifted - np.log(total) if p.is_log else np.exp(shifted) / total
        magnitude = depth + np.log(p.cols) if p.is_log else values * depth
        magnitude = np.where(np.isinf(shifted), 0, magnitude)  # a masked column is exact
        outputs = [Expected(values, magnitude)]
        if drop is not None:
            output = _beyond(values, p.dtype) * drop
            outputs.append(Expected(output, magnitude * drop, roundings=1 + 1 / p.keep))  # y is rounded first
        return outputs


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


def _gradient(p: SoftmaxProblem, y: Array, dy: Array) -> Expected:
    if p.is_log:
        power = np.exp(y)
        values = dy - power * dy.sum(axis=-1, keepdims=True)
        depth = np.where(np.isinf(y), 1, 1 + np.abs(y))
        magnitude = np.abs(dy) + power * np.abs(dy).sum(axis=-1, keepdims=True) * depth
    else:
        values = y * (dy - (y * dy).sum(axis=-1, keepdims=True))
        magnitude = np.abs(y) * (np.abs(dy) + np.abs(y * dy).sum(axis=-1, keepdims=True))
    return Expected(p.scale * values, abs(p.scale) * magnitude)
