"""Steps of a graph put into int8: what they read is packed, filters are made, and what leaves them for floating point
is unpacked.

Numbers are symmetric: a tensor has one scale, a filter one for each output channel, sums are int32 with a bias in their
units.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from schedules.core.problem import Problem
from schedules.core.registry import operator_of
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem
from schedules.operators.conv2d_nchw32.packing import (
    GROUP,
    groups,
    lanes_for,
    pack_depthwise,
    pack_filter,
    pack_scales,
)
from schedules.operators.depthwise_nchw32.definition import DepthwiseNchw32Problem
from schedules.operators.pack_nchw32.definition import PackProblem
from schedules.operators.pool2d.definition import PoolProblem
from schedules.torch.convolution import conv2d_nchw32, depthwise_nchw32
from schedules.torch.graph import UNFIT, Frozen
from schedules.torch.kernels import arch_of, dtype_name
from schedules.torch.layers import example, sizes_of
from schedules.torch.packed import pack_nchw32, pool2d_nchw32, unpack_nchw32
from schedules.torch.steps import LARGEST, Plan, Step, exact, sides_of

BIAS = 2**23  # units of the sums that a bias has at most, so that float32 holds it


def settled(step: Step, dtype: torch.dtype, packed_for: bool = False) -> Problem:
    """The problem of a step that reads packed tensors; of what is `packed_for` it alone, few channels have few lanes
    where a kernel takes these.  Raises ProblemError."""
    data, made = example(step.source), example(step.result)
    assert data is not None and made is not None
    n, c = sizes_of(data)[:2]
    fields: dict[str, Any] = dict(
        n=n, ci=groups(c) * GROUP, kh=step.kernel[0], kw=step.kernel[1], stride=step.stride, pad=step.pad,
        dilation=step.dilation, residual=step.residual is not None,
    )  # fmt: skip
    fields["h"], fields["w"] = sides_of(data)
    if step.kind != "convolution":
        activation = exact(step.activation) or "none"
        return PoolProblem(**fields, kind=step.kind, activation=activation)
    fields |= {"activation": (exact(step.activation) or "none") if step.stays else step.activation}
    fields |= {"out_dtype": "int8" if step.stays else _floats(dtype)}
    fields |= {"gamma": "tensor"} if step.residual is not None else {}
    fields |= {"bias": True, "alpha": "channel", "beta": "alpha"}
    if step.layer is not None and step.layer.depthwise:
        return DepthwiseNchw32Problem(**fields)
    problem = Nchw32Problem(**{**fields, "ci": c}, co=groups(int(made.shape[1])) * GROUP)
    few, arch = replace(problem, lanes=lanes_for(c) if packed_for else GROUP), arch_of(data.device)
    return few if any(spec.serves(few, arch) for spec in operator_of(few).schedules) else problem


def _floats(dtype: torch.dtype) -> str:
    """What a kernel stores where floating point of `dtype` is wanted."""
    return "float16" if dtype is torch.float16 else "float32"


def plain(packed: Tensor, channels: int, flat: bool) -> Tensor:
    """(n, groups, h, w, 32) of any dtype as (n, channels, h, w), or (n, channels) of one pixel."""
    value = packed.permute(0, 1, 4, 2, 3).flatten(1, 2)[:, :channels]
    return value.flatten(1) if flat else value


def packed_again(values: Tensor, scale: Tensor) -> Tensor:
    """(n, groups, h, w, 32) in floating point as int8: images of 32 channels, the channels last."""
    images = values.flatten(0, 1).permute(0, 3, 1, 2)
    return pack_nchw32(images, scale).view(values.shape)


def as_images(value: Tensor) -> Tensor:
    """(n, c) as images of one pixel."""
    return value if value.dim() == 4 else value[:, :, None, None]


@dataclass(frozen=True)
class Int8:
    """A packed tensor in a graph, and its scale."""

    node: Node
    scale: float


class Writer:
    """Puts steps into a graph, in the order of their results."""

    def __init__(self, module: GraphModule, frozen: Frozen, plan: Plan) -> None:
        self.module, self.graph, self.frozen, self.plan = module, module.graph, frozen, plan
        self.ints: dict[Node, Int8] = {}  # by the node whose elements they are
        self.packed: dict[tuple[Node, int], tuple[Int8, Node]] = {}  # of so many lanes, before which node
        self.floats: dict[Node, Node] = {}  # what stands in the place of a result
        self.shown: dict[Step, Node] = {}  # where a step's result can be seen
        self.covered: list[Node] = []
        self.converted: dict[Node, tuple[Node, bool]] = {}  # the nodes that pack and unpack: of what, and which

    def constant(self, what: Any, value: Callable[[], Tensor], like: Node) -> Node:
        """A node for a number that the ranges give, on the device of `like`."""
        made = example(like)
        assert made is not None
        return self.frozen.constant(self.module, what, (), lambda _: value().to(made.device))

    def single(self, value: float, like: Node) -> Node:
        return self.constant(("scale", value), lambda: torch.tensor([value], dtype=torch.float32), like)

    def operand(self, source: Node, step: Step) -> Int8:
        """What `step` reads, packed before it where it is not yet."""
        plan, reader = self.plan, step.nodes[0]
        lanes = getattr(step.problem, "lanes", GROUP) if source is step.source else GROUP
        known, at = self.packed.get((source, lanes)) or (self.ints.get(source), source)
        if known is not None and plan.unwritten(at, reader):
            return known
        scale, value = plan.scale(source), example(source)
        assert scale is not None and value is not None
        node = self.floats.get(source, source)
        if value.dim() == 2:
            node = self.graph.call_function(as_images, (node,))
        node = self.graph.call_function(pack_nchw32, (node, self.single(float(np.float32(1 / scale)), source), lanes))
        self.converted[node] = source, False
        self.packed[source, lanes] = Int8(node, scale), reader
        return Int8(node, scale)

    def put(self, step: Step) -> None:
        last, plan = step.result, self.plan
        value = example(last)
        assert value is not None
        with self.graph.inserting_before(last):
            operands = [self.operand(source, step) for source in step.sources]
            scale = plan.scale(last) if step.kind != "max" else operands[0].scale
            assert scale is not None
            put = self._convolution if step.kind == "convolution" else self._pooling
            new = put(step, operands, scale)
            if step.stays:
                self.ints[last] = Int8(new, scale)
                shown, floats = new, self._unpacked(new, scale, last)
            else:
                shown = self.graph.call_function(plain, (new, value.shape[1], value.dim() == 2))
                floats = self._cast(shown, value.dtype)
                if plan.ranges and any(last in other.sources for other in plan.steps):
                    again = self.single(float(np.float32(1 / scale)), last)
                    self.ints[last] = Int8(self.graph.call_function(packed_again, (new, again)), scale)
        self.shown[step], self.floats[last] = shown, floats
        floats.meta = {name: last.meta[name] for name in ("example_value", "nn_module_stack") if name in last.meta}
        last.replace_all_uses_with(floats)
        self.covered += step.nodes

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        return node if dtype in (torch.float16, torch.float32) else self.graph.call_method("to", (node, dtype))

    def _unpacked(self, node: Node, scale: float, last: Node) -> Node:
        value = example(last)
        assert value is not None
        keywords = {"dtype": value.dtype, "memory_format": _format(value)}
        arguments = node, value.shape[1], self.single(scale, last)
        made = self.graph.call_function(unpack_nchw32, arguments, keywords)
        self.converted[made] = last, True
        return made if value.dim() == 4 else self.graph.call_method("flatten", (made, 1))

    def _convolution(self, step: Step, operands: Sequence[Int8], scale: float) -> Node:
        layer, (data, *residual) = step.layer, operands
        assert layer is not None and step.problem is not None
        given, norm, value = layer.call.given, layer.norm, example(step.result)
        weight, bias = given["weight"], given.get("bias")
        assert value is not None
        sources = weight, bias, *(norm.sources if norm else ())
        result = scale if step.stays else 1.0
        lanes = getattr(step.problem, "lanes", GROUP)
        what = data.scale, result, step.kernel, value.device, lanes

        def parts(tensors: dict[Node, Tensor]) -> Filter:
            on_host = {node: tensors[node].detach().cpu() for node in sources if node is not None}
            filters = on_host[weight].double()
            filters = filters.view(len(filters), -1, *step.kernel)
            terms = on_host[bias].double() if bias is not None else None
            if norm:
                filters, terms = norm.filter(filters, on_host), norm.shift(terms, on_host)
            return Filter.of(filters, terms, data.scale, result, layer.depthwise, lanes)

        def constant(name: str) -> Node:
            return self.frozen.constant(
                self.module,
                (name, *what),
                sources,
                lambda tensors: torch.from_numpy(getattr(parts(tensors), name)).to(value.device),
            )

        alpha, problem = constant("scales"), step.problem
        keywords: dict[str, Any] = {"alpha": alpha, "beta": None, "activation": getattr(problem, "activation")}  # noqa: B009
        if residual:
            keywords["gamma"] = self.single(float(np.float32(residual[0].scale / result)), step.result)
        keywords["out_dtype"] = getattr(torch, getattr(problem, "out_dtype"))  # noqa: B009
        arguments = data.node, constant("values"), constant("bias"), residual[0].node if residual else None
        keywords |= {"kw": step.kernel[1]} if layer.depthwise else {"channels": getattr(problem, "ci")}  # noqa: B009
        convolve = depthwise_nchw32 if layer.depthwise else conv2d_nchw32
        return self.graph.call_function(convolve, (*arguments, step.stride, step.pad, step.dilation), keywords)

    def _pooling(self, step: Step, operands: Sequence[Int8], scale: float) -> Node:
        data, *residual = operands
        keywords: dict[str, Any] = {"kind": step.kind}
        if step.kind == "average":
            alpha = data.scale / (scale * math.prod(step.kernel))
            keywords |= {"alpha": self.single(float(np.float32(alpha)), step.result)}
            keywords |= {"activation": exact(step.activation)}
        if residual:
            gamma = self.single(float(np.float32(residual[0].scale / scale)), step.result)
            keywords |= {"residual": residual[0].node, "gamma": gamma}
        arguments = data.node, step.kernel, step.stride, step.pad, step.dilation
        return self.graph.call_function(pool2d_nchw32, arguments, keywords)

    def erase(self) -> None:
        """Remove what nothing reads any more."""
        gone = {*self.covered, *self.plan.passed}
        for node in reversed(list(self.graph.nodes)):
            ours = node not in self.plan.order or node in gone
            if ours and not node.users and node.op in ("call_function", "call_method", "get_attr"):
                self.graph.erase_node(node)

    def conversions(self) -> dict[Node, tuple[Node, Problem]]:
        """What is packed, and unpacked, by the node that does it: the node it is of, and the problem."""
        found: dict[Node, tuple[Node, Problem]] = {}
        for node in self.graph.nodes:
            source, unpack = self.converted.get(node, (None, False))
            value = example(source)
            if source is None or value is None:
                continue
            n, c = sizes_of(value)[:2]
            h, w = sides_of(value)
            layout = "nhwc" if _format(value) is torch.channels_last else "nchw"
            with contextlib.suppress(*UNFIT):
                lanes = GROUP if unpack else node.args[2]
                fields: dict[str, Any] = dict(n=n, h=h, w=w, ci=c, dtype=dtype_name(value.dtype), lanes=lanes)
                found[node] = source, PackProblem(**fields, layout=layout, unpack=unpack)
        return found


def _format(value: Tensor) -> torch.memory_format:
    last = value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


@dataclass(frozen=True)
class Filter:
    """An int8 filter as kernels read it: `values` (gi, kh, kw, co', lanes), depthwise (co'/32, kh, 32, kw'); `bias`
    int32 (co',) in units of the sums; `scales` float32 (co',), which make of sums the result's units."""

    values: np.ndarray[Any, Any]
    bias: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        data: float,
        result: float,
        depthwise: bool = False,
        lanes: int = GROUP,
    ) -> Filter:
        """Of float64 weight (co, ci, kh, kw), or (co, 1, kh, kw) depthwise, and bias (co,), for data and result of
        these scales."""
        filters = weight.numpy()
        terms = np.zeros(len(filters)) if bias is None else bias.numpy()
        # a channel that is hardly there takes coarser steps, in which its bias is a number that float32 holds
        steps = np.maximum(np.abs(filters).reshape(len(filters), -1).max(1) / LARGEST, np.abs(terms) / (data * BIAS))
        steps[steps < 2.0**-100] = 1.0
        values = np.rint(filters / steps[:, None, None, None]).astype(np.int8)
        sums = np.zeros(groups(len(filters)) * GROUP, np.int32)
        sums[: len(terms)] = np.rint(terms / (data * steps))
        packed = pack_depthwise(values[:, 0]) if depthwise else pack_filter(values, lanes)
        return cls(packed, sums, pack_scales(data * steps / result, len(filters), "alpha"))
