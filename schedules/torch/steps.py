"""The layers of a graph that can be in int8 over groups of 32 channels, as steps that one kernel each serves.

A step is a convolution with its batch norm, residual and activation, a linear layer behind one, pooling, or an
addition.  `Plan` finds those of a graph, and says of what is left why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from schedules.core.epilogue import Activation
from schedules.core.errors import ProblemError
from schedules.core.problem import Problem
from schedules.torch.convolution import is_depthwise, padding_of, pair
from schedules.torch.graph import FLOATS, Frozen
from schedules.torch.kernels import dtype_name
from schedules.torch.layers import (
    Call,
    Layer,
    Reader,
    example,
    extents_of,
    given_of,
    module_of,
    read,
    signature_of,
    sizes_of,
    words_of,
)

SAMPLED = 2**20  # elements of a tensor that a percentile is taken of
LARGEST = 127  # what a range's end becomes
# what steps are made of besides the kinds that `graph` reads
FUNCTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "linear": ("input weight bias", (F.linear,)),
    "max": (
        "input kernel_size stride padding dilation ceil_mode return_indices", (F.max_pool2d, torch.max_pool2d)
    ),
    "average": ("input kernel_size stride padding ceil_mode count_include_pad divisor_override", (F.avg_pool2d,)),
    "adaptive": ("input output_size", (F.adaptive_avg_pool2d,)),
    "mean": ("input dim keepdim dtype", (torch.mean, "mean")),
}  # fmt: skip
KINDS = {target: (kind, names.split()) for kind, (names, targets) in FUNCTIONS.items() for target in targets}
ATEN = torch.ops.aten
SHAPES = (
    torch.flatten, torch.reshape, "flatten", "reshape", "view", ATEN.flatten.using_ints, ATEN.reshape.default,
    ATEN.view.default,
)  # fmt: skip # that may leave elements where they are


@dataclass
class Ranges:
    """The largest absolute values, or percentiles of them, of the tensors of a model, by `key_of`."""

    percentile: float
    seen: dict[str, list[float]] = field(default_factory=dict)

    def see(self, key: str, value: Tensor) -> None:
        size = value.detach().abs().float()
        if self.percentile < 100:
            size = size.flatten()
            size = size[:: -(-size.numel() // SAMPLED)]
            number = max(1, math.ceil(size.numel() * self.percentile / 100))
            found = float(size.kthvalue(number).values)
        else:
            found = float(size.amax())
        self.seen.setdefault(key, []).append(found)

    def scale(self, key: str) -> float | None:
        """Of one unit of int8; None where no finite range was seen."""
        seen = self.seen.get(key, ())
        if not seen or not all(map(math.isfinite, seen)):
            return None
        size = max(seen) if self.percentile == 100 else sum(seen) / len(seen)
        return float(np.float32(max(size / LARGEST, 2.0**-60))) if size else 1.0


@dataclass(eq=False)
class Step:
    """Nodes of a graph that one kernel serves in int8; the last is the result.

    `source` and `residual` are what it reads, behind what leaves elements where they are.  A linear layer is a
    convolution over all of an image.
    """

    kind: str  # convolution, max, average
    nodes: list[Node]
    source: Node
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    residual: Node | None = None
    activation: str = "none"
    layer: Layer | None = None
    problem: Problem | None = None
    stays: bool = True  # what comes of it is int8

    @property
    def result(self) -> Node:
        return self.nodes[-1]

    @property
    def sources(self) -> tuple[Node, ...]:
        return (self.source,) if self.residual is None else (self.source, self.residual)

    @property
    def words(self) -> str:
        if self.layer and self.layer.call.kind == "conv2d":
            return words_of(self.layer).rpartition(",")[0] + ", int8"
        sizes = extents_of(value) if (value := example(self.source)) is not None else ""
        if self.layer:
            name, made = "linear", example(self.layer.call.given["weight"])
            sizes += f" -> {made.shape[0]}" if made is not None else ""
        else:
            name = "add" if self.residual is not None else f"{self.kind} pooling"
            sizes += "" if self.residual is not None else f" {self.kernel[0]}x{self.kernel[1]}"
        return f"{name} {sizes}" + (f" + {self.activation}" if self.activation != "none" else "") + ", int8"


def exact(activation: str) -> str | None:
    """The activation that, with saturation at a range's ends, is this one; None if none of an int8 result is."""
    found = Activation.parse(activation)
    if found.name != "clamp":
        return activation if found.name in ("none", "relu") else None
    return "relu" if found.low == 0 else "none" if found.low == -found.high else None


class Plan:
    """The steps of one graph, in the order of their results; those of `refused`, and with `ranges` those whose ranges
    are not known, are none."""

    def __init__(
        self,
        module: GraphModule,
        frozen: Frozen,
        ranges: Ranges | None = None,
        refused: Mapping[Node, str] | None = None,
    ) -> None:
        self.frozen, self.ranges, self.refused = frozen, ranges, dict(refused or {})
        self.reader = Reader(module.graph, frozen.tensors)
        self.order, self.writes = self.reader.order, self.reader.writes
        self.keys = _keys(self.order)
        self.made: dict[Node, Step] = {}
        self.passed: set[Node] = set()  # what sources lie behind
        self.left: dict[Node, tuple[Layer, str]] = {}  # and why
        self.layers = {layer.nodes[0]: layer for layer in self.reader.layers() if layer.call.kind == "conv2d"}
        taken: set[Node] = set(chain.from_iterable(layer.nodes for layer in self.layers.values()))
        for node in self.order:
            if node in taken and node not in self.layers:
                continue
            layer = self.layers.get(node)
            try:
                step = self._convolution(layer) if layer else self._other(node)
                if step is None:
                    continue
                if why := self._refused(step):
                    raise ProblemError(why)
                self.made[step.result] = step
                taken.update(step.nodes)
            except ProblemError as error:
                self.left[node] = layer or Layer([node], call_of(node) or Call("", {})), str(error)
        self.steps = sorted(self.made.values(), key=lambda step: self.order[step.result])
        read_by = Counter(
            source for step in self.steps for source in step.sources if self.step_of(source, step.nodes[0]) is not None
        )
        for step in self.steps:
            convolves = step.kind == "convolution"
            step.stays = not (convolves and (exact(step.activation) is None or not read_by[step.result]))
            if not step.stays and step.residual is not None:
                step.stays = True

    def step_of(self, source: Node, reader: Node) -> Step | None:
        """The step whose result a node reads, as long as nothing was written since."""
        return self.made.get(source) if self.unwritten(source, reader) else None

    def unwritten(self, start: Node, end: Node) -> bool:
        return not any(self.order[start] < number < self.order[end] for number in self.writes)

    def scale(self, node: Node) -> float | None:
        """Of a result, or of what is read."""
        step = self.made.get(node)
        if step is not None and step.kind == "max":
            return self.scale(step.source)
        return self.ranges.scale(self.keys[node]) if self.ranges else 1.0

    def _refused(self, step: Step) -> str:
        if why := self.refused.get(step.nodes[0]):
            return why
        needed = (*step.sources, *(() if step.kind == "max" else (step.result,)))
        if any(self.scale(node) is None for node in needed):
            return "no finite range was seen of what it reads or returns"
        return ""

    def _convolution(self, layer: Layer) -> Step:
        """Raises ProblemError."""
        given = layer.call.given
        data, weight, made = (example(node) for node in (given["input"], given["weight"], layer.nodes[-1]))
        if data is None or weight is None or made is None or data.dim() != 4:
            raise ProblemError("not a batch of images")
        if not layer.constant:
            raise ProblemError("its filter is no parameter that stays")
        groups = given.get("groups", 1)
        if groups != 1 and not is_depthwise(data.shape, weight.shape, groups):
            raise ProblemError(f"{groups} groups")
        layer = replace(layer, depthwise=groups != 1)
        if made.dtype not in FLOATS or data.dtype != made.dtype:
            raise ProblemError(f"dtype {dtype_name(made.dtype)}")
        dilation = given.get("dilation", 1)
        pads = padding_of(given.get("padding", 0), weight.shape, dilation)
        if pads is None:
            raise ProblemError("padding is not the same on both sides")
        if layer.adds and exact(layer.activation) is None:
            layer = replace(layer, nodes=layer.nodes[:-1], activation="none")
        residual = None
        if layer.adds:
            before, add = layer.nodes[layer.adds - 1 : layer.adds + 1]
            terms = [given_of(add).get("input"), given_of(add).get("other")]
            residual = self._source(next(term for term in terms if term is not before))
        kernel = weight.shape[2], weight.shape[3]
        return Step(
            "convolution", layer.nodes, self._source(given["input"]), kernel, pair(given.get("stride", 1)), pads,
            pair(dilation), residual, layer.activation, layer,
        )  # fmt: skip

    def _other(self, node: Node) -> Step | None:
        """A step that keeps int8 what is.  Raises ProblemError."""
        call = call_of(node)
        if call is None or not isinstance(call.given.get("input"), Node):
            return None
        source, result = self._source(call.given["input"]), example(node)
        before = example(source)
        if before is None or result is None:
            return None
        if self.step_of(source, node) is None:
            if call.kind == "linear":
                raise ProblemError("what it reads is not in int8")
            return None
        sides = sides_of(before)
        if call.kind == "linear":
            weight, bias = call.given["weight"], call.given.get("bias")
            shape = example(weight)
            constant = all(part in self.frozen.tensors for part in (weight, bias) if part is not None)
            if shape is None or not constant or result.dim() != 2:
                raise ProblemError("its weight is no parameter that stays")
            layer = self.reader.activated(Layer([node], call, constant=True))
            return Step("convolution", layer.nodes, source, sides, activation=layer.activation, layer=layer)
        if call.kind == "add":
            other = call.given.get("other")
            if not isinstance(other, Node) or call.given.get("alpha", 1) != 1:
                return None
            second = self._source(other)
            if self.step_of(second, node) is None or not _alike(example(second), before, result):
                return None
            layer = self.reader.activated(Layer([node], call))
            if exact(layer.activation) is None:
                layer = Layer([node], call)
            return Step("average", layer.nodes, source, (1, 1), residual=second, activation=layer.activation)
        step = _pooling(call, node, source, sides)
        if step is not None and before.dim() != 4:
            raise ProblemError("not a batch of images")
        return step

    def _source(self, node: Node) -> Node:
        """What a node's elements are, in order: behind dropout in evaluation, and what makes rows of images."""
        while True:
            call, value = read(node), example(node)
            before = node.args[0] if node.args else None
            source = example(before)
            if value is None or source is None or not isinstance(before, Node) or node.op == "placeholder":
                return node
            dropped = call is not None and call.kind == "dropout" and call.given.get("training", True) is False
            rows = node.target in SHAPES and source.dim() in (2, 4) and value.dim() == 2
            rows = rows and str(source.shape[0]) == str(value.shape[0])
            if not (dropped or rows) or not self.unwritten(before, node):
                return node
            self.passed.add(node)
            node = before


def _keys(order: Iterable[Node]) -> dict[Node, str]:
    """A name for each node that another capture of the same graph gives it too."""
    seen: Counter[str] = Counter()
    keys = {}
    for node in order:
        where = module_of(node) if node.meta.get("nn_module_stack") else ""
        name = f"{where} {getattr(node.target, '__name__', node.target)}"
        seen[name] += 1
        keys[node] = f"{name} {seen[name]}"
    return keys


def call_of(node: Node) -> Call | None:
    """As `graph.read`, with the functions of this module too."""
    if node.op in ("call_function", "call_method"):
        kind, names = signature_of(node.target, KINDS)
        if kind and len(node.args) <= len(names):
            return Call(kind, dict(zip(names, node.args, strict=False)) | node.kwargs)
    found = read(node)
    return found if found is not None and found.kind == "add" and not found.inplace else None


def sides_of(value: Tensor) -> tuple[int, int]:
    """Of an image."""
    return tuple(sizes_of(value)[2:]) if value.dim() == 4 else (1, 1)  # type: ignore[return-value]


def _alike(*values: Tensor | None) -> bool:
    return len({tuple(map(str, value.shape)) for value in values if value is not None}) == 1


def _pooling(call: Call, node: Node, source: Node, sides: tuple[int, int]) -> Step | None:
    """Raises ProblemError for one that no kernel has."""
    given = call.given
    if call.kind == "mean":
        dim = given.get("dim")
        axes = {axis % 4 for axis in ([dim] if isinstance(dim, int) else dim or ())}
        if axes != {2, 3} or given.get("dtype") is not None:
            raise ProblemError("a mean over other axes than those of images")
        return Step("average", [node], source, sides)
    if call.kind == "adaptive":
        if given.get("output_size") not in (1, (1, 1), [1, 1]):
            raise ProblemError("adaptive pooling to more than one pixel")
        return Step("average", [node], source, sides)
    kernel = pair(given["kernel_size"])
    if given.get("ceil_mode", False) or given.get("return_indices", False) or given.get("divisor_override"):
        raise ProblemError("pooling with ceil_mode, indices or a divisor")
    pad = pair(given.get("padding", 0))
    if call.kind == "average" and pad != (0, 0) and not given.get("count_include_pad", True):
        raise ProblemError("a border that does not count")
    stride = given.get("stride")
    return Step(
        call.kind, [node], source, kernel, kernel if stride in (None, [], ()) else pair(stride), pad,
        pair(given.get("dilation", 1)),
    )  # fmt: skip
