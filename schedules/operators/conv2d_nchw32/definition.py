"""int8 convolution over channels in groups of 32: what is computed.

data (n, ci/32, h, w, 32), filter (ci/32, kh, kw, co', 32), output (n, co'/32, out_h, out_w, 32); ci/32 is rounded up,
co' is co rounded up to 32, and the channels added hold zeros.  Data of few channels, an image's, may have 4, 8 or 16
`lanes` in place of 32, and the filter as many.  Sums are int32.  The epilogue is
``y = alpha * conv + beta * bias + gamma * residual`` with bias (co',) int32 and the residual as the output; alpha, beta
and gamma are numbers of the problem, or float32 arguments of one number (1,) or of one for each channel (co',).  Where
beta is alpha, it is ``y = alpha * (conv + bias) + gamma * residual``, and the sum in brackets is int32.
After MegEngine's int8 tensor-core convolution on NCHW32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from schedules.core.draws import Draw, one_of
from schedules.core.epilogue import ACTIVATIONS, RUN_TIME, Activation, Epilogue, Factor, Term
from schedules.core.errors import ProblemError
from schedules.core.fields import Scale
from schedules.core.operator import Array, Expected
from schedules.core.problem import Conv2dProblem
from schedules.core.reference import finished
from schedules.core.tvm import te
from schedules.definitions.implicit import textbook
from schedules.operators.conv2d_nchw32.packing import GROUP, LANES, groups, pack_data, pack_filter, pack_scales

OUT_DTYPES = ("int8", "int32", "float16", "float32")
SCALES = ("alpha", "beta", "gamma")
PART = 2**21  # output elements that the reference computes at a time: what a cache holds
LONGEST_SUM = 2**31 // 128**2  # products of two int8 whose sum an int32 always holds


@dataclass(frozen=True)
class Nchw32Problem(Conv2dProblem):
    """An int8 convolution with its epilogue.

    `alpha`, `beta` and `gamma` are positive numbers, rounded to float32 and compiled in; or "tensor" or "channel" for
    an argument of one number, or of one for each output channel, so that one build serves layers of other scales.  With
    ``beta="alpha"`` the bias is in units of the sums, and added to them.
    `out_dtype` int8 rounds to nearest even and saturates, and so does int32, but that whole numbers stay int32;
    float16 and float32 keep y.  The default alpha brings sums of random data into the range of int8.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("int8",)
    data_axes = ("n", "gi", "h", "w", "li")
    filter_axes: ClassVar[tuple[str, ...]] = ("gi", "kh", "kw", "co", "li")
    output_axes = ("n", "go", "y", "x", "lo")
    out_dtypes: ClassVar[tuple[str, ...]] = OUT_DTYPES
    alphas: ClassVar[tuple[str, ...]] = RUN_TIME  # words that may stand for a number
    betas: ClassVar[tuple[str, ...]] = (*RUN_TIME, "alpha")
    gammas: ClassVar[tuple[str, ...]] = RUN_TIME
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS
    finishing = ("out_dtype", *SCALES, "bias", "residual", "activation")
    later = ("n_from", "lanes")

    dtype: str = "int8"
    out_dtype: str = "int8"
    alpha: Scale = 2.0**-11
    beta: Scale = 2.0**-11
    gamma: Scale = 1.0
    bias: bool = False
    residual: bool = False
    activation: str = "none"
    lanes: int = GROUP

    def __post_init__(self) -> None:
        super().__post_init__()
        fewer = [lanes for lanes in LANES if self.ci <= lanes < GROUP]
        if self.lanes not in (*fewer, GROUP):
            raise ProblemError(f"lanes={self.lanes} is not {' or '.join(map(str, (*fewer, GROUP)))} for ci={self.ci}")
        if self.out_dtype not in OUT_DTYPES:
            raise ProblemError(f"out_dtype={self.out_dtype} is not {' or '.join(OUT_DTYPES)}")
        for name in SCALES:
            value, words = getattr(self, name), getattr(self, f"{name}s")
            if not isinstance(value, str):
                object.__setattr__(self, name, float(pack_scales(value, self.co, name)[0]))
            elif value not in words:
                raise ProblemError(f"{name}={value} is not a number, {' or '.join(words)}")
        object.__setattr__(self, "activation", str(self.epilogue.activation))
        if self.products > LONGEST_SUM:
            raise ProblemError(
                f"ci={self.ci} kh={self.kh} kw={self.kw} sums more than {LONGEST_SUM} products, which can exceed int32"
            )

    @classmethod
    def draws(cls, large: bool = False) -> dict[str, Draw]:
        scales = {name: one_of(2.0**-11, 0.0007, 1.0, *getattr(cls, f"{name}s")) for name in SCALES}
        return {**super().draws(large), **scales}

    @property
    def ci_groups(self) -> int:
        return -(-self.ci // self.lanes)

    @property
    def co_groups(self) -> int:
        return groups(self.co)

    @property
    def not_groups(self) -> str | None:
        """Why a schedule that takes data by whole groups does not serve the problem, if it does not."""
        return None if self.lanes == GROUP else f"lanes={self.lanes} of data are not the {GROUP} that it loads at once"

    @property
    def products(self) -> int:
        """Of a sum."""
        return self.ci * self.kh * self.kw

    @cached_property
    def epilogue(self) -> Epilogue:
        alpha, beta, gamma = (self._factor(name) for name in SCALES)
        bias, residual = Term("bias", "channel", "int32", beta), Term("residual", "element", self.out_dtype, gamma)
        terms = tuple(term for given, term in ((self.bias, bias), (self.residual, residual)) if given)
        return Epilogue(self.out_dtype, terms, alpha, Activation.parse(self.activation))

    def _factor(self, name: str) -> Factor:
        value: Scale = getattr(self, name)
        if value == "alpha":
            return None
        return Term(name, value, "float32") if isinstance(value, str) else value

    @cached_property
    def extents(self) -> dict[str, int]:
        groups = {
            "gi": self.ci_groups,
            "li": self.lanes,
            "go": self.co_groups,
            "lo": GROUP,
            "co": self.co_groups * GROUP,
        }
        return super().extents | groups


def definition(problem: Nchw32Problem) -> list[te.Tensor]:
    """The TE graph: ``padded`` (data with its border of zeros, if it has one), ``conv`` (n, co'/32, out_h, out_w, 32)
    int32, ``output``.  The reduction runs over (ci/32, kh, kw, 32).

    Returns [data, filter, the epilogue's operands, the output].
    """
    return textbook(problem)


def inputs(problem: Nchw32Problem, rng: np.random.Generator) -> list[Array]:
    """Uniform over the range of int8, bias of the size of the sums; packed, so zeros in the channels added.  Scales
    about their default."""
    p = problem
    return drawn_inputs(
        p, rng, lambda rng: pack_filter(rng.integers(-128, 128, (p.co, p.ci, p.kh, p.kw), "int8"), p.lanes)
    )


def drawn_inputs(
    problem: Nchw32Problem, rng: np.random.Generator, weight: Callable[[np.random.Generator], Array]
) -> list[Array]:
    """The same, of a `weight` that is drawn after the data."""
    p = problem
    defaults: dict[str, Any] = {name: type(p).__dataclass_fields__[name].default for name in SCALES}

    def integers(bound: int, shape: tuple[int, ...], dtype: str = "int8") -> Array:
        return rng.integers(-bound, bound, shape, dtype=dtype)

    made = [pack_data(integers(128, (p.n, p.ci, p.h, p.w)), p.lanes), weight(rng)]
    for term in p.epilogue.operands:
        if term.name in SCALES:
            size = p.co if term.axis == "channel" else None
            made.append(pack_scales(defaults[term.name] * rng.uniform(0.5, 2, size), p.co, term.name))
        elif term.axis == "channel":
            bound = round(64 / defaults["beta"])
            made.append(np.pad(integers(bound, (p.co,), "int32"), (0, p.co_groups * GROUP - p.co)))
        else:
            made.append(pack_data(integers(128, (p.n, p.co, p.out_h, p.out_w)).astype(term.dtype)))
    return made


def reference(problem: Nchw32Problem, arrays: Sequence[Array]) -> list[Expected]:
    """The output, exact unless the activation is not."""
    return finished_sums(problem, arrays, _sums)


def finished_sums(
    problem: Nchw32Problem, arrays: Sequence[Array], sums: Callable[[Any, Array, Array], Array]
) -> list[Expected]:
    """The output of the `sums` of problem, data and filter, for as many images at a time as PART has room for."""
    p = problem
    data, weight, *operands = arrays
    images = max(1, PART // math.prod(p.shapes()[2][1:]))
    found = []
    for start in range(0, p.n, images):
        part = slice(start, start + images)
        of_images = [
            array[part] if operand.axis == "element" else array
            for operand, array in zip(p.epilogue.operands, operands, strict=True)
        ]
        found.append(finished(p, sums(p, data[part], weight), of_images))
    values, magnitude = (np.concatenate([getattr(part, name) for part in found]) for name in ("values", "magnitude"))
    return [Expected(values, magnitude)]


def _sums(problem: Nchw32Problem, data: Array, weight: Array) -> Array:
    """The sums of some images, int64: one matrix product for each tap and 512 channels, whose sums float32 holds
    exactly."""
    p = problem
    padded = np.pad(data, [(0, 0), (0, 0), (p.pad[0],) * 2, (p.pad[1],) * 2, (0, 0)])
    total = np.zeros((len(data), p.out_h, p.out_w, p.co_groups * GROUP), dtype=np.int64)
    for ry in range(p.kh):
        for rx in range(p.kw):
            y, x = ry * p.dilation[0], rx * p.dilation[1]
            window = padded[:, :, y : y + p.out_h * p.stride[0], x : x + p.out_w * p.stride[1]]
            window = window[:, :, :: p.stride[0], :: p.stride[1]]
            for g in range(0, p.ci_groups, 16):
                channels = window[:, g : g + 16].transpose(0, 2, 3, 1, 4)
                rows = channels.reshape(-1, channels.shape[3] * p.lanes).astype(np.float32)
                taps = weight[g : g + 16, ry, rx].transpose(0, 2, 1).reshape(rows.shape[1], -1).astype(np.float32)
                total += (rows @ taps).astype(np.int64).reshape(total.shape)
    return total.reshape(*total.shape[:3], p.co_groups, GROUP).transpose(0, 3, 1, 2, 4)
