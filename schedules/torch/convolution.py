"""Convolutions for PyTorch: the operators ``schedules::conv2d_nchw``, ``conv2d_nhwc``, ``conv2d_hwcn``,
``conv2d_nchw32`` and ``depthwise_nchw32``.  Forward only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from schedules.core.epilogue import Activation
from schedules.core.errors import ArgumentError, DerivativeError
from schedules.core.problem import Problem
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.torch.kernels import DTYPES, Output, TorchKernel, dtype_name, kernel_for, remembered
from schedules.torch.operators import LOWER, Known, Launch, custom_operator, found

Size = int | Sequence[int]
Padding = Size | str
Shape = Sequence[int]

SIZES = ("stride", "pad", "dilation")
PACKED = "kh kw co ci"
LAST = torch.channels_last
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "hardswish": F.hardswish,
}  # as PyTorch computes them


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """`conv2d_nchw` or, where `x` is in PyTorch's channels-last format, `conv2d_nhwc` on the same memory.

    x (n, ci, h, w), weight (co, ci / groups, kh, kw), bias (co,); residual and the result (n, co, out_h, out_w), which
    is in the format of `x`.  Give `weight` and `residual` in it too: others are copied at each call.  `padding` may be
    "same" or "valid".  Each channel may be a group, with one filter; convolutions in other groups are PyTorch's own.
    """
    if groups != 1 and not is_depthwise(x.shape, weight.shape, groups):
        return by_pytorch(x, weight, bias, residual, stride, padding, dilation, groups, activation)
    return _by_views(_as_pytorch, (x, weight, bias, residual), (stride, padding, dilation, groups, activation))


def in_layout(
    x: Tensor,
    filter: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: tuple[int, int],
    pad: tuple[int, int],
    dilation: tuple[int, int],
    activation: str,
    last: bool,
    filter_layout: str,
) -> Tensor:
    """`conv2d` by `conv2d_nhwc`, if `last`, or `conv2d_nchw`, whose filters these are, in any format of `x`; without a
    `filter_layout` of depthwise filters (ci, kh, kw)."""
    options = stride, pad, dilation, activation, last, filter_layout
    return _by_views(_in_layout, (x, filter, bias, residual), options)


Views = tuple[Callable[..., Tensor], tuple[Any, ...]]  # an operator, and its arguments: views of tensors, then options
_views, _compiling = Known(), torch.compiler.is_dynamo_compiling


def _by_views(views: Callable[..., Views], given: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> Tensor:
    """The convolution of channels last, or not, that `views` of these arguments says."""
    compiling = _compiling()
    if not compiling:
        x, filter, bias, residual = given
        key = views, x.shape, filter.shape, bias is None, residual is None, options  # type: ignore[union-attr]
        tensors = [tensor for tensor in given if tensor is not None]
        launch = _views.find(key, tensors)
        if launch is not None:
            return launch(*tensors)  # type: ignore[no-any-return]
    convolve, arguments = views(*given, *options)
    output = convolve(*arguments)
    if convolve in (_conv2d_nhwc, _depthwise_nhwc):
        output = output.permute(0, 3, 1, 2)
    if not compiling and not any(isinstance(option, list) for option in options):
        launch = found(convolve, given, arguments, output)
        if launch is not None:
            _views.keep(key, tensors, launch)
    return output


def _as_pytorch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Size,
    padding: Padding,
    dilation: Size,
    groups: int,
    activation: str,
) -> Views:
    """`conv2d` of these."""
    steps, spread = pair(stride), pair(dilation)
    if isinstance(padding, str):
        if padding == "same" and steps != (1, 1):
            raise ArgumentError(f'padding="same" is for stride=1, and stride is {stride}; give the pixels to pad')
        pads = padding_of(padding, weight.shape, dilation)
        if pads is None:
            total = [(size - 1) * step for size, step in zip(weight.shape[2:], spread, strict=True)]
            x, pads = F.pad(x, [part for size in reversed(total) for part in (size // 2, size - size // 2)]), (0, 0)
    else:
        pads = pair(padding)
    last = is_last(x, weight, pads)
    if groups != 1:
        weight = weight.squeeze(1)
    elif last:
        weight = weight.permute(0, 2, 3, 1)
    layout = "" if groups != 1 else "oihw"
    return _in_layout(x, weight, bias, residual, steps, pads, spread, activation, last, layout)


def _in_layout(
    x: Tensor,
    filter: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: tuple[int, int],
    pad: tuple[int, int],
    dilation: tuple[int, int],
    activation: str,
    last: bool,
    filter_layout: str,
) -> Views:
    """`in_layout` of these."""
    options: tuple[Any, ...] = stride, pad, dilation, activation
    if not last:
        convolve, options = (_conv2d_nchw, (*options, filter_layout)) if filter_layout else (_depthwise_nchw, options)
        return convolve, (x, filter, bias, residual, *options)
    added = None if residual is None else residual.permute(0, 2, 3, 1)
    convolve = _conv2d_nhwc if filter_layout else _depthwise_nhwc
    return convolve, (x.permute(0, 2, 3, 1), filter, bias, added, *options)


def by_pytorch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Size,
    padding: Padding,
    dilation: Size,
    groups: int = 1,
    activation: str = "none",
) -> Tensor:
    """What `conv2d` computes, by PyTorch's functions."""
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    y = y if residual is None else y + residual
    if known := ACTIVATIONS.get(activation):
        return known(y)
    clamp = Activation.parse(activation)
    return y.clamp(clamp.low, clamp.high)


def is_depthwise(data: Shape, filter: Shape, groups: int) -> bool:
    """Whether each channel of the data (n, ci, h, w) has one filter of (co, 1, kh, kw)."""
    return groups != 1 and len(data) == len(filter) == 4 and data[1] == groups == filter[0]


def is_last(x: Tensor, filter: Tensor, pads: Shape) -> bool:
    """Whether `conv2d` takes `x` as channels last.  Images of one pixel, whose results are too, lie alike in both."""
    if x.is_contiguous() and not (x.shape[-1] == 1 and pads == (0, 0) and x.shape[2:] == filter.shape[2:] == (1, 1)):
        return False
    return x.is_contiguous(memory_format=LAST)


def pair(size: Size) -> tuple[int, int]:
    """Of rows and columns, as PyTorch takes it: a number, or a sequence of one or two."""
    if isinstance(size, int):
        return size, size
    if len(size) not in (1, 2):
        raise ArgumentError(f"{tuple(size)} is neither a number nor one for rows and one for columns")
    return size[0], size[-1]


def padding_of(padding: Padding, filter: Shape, dilation: Size) -> tuple[int, int] | None:
    """Pixels on both sides of rows and columns, of a filter (co, ci, kh, kw); None where "same" needs more on one side.

    Raises ArgumentError.
    """
    if not isinstance(padding, str):
        return pair(padding)
    if padding == "valid":
        return 0, 0
    if padding != "same":
        raise ArgumentError(f'padding={padding!r} is not "same", "valid" or pixels')
    rows, columns = ((size - 1) * step for size, step in zip(filter[2:], pair(dilation), strict=True))
    return None if rows % 2 or columns % 2 else (rows // 2, columns // 2)


def conv2d_nchw(
    data: Tensor,
    filter: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
    filter_layout: str = "oihw",
) -> Tensor:
    """activation(conv + bias + residual) of data (n, ci, h, w) with filter (co, ci, kh, kw): (n, co, out_h, out_w).

    All of one dtype, float32, float16 or bfloat16; sums in float32; bias (co,), residual as the result.  `activation`
    is none, relu, relu6, silu, gelu, gelu_tanh (PyTorch's gelu with approximate="tanh"), hardswish or clamp:LOW:HIGH;
    with `filter_layout` hwoi the filter is packed, (kh, kw, co, ci).

    Raises ArgumentError, ProblemError; DerivativeError in a backward pass.
    """
    sizes = pair(stride), pair(padding), pair(dilation)
    return _conv2d_nchw(data, filter, bias, residual, *sizes, activation, filter_layout)


def conv2d_nhwc(
    data: Tensor,
    filter: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """As `conv2d_nchw` of data (n, h, w, ci), filter (co, kh, kw, ci): (n, out_h, out_w, co)."""
    sizes = pair(stride), pair(padding), pair(dilation)
    return _conv2d_nhwc(data, filter, bias, residual, *sizes, activation)


def conv2d_hwcn(
    data: Tensor,
    filter: Tensor,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """As `conv2d_nchw` of data (h, w, ci, n), filter (kh, kw, ci, co): (out_h, out_w, co, n)."""
    return _conv2d_hwcn(data, filter, bias, residual, pair(stride), pair(padding), pair(dilation), activation)


def conv2d_nchw32(
    data: Tensor,
    filter: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    alpha: float | Tensor,
    beta: float | Tensor | None = 1.0,
    gamma: float | Tensor = 1.0,
    activation: str = "none",
    out_dtype: torch.dtype = torch.int8,
    channels: int | None = None,
) -> Tensor:
    """int8 convolution over channels in groups of 32: activation(alpha * conv + beta * bias + gamma * residual).

    data (n, ci/32, h, w, 32) and filter (ci/32, kh, kw, co, 32) int8, as `operators.conv2d_nchw32.packing` makes them,
    co a multiple of 32; both may have 4, 8 or 16 lanes in place of 32 where these hold all channels; bias (co,) int32;
    residual and the result (n, co/32, out_h, out_w, 32) of `out_dtype`: int8 and int32 (rounded to nearest even,
    saturated), float16 or float32.

    alpha, beta and gamma are positive: numbers, which are rounded to float32 and compiled in, or float32 tensors of one
    number (1,) or one for each channel (co,), of which one build takes any.  With beta=None the bias is in units of the
    sums, and added to them: activation(alpha * (conv + bias) + gamma * residual).  `channels` says how many of data's
    are no zeros, by default all: those of an image may be 3, and the others are then not read.

    Raises ArgumentError, ProblemError; DerivativeError in a backward pass.
    """
    sizes = pair(stride), pair(padding), pair(dilation)
    given = _scaled(data, filter, bias, residual, sizes, (alpha, beta, gamma), activation, out_dtype)
    return _conv2d_nchw32(*given, channels)


def depthwise_nchw32(
    data: Tensor,
    filter: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    kw: int,
    alpha: float | Tensor,
    beta: float | Tensor | None = 1.0,
    gamma: float | Tensor = 1.0,
    activation: str = "none",
    out_dtype: torch.dtype = torch.int8,
) -> Tensor:
    """`conv2d_nchw32` of each channel with a filter of its own: as many channels come out.

    filter (ci/32, kh, 32, kw'), as `operators.conv2d_nchw32.packing.pack_depthwise` makes it: kw' is `kw`, the columns
    of the kernel, rounded up to 4.  All else is as there.
    """
    sizes = pair(stride), pair(padding), pair(dilation)
    given = _scaled(data, filter, bias, residual, sizes, (alpha, beta, gamma), activation, out_dtype)
    return _depthwise_nchw32(*given, kw)


def _scaled(
    data: Tensor,
    filter: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    sizes: tuple[Any, ...],
    scales: Sequence[Any],
    activation: str,
    out_dtype: torch.dtype,
) -> tuple[Any, ...]:
    """The arguments of an operator with scales, each a tensor or a number; those of what is not there are 1."""
    given = True, bias is not None, residual is not None
    scales = [scale if there else 1.0 for scale, there in zip(scales, given, strict=True)]
    tensors = [scale if isinstance(scale, Tensor) else None for scale in scales]
    numbers = [None if isinstance(scale, Tensor) else scale for scale in scales]
    return data, filter, bias, residual, *tensors, *sizes, *numbers, activation, dtype_name(out_dtype)


@dataclass(frozen=True)
class _Convolution:
    """A custom operator: its axes of data, filter and output, its options, fields of the problem with their types in
    PyTorch's schemas, and the tensors it may be given besides; those of them that scale, in place of a number."""

    name: str
    data: str
    filter: str
    result: str
    options: tuple[tuple[str, str], ...]
    optional: tuple[str, ...] = ("bias", "residual")
    of: str = ""  # the operator, if it has another name
    layout: str = ""  # a field of its problem
    scales: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.optional + self.scales

    @property
    def schema(self) -> str:
        tensors = ["Tensor data", "Tensor filter", *(f"Tensor? {name}" for name in self.tensors)]
        sizes = [f"int[2] {name}" for name in SIZES]
        return f"({', '.join([*tensors, *sizes, *(f'{kind} {name}' for name, kind in self.options)])}) -> Tensor"

    def sizes(self, data: Shape, filter: Shape, layout: str) -> dict[str, int]:
        """Extents by name of axis.  Raises ArgumentError."""
        sizes: dict[str, int] = {}
        # an extent that both have is taken from data; a filter of another is refused when it is called
        filters = PACKED if layout == "hwoi" else self.filter
        for name, shape, axes in (("filter", filter, filters), ("data", data, self.data)):
            names = axes.split()
            if len(names) != len(shape):
                raise ArgumentError(f"{name} has shape {tuple(shape)}, needed ({', '.join(names)})")
            sizes.update(zip(names, shape, strict=True))
        return sizes

    def fields(self, options: Sequence[Any]) -> dict[str, Any]:
        return dict(zip((*SIZES, *(name for name, _ in self.options)), options, strict=True))

    def problem(
        self, data: Shape, filter: Shape, dtype: torch.dtype, given: Sequence[int], options: Sequence[Any]
    ) -> Problem:
        """The problem for tensors of these shapes, of which as many numbers as are `given` come besides.

        Raises ArgumentError, ProblemError.
        """
        fields = self.fields(options)
        sizes = self.sizes(data, filter, fields.get("filter_layout", ""))
        if "groups" in sizes:
            count, lanes, channels = sizes.pop("groups"), sizes.pop("lanes"), fields.pop("channels", None)
            if channels is not None and -(-channels // lanes) != count:
                raise ArgumentError(f"channels={channels} are not in {count} groups of {lanes}, as data's are")
            sizes["ci"] = channels or count * lanes
            fields |= {"lanes": lanes} if lanes != GROUP else {}
            sizes.pop("words", None)
        counts = dict(zip(self.tensors, given, strict=True))
        fields |= {name: counts[name] > 0 for name in self.optional} | {"dtype": dtype_name(dtype)}
        for name in self.scales:
            number, words = fields.pop(f"{name}_value"), {0: "alpha", 1: "tensor"}
            fields[name] = words.get(counts[name], "channel") if number is None else number
        fields |= {"layout": self.layout} if self.layout else {}
        return operator(self.of or self.name).problem(**sizes, **fields)

    def empty(self, data: Tensor, filter: Tensor, options: Sequence[Any]) -> Tensor:
        """Memory for the output; extents may be symbolic."""
        fields = self.fields(options)
        sizes = self.sizes(data.shape, filter.shape, fields.get("filter_layout", ""))
        sizes.setdefault("kw", fields.get("kw", 1))
        for axis, number, kernel in (("h", 0, "kh"), ("w", 1, "kw")):
            stride, pad, dilation = (fields[name][number] for name in SIZES)
            sizes[f"out_{axis}"] = (sizes[axis] + 2 * pad - dilation * (sizes[kernel] - 1) - 1) // stride + 1
        if "lanes" in sizes:
            sizes["lanes"] = GROUP  # of a result
        if "co" in sizes:
            sizes["groups"] = sizes["co"] // GROUP
        dtype = DTYPES.get(fields.get("out_dtype", ""), data.dtype)
        return data.new_empty([sizes[axis] for axis in self.result.split()], dtype=dtype)


def _operator(convolution: _Convolution) -> Callable[..., Tensor]:
    count = len(convolution.tensors)

    @remembered
    def kernel(
        data: Shape, filter: Shape, dtype: torch.dtype, device: torch.device, *rest: Any
    ) -> tuple[TorchKernel, Output]:
        """The kernel, and its result's shape and dtype."""
        problem = convolution.problem(data, filter, dtype, rest[:count], rest[count:])
        result = problem.arguments()[-1]
        return kernel_for(problem, device), (result.shape, DTYPES[result.dtype])

    def bind(data: Tensor, filter: Tensor, *rest: Any) -> Launch:
        sizes, others = map(tuple, rest[count:][: len(SIZES)]), rest[count:][len(SIZES) :]  # from PyTorch: lists
        options = *sizes, *others
        if not data.numel():
            return lambda data, filter, *terms: convolution.empty(data, filter, options)
        # an empty one counts as many, whose shape is then refused
        given = [0 if tensor is None else tensor.numel() or 2 for tensor in rest[:count]]
        chosen, result = kernel(data.shape, filter.shape, data.dtype, data.device, *given, *options)
        names = [name for name, numbers in zip(convolution.tensors, given, strict=True) if numbers]
        return looking(chosen.launch(data.device, result), ["data", "filter", *names], convolution.scales)

    def key(data: Tensor, filter: Tensor, *rest: Any) -> tuple[Any, ...]:
        stride, pad, dilation, *others = rest[count:]
        given = [tensor is None for tensor in rest[:count]]
        return data.shape, filter.shape, *given, *stride, *pad, *dilation, *others

    def fake(data: Tensor, filter: Tensor, *rest: Any) -> Tensor:
        return convolution.empty(data, filter, rest[count:])

    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise DerivativeError(f"{convolution.name} computes no gradients; call it under torch.no_grad()")

    lower = "" if convolution.scales else LOWER
    return custom_operator(convolution.name, convolution.schema, bind, key, fake, backward, autocast=lower)


_positive: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # scales that were looked at, and their versions


def require_positive(name: str, scales: Tensor) -> None:
    """Raise ArgumentError unless all `scales` are positive and finite.  They are looked at when they are new or
    changed, and no graph is captured: to read them from a GPU takes longer than a kernel."""
    key, version = id(scales), -1 if scales.is_inference() else scales._version
    known = _positive.get(key)
    if known and known[0]() is scales and known[1] == version:
        return
    if scales.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise ArgumentError(f"{name} has scales that are not positive and finite; mend them")
    _positive[key] = weakref.ref(scales, lambda _: _positive.pop(key, None)), version


def looking(launch: Launch, names: Sequence[str], scales: Collection[str]) -> Launch:
    """`launch`, which looks first at those of its tensors, called `names`, that are `scales`: in the kernel and not
    before, where tensors may be fake."""
    if not set(names) & set(scales):
        return launch

    def looked(*tensors: Tensor) -> Any:
        for name, tensor in zip(names, tensors, strict=True):
            if name in scales:
                require_positive(name, tensor)
        return launch(*tensors)

    return looked


_ACTIVATION = (("activation", "str"),)
_FILTER_LAYOUT = (("filter_layout", "str"),)
_SCALES = ("alpha", "beta", "gamma")
_EPILOGUE = (*((f"{name}_value", "float?") for name in _SCALES), *_ACTIVATION, ("out_dtype", "str"))
NCHW = _Convolution("conv2d_nchw", "n ci h w", "co ci kh kw", "n co out_h out_w", (*_ACTIVATION, *_FILTER_LAYOUT))
NHWC = _Convolution("conv2d_nhwc", "n h w ci", "co kh kw ci", "n out_h out_w co", _ACTIVATION)
HWCN = _Convolution("conv2d_hwcn", "h w ci n", "kh kw ci co", "out_h out_w co n", _ACTIVATION)
NCHW32 = _Convolution(
    "conv2d_nchw32",
    "n groups h w lanes",
    "groups kh kw co lanes",
    "n groups out_h out_w lanes",
    (*_EPILOGUE, ("channels", "int?")),
    scales=_SCALES,
)
DEPTHWISE_NCHW32 = _Convolution(
    "depthwise_nchw32",
    "n groups h w lanes",
    "groups kh lanes words",
    "n groups out_h out_w lanes",
    (*_EPILOGUE, ("kw", "int")),
    scales=_SCALES,
)
DEPTHWISE_NCHW, DEPTHWISE_NHWC = (
    _Convolution(
        f"depthwise_conv2d_{layout}", axes, "ci kh kw", result, _ACTIVATION, of="depthwise_conv2d", layout=layout
    )
    for layout, axes, result in (("nchw", "n ci h w", "n ci out_h out_w"), ("nhwc", "n h w ci", "n out_h out_w ci"))
)
_conv2d_nchw, _conv2d_nhwc, _conv2d_hwcn, _conv2d_nchw32 = map(_operator, (NCHW, NHWC, HWCN, NCHW32))
_depthwise_nchw, _depthwise_nhwc, _depthwise_nchw32 = map(_operator, (DEPTHWISE_NCHW, DEPTHWISE_NHWC, DEPTHWISE_NCHW32))
