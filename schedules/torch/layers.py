"""The layers of a graph of PyTorch's functions, as `torch.compile` captures one.

A layer is a convolution with what follows it and nothing else uses: batch norm in inference, an addition, an
activation; or a softmax with the scale before it and the dropout after it.  What is written in place is first written
out of place, where nothing can see the difference.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from schedules.core.epilogue import Activation
from schedules.core.errors import ProblemError
from schedules.core.problem import Problem
from schedules.torch.kernels import dtype_name

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
    "convolution": (" ".join(NAMES), (torch.conv1d, torch.conv3d)),
    "convolution ": (
        "input weight bias stride padding output_padding groups dilation",
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    ),
}  # fmt: skip
WRITING = "iadd iand iconcat ifloordiv ilshift imod imul imatmul ior ipow irshift isub itruediv ixor setitem delitem"
OUT_OF_PLACE = {operator.iadd: operator.add, torch.relu_: torch.relu, torch.clamp_: torch.clamp}
KINDS = {target: (kind.strip(), names.split()) for kind, (names, targets) in FUNCTIONS.items() for target in targets}
# the same as torch.export has them: operators of aten, whose other names are these, and those of their arguments
ATEN = {"to": "cast", "scaled_dot_product_attention": "attention", "max_pool2d": "max", "avg_pool2d": "average",
        "adaptive_avg_pool2d": "adaptive", "conv1d": "convolution", "conv3d": "convolution"} | {
    f"conv_transpose{count}d": "convolution" for count in (1, 2, 3)
}  # fmt: skip
ARGUMENTS = {"self": "input", "query": "input", "train": "training"}
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


def signature_of(target: Any, kinds: Mapping[Any, tuple[str, Sequence[str]]]) -> tuple[str, Sequence[str]]:
    """The kind of what a node calls, of `kinds` by function, and the names of its arguments; "" if it is of none."""
    if not isinstance(target, torch._ops.OpOverload):
        return kinds.get(target, ("", ()))
    space, _, name = target._schema.name.partition("::")
    base = name.removesuffix("_")
    kind = ATEN.get(base, base)
    if space != "aten" or all(known.removesuffix("_") != kind for known, _ in kinds.values()):
        return "", ()
    if kind == "cast" and target._overloadname != "dtype":
        return "", ()
    names = [ARGUMENTS.get(argument.name, argument.name) for argument in target._schema.arguments]
    return kind + name[len(base) :], names


def read(node: Any) -> Call | None:
    """The call of a node, if it is one of FUNCTIONS."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    kind, names = signature_of(node.target, KINDS)
    if not kind or len(node.args) > len(names) and kind not in ("attention", "cast"):
        return None
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return Call(kind.removesuffix("_"), given, kind.endswith("_") or bool(given.get("inplace")))


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
    path = path.rpartition("__self__.")[2]  # also of a model that was captured before
    return re.sub(r"__dict__\['_modules'\]\['(\w+)'\]", r"\1", path) if dot else node.name


def given_of(node: Node) -> dict[str, Any]:
    """What a node that is read was given, by name."""
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
        elif isinstance(node.target, torch._ops.OpOverload):
            packet = getattr(torch.ops.aten, node.target._opname.removesuffix("_"))
            node.target = getattr(packet, node.target._overloadname)
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

    def __init__(self, graph: Graph, frozen: Container[Node]) -> None:
        self.frozen = frozen  # placeholders of tensors that stay as they are
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
                layer.constant = weight in self.frozen and (bias is None or bias in self.frozen)
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
        self.activated(layer)

    def activated(self, layer: Layer) -> Layer:
        """The layer with the activation that follows it."""
        call = self._next(layer)
        if call and call.given.get("input") is layer.nodes[-1] and (activation := call.activation):
            layer.activation = activation
            self._take(layer)
        return layer

    def _affine(self, layer: Layer, call: Call) -> Affine | None:
        given = call.given
        mean, variance, weight, bias = (given.get(name) for name in ("running_mean", "running_var", "weight", "bias"))
        used = [node for node in (mean, variance, weight, bias) if node is not None]
        constant = layer.constant and mean and variance and all(node in self.frozen for node in used)
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


def extents_of(value: Tensor) -> str:
    """In words; those that later calls may change are a question mark."""
    return "x".join(str(size) if isinstance(size, int) else "?" for size in value.shape)


def words_of(layer: Layer) -> str:
    """A layer in a few words: its sizes, and what is in its epilogue or around it."""
    node, made = layer.nodes[0], example(layer.nodes[-1])
    kind = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    data, weight = (example(layer.call.given.get(name)) for name in ("input", "weight"))
    kind = kind.partition(".")[0]  # without the overload
    text = kind if layer.call.kind in ("attention", "convolution") else layer.call.kind
    if data is not None:
        text += f" {extents_of(data)}"
    if weight is not None and made is not None:
        kernel = "x".join(str(size) for size in weight.shape[2:])
        text += f" -> {made.shape[1 - weight.dim()]} {kernel}".rstrip()
        stride, groups = (layer.call.given.get(name, 1) for name in ("stride", "groups"))
        steps = [stride] if isinstance(stride, int) else list(stride)
        steps = steps[:1] if len(set(steps)) == 1 else steps
        text += "" if steps == [1] else f" stride {'x'.join(map(str, steps))}"
        text += "" if groups == 1 else f" groups {groups}"
    parts = ["batch norm"] if layer.norm else []
    if not layer.why:
        parts += ["residual"] if layer.adds else []
        parts += [layer.activation] if layer.activation != "none" else []
        parts += ["dropout"] if layer.dropout else []
    text = " + ".join([text, *parts])
    return text if made is None else f"{text}, {dtype_name(made.dtype)}"
