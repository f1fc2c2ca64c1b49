"""Our kernels in a graph of PyTorch's functions, as `torch.compile` captures one.

A layer is a convolution with what follows it and nothing else uses: batch norm in inference, an addition, an
activation; or a softmax with the scale before it and the dropout after it.  `kernels_in` finds the layers of a graph
and puts kernels in; of each that is left to PyTorch a line of the report says why.  What is written in place is first
written out of place, where nothing can see the difference.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from schedules.core.epilogue import Activation
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
from schedules.torch.kernels import DTYPES, arch_of, dtype_name, kernel_for, prepare
from schedules.torch.softmax import dropout_softmax, log_softmax, problem_of, softmax

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
ADD = "input other alpha"
CLAMP = "input min max"
NAMES = ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
FUNCTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "conv2d": (" ".join(NAMES), (torch.conv2d,)),
    "batch_norm": ("input running_mean running_var weight bias training momentum eps", (F.batch_norm,)),
    "add": (ADD, (operator.add, torch.add, "add")),
    "add_": (ADD, (operator.iadd, "add_")),
    "relu": ("input inplace", (F.relu, torch.relu, "relu")),
    "relu_": ("input", (torch.relu_, "relu_")),
    "relu6": ("input inplace", (F.relu6,)),
    "hardtanh": ("input min_val max_val inplace", (F.hardtanh,)),
    "clamp": (CLAMP, (torch.clamp, "clamp")),
    "clamp_": (CLAMP, (torch.clamp_, "clamp_")),
    "silu": ("input inplace", (F.silu,)),
    "hardswish": ("input inplace", (F.hardswish,)),
    "gelu": ("input approximate", (F.gelu,)),
    "softmax": ("input dim _stacklevel dtype", (F.softmax,)),
    "softmax ": ("input dim dtype", (torch.softmax, "softmax")),
    "log_softmax": ("input dim _stacklevel dtype", (F.log_softmax,)),
    "log_softmax ": ("input dim dtype", (torch.log_softmax, "log_softmax")),
    "dropout": ("input p training inplace", (F.dropout,)),
    "mul": ("input other", (operator.mul, torch.mul, "mul")),
    "div": ("input other", (operator.truediv, torch.div, "div")),
    "cast": ("input dtype", ("to",)),
    "attention": ("input", (F.scaled_dot_product_attention, F.multi_head_attention_forward)),
    "convolution": ("input weight", (torch.conv1d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d,
                                     torch.conv_transpose3d)),
}  # fmt: skip
WRITING = "iadd iand iconcat ifloordiv ilshift imod imul imatmul ior ipow irshift isub itruediv ixor setitem delitem"
OUT_OF_PLACE = {operator.iadd: operator.add, torch.relu_: torch.relu, torch.clamp_: torch.clamp}
KINDS = {target: (kind.strip(), names.split()) for kind, (names, targets) in FUNCTIONS.items() for target in targets}
# of the axes of a filter (co, ci, kh, kw), by `filter_layout` and whether channels are last
ORDERS = {("oihw", False): (0, 1, 2, 3), ("hwoi", False): (2, 3, 0, 1), ("oihw", True): (0, 2, 3, 1)}
# whose results lie in memory of their own
FRESH = {"conv2d", "batch_norm", "add", "relu", "relu6", "hardtanh", "clamp", "silu", "hardswish", "gelu", "softmax"}


@dataclass(frozen=True)
class Call:
    """What a node of a graph calls: a kind of FUNCTIONS without its underscore, and the arguments that are given."""

    kind: str
    given: dict[str, Any]
    inplace: bool = False

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self.given.get(name, default)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def activation(self) -> str | None:
        """As an epilogue has it, if one can."""
        if self.kind in ("relu", "relu6", "silu", "hardswish"):
            return self.kind
        if self.kind == "gelu":
            return {"none": "gelu", "tanh": "gelu_tanh"}.get(self.given.get("approximate", "none"))
        if self.kind == "clamp":
            low, high = self.number("min"), self.number("max")
            if low == 0 and self.given.get("max") is None:
                return "relu"
        elif self.kind == "hardtanh":
            low, high = self.number("min_val", -1.0), self.number("max_val", 1.0)
        else:
            return None
        return None if low is None or high is None or not low <= high else str(Activation("clamp", low, high))


def read(node: Any) -> Call | None:
    """The call of a node, if it is one of FUNCTIONS."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    kind, names = KINDS.get(node.target, (None, ()))
    if kind is None or len(node.args) > len(names) and kind not in ("attention", "convolution", "cast"):
        return None
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return Call(kind.removesuffix("_"), given, kind.endswith("_") or bool(given.get("inplace")))


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


@dataclass(frozen=True)
class Affine:
    """Batch norm in inference: the frozen tensors of y = (x - mean) / sqrt(variance + eps) * weight + bias."""

    mean: Node
    variance: Node
    weight: Node | None
    bias: Node | None
    eps: float

    @property
    def sources(self) -> tuple[Node | None, ...]:
        return self.mean, self.variance, self.weight, self.bias

    def factor(self, tensors: dict[Node, Tensor]) -> Tensor:
        root = (tensors[self.variance].double() + self.eps).rsqrt()
        return root if self.weight is None else root * tensors[self.weight].double()

    def filter(self, weight: Tensor, tensors: dict[Node, Tensor]) -> Tensor:
        return (weight.double() * self.factor(tensors).view(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)

    def shift(self, bias: Tensor | None, tensors: dict[Node, Tensor]) -> Tensor:
        mean = tensors[self.mean].double()
        moved = -mean if bias is None else bias.double() - mean
        moved = moved * self.factor(tensors)
        return moved if self.bias is None else moved + tensors[self.bias].double()


@dataclass
class Layer:
    """Nodes that one kernel serves, in order: a convolution and what follows it, or a softmax and what is around it."""

    nodes: list[Node]
    call: Call
    norm: Affine | None = None
    adds: int = 0  # the number of the node that adds a tensor
    activation: str = "none"
    constant: bool = False  # its filter and bias are frozen
    last: bool = False  # channels
    packed: bool = False  # its filter, once
    depthwise: bool = False
    dropout: float = 0.0
    scale: float = 1.0
    problem: Problem | None = None
    symbolic: bool = False  # later calls may have other extents
    why: str = ""  # it is left to PyTorch

    @property
    def device(self) -> torch.device:
        value = example(self.nodes[0])
        assert value is not None
        return value.device

    @property
    def on_gpu(self) -> bool:
        value = example(self.nodes[0])
        return value is not None and value.device.type == "cuda"


def example(node: Any) -> Tensor | None:
    """The fake tensor that was seen where the graph was captured."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def sizes_of(value: Tensor) -> tuple[int, ...]:
    """Of the call that is captured; extents that later calls may change are those of this one.  Raises ProblemError."""
    sizes = tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape)
    if None in sizes:
        raise ProblemError("its sizes are known only when it runs")
    return sizes


def module_of(node: Node) -> str:
    """The path of the module that a node was called in, or the node's own name."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    _, dot, path = stack[-1][0].partition("].") if stack else ("", "", "")
    path = path.removeprefix("__self__.")
    return re.sub(r"__dict__\['_modules'\]\['(\w+)'\]", r"\1", path) if dot else node.name


def _given(node: Node) -> dict[str, Any]:
    call = read(node)
    assert call is not None
    return call.given


def _kind(node: Any) -> str:
    call = read(node)
    return call.kind if call else ""


def out_of_place(graph: Graph) -> None:
    """Rewrite what is written in place into tensors that were made in the graph and have no views."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        call = read(node)
        if call is None or not call.inplace:
            continue
        target, other = call.given.get("input"), example(call.given.get("other"))
        if not isinstance(target, Node):
            continue
        made, value = read(target), example(target)
        if made is None or made.inplace or made.kind not in FRESH or value is None:
            continue
        if other is not None and other.dtype != value.dtype:  # the result may be of another
            continue
        if any(order[user] < order[node] and _kind(user) not in FRESH for user in target.users):
            continue
        for user in list(target.users):
            if order[user] > order[node]:
                user.replace_input_with(target, node)
        if isinstance(node.target, str):
            node.target = node.target.removesuffix("_")
        elif node.target in OUT_OF_PLACE:
            node.target = OUT_OF_PLACE[node.target]
        else:  # by an argument
            names = KINDS[node.target][1]
            node.args = tuple(arg for name, arg in zip(names, node.args, strict=False) if name != "inplace")
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "inplace"}


def _writes(node: Node) -> bool:
    """Whether a node may change a tensor that another node made."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    if call := read(node):
        return call.inplace
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in WRITING.split() or name.endswith("_") and not name.endswith("__") or "out" in node.kwargs:
        return True
    try:
        parameters = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # of a builtin, or a method's name
        return False
    given = dict(zip(parameters, node.args, strict=False)) | node.kwargs
    return bool(given.get("inplace"))


class Reader:
    """The layers of one graph."""

    def __init__(self, graph: Graph, frozen: Frozen) -> None:
        self.frozen = frozen
        self.order = {node: number for number, node in enumerate(graph.nodes)}
        self.writes = [number for node, number in self.order.items() if _writes(node)]

    def layers(self) -> Iterator[Layer]:
        taken: set[Node] = set()
        for node in self.order:
            call = read(node)
            if call is None or call.kind not in ("conv2d", "softmax", "log_softmax", "attention", "convolution"):
                continue
            layer = Layer([node], call)
            if call.kind == "conv2d":
                weight, bias = call.given["weight"], call.given.get("bias")
                layer.constant = weight in self.frozen.tensors and (bias is None or bias in self.frozen.tensors)
                self._follow(layer, taken)
            elif call.kind in ("softmax", "log_softmax"):
                self._surround(layer)
            taken.update(layer.nodes)
            yield layer

    def _next(self, layer: Layer, dtype: bool = True) -> Call | None:
        """The call of the only user of the layer's result, if the layer's work may be done there."""
        node = layer.nodes[-1]
        user = next(iter(node.users), None)
        call, value, found = read(user), example(node), example(user)
        if len(node.users) != 1 or user is None or call is None or call.inplace or value is None or found is None:
            return None
        if dtype and found.dtype != value.dtype or not _alike(found, value):
            return None
        between = self.order[layer.nodes[0]], self.order[user]
        return None if any(between[0] < number < between[1] for number in self.writes) else call

    def _take(self, layer: Layer) -> None:
        layer.nodes.append(next(iter(layer.nodes[-1].users)))

    def _follow(self, layer: Layer, taken: set[Node]) -> None:
        """What follows a convolution."""
        call = self._next(layer)
        if call and call.kind == "batch_norm":
            layer.norm = self._affine(layer, call)
            if layer.norm is None:
                return
            self._take(layer)
            call = self._next(layer)
        if call and call.kind == "add" and call.given.get("alpha", 1) == 1:
            terms, last = [call.given.get("input"), call.given.get("other")], layer.nodes[-1]
            other = terms[1] if terms[0] is last else terms[0]
            value, added = example(last), example(other)
            if (
                value is not None and added is not None and other is not last and _alike(added, value)
                and (added.dtype, added.device) == (value.dtype, value.device)
                and next(iter(last.users)) not in taken
            ):  # fmt: skip
                self._take(layer)
                layer.adds = len(layer.nodes) - 1
                call = self._next(layer)
        if call and call.given.get("input") is layer.nodes[-1] and (activation := call.activation):
            layer.activation = activation
            self._take(layer)

    def _affine(self, layer: Layer, call: Call) -> Affine | None:
        given, frozen = call.given, self.frozen.tensors
        mean, variance, weight, bias = (given.get(name) for name in ("running_mean", "running_var", "weight", "bias"))
        used = [node for node in (mean, variance, weight, bias) if node is not None]
        constant = layer.constant and mean and variance and all(node in frozen for node in used)
        if given.get("input") is not layer.nodes[-1] or given.get("training", False) is not False or not constant:
            return None
        return Affine(mean, variance, weight, bias, given.get("eps", 1e-5))

    def _surround(self, layer: Layer) -> None:
        """The scale before a softmax, and the dropout, or the way back to the dtype of its input, after it."""
        before = layer.call.given.get("input")
        call, value = read(before), example(before)
        if (
            isinstance(before, Node)
            and call
            and call.kind in ("mul", "div")
            and len(before.users) == 1
            and not layer.call.given.get("dtype")
        ):
            number, data = call.number("other"), example(call.given.get("input"))
            if number and data is not None and value is not None and data.dtype == value.dtype:
                layer.scale = number if call.kind == "mul" else 1 / number
                layer.nodes.insert(0, before)
        data, after = example(layer.call.given.get("input")), self._next(layer, dtype=False)
        if after and data is not None and after.kind == "cast" and after.given.get("dtype") is data.dtype:
            self._take(layer)
            after = self._next(layer)
        if after and after.kind == "dropout" and layer.call.kind == "softmax":
            p, training = after.number("p", 0.5), after.given.get("training", True)
            if training is True and p is not None and 0 < p < 1:
                layer.dropout = p
                self._take(layer)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dim() == b.dim() and all(str(x) == str(y) for x, y in zip(a.shape, b.shape, strict=True))


def settle(layer: Layer, memory_format: torch.memory_format | None, on_gpu: bool) -> None:
    """Find a layer's problem, or say why PyTorch keeps it."""
    made, kind = example(layer.nodes[-1]), layer.call.kind
    data = example(layer.call.given.get("input"))
    try:
        if kind == "attention":
            raise ProblemError("PyTorch's fused attention")
        if kind == "convolution":
            raise ProblemError("transposed, or not of images")
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
        raise ProblemError("gradients are recorded, which our convolutions do not have")
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
    layer.problem = problem_of(layer.call.kind, sizes_of(data), made.dtype, layer.scale, keep=keep)


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
    data = _cast(module.graph, _given(layer.nodes[0])["input"], dtype)
    if layer.dropout:
        return module.graph.call_function(dropout_softmax, (data, layer.dropout), {"scale": layer.scale})
    function = softmax if layer.call.kind == "softmax" else log_softmax
    return module.graph.call_function(function, (data,), {"scale": layer.scale})


def _put_convolution(module: GraphModule, layer: Layer, frozen: Frozen, dtype: torch.dtype) -> Node:
    graph, norm, last = module.graph, layer.norm, layer.last
    given = _given(layer.nodes[0])  # as it is now: layers before have been replaced
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
        residual = next(term for term in (_given(add)["input"], _given(add)["other"]) if term is not before)
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


def words_of(layer: Layer) -> str:
    """A layer in a few words: its sizes, and what is in its epilogue or around it."""
    node, made = layer.nodes[0], example(layer.nodes[-1])
    kind = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    data, weight = (example(layer.call.given.get(name)) for name in ("input", "weight"))
    text = kind if layer.call.kind in ("attention", "convolution") else layer.call.kind
    if data is not None:
        text += " " + "x".join(str(size) for size in data.shape)
    if weight is not None:
        co, *_, kh, kw = weight.shape if weight.dim() > 3 else (weight.shape[0], *weight.shape[-1:] * 2)
        text += f" -> {co} {kh}x{kw}"
        stride = layer.call.given.get("stride", 1)
        text += "" if stride in (1, (1, 1)) else f" stride {stride if isinstance(stride, int) else stride[0]}"
    parts = ["batch norm"] if layer.norm else []
    if not layer.why:
        parts += ["residual"] if layer.adds else []
        parts += [layer.activation] if layer.activation != "none" else []
        parts += ["dropout"] if layer.dropout else []
    text = " + ".join([text, *parts])
    return text if made is None else f"{text}, {dtype_name(made.dtype)}"


def kernels_in(
    module: GraphModule,
    frozen: Frozen,
    memory_format: torch.memory_format | None,
    on_gpu: bool | None = None,
    prepares: bool = True,
) -> list[tuple[Row, Problem | None]]:
    """Put kernels into a captured graph, built for the sizes it was captured with; a line for each of its layers, and
    the problem if it has one.  `on_gpu` is whether kernels are for a GPU, by default as the layers are."""
    out_of_place(module.graph)
    found = list(Reader(module.graph, frozen).layers())
    for layer in found:
        settle(layer, memory_format, layer.on_gpu if on_gpu is None else on_gpu)
    rows: list[tuple[Row, Problem | None]] = []
    served = [layer for layer in found if layer.problem is not None and not layer.why]
    for device in {layer.device for layer in served} if prepares else ():
        with contextlib.suppress(*UNFIT):  # each layer's own tells it below
            prepare([layer.problem for layer in served if layer.device == device and layer.problem], device)
    for layer in found:
        kernel = ""
        if prepares and layer.problem is not None and not layer.why:
            try:
                made = kernel_for(layer.problem, layer.device)
                kernel, how = made.made.split()[0], made.why
            except UNFIT as error:
                layer.why = str(error)
        rows.append(
            (Row(module_of(layer.nodes[0]), words_of(layer), kernel, layer.why or (kernel and how)), layer.problem)
        )
        if prepares:
            put(module, layer, frozen)
    module.recompile()
    return rows
