"""Code that inductor writes calls our operators as `operators.straight` makes them.

To inductor a custom operator is what it has no code for: it writes the operator's name, whose call looks at tensors and
options anew each time.  Here it is told to write, where all sizes are numbers, a function of the tensors alone, which
is made when that code is loaded.  What this takes of inductor has no public name: where a name is missing, code calls
the operator as it would; so does code in C++, and what inductor kept on disk from before.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger("schedules")

_LOWERING = "torch._inductor.lowering"
_MISSING = AttributeError, ImportError, KeyError, TypeError, ValueError


def tell(registered: Any) -> None:
    """Tell inductor about an operator, if it is imported: before that it compiles nothing, and to import it takes
    seconds."""
    if _LOWERING in sys.modules:
        _tell(registered)


@functools.cache
def _tell(registered: Any) -> None:
    lowering = sys.modules[_LOWERING]
    try:
        from torch._inductor import ir
        from torch._inductor.virtualized import V
        from torch._library.utils import get_layout_constraint_tag

        constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(registered))
        lowering.make_fallback(registered, constraint, warn=False)  # as inductor does when it meets an operator
        fallback = lowering.lowerings[registered]
    except _MISSING as error:
        return _by_name(registered, error)

    def lower(*arguments: Any, **named: Any) -> Any:
        operations = getattr(V.graph, "operations", [])
        before = len(operations)
        results = fallback(*arguments, **named)
        for node in operations[before:]:
            if type(node) is ir.FallbackKernel:
                node.codegen = functools.partial(_codegen, node)
        return results

    lowering.lowerings[registered] = lower


def _by_name(operator: Any, error: Exception) -> None:
    logger.info("inductor calls %s by its name: %s", operator, error)


def _codegen(node: Any, wrapper: Any) -> None:
    """Write the call `node`, for inductor's graph."""
    try:
        _straighten(node, wrapper)
    except _MISSING as error:
        _by_name(node.op_overload, error)
    type(node).codegen(node, wrapper)


def _straighten(node: Any, wrapper: Any) -> None:
    """Have `node` written as a call of a function of its tensors, if these are always of the same sizes and strides and
    the rest are numbers and words."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
    from torch._inductor.ir import IRNode
    from torch.utils._pytree import tree_leaves

    arguments, named = node.unflatten_args(node.inputs, node.constant_args)
    sizes = [size for tensor in node.inputs for size in (*tensor.get_size(), *tensor.get_stride())]
    symbolic = any(getattr(each, "free_symbols", ()) for each in (*sizes, *tree_leaves(arguments)))
    if type(wrapper) not in (PythonWrapperCodegen, SubgraphPythonWrapperCodegen) or named or symbolic:
        return
    names = iter(tensors := [f"t{number}" for number in range(len(node.inputs))])
    texts = [next(names) if isinstance(each, IRNode) else wrapper.val_to_arg_str(each) for each in arguments]
    function = f"straight_{wrapper.next_kernel_suffix()}"
    made = f"straight({node.python_kernel_name}, lambda {', '.join(tensors)}: ({', '.join(texts)},))"
    wrapper.header.writeline("from schedules.torch.operators import straight")
    wrapper.header.writeline(f"{function} = {made}")
    node.python_kernel_name, node.codegen_args = function, _references(node.inputs)
    for output in node.outputs:  # the fake kernel tells of them what is so of the kernel's
        output.skip_size_stride_alignment_checks = True


def _references(tensors: Sequence[Any]) -> Callable[[], list[str]]:
    return lambda: [tensor.codegen_reference() for tensor in tensors]
