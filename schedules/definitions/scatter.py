"""Storing a stage elsewhere than where it was computed: what a TE compute, which fills its whole output, cannot say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedules.core.tvm import tirx

Place = Callable[..., "tuple[tirx.PrimExpr | None, tuple[tirx.PrimExpr, ...]]"]


def scatter(func: tirx.PrimFunc, shape: tuple[Any, ...], place: Place) -> tirx.PrimFunc:
    """`func` (not scheduled) with its last argument of `shape`, and each element of it stored where `place` says.

    `place` takes the element's index and returns the condition under which it is stored (None: always), and its index
    in `shape`.
    """
    import tvm_ffi
    from tvm.ir import Range
    from tvm.s_tir.stmt import SBlock

    old = func.params[-1]
    index = str(old.shape[0].ty)
    extents = [tirx.const(extent, index) if isinstance(extent, int) else extent for extent in shape]
    new = tirx.decl_buffer(extents, old.dtype, old.name)

    def store(node: Any) -> Any:
        if not node.buffer.same_as(old):
            return node
        condition, index = place(*node.indices)
        stored = tirx.BufferStore(new, node.value, list(index))
        return stored if condition is None else tirx.IfThenElse(condition, stored, None)

    def block(node: Any) -> Any:
        if not any(region.source.same_as(old) for region in node.writes):
            return node
        _, index = place(*(axis.var for axis in node.iter_vars))
        writes = [tirx.BufferRegion(new, [Range.from_min_extent(i, 1) for i in index])]
        return SBlock(
            node.iter_vars, node.reads, writes, node.name_hint, node.body, node.init, node.alloc_buffers,
            node.match_buffers, node.annotations,
        )  # fmt: skip

    body = tvm_ffi.structural_map(func.body, [(tirx.BufferStore, store), (SBlock, block)])
    return tirx.PrimFunc([*func.params[:-1], new], body, func.ret_type, func.attrs)
