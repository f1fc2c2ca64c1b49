"""Softmax over the last axis of (rows, cols): what is computed.

Functions of a row, all in float32 whatever the tensors' dtype:

===================  ==========================================  =====================
softmax              exp(v - max v) / sum exp(v - max v)         x -> y
log_softmax          v - max v - log sum exp(v - max v)          x -> y
softmax_grad         y * (dy - sum y * dy)                       y, dy -> dx
log_softmax_grad     dy - exp(y) * sum dy                        y, dy -> dx
cross_entropy        log sum exp v - v[target]                   x, target -> loss
cross_entropy_grad   (softmax - onehot target) * dloss           x, target, dloss -> dx, loss
===================  ==========================================  =====================

with v = scale * x + mask before, or v = scale * x of the first so many columns of a row and -inf of the others, and
dropout after: forward, output = y * drop / keep, and y is an output too, because
the gradient needs it; backward, dy * drop / keep takes the place of dy, and dx is multiplied by scale.  After OneFlow's
softmax, whose load and store functors fuse the same steps.  With a temperature, a number a row, scale / temperature
takes the place of scale.  Loss and gradient in one kernel are Liger-Kernel's (Hsu et al., 2024).

Special values are PyTorch's: a row with NaN or +inf in v, or with nothing but -inf (every column masked), is NaN
throughout; beside a finite column -inf gives 0, or -inf as a logarithm, and so does a difference beyond float32.  In a
gradient a NaN or an infinity in dy, kept or dropped, makes NaN or infinities of its row; y = 0, or -inf as a logarithm,
does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from schedules.core.draws import Draw, one_of, up_to
from schedules.core.errors import ProblemError
from schedules.core.problem import Argument, Problem
from schedules.core.tolerance import LARGEST
from schedules.core.tvm import PrimExpr, tirx

FUNCTIONS = ("softmax", "log_softmax", "softmax_grad", "log_softmax_grad")
LOSSES = ("cross_entropy", "cross_entropy_grad")
MASKS = ("none", "full", "cols", "lengths", "causal")
DROPS = ("given", "drawn")
CUTS = ("lengths", "causal")  # masks that are no elements, but how many of a row's columns count
LOG2E = math.log2(math.e)
SMALLEST = 2.0**-126  # float32's last number that no GPU flushes to 0
LOWEST = float.fromhex("-0x1.fffffep127")  # float32
SHORT = 1024  # columns up to which rows of any width may share a build


@dataclass(frozen=True)
class SoftmaxProblem(Problem):
    """A function of rows.  `rows` only sizes tests and measurements: the built function takes any number of rows.

    `scale` multiplies the input; `mask` is added to it: "full" (rows, cols) or "cols" (cols,), of x's dtype; or it
    says which columns count: with "lengths" (rows,), int32, the first so many of each row, no fewer than 0 and no more
    than `cols`; with "causal" those up to the row's own, where rows are `queries` after `queries` and the last of
    these has all columns.  A row of which none counts is NaN, as in PyTorch.  With `cols_from`, it takes any number of
    columns from that to `cols` too.

    `keep` < 1 adds dropout: what is kept is divided by `keep`.  Which elements are is `drop`: "given" as a uint8 tensor
    of zeros and ones (rows, cols), as in OneFlow, or "drawn" in the kernel from philox (2,), int64, a seed and an
    offset, by the element's number in rows * cols (`core.philox`): the same forward and backward, on whatever device.

    With `temperature`, the input is divided by (rows,), float32: of a row with one that is not positive all is NaN.
    `y_dtype` is that of y and dy, where they are wider than x and dx.  `lse` adds the output log sum exp v, (rows,),
    float32, and to a gradient the input dlse, its gradient; beside +inf it is NaN.

    Losses take targets (rows,), int64; of `ignore_index` the loss is 0 and the gradient too; of one that is no column
    both are NaN.  `smoothing` is PyTorch's label_smoothing; `z` times the square of log sum exp v is added to the loss
    (PaLM, Chowdhery et al., 2022, section 5).  loss and dloss are (rows,), float32.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32")
    functions: ClassVar[tuple[str, ...]] = (*FUNCTIONS, *LOSSES)
    masks: ClassVar[tuple[str, ...]] = MASKS
    drops: ClassVar[tuple[str, ...]] = DROPS
    later: ClassVar[tuple[str, ...]] = (
        "cols_from", "queries", "temperature", "y_dtype", "lse", "smoothing", "z", "ignore_index", "drop"
    )  # fmt: skip
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
    temperature: bool = field(default=False, kw_only=True)
    y_dtype: str = field(default="same", kw_only=True)  # or float32
    lse: bool = field(default=False, kw_only=True)
    smoothing: float = field(default=0.0, kw_only=True)
    z: float = field(default=0.0, kw_only=True)
    ignore_index: int = field(default=-100, kw_only=True)
    drop: str = field(default="given", kw_only=True)

    def __post_init__(self) -> None:
        self.require_positive("rows", "cols")
        self.require_dtype()
        if self.function not in self.functions:
            raise ProblemError(f"function={self.function} is not one of {', '.join(self.functions)}")
        if self.mask not in MASKS:
            raise ProblemError(f"mask={self.mask} is not one of {', '.join(MASKS)}")
        if self.is_grad and self.mask != "none":
            raise ProblemError(f"mask={self.mask} has no part in a gradient; leave it out")
        if (self.queries > 0) != (self.mask == "causal") or self.queries < 0:
            raise ProblemError(
                f"queries={self.queries} with mask={self.mask}: causal masks have 1 or more, others none"
            )
        if self.y_dtype == self.dtype:
            object.__setattr__(self, "y_dtype", "same")
        self._check_loss()
        if self.cols_from and self.is_cut:
            raise ProblemError(f"cols_from={self.cols_from} is not for mask={self.mask}; leave it out")
        if self.cols_from and (self.of_rows or self.y_dtype != "same"):
            raise ProblemError(f"cols_from={self.cols_from} is for softmax as it stands and its gradient; leave it out")
        if not SMALLEST <= abs(self.scale) <= LARGEST["float32"]:
            raise ProblemError(f"scale={self.scale} must be finite and not 0, in float32 as well")
        if not SMALLEST <= self.keep <= 1:
            raise ProblemError(f"keep={self.keep} must be over 0, in float32 as well, and at most 1")
        if self.drop not in DROPS:
            raise ProblemError(f"drop={self.drop} is not one of {', '.join(DROPS)}")
        if self.keep == 1:
            object.__setattr__(self, "drop", "given")
        self.require_reach({}, [(self.rows, self.cols)])
        if self.cols_from and not 1 <= self.cols_from <= self.cols:
            raise ProblemError(
                f"cols_from={self.cols_from} is not 1 to cols={self.cols}; leave it out to take cols only"
            )
        if self.cols_from == self.cols:
            object.__setattr__(self, "cols_from", 0)

    def _check_loss(self) -> None:
        if self.y_dtype not in ("same", "float32"):
            raise ProblemError(f"y_dtype={self.y_dtype} is not one of same, float32")
        if self.is_loss:
            plain = dict(mask="none", keep=1.0, y_dtype="same", lse=False)
            for name, value in plain.items():
                if getattr(self, name) != value:
                    raise ProblemError(f"{name}={getattr(self, name)} has no part in {self.function}; leave it out")
        elif self.smoothing or self.z or self.ignore_index != -100:
            raise ProblemError(f"smoothing, z and ignore_index have no part in {self.function}; leave them out")
        if not 0 <= self.smoothing <= 1:
            raise ProblemError(f"smoothing={self.smoothing} is not from 0 to 1")
        if not 0 <= self.z <= LARGEST["float16"]:
            raise ProblemError(f"z={self.z} is not from 0 to {LARGEST['float16']}")

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
            "function": one_of(*FUNCTIONS),
            "y_dtype": one_of("same", "same", "float32"),
            "ignore_index": one_of(-100),
            "drop": one_of(*DROPS),
        }

    @property
    def is_grad(self) -> bool:
        """Whether of y and dy."""
        return self.function.endswith("_grad") and not self.is_loss

    @property
    def in_dtype(self) -> str:
        """The dtype of the rows that are reduced."""
        return self.y_dtype if self.is_grad and self.y_dtype != "same" else self.dtype

    @property
    def is_loss(self) -> bool:
        return self.function in LOSSES

    @property
    def of_rows(self) -> tuple[str, ...]:
        """The arguments that are a number a row."""
        return tuple(a.name for a in self.arguments() if len(a.shape) == 1 and a.runtime_axis == 0)

    @property
    def of_columns(self) -> tuple[Argument, ...]:
        """The inputs that have an element for each column."""
        return tuple(a for a in self.arguments() if not a.output and a.name not in (*self.of_rows, "philox"))

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
    def is_drawn(self) -> bool:
        """Whether the kernel draws what is dropped."""
        return self.has_dropout and self.drop == "drawn"

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
        alone = self.cols_from or self.cols > SHORT or self.is_cut or self.of_rows or self.y_dtype != "same"
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

        wide = self.dtype if self.y_dtype == "same" else self.y_dtype

        def rows(name: str, dtype: str = self.dtype, output: bool = False) -> Argument:
            return Argument(name, shape, dtype, output, 0, 1 if least else None, least)

        def numbers(name: str, dtype: str = "float32", output: bool = False) -> Argument:
            return Argument(name, (self.rows,), dtype, output, runtime_axis=0)

        arguments = [rows("y", wide), rows("dy", wide)] if self.is_grad else [rows("x")]
        if self.mask == "full":
            arguments.append(rows("mask"))
        elif self.mask == "cols":
            arguments.append(Argument("mask", (self.cols,), self.dtype, False, None, 0 if least else None, least))
        elif self.mask == "lengths":
            arguments.append(numbers("lengths", "int32"))
        if self.is_drawn:
            arguments.append(Argument("philox", (2,), "int64"))
        elif self.has_dropout:
            arguments.append(rows("drop", "uint8"))
        if self.temperature:
            arguments.append(numbers("temperature"))
        if self.is_loss:
            arguments.append(numbers("target", "int64"))
        if self.function == "cross_entropy_grad":
            arguments.append(numbers("dloss"))
        if self.is_grad and self.lse:
            arguments.append(numbers("dlse"))
        if self.function.endswith("_grad"):
            arguments.append(rows("dx", output=True))
        elif not self.is_loss:
            arguments.append(rows("y", wide, output=True))
            if self.has_dropout:
                arguments.append(rows("output", wide, output=True))
        if self.is_loss:
            arguments.append(numbers("loss", output=True))
        if self.lse and not self.is_grad:
            arguments.append(numbers("lse", output=True))
        return tuple(arguments)

    @property
    def row_output(self) -> str | None:
        """The output that is a number a row."""
        return next((a.name for a in self.arguments() if a.output and len(a.shape) == 1), None)

    @property
    def element_outputs(self) -> tuple[Argument, ...]:
        return tuple(argument for argument in self.arguments() if argument.output and len(argument.shape) == 2)


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
    of_row: bool = False  # whether only the output that is a number a row asks for it

    def of_part(self, part: Values, results: Values) -> PrimExpr:
        """What a part brings to the row's number."""
        return self.share(part, results) if self.share else part[self.name]


@dataclass(frozen=True)
class RowProgram:
    """A function of rows as its reductions, in order, and its outputs.  Schedules decide where each step lives.

    `fill` is what columns past the end read as, for each input: neutral in every reduction.  `dropped` makes, from the
    output (rounded to the tensors' dtype) and drop, a second output.  `from_element` makes the output of a column from
    its element of the last reduction, for schedules that keep that rather than compute it again.  `lowest` is what a
    largest starts from: finite, as are its products that the program makes.
    """

    fill: dict[str, float]
    reductions: tuple[Reduction, ...]  # the largest first, then sums relative to it; that of exponentials last
    output: Output
    derived: tuple[tuple[str, Callable[[Values], PrimExpr]], ...] = ()  # further results, made of those of reductions
    dropped: Callable[[PrimExpr, PrimExpr], PrimExpr] | None = None
    from_element: Callable[[PrimExpr, Values, Values], PrimExpr] | None = None
    of_row: Callable[[Values], PrimExpr] | None = None  # the output that is a number a row
    lowest: float = LOWEST


@dataclass(frozen=True)
class Rounding:
    """float32 operations whose rounding the compiler leaves alone: a * b + c rounded once, and a * b rounded."""

    fma: Callable[[PrimExpr, PrimExpr, PrimExpr], PrimExpr]
    times: Callable[[PrimExpr, PrimExpr], PrimExpr]


def row_program(problem: SoftmaxProblem, rounding: Rounding | None = None) -> RowProgram:
    """Compose the input step, the function and the output step of `problem`.

    With `rounding` the exponents of softmax take one operation in place of two, where they are small enough (from
    FlashAttention-2, Dao 2023, section 3.1).
    """
    p = problem

    def f32(value: float) -> PrimExpr:
        return tirx.const(value, "float32")

    def exp(value: PrimExpr) -> PrimExpr:
        return tirx.exp2(value * f32(LOG2E))

    def scaled(value: PrimExpr, results: Values) -> PrimExpr:
        if p.temperature:
            return value * results["factor"] * f32(math.copysign(1, p.scale))
        return value if p.scale == 1 else value * f32(p.scale)

    def dropped(value: PrimExpr, drop: PrimExpr) -> PrimExpr:
        return value * drop * f32(1 / p.keep)

    if p.is_grad:

        def gradient(inputs: Values) -> PrimExpr:
            return dropped(inputs["dy"], inputs["drop"]) if p.has_dropout else inputs["dy"]

        def output(inputs: Values, results: Values) -> PrimExpr:
            if p.is_log:
                return scaled(gradient(inputs) - exp(inputs["y"]) * total_of(results), results)
            return scaled(inputs["y"] * (gradient(inputs) - total_of(results)), results)

        def total_of(results: Values) -> PrimExpr:
            return results["total"] - results["dlse"] if p.lse else results["total"]

        total = Reduction(
            "total", "sum", lambda inputs, _: gradient(inputs) if p.is_log else inputs["y"] * gradient(inputs)
        )
        return RowProgram({"y": 0.0, "dy": 0.0, "drop": 0.0}, (total,), output)

    # Without a mask the peak is that of x or -x, scaled after the subtraction: GPUs fuse scale * x - peak to one
    # rounding, and less a peak that was rounded before, the largest element is far from 0 where x is large.
    late = p.mask == "none" or p.is_cut

    fill = math.copysign(math.inf, -p.scale)

    def rising(x: PrimExpr) -> PrimExpr:
        return x if p.scale > 0 else f32(0) - x

    def compared(inputs: Values, results: Values) -> PrimExpr:
        """What the peak is the largest of."""
        if late:
            x = inputs["x"]
            return rising(tirx.Select(inputs["col"] < results["length"], x, f32(fill)) if p.is_cut else x)
        return scaled(inputs["x"], results) + inputs["mask"]

    def spread(difference: PrimExpr, results: Values) -> PrimExpr:
        """How far v is apart where `compared` is `difference` apart."""
        if late and p.temperature:
            return difference * results["factor"]
        return difference * f32(abs(p.scale)) if late and abs(p.scale) != 1 else difference

    # 2**(x * k - peak * k): that the product with the peak is rounded divides every exponential of a row, and with them
    # their sum, by the same number; at most by 2**0.5, where the product is no larger than 2**24.  A logarithm of the
    # sum would differ
    k = abs(p.scale) * LOG2E
    exact = p.is_log or p.is_loss or p.lse or p.temperature
    fused = rounding if late and not exact and k * LARGEST[p.dtype] <= 2**24 else None

    def numerator(inputs: Values, results: Values) -> PrimExpr:
        if fused:
            return tirx.exp2(fused.fma(compared(inputs, results), f32(k), fused.times(results["peak"], f32(-k))))
        return exp(shifted(inputs, results))

    def share(part: Values, results: Values) -> PrimExpr:
        if fused:
            return part["total"] * tirx.exp2(fused.times(part["peak"], f32(k)) - fused.times(results["peak"], f32(k)))
        return part["total"] * exp(spread(part["peak"] - results["peak"], results))

    def shifted(inputs: Values, results: Values) -> PrimExpr:
        return spread(compared(inputs, results) - results["peak"], results)

    def softmax(inputs: Values, results: Values) -> PrimExpr:
        if p.is_log:
            return shifted(inputs, results) - results["log_total"]
        return numerator(inputs, results) * results["inverse"]

    def lse(results: Values) -> PrimExpr:
        return results["log_total"] + spread(results["peak"], results)

    def loss(results: Values) -> PrimExpr:
        smoothing = f32(p.smoothing)
        apart = spread(rising(results["picked"]) - results["peak"], results)
        value = results["log_total"] - apart * (f32(1) - smoothing)
        if p.smoothing:
            value = value + (spread(results["peak"], results) - results["linear"] * f32(1 / p.cols)) * smoothing
        if p.z:
            value = value + lse(results) * lse(results) * f32(p.z)
        return tirx.Select(results["ignored"], f32(0), value)

    def gradient_of_loss(probability: PrimExpr, inputs: Values, results: Values) -> PrimExpr:
        value = probability * results["more"] if p.z else probability
        if p.smoothing:
            value = value - f32(p.smoothing / p.cols)
        taken = tirx.Select(inputs["col"] == results["target"], f32(1 - p.smoothing), f32(0))
        return (value - taken) * results["weight"]

    def linear(inputs: Values, results: Values) -> PrimExpr:
        own = tirx.all(inputs["col"] >= 0, inputs["col"] < p.cols)
        return tirx.Select(own, scaled(inputs["x"], results), f32(0))

    derived = []
    if not p.is_log and p.element_outputs:
        derived.append(("inverse", lambda results: f32(1) / results["total"]))
    if p.is_log or p.lse or p.is_loss:
        derived.append(("log_total", lambda results: tirx.log(results["total"])))
    if p.z and p.element_outputs:
        derived.append(("more", lambda results: lse(results) * f32(2 * p.z) + f32(1)))
    # a part's total is relative to its own peak.  Peaks start from the lowest finite number, not from -inf, so that a
    # part that is empty or all -inf has the factor 0 or 1, not NaN, for its total of 0; one that holds +inf or NaN has
    # a NaN for its total, which no factor takes away
    reductions = [Reduction("peak", "max", compared), Reduction("total", "sum", numerator, share)]
    if p.smoothing:
        reductions.insert(1, Reduction("linear", "sum", linear, of_row=True))

    def from_element(element: PrimExpr, inputs: Values, results: Values) -> PrimExpr:
        probability = element * results["inverse"]
        return gradient_of_loss(probability, inputs, results) if p.is_loss else probability

    return RowProgram(
        # a column past the end must be the smallest: the sign of scale decides which infinity that is
        {"x": fill, "mask": 0.0},
        tuple(reductions),
        (lambda inputs, results: from_element(numerator(inputs, results), inputs, results)) if p.is_loss else softmax,
        tuple(derived),
        dropped if p.has_dropout else None,
        None if p.is_log else from_element,
        loss if p.is_loss else lse if p.lse else None,
        -LARGEST[p.dtype] if fused else LOWEST,
    )


def row_values(problem: SoftmaxProblem, number: Callable[[str], PrimExpr], x: Callable[[PrimExpr], PrimExpr]) -> Values:
    """What is known of a row before it is reduced: from its `number` in an argument of that name, and its element `x`
    of a column that there is, in float32."""

    def f32(value: float) -> PrimExpr:
        return tirx.const(value, "float32")

    p, values = problem, {}
    if p.temperature:
        temperature = number("temperature")
        values["factor"] = tirx.Select(temperature > 0, f32(abs(p.scale)) / temperature, f32(math.nan))
    if p.is_grad and p.lse:
        values["dlse"] = number("dlse")
    if not p.is_loss:
        return values
    target = number("target")
    values["ignored"] = target == tirx.const(p.ignore_index, "int64")
    inside = tirx.all(target >= 0, target < p.cols)
    last = tirx.const(p.cols - 1, "int64")
    picked = x(tirx.max(tirx.min(target, last), tirx.const(0, "int64")))
    values["picked"] = tirx.Select(inside, picked, f32(math.nan))
    if p.function == "cross_entropy_grad":
        weight = number("dloss") * (values["factor"] if p.temperature else f32(abs(p.scale)))
        weight = tirx.Select(inside, weight * f32(math.copysign(1, p.scale)), f32(math.nan))
        values["target"] = target
        values["weight"] = tirx.Select(values["ignored"], f32(0), weight)
    return values
