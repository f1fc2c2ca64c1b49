"""Whole models: `optimize` puts our kernels into one, and `backend` is the same for `torch.compile`.

`torch.compile` captures a model as graphs and keeps what it cannot capture, control flow by values first of all, as it
is; `graph` puts kernels into these.  What is left of a graph runs as captured, or is compiled by PyTorch's inductor.

Without gradients, parameters and buffers may be frozen: filters then carry batch norm and lie as kernels read them.  A
call checks that they are the tensors, and the versions of them, that were frozen, and else freezes them again.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from schedules.core.errors import UsageError
from schedules.core.problem import Problem
from schedules.torch.graph import Frozen, Row, kernels_in
from schedules.torch.kernels import likely_to_build

logger = logging.getLogger("schedules")

Model = TypeVar("Model", bound=nn.Module)
RESTS = ("inductor", "eager")


@dataclass
class Report:
    """What became of the layers of a model: of its convolutions, softmaxes and attention.

    `rows` has a line for each, `notes` what else there is to know; printed, both as a table.  Sizes that a model was
    called with later add lines.
    """

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def replaced(self) -> list[Row]:
        """The lines of the layers that our kernels serve."""
        return [row for row in self.rows if row.kernel]

    def add(self, rows: Sequence[tuple[Row, Problem | None]]) -> None:
        known = set(self.rows)  # from a graph of the same layers
        self.rows += [row for row, _ in rows if row not in known]
        self.problems += [problem for row, problem in rows if problem is not None and row not in known]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def __str__(self) -> str:
        lines = [("module", "layer", "kernel", "")]
        lines += [(row.module, row.layer, row.kernel or "PyTorch", row.why) for row in self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        table = [
            "  ".join([*(part.ljust(width) for part, width in zip(line, widths, strict=False)), line[3]]).rstrip()
            for line in lines
        ]
        total = f"{len(self.replaced)} of {len(self.rows)} layers by our kernels"
        return "\n".join([*table, total, *self.notes])


# (graph, its frozen tensors, what it is called with, the backend) -> lines of the report
Rewrite = Callable[[GraphModule, Frozen, Sequence[Any], "Backend"], list[tuple[Row, Problem | None]]]


@dataclass(frozen=True)
class Backend:
    """Our kernels in captured graphs.  `rest` runs what is left: inductor, with `mode` and `options` of its own, eager,
    or by default inductor where it has a compiler.  Without `builds`, graphs stay as they are: only the report grows.
    """

    rest: str = ""
    freeze: bool = False
    memory_format: torch.memory_format | None = None
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    builds: bool = True
    on_gpu: bool | None = None  # whether kernels are for a GPU; None: as the graph is
    rewrite: Rewrite | None = None  # what is done to a graph before
    meanwhile: bool = True  # kernels are built while inductor compiles

    def __post_init__(self) -> None:
        if self.rest not in ("", *RESTS):
            raise UsageError(f"rest={self.rest!r} is not {' or '.join(RESTS)}")

    def __call__(self, module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        plain = module.forward
        devices = {value.device.type for value in examples if isinstance(value, Tensor)}
        compiles = self.builds and self.rest != "eager" and bool(self.rest or has_compiler(devices))
        meanwhile = compiles and self.meanwhile
        before = copied(module) if meanwhile or not self.builds else module
        if not self.builds:
            module = before
        given = inputs_of(module, examples)
        frozen = frozen_of(given) if self.freeze else Frozen({})
        rewritten = self.rewrite(module, frozen, examples, self) if self.rewrite else []
        served = kernels_in(module, frozen, self.memory_format, self.on_gpu, self.builds, meanwhile)
        run = self._compiled(module, examples, frozen) if compiles else module.forward if self.builds else plain
        if meanwhile and served.misses():
            return replace(self, meanwhile=False)(before, examples)
        rows = served.rows()
        self.report.add(_joined(rewritten, rows) if self.rewrite else rows)
        return _guarded(run, module, frozen, list(given)) if self.builds and frozen.made else run

    def _compiled(self, module: GraphModule, examples: Sequence[Any], frozen: Frozen) -> Callable[..., Any]:
        """A graph that inductor has compiled."""
        from torch._dynamo.source import ConstantSource
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        # tensors that dynamo has not put there need a source of their own
        getattr(module, "_param_name_to_source", {}).update((name, ConstantSource(name)) for name in frozen.made)
        patches = {**(list_mode_options(self.mode) if self.mode else {}), **self.options}
        # parameters that nothing reads any more would cost time in each of inductor's passes, and at every call; dynamo
        # passes what the captured graph itself takes
        module = copied(module)
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        read = [number for number, node in enumerate(inputs) if node.users or not _is_of_module(node)]
        for node in {*inputs} - {inputs[number] for number in read}:
            module.graph.erase_node(node)
        module.recompile()
        run: Callable[..., Any] = compile_fx(module, [examples[number] for number in read], config_patches=patches)
        return lambda *arguments: run(*[arguments[number] for number in read])


def backend(
    module: GraphModule, examples: Sequence[Any], *, mode: str | None = None, options: Any = None
) -> Callable[..., Any]:
    """The backend "schedules" of `torch.compile`: our kernels, and inductor for what is left.

    `options` may have "rest", inductor or eager (the default where inductor has no compiler); "freeze", true to take
    parameters as constants where no gradient is recorded; "memory_format" as of `optimize`; and options of inductor,
    which takes `mode` too.  Raises UsageError for a `rest` that is neither.
    """
    given = dict(options or {})
    ours = {name: given.pop(name) for name in ("rest", "freeze", "memory_format") if name in given}
    return Backend(**ours, mode=mode, options=given)(module, examples)


def has_compiler(devices: set[str]) -> bool:
    """Whether inductor can compile for these devices here: with Triton for GPUs, else with a compiler of C++."""
    from torch.utils._triton import has_triton

    if "cuda" in devices:
        return bool(has_triton())
    return any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)


def _joined(
    first: Sequence[tuple[Row, Problem | None]], then: Sequence[tuple[Row, Problem | None]]
) -> list[tuple[Row, Problem | None]]:
    """One line for a layer that has two: what `first` left, and what became of it `then`."""
    lines = list(first)
    left = [number for number, (row, problem) in enumerate(first) if not row.kernel and problem is None]
    for row, problem in then:
        known = next((number for number in left if _layer(lines[number][0]) == _layer(row)), None)
        if known is None:
            lines.append((row, problem))
        else:
            left.remove(known)
            lines[known] = replace(row, why=f"{lines[known][0].why}; {row.why}".removesuffix("; ")), problem
    return lines


def _layer(row: Row) -> tuple[str, str]:
    """The module and the sizes of a line: what is fused depends on what serves it."""
    return row.module, row.layer.partition(" + ")[0].partition(",")[0]


def inputs_of(module: GraphModule, examples: Sequence[Any]) -> dict[Node, Any]:
    """What a graph is called with, by its placeholders."""
    return dict(zip((node for node in module.graph.nodes if node.op == "placeholder"), examples, strict=True))


def frozen_of(given: Mapping[Node, Any]) -> Frozen:
    """The parameters and buffers among a graph's inputs, where no gradient is recorded."""
    tensors = {node: value for node, value in given.items() if _is_of_module(node)}
    return Frozen({} if torch.is_grad_enabled() else tensors)


def copied(module: GraphModule) -> GraphModule:
    """The same with a graph of its own."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    for node, copy in copies.items():
        if source := getattr(node, "_dynamo_source", None):
            copy._dynamo_source = source  # type: ignore[attr-defined]
    result = GraphModule(module, graph)
    result.meta = dict(module.meta)
    if (sources := getattr(module, "_param_name_to_source", None)) is not None:
        result._param_name_to_source = dict(sources)
    return result


def _is_of_module(node: Node) -> bool:
    """Whether a graph's input is a parameter or buffer."""
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def _guarded(
    run: Callable[..., Any], module: GraphModule, frozen: Frozen, inputs: Sequence[Node]
) -> Callable[..., Any]:
    """`run` after a look at the tensors that were frozen."""
    kept = [(inputs.index(node), node) for node in frozen.used]
    seen = [(index, frozen.tensors[node], _version(frozen.tensors[node])) for index, node in kept]

    def call(*arguments: Any) -> Any:
        if any(arguments[index] is not tensor or _version(tensor) != version for index, tensor, version in seen):
            frozen.refresh(module, {node: arguments[index] for index, node in kept})
            seen[:] = [(index, arguments[index], _version(arguments[index])) for index, _ in kept]
        return run(*arguments)

    return call


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def optimize(
    model: Model,
    example_inputs: Any,
    *,
    memory_format: torch.memory_format | None = None,
    rest: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Model:
    """The model with our kernels in it: another module over the same parameters, whose calls compute the same.

    `example_inputs` is a tensor, a tuple of arguments or a dict of them by name.  The model is called with them once,
    which builds the kernels; sizes that come later build theirs at their first call.  `report` of the result says what
    serves each layer.  In evaluation (`model.eval()`) no gradients are recorded unless an input asks for them, and
    parameters are frozen: after they have changed, the next call takes them anew.

    `memory_format` is that of the convolutions: channels_last; preserve_format, as the model has it; by default
    channels last on a GPU in float16 and bfloat16, else as the model has it.  `rest` is what runs the rest of the
    model: inductor, with `options` of its own, or eager; by default inductor on a GPU where Triton is, else eager.

    What PyTorch runs, this runs: a model that cannot be captured is called as it is, and the report says why.
    Raises UsageError for a `rest` that is neither.
    """
    return optimized_by(model, example_inputs, None, Report(), memory_format, rest, options)


def optimized_by(
    model: Model,
    example_inputs: Any,
    rewrite: Rewrite | None,
    report: Report,
    memory_format: torch.memory_format | None,
    rest: str | None,
    options: Mapping[str, Any] | None,
) -> Model:
    """`optimize`, after `rewrite` of each graph."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if rest is None:
        kinds = {device.type for device in devices}
        rest = "inductor" if "cuda" in kinds and has_compiler(kinds) else "eager"
    backends = [
        Backend(each, True, memory_format, options=dict(options or {}), report=report, rewrite=rewrite)
        for each in dict.fromkeys((rest, "eager"))
    ]
    result = captured(same(model), backends)
    result.__dict__["report"] = report
    with likely_to_build(devices):
        called(result, example_inputs, report)
    return result


def problems(
    model: nn.Module,
    example_inputs: Any,
    *,
    memory_format: torch.memory_format | None = None,
    on_gpu: bool | None = None,
) -> dict[Problem, int]:
    """The problems that `optimize` would serve with kernels in evaluation, and how many layers each has.  Nothing is
    built.

    `on_gpu` is whether the kernels would be for a GPU, by default as the model is.
    """
    report, result = Report(), same(model)
    own = result.__dict__.pop("forward", None)  # of a model that has kernels
    rewrite = own.backends[0].rewrite if isinstance(own, _Forward) and own.backends else None
    found = Backend("eager", True, memory_format, report=report, builds=False, on_gpu=on_gpu, rewrite=rewrite)
    captured(result, [found])
    training = [module for module in result.modules() if module.training]
    try:
        for module in training:  # eval() itself is not to be had of what torch.export made
            module.training = False
        with torch.no_grad():
            called(result, example_inputs, report)
    finally:
        for module in training:
            module.training = True
    return {problem: report.problems.count(problem) for problem in report.problems}


def same(model: Model) -> Model:
    """Another module with the same parameters, buffers and modules."""
    result: Model = object.__new__(type(model))
    result.__dict__ = {**model.__dict__, "_compiled_call_impl": None}
    return result


def captured(model: Model, backends: Sequence[Any]) -> Model:
    """`model` with its `forward` captured for the first of `backends`, or those after it where that fails."""
    model.__dict__["forward"] = _Forward(model, model.forward, backends)
    return model


def called(model: nn.Module, example_inputs: Any, report: Report) -> None:
    """Call a model with its example inputs, and note what was not captured."""
    from torch._dynamo.utils import counters

    def breaks() -> list[str]:
        return [reason for kind in ("graph_break", "unimplemented") for reason in counters[kind].elements()]

    before = breaks()
    if isinstance(example_inputs, Mapping):
        model(**example_inputs)
    else:
        model(*(example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,)))
    for reason in breaks():
        if reason not in before:
            report.note(f"not captured, and run as it is: {reason.splitlines()[0]}")


# Code is captured eight times at most, for all models of a class together, and then run as it is without a word: where
# PyTorch can, each model has graphs of its own, and more of them.
_APART = {
    name: value
    for name, value in (("isolate_recompiles", True), ("recompile_limit", 64))
    if name in inspect.signature(torch.compile).parameters
}


class _Forward:
    """A model's `forward`, captured; as it was, where that fails.  A copy, pickled too, captures its own model."""

    model: nn.Module
    plain: Callable[..., Any]
    backends: list[Any]

    def __init__(self, model: nn.Module, plain: Callable[..., Any], backends: Sequence[Any]) -> None:
        self.__setstate__({"model": model, "plain": plain, "backends": list(backends)})

    @property
    def __signature__(self) -> inspect.Signature:  # which callers look at: transformers' `generate` does
        return inspect.signature(self.plain)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "compiled"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.compiled = [torch.compile(self.plain, backend=each, **_APART) for each in self.backends]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        recorded = torch.is_grad_enabled() and (
            self.model.training
            or any(
                isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((arguments, keywords))
            )
        )
        failed: list[Exception] = []
        with torch.set_grad_enabled(recorded):
            for compiled in self.compiled:
                try:
                    result = compiled(*arguments, **keywords)
                    break
                except TorchDynamoException as error:
                    failed.append(error)
            else:
                result = self.plain(*arguments, **keywords)  # what eager refuses is its own error, and gives up nothing
        for each in failed:
            self._give_up(each)
        return result

    def _give_up(self, error: Exception) -> None:
        given_up, *left = self.backends
        self.backends, self.compiled = left, self.compiled[1:]
        then = f"rest={left[0].rest}" if left else "the model as it is"
        cause = getattr(error, "inner_exception", error)  # of a backend's
        words = f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"
        given_up.report.note(f"rest={given_up.rest} failed, {then} runs: {words}")
        logger.warning("rest=%s failed, %s runs: %s", given_up.rest, then, words)
        logger.debug("the capture that failed", exc_info=error)
