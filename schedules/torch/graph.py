"""Our kernels in a graph of PyTorch's functions, as `torch.compile` captures one.

`kernels_in` settles for each layer (`layers`) whether a kernel serves it, and puts the kernels in; of each that is left
to PyTorch a line of the report says why.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from schedules.core.errors import ArgumentError, BuildError, ConfigError, DeviceError, ProblemError, ToolchainError
from schedules.core.problem import Problem
from schedules.torch.convolution import (
    DEPTHWISE_NCHW,
    DEPTHWISE_NHWC,
    NCHW,
    NHWC,
    by_pytorch,
    in_layout,
    is_depthwise,
    is_last,
    padding_of,
    pair,
)
from schedules.torch.kernels import DTYPES, TorchKernel, arch_of, dtype_name, kernel_for, prepare
from schedules.torch.layers import NAMES, Layer, Reader, example, given_of, module_of, out_of_place, sizes_of, words_of
from schedules.torch.rows import problem_of
from schedules.torch.softmax import dropout_softmax, log_softmax, softmax

logger = logging.getLogger("schedules")
UNFIT = (
    ArgumentError,
    BuildError,
    ConfigError,
    DeviceError,
    ProblemError,
    ToolchainError,
)  # a layer that has no kernel
FLOATS = tuple(DTYPES[name] for name in ("float32", "float16", "bfloat16"))
# of the axes of a filter (co, ci, kh, kw), by `filter_layout` and whether channels are last
ORDERS = {("oihw", False): (0, 1, 2, 3), ("hwoi", False): (2, 3, 0, 1), ("oihw", True): (0, 2, 3, 1)}


@dataclass(frozen=True)
class Row:
    """A line of a report: the module, its layer, what serves it (empty for PyTorch), and why or how."""

    module: str
    layer: str
    kernel: str
    why: str


@dataclass(frozen=True)
class Frozen:
    """The tensors of a graph that stay as they are, by placeholder, and what is made of them."""

    tensors: dict[Node, Tensor]
    made: dict[str, Callable[[dict[Node, Tensor]], Tensor]] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)
    used: dict[Node, None] = field(default_factory=dict)  # in order

    def constant(
        self,
        module: GraphModule,
        what: Any,
        sources: Sequence[Node | None],
        make: Callable[[dict[Node, Tensor]], Tensor],
    ) -> Node:
        """A node for `what` is made of `sources`, which is made once, where nodes are being inserted."""
        key = (what, *sources)
        if key not in self.names:
            self.names[key] = name = f"_schedules_{len(self.names)}"
            self.made[name] = make
            self.used.update(dict.fromkeys(node for node in sources if node is not None))
            with torch.no_grad():
                module.register_buffer(name, make(self.tensors), persistent=False)
        return module.graph.get_attr(self.names[key])

    @torch.no_grad()
    def refresh(self, module: GraphModule, tensors: dict[Node, Tensor]) -> None:
        """Make everything again, in the memory that it has."""
        for name, make in self.made.items():
            getattr(module, name).copy_(make(tensors))


def settle(layer: Layer, memory_format: torch.memory_format | None, on_gpu: bool) -> None:
    """Find a layer's problem, or say why PyTorch keeps it."""
    made, kind = example(layer.nodes[-1]), layer.call.kind
    data = example(layer.call.given.get("input"))
    try:
        if kind == "attention":
            raise ProblemError("PyTorch's fused attention")
        if kind == "convolution":
            called = str(getattr(layer.nodes[0].target, "__name__", ""))
            raise ProblemError("transposed" if "transpose" in called else "not of images")
        if made is None or data is None:
            raise ProblemError("its tensors are not known")
        if made.dtype not in FLOATS:
            raise ProblemError(f"dtype {dtype_name(made.dtype)}")
        layer.symbolic = not all(isinstance(size, int) for size in data.shape)
        (_settle_convolution if kind == "conv2d" else _settle_softmax)(layer, data, made, memory_format, on_gpu)
        arch_of(made.device)
    except UNFIT as error:
        layer.why = str(error)


def _settle_convolution(
    layer: Layer, data: Tensor, made: Tensor, memory_format: torch.memory_format | None, on_gpu: bool
) -> None:
    given, weight = layer.call.given, example(layer.call.given["weight"])
    if weight is None or data.dim() != 4:
        raise ProblemError("not a batch of images")
    if made.requires_grad:
        raise ProblemError(
            "gradients are recorded, which our convolutions do not have; eval() and torch.no_grad() end that"
        )
    groups = given.get("groups", 1)
    depthwise = is_depthwise(data.shape, weight.shape, groups)
    if groups != 1 and not depthwise:
        raise ProblemError(f"{groups} groups")
    dilation = given.get("dilation", 1)
    data_sizes, filter_sizes = sizes_of(data), sizes_of(weight)
    pads = padding_of(given.get("padding", 0), filter_sizes, dilation)
    if pads is None:
        raise ProblemError("padding is not the same on both sides")
    half = on_gpu and made.dtype is not torch.float32
    layer.last = memory_format is torch.channels_last or memory_format is None and half
    if not layer.last:  # as PyTorch's own would have it
        layer.last = is_last(made, weight, (1, 1)) or is_last(data, weight, pads)
    options = [pair(given.get("stride", 1)), pads, pair(dilation), layer.activation]
    terms = given.get("bias") is not None or layer.norm is not None, layer.adds > 0
    if depthwise:
        layer.depthwise = True
        filter_sizes = (filter_sizes[0], *filter_sizes[2:])
        if layer.last:
            data_sizes = (data_sizes[0], *data_sizes[2:], data_sizes[1])
        kind = DEPTHWISE_NHWC if layer.last else DEPTHWISE_NCHW
        layer.problem = kind.problem(data_sizes, filter_sizes, made.dtype, terms, options)
    elif layer.last:
        data_sizes, filter_sizes = ((shape[0], *shape[2:], shape[1]) for shape in (data_sizes, filter_sizes))
        layer.problem = NHWC.problem(data_sizes, filter_sizes, made.dtype, terms, options)
    else:
        layer.packed = layer.constant and on_gpu  # a CPU's kernels read filters as they lie
        if layer.packed:
            filter_sizes = (*filter_sizes[2:], *filter_sizes[:2])
        layout = "hwoi" if layer.packed else "oihw"
        layer.problem = NCHW.problem(data_sizes, filter_sizes, made.dtype, terms, [*options, layout])


def _settle_softmax(layer: Layer, data: Tensor, made: Tensor, *_: Any) -> None:
    dim = layer.call.given.get("dim")
    if dim not in (-1, data.dim() - 1) or not data.dim():
        raise ProblemError(f"dim={dim} is not the last axis")
    if not isinstance(data.shape[-1], int) and made.device.type != "cpu":
        raise ProblemError("its width is known only when it runs, and a kernel of a GPU has one")
    keep = round(1 - layer.dropout, 12)
    layer.problem = problem_of(layer.call.kind, sizes_of(data), made.dtype, layer.scale, keep=keep, drop="drawn")


def put(module: GraphModule, layer: Layer, frozen: Frozen) -> None:
    """Replace a layer by its kernel, or, where PyTorch keeps it, fold its batch norm only."""
    convolves, count = layer.call.kind == "conv2d", len(layer.nodes)
    if layer.why:
        count = 2 if layer.norm else 0
    if not count:
        return
    last = layer.nodes[count - 1]
    value = example(last)
    assert value is not None
    with module.graph.inserting_before(last):
        new = (_put_convolution if convolves else _put_softmax)(module, layer, frozen, value.dtype)
    new.meta = {name: last.meta[name] for name in ("example_value", "nn_module_stack") if name in last.meta}
    last.replace_all_uses_with(new)
    for node in reversed(layer.nodes[:count]):
        module.graph.erase_node(node)


def _put_softmax(module: GraphModule, layer: Layer, frozen: Frozen, dtype: torch.dtype) -> Node:
    data = _cast(module.graph, given_of(layer.nodes[0])["input"], dtype)
    if layer.dropout:
        return module.graph.call_function(dropout_softmax, (data, layer.dropout), {"scale": layer.scale})
    function = softmax if layer.call.kind == "softmax" else log_softmax
    return module.graph.call_function(function, (data,), {"scale": layer.scale})


def _put_convolution(module: GraphModule, layer: Layer, frozen: Frozen, dtype: torch.dtype) -> Node:
    graph, norm, last = module.graph, layer.norm, layer.last
    given = given_of(layer.nodes[0])  # as it is now: layers before have been replaced
    weight, bias, ours = given["weight"], given.get("bias"), not layer.why
    order = (0, 1, 2, 3) if layer.depthwise else ORDERS["hwoi" if layer.packed else "oihw", last]

    def filters(tensors: dict[Node, Tensor]) -> Tensor:
        tensor = norm.filter(tensors[weight], tensors) if norm else tensors[weight]
        tensor = tensor.detach().to(dtype)
        tensor = tensor.permute(order).contiguous() if ours else tensor
        return tensor.squeeze(1) if ours and layer.depthwise else tensor

    def terms(tensors: dict[Node, Tensor]) -> Tensor:
        tensor = tensors[bias] if bias is not None else None
        tensor = norm.shift(tensor, tensors) if norm else tensor
        assert tensor is not None
        return tensor.detach().to(dtype)

    if layer.constant:
        sources = weight, bias, *(norm.sources if norm else ())
        new_filter = frozen.constant(module, ("filter", ours and order, dtype), sources, filters)
        new_bias = frozen.constant(module, ("bias", dtype), sources, terms) if bias is not None or norm else None
    else:
        new_filter, new_bias = _cast(graph, weight, dtype), _cast(graph, bias, dtype) if bias is not None else None
        if ours and layer.depthwise:
            new_filter = graph.call_method("squeeze", (new_filter, 1))
        elif ours and last:
            new_filter = graph.call_method("permute", (new_filter, order))
    if not ours:
        rest = [given.get(name, default) for name, default in zip(NAMES[3:], (1, 0, 1, 1), strict=True)]
        return graph.call_function(torch.conv2d, (given["input"], new_filter, new_bias, *rest))
    steps = [getattr(layer.problem, name) for name in ("stride", "pad", "dilation")]
    layout = "" if layer.depthwise else "hwoi" if layer.packed else "oihw"
    data = _cast(graph, given["input"], dtype)
    residual = None
    if layer.adds:
        before, add = layer.nodes[layer.adds - 1 : layer.adds + 1]
        residual = next(term for term in (given_of(add)["input"], given_of(add)["other"]) if term is not before)
    return graph.call_function(
        convolution, (data, new_filter, new_bias, residual, *steps, layer.activation, last, layout)
    )


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    value = example(node)
    return node if value is None or value.dtype == dtype else graph.call_method("to", (node, dtype))


def convolution(*arguments: Any) -> Tensor:
    """`in_layout` of the same arguments, or PyTorch's own for sizes that came later and have no kernel."""
    x, filter, bias, residual, stride, pad, dilation, activation, last, filter_layout = arguments
    try:
        return in_layout(*arguments)
    except UNFIT as error:
        logger.warning("a convolution of %s is left to PyTorch: %s", tuple(x.shape), error)
    if not filter_layout:
        return by_pytorch(x, filter.unsqueeze(1), bias, residual, stride, pad, dilation, len(filter), activation)
    order = (0, 3, 1, 2) if last else ORDERS[filter_layout, last]  # hwoi is its own way back
    return by_pytorch(x, filter.permute(order), bias, residual, stride, pad, dilation, 1, activation)


@dataclass(frozen=True)
class Served:
    """The layers of a graph, and what serves each, which is found out meanwhile: a kernel, or why PyTorch keeps it."""

    layers: list[Layer]
    kernels: Future[list[TorchKernel | str]]
    words: list[tuple[str, str]]  # the module of each, and what it does

    def misses(self) -> bool:
        """Whether a layer that is to have a kernel has none, once all are built."""
        pairs = zip(self.layers, self.kernels.result(), strict=True)
        return any(isinstance(kernel, str) and not layer.why for layer, kernel in pairs)

    def rows(self) -> list[tuple[Row, Problem | None]]:
        """A line for each layer, and the problem if it has one."""
        rows: list[tuple[Row, Problem | None]] = []
        for layer, words, kernel in zip(self.layers, self.words, self.kernels.result(), strict=True):
            told = ("", kernel) if isinstance(kernel, str) else (kernel.made.split()[0], kernel.why)
            rows.append((Row(*words, *told), layer.problem))
        return rows


def kernels_in(
    module: GraphModule,
    frozen: Frozen,
    memory_format: torch.memory_format | None,
    on_gpu: bool | None = None,
    prepares: bool = True,
    meanwhile: bool = False,
) -> Served:
    """Put kernels into a captured graph, built for the sizes it was captured with.  `on_gpu` is whether kernels are for
    a GPU, by default as the layers are.  What turns out to have no kernel is left to PyTorch; with `meanwhile`, where
    kernels are built while the caller goes on, it is there as if it had one (`Served.misses`)."""
    out_of_place(module.graph)
    found = list(Reader(module.graph, frozen.tensors).layers())
    for layer in found:
        settle(layer, memory_format, layer.on_gpu if on_gpu is None else on_gpu)
    kernels: Future[list[TorchKernel | str]] = Future()
    if not prepares:
        kernels.set_result([layer.why for layer in found])
    elif meanwhile:
        threading.Thread(target=_build, args=(found, kernels), daemon=True).start()
    else:
        _build(found, kernels)
        for layer, kernel in zip(found, kernels.result(), strict=True):
            layer.why = kernel if isinstance(kernel, str) else ""
    served = Served(found, kernels, [(module_of(layer.nodes[0]), words_of(layer)) for layer in found])
    if prepares:
        for layer in found:
            put(module, layer, frozen)
    module.recompile()
    return served


def _build(layers: Sequence[Layer], kernels: Future[list[TorchKernel | str]]) -> None:
    """Have the kernels of settled layers built: of each the kernel, or why there is none."""
    try:
        wanted = [layer for layer in layers if layer.problem is not None and not layer.why]
        for device in {layer.device for layer in wanted}:
            with contextlib.suppress(*UNFIT):  # each layer's own tells it below
                prepare([layer.problem for layer in wanted if layer.device == device and layer.problem], device)
        kernels.set_result([_kernel(layer) for layer in layers])
    except BaseException as error:
        kernels.set_exception(error)


def _kernel(layer: Layer) -> TorchKernel | str:
    if layer.problem is None or layer.why:
        return layer.why
    try:
        return kernel_for(layer.problem, layer.device)
    except UNFIT as error:
        return str(error)
