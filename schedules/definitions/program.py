"""A graph as a program, with indices as wide as its tensors need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from schedules.core.problem import Argument
from schedules.core.tvm import PrimExpr, te, tirx

# elements of a tensor from which on indices have 64 bits: half of what 32 bits reach, since tiles at a tensor's end
# have indices past it, of elements that a test then leaves out
WIDE = 2**30


def program_of(graph: Sequence[te.Tensor]) -> tirx.PrimFunc:
    """The program, not yet scheduled, of a graph [inputs, outputs].

    A large tensor makes all indices 64 bits wide, of which the lowering narrows those that need not be.  What data is
    under each tap, ``columns``, lies nowhere in memory and does not count; nor do extents that are only known at run
    time, which have 64 bits themselves.
    """
    stages = (stage for stage in _stages(graph) if not stage.op.name.startswith("columns"))
    fixed = ([int(extent) for extent in stage.shape if isinstance(extent, int | tirx.IntImm)] for stage in stages)
    large = any(math.prod(extents) >= WIDE for extents in fixed)
    return te.create_prim_func(list(graph), "int64" if large else None)


def of_shapes(function: tirx.PrimFunc, arguments: Sequence[Argument]) -> tirx.PrimFunc:
    """`function`, which takes `arguments`, for their shapes alone: without run-time extents."""
    fixed = {
        parameter: tirx.decl_buffer(
            [
                tirx.IntImm(str(wanted.ty), extent)
                for wanted, extent in zip(parameter.shape, argument.shape, strict=True)
            ],
            argument.dtype,
        )
        for parameter, argument in zip(function.params, arguments, strict=True)
        if not all(isinstance(extent, tirx.IntImm) for extent in parameter.shape)
    }
    return function.specialize(fixed) if fixed else function


def _stages(graph: Sequence[te.Tensor]) -> Iterator[te.Tensor]:
    """The tensors of the graph and all that they are computed from."""
    left = list(graph)
    seen: set[te.Tensor] = set()
    while left:
        tensor = left.pop()
        if tensor not in seen:
            seen.add(tensor)
            left.extend(tensor.op.input_tensors)
            yield tensor


def begun(func: tirx.PrimFunc, source: str, index: Callable[[Sequence[PrimExpr]], Sequence[PrimExpr]]) -> tirx.PrimFunc:
    """`func`, whose sums ``conv`` begin with elements of `source`, a stage or an argument, at the `index` of theirs:
    TVM keeps the beginning of a sum in a graph, but makes programs that begin with zero."""
    import tvm_ffi
    from tvm.s_tir.stmt import SBlock

    buffers = {buffer.name: buffer for buffer in (*func.params, *func.body.block.alloc_buffers)}

    def begin(block: SBlock) -> SBlock:
        if block.name_hint != "conv":
            return block
        zero = block.init
        value = tirx.BufferLoad(buffers[source], index(zero.indices))
        return SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, block.body,
            tirx.BufferStore(zero.buffer, value, zero.indices), block.alloc_buffers, block.match_buffers,
            block.annotations,
        )  # fmt: skip

    return func.with_body(tvm_ffi.structural_map(func.body, (SBlock, begin)))
