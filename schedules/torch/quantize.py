"""Post-training quantisation of whole models: convolutions and linear layers in int8 over groups of 32 channels.

`torch.compile` captures the model as `optimize` has it captured.  First the batches are run as they are, and the ranges
of what layers read and return are kept by name; then the layers of a graph are put into int8: a step is a convolution
with its batch norm, residual and activation, a linear layer behind one, pooling, or an addition.  From step to step
tensors stay packed.  Whatever else a graph has reads and returns floating point, converted at the border.

Numbers are symmetric: a tensor has one scale, a filter one for each output channel, sums are int32 with a bias in their
units, and what leaves a step is rounded to nearest even.  So a network's int8 part gives the same bits on every device;
filters are made on the host for that.  After Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018, section 2; percentiles as ranges after Wu et al., "Integer Quantization for
Deep Learning Inference", 2020.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from schedules.core.errors import UsageError
from schedules.core.problem import Problem
from schedules.torch.graph import UNFIT, Frozen, Row
from schedules.torch.kernels import kernel_for, prepare
from schedules.torch.layers import example, module_of, out_of_place, words_of
from schedules.torch.network import (
    Backend,
    Model,
    Report,
    called,
    captured,
    copied,
    frozen_of,
    inputs_of,
    optimized_by,
    same,
)
from schedules.torch.steps import Plan, Ranges, Step
from schedules.torch.written import Int8, Writer, plain, settled


def quantize(
    model: Model,
    batches: Iterable[Any],
    *,
    percentile: float = 100.0,
    memory_format: torch.memory_format | None = None,
    rest: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Model:
    """The model with its convolutions and linear layers in int8: another module over the same parameters.

    Each of `batches` is what the model is called with: a tensor, a tuple of arguments, or a dict of them by name.
    Their largest values are the ranges of the layers' tensors, or, under 100, the mean over the batches of this
    `percentile` of the absolute values.  The model is to be in evaluation; what it is called with later may have other
    sizes, and may be on another device, where the model then is too.

    `report` of the result says of each layer which kernel serves it and how far its output is from that of the model
    as it was (of the first image of the first batch: the norm of the difference by the norm), or why it stays in
    floating point.  Those that stay, and all else, are as `optimize` has them, and so are the other arguments.

    Raises UsageError for no batches, and for a percentile that is not over 0 and up to 100.
    """
    if not 0 < percentile <= 100:
        raise UsageError(f"percentile={percentile} is not over 0 and up to 100")
    given = [batches] if isinstance(batches, Tensor | Mapping) else batches
    ranges, report = Ranges(percentile), Report()
    first = None
    watched = captured(same(model), [_Watch(ranges, report)])
    with torch.no_grad():
        for batch in given:
            first = (batch,) if first is None else first
            called(watched, batch, report)
    if first is None:
        raise UsageError("there are no batches; give at least one")
    if model.training and torch.is_grad_enabled():
        report.note("the model is in training mode, where nothing is quantised; call eval() first")
    return optimized_by(model, first[0], partial(rewrite, ranges), report, memory_format, rest, options)


@dataclass(frozen=True)
class _Watch:
    """Has the graphs of a model tell the ranges of what their steps read and return."""

    ranges: Ranges
    report: Report
    rest: str = "ranges"

    def __call__(self, module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        module = copied(module)
        out_of_place(module.graph)
        plan = Plan(module, frozen_of(inputs_of(module, examples)))
        wanted = {node for step in plan.steps for node in (*step.sources, step.result)}
        keys = {node.name: plan.keys[node] for node in wanted}

        def show(name: str, value: Tensor) -> None:
            if name in keys:
                self.ranges.see(keys[name], value)

        module.recompile()
        return _Watcher(module, show).run


class _Watcher(Interpreter):
    """Runs a graph and shows the tensors of its nodes, by name, with something in them."""

    def __init__(self, module: GraphModule, show: Callable[[str, Tensor], None]) -> None:
        super().__init__(module)
        self.show = show

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.numel():
            self.show(n.name, value)
        return value


def rewrite(
    ranges: Ranges, module: GraphModule, frozen: Frozen, examples: Sequence[Any], backend: Backend
) -> list[tuple[Row, Problem | None]]:
    """Put the steps of a graph into int8; a line of the report for each, and for those that are left."""
    out_of_place(module.graph)
    refused: dict[Node, str] = {}
    while True:
        plan = Plan(module, frozen, ranges, refused)
        how: dict[Step, tuple[str, str]] = {}
        failed = len(refused)
        for step in plan.steps:
            try:
                step.problem = settled(step, _dtype(step.result), packed_for=step.source not in plan.made)
            except UNFIT as error:
                refused[step.nodes[0]] = str(error)
        if len(refused) == failed and backend.builds:
            how = _kernels(plan, refused)
        if len(refused) == failed:
            break
    rows: dict[Node, tuple[Row, Problem | None]] = {}
    for node, (layer, why) in plan.left.items():
        text = f"in floating point: {why}"
        rows[node] = Row(module_of(node), words_of(layer), "", text), None
    before: dict[str, Tensor] = {}
    if backend.builds and plan.steps and all(isinstance(value, Tensor) for value in examples):
        wanted = {step.result.name for step in plan.steps}
        _Watcher(module, lambda name, value: before.update({name: value[:1].clone()} if name in wanted else {})).run(
            *examples
        )
    writer = Writer(module, frozen, plan)
    for step in plan.steps:
        writer.put(step)
    writer.erase()
    border = writer.conversions()
    for words, of in (("packed", False), ("unpacked", True)):
        names = [str(source) for node, (source, _) in border.items() if writer.converted[node][1] is of]
        if names:
            backend.report.note(f"{words} at the border: {', '.join(names)}")
    backend.report.problems.extend(problem for _, problem in border.values())
    errors: dict[str, float] = {}
    module.recompile()
    if before:
        after = {writer.shown[step].name: step for step in plan.steps}

        def compare(name: str, value: Tensor) -> None:
            if step := after.get(name):
                errors[step.result.name] = _error(before[step.result.name], value[:1], writer.ints.get(step.result))

        _Watcher(module, compare).run(*examples)
    for step in plan.steps:
        kernel, why = how.get(step, ("", ""))
        off = errors.get(step.result.name)
        why = f"error {off:.2%}; {why}" if off is not None else why
        rows[step.nodes[0]] = Row(module_of(step.nodes[0]), step.words, kernel, why), step.problem
    return [rows[node] for node in plan.order if node in rows]


def _dtype(node: Node) -> torch.dtype:
    value = example(node)
    return torch.float32 if value is None else value.dtype


def _kernels(plan: Plan, refused: dict[Node, str]) -> dict[Step, tuple[str, str]]:
    """Which kernel serves each step and how it was chosen; those without one are `refused`."""
    how = {}
    for device in {example(step.result).device for step in plan.steps}:  # type: ignore[union-attr]
        of_device = [step for step in plan.steps if example(step.result).device == device]  # type: ignore[union-attr]
        with contextlib.suppress(*UNFIT):  # each step's own tells it below
            prepare([step.problem for step in of_device if step.problem is not None], device)
        for step in of_device:
            assert step.problem is not None
            try:
                made = kernel_for(step.problem, device)
                how[step] = made.made.split()[0], made.why
            except UNFIT as error:
                refused[step.nodes[0]] = str(error)
    return how


def _error(wanted: Tensor, got: Tensor, packed: Int8 | None) -> float:
    """The norm of the difference by the norm."""
    wanted = wanted.double()
    if packed is not None:
        got = plain(got, wanted.shape[1], False).double() * packed.scale
    norm = float(wanted.norm())
    return float((got.double().reshape(wanted.shape) - wanted).norm()) / norm if norm else 0.0
