"""A program's arguments: the buffers of their handles, and their elements without a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.core.problem import Argument
from schedules.tirx.types import Handle, Tensors


def matched(arguments: Sequence[Argument], handles: Sequence[Handle]) -> Tensors:
    """The buffers of `arguments` by name, which the first of `handles` are of."""
    tensors = {}
    for argument, handle in zip(arguments, handles, strict=False):
        buffer = T.match_buffer(handle, argument.shape, argument.dtype, align=16)
        IRBuilder.name(argument.name, buffer)
        tensors[argument.name] = buffer
    return tensors


def flattened(arguments: Sequence[Argument], tensors: Tensors) -> Tensors:
    """Views of `arguments` by name, their elements along one axis."""
    views = {}
    for argument in arguments:
        view = T.decl_buffer((math.prod(argument.shape),), argument.dtype, data=tensors[argument.name].data)
        IRBuilder.name(f"flat_{argument.name}", view)
        views[argument.name] = view
    return views
