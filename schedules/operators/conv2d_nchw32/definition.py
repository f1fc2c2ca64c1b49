"""int8 convolution over channels in groups of 32: what is computed.

data (n, ci/32, h, w, 32), filter (ci/32, kh, kw, co', 32), output (n, co'/32, out_h, out_w, 32); ci/32 is rounded up,
co' is co rounded up to 32, and the channels added hold zeros.  Sums are int32.  The epilogue is
``y = alpha * conv + beta * bias + gamma * residual`` with bias (co',) int32 and the residual as the output.
After MegEngine's int8 tensor-core convolution on NCHW32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from schedules.core.draws import Draw, one_of
from schedules.core.errors import ProblemError
from schedules.core.operator import Array, Expected
from schedules.core.problem import Argument, Conv2dProblem
from schedules.operators.conv2d_nchw32.epilogue import epilogue, epilogue_reference
from schedules.operators.conv2d_nchw32.packing import GROUP, groups, pack_data, pack_filter

if TYPE_CHECKING:
    from tvm import te

OUT_DTYPES = ("int8", "int32", "float32")
ACTIVATIONS = ("none", "relu")
PART = 2**21  # output elements that the reference computes at a time: what a cache holds
LONGEST_SUM = 2**31 // 128**2  # products of two int8 whose sum an int32 always holds


@dataclass(frozen=True)
class Nchw32Problem(Conv2dProblem):
    """An int8 convolution with its epilogue.

    `out_dtype` int8 rounds to nearest even and saturates; float32 keeps y; int32 computes in int32 and takes whole
    alpha, beta and gamma.  The default alpha brings sums of random data into the range of int8.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("int8",)
    out_dtypes: ClassVar[tuple[str, ...]] = OUT_DTYPES
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS

    dtype: str = "int8"
    out_dtype: str = "int8"
    alpha: float = 2.0**-11
    beta: float = 2.0**-11
    gamma: float = 1.0
    bias: bool = False
    residual: bool = False
    activation: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("out_dtype", OUT_DTYPES), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ProblemError(f"{name}={getattr(self, name)} is not {' or '.join(known)}")
        for name, used in (("alpha", True), ("beta", self.bias), ("gamma", self.residual)):
            value = getattr(self, name)
            if not math.isfinite(value) or float(np.float32(value)) != value:
                raise ProblemError(f"{name}={value} is not a float32; give {float(np.float32(value))!r}")
            if used and self.out_dtype == "int32" and (value != int(value) or abs(value) >= 2**31):
                raise ProblemError(f"{name}={value} is not whole, as int32 output needs; give {name}=1")
        if self.ci * self.kh * self.kw > LONGEST_SUM:
            raise ProblemError(
                f"ci={self.ci} kh={self.kh} kw={self.kw} sums more than {LONGEST_SUM} products, which can exceed int32"
            )

    @classmethod
    def draws(cls) -> dict[str, Draw]:
        factor = one_of(2.0**-11, 1.0)  # whole where the output is int32
        return {**super().draws(), "alpha": factor, "beta": factor}

    @property
    def ci_groups(self) -> int:
        return groups(self.ci)

    @property
    def co_groups(self) -> int:
        return groups(self.co)

    @property
    def pixels(self) -> int:
        """Output pixels of all images: the rows of the implicit matrix product."""
        return self.n * self.out_h * self.out_w

    def arguments(self) -> tuple[Argument, ...]:
        output = (self.n, self.co_groups, self.out_h, self.out_w, GROUP)
        optional = (
            (self.bias, Argument("bias", (self.co_groups * GROUP,), "int32")),
            (self.residual, Argument("residual", output, self.out_dtype)),
        )
        return (
            Argument("data", (self.n, self.ci_groups, self.h, self.w, GROUP), "int8"),
            Argument("filter", (self.ci_groups, self.kh, self.kw, self.co_groups * GROUP, GROUP), "int8"),
            *(argument for given, argument in optional if given),
            Argument("output", output, self.out_dtype, output=True),
        )


class Inputs(NamedTuple):
    """The placeholders of a problem."""

    data: te.Tensor
    weight: te.Tensor
    bias: te.Tensor | None
    residual: te.Tensor | None

    def tensors(self) -> list[te.Tensor]:
        return [tensor for tensor in self if tensor is not None]


def placeholders(problem: Nchw32Problem) -> Inputs:
    """The inputs of the TE graph."""
    from tvm import te

    made = {a.name: te.placeholder(a.shape, name=a.name, dtype=a.dtype) for a in problem.arguments() if not a.output}
    return Inputs(made["data"], made["filter"], made.get("bias"), made.get("residual"))


def definition(problem: Nchw32Problem) -> list[te.Tensor]:
    """The TE graph: ``padded`` (data with its border of zeros, if it has one), ``conv`` (n, co'/32, out_h, out_w, 32)
    int32, ``output``.  The reduction runs over (ci/32, kh, kw, 32).

    Returns [data, filter, bias and residual if there are, output].
    """
    from tvm import te, tirx

    p = problem
    given = placeholders(p)
    (top, left), source = p.pad, given.data
    if p.pad != (0, 0):
        source = te.compute(
            (p.n, p.ci_groups, p.h + 2 * top, p.w + 2 * left, GROUP),
            lambda b, g, y, x, c: te.if_then_else(
                te.all(y >= top, y - top < p.h, x >= left, x - left < p.w),
                given.data[b, g, y - top, x - left, c],
                tirx.const(0, "int8"),
            ),
            name="padded",
        )
    extents = {"rg": p.ci_groups, "ry": p.kh, "rx": p.kw, "rc": GROUP}
    rg, ry, rx, rc = (te.reduce_axis((0, extent), name=name) for name, extent in extents.items())
    conv = te.compute(
        (p.n, p.co_groups, p.out_h, p.out_w, GROUP),
        lambda b, g, y, x, f: te.sum(
            source[b, rg, y * p.stride[0] + ry * p.dilation[0], x * p.stride[1] + rx * p.dilation[1], rc].astype(
                "int32"
            )
            * given.weight[rg, ry, rx, g * GROUP + f, rc].astype("int32"),
            axis=[rg, ry, rx, rc],
        ),
        name="conv",
    )
    output = te.compute(
        conv.shape,
        lambda b, g, y, x, f: epilogue(
            p,
            conv[b, g, y, x, f],
            given.bias[g * GROUP + f] if given.bias is not None else None,
            given.residual[b, g, y, x, f] if given.residual is not None else None,
        ),
        name="output",
    )
    return [*given.tensors(), output]


def inputs(problem: Nchw32Problem, rng: np.random.Generator) -> list[Array]:
    """Uniform over the range of int8, bias of the size of the sums; packed, so zeros in the channels added."""
    p = problem

    def integers(bound: int, shape: tuple[int, ...], dtype: str = "int8") -> Array:
        return rng.integers(-bound, bound, shape, dtype=dtype)

    made = [
        pack_data(integers(128, (p.n, p.ci, p.h, p.w))),
        pack_filter(integers(128, (p.co, p.ci, p.kh, p.kw))),
    ]
    if p.bias:
        made.append(np.pad(integers(2**17, (p.co,), "int32"), (0, p.co_groups * GROUP - p.co)))
    if p.residual:
        residual = integers(128, (p.n, p.co, p.out_h, p.out_w)).astype(p.out_dtype)
        made.append(pack_data(residual))
    return made


def reference(problem: Nchw32Problem, arrays: Sequence[Array]) -> list[Expected]:
    """The output, exact, for as many images at a time as PART has room for."""
    p = problem
    rest = list(arrays)
    data, weight = rest.pop(0), rest.pop(0)
    bias, residual = rest.pop(0) if p.bias else None, rest.pop(0) if p.residual else None
    values = np.empty((p.n, p.co_groups, p.out_h, p.out_w, GROUP))
    images = max(1, PART // math.prod(values.shape[1:]))
    for start in range(0, p.n, images):
        part = slice(start, start + images)
        values[part] = _outputs(p, data[part], weight, bias, residual[part] if residual is not None else None)
    return [Expected(values, np.zeros((1,) * values.ndim))]


def _outputs(problem: Nchw32Problem, data: Array, weight: Array, bias: Array | None, residual: Array | None) -> Array:
    """The outputs of some images: one matrix product for each tap and 512 channels, whose sums float32 holds
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
                rows = channels.reshape(-1, channels.shape[3] * GROUP).astype(np.float32)
                taps = weight[g : g + 16, ry, rx].transpose(0, 2, 1).reshape(rows.shape[1], -1).astype(np.float32)
                total += (rows @ taps).astype(np.int64).reshape(total.shape)
    total = total.reshape(*total.shape[:3], p.co_groups, GROUP).transpose(0, 3, 1, 2, 4)
    shaped = bias.reshape(1, p.co_groups, 1, 1, GROUP) if bias is not None else None
    return epilogue_reference(p, total, shaped, residual)
