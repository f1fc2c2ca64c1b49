"""What products in tiles ask of the lowering, beyond TVM's passes: fragments, swizzles, the multi-stage main loop.

A schedule says it with annotations; `lower` runs before TVM's pipeline on programs that have any.  Serial verification
drops them: each changes where data lies or when it moves, never what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir.stmt import SBlock, SBlockRealize

from schedules.lowering.annotations import PER_THREAD, PREFIX, SWIZZLE, VECTOR_BYTES
from schedules.lowering.multistage import MAIN_LOOP, multistage
from schedules.lowering.order import marked
from schedules.lowering.statements import of_functions

Index = Callable[[list[Any]], list[Any]]


def swizzle(row: Any, vector: Any, vectors: int, line: int) -> Any:
    """Where vector `vector` of row `row` lies, in a row of `vectors` 16-byte vectors, where all banks have
    `line` bytes.

    As many consecutive rows at one `vector` as a line has vectors, and as many vectors of one row, fall into the
    different 16-byte columns of the banks.  Rows of an odd number of vectors already do.
    Source: the crosswise layouts of CUTLASS and of MegEngine's int8 convolution.
    """
    group = 1
    while group < line // VECTOR_BYTES and vectors % (2 * group) == 0:
        group *= 2
    rows = line // VECTOR_BYTES // group  # this many rows differ by themselves
    return vector if group == 1 else vector ^ (row // rows % group)


def needed(mod: tvm.IRModule) -> bool:
    """Whether any block or loop of the program carries an annotation of this module."""
    found = False

    def visit(node: Any) -> None:
        nonlocal found
        found = found or any(str(key).startswith(PREFIX) for key in dict(node.annotations))

    for function in mod.functions.values():
        if isinstance(function, tirx.PrimFunc):
            tvm_ffi.structural_walk(function.body, ((SBlock, tirx.For), visit))
    return found


def lower(mod: tvm.IRModule) -> tvm.IRModule:
    """Apply what the annotations ask for, on the program brought to threads, tiles and compact buffers."""
    passes = s_tir.transform
    mod = tvm.ir.transform.Sequential(
        [
            passes.CanonicalizeLoop(),
            passes.LowerInitBlock(),
            passes.PlanAndUpdateBufferAllocationLocation(),
            passes.ConvertBlocksToOpaque(),
            passes.LiftThreadBinding(),
            passes.ManifestSharedMemoryLocalStage(),
            passes.CompactBufferAllocation(),
            passes.LowerAutoCopy(),
            passes.UnifyThreadBinding(),
            passes.LowerMatchBuffer(),
            passes.StmtSimplify(),
            _pass("relayout", _relayout),
            _pass("multistage", multistage),
            _pass("share", lambda body: _hide_pointers(_share(body))),
            _pass("order", marked),
        ]
    )(mod)
    return mod


def _pass(name: str, change: Callable[[Any], Any]) -> Any:
    """`change` of the body of every function, as a pass that those who watch the passes see by name."""

    @tvm.transform.module_pass(opt_level=0, name=PREFIX + name)
    def changed(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return of_functions(mod, lambda function: function.with_body(change(function.body)))

    return changed


def _relayout(body: Any) -> Any:
    """Leave each thread its own part of the fragments, and apply the swizzles."""
    analyzer = tvm.sym.Analyzer()
    indices: dict[Any, Index] = {}  # of a buffer as it will be
    renewed: dict[Any, Any] = {}

    def swizzled(buffer: Any, line: int) -> Index:
        per_vector = VECTOR_BYTES * 8 // tvm.DataType(str(buffer.dtype)).bits
        vectors = int(buffer.shape[-1]) // per_vector

        def index(at: list[Any]) -> list[Any]:
            *outer, row, column = at
            vector = analyzer.simplify(column // per_vector)
            lane = analyzer.simplify(column % per_vector)
            return [*outer, row, swizzle(row, vector, vectors, line) * per_vector + lane]

        return index

    def per_thread(axes: list[int]) -> Index:
        def index(at: list[Any]) -> list[Any]:
            return [tirx.const(0, "int32") if len(at) - axis in axes else value for axis, value in enumerate(at)]

        return index

    def collect(block: Any) -> None:
        annotations = dict(block.annotations)
        if PER_THREAD in annotations:
            buffer, axes = block.writes[0].source, [int(axis) for axis in annotations[PER_THREAD]]
            if buffer not in renewed:
                rank = len(buffer.shape)
                shape = [1 if rank - axis in axes else extent for axis, extent in enumerate(buffer.shape)]
                renewed[buffer] = tirx.decl_buffer(shape, buffer.dtype, buffer.name, scope=buffer.scope())
                indices[renewed[buffer]] = per_thread(axes)
        if SWIZZLE in annotations:
            buffer = block.writes[0].source
            indices[buffer] = swizzled(buffer, int(annotations[SWIZZLE]))

    tvm_ffi.structural_walk(body, (SBlock, collect))
    tvm_ffi.structural_walk(
        body, (tirx.For, lambda loop: analyzer.bind(loop.loop_var, tvm.ir.Range(loop.min, loop.min + loop.extent)))
    )

    def load(node: Any) -> Any:
        buffer = renewed.get(node.source, node.source)
        change = indices.get(buffer)
        return node if change is None else tirx.BufferLoad(buffer, change(list(node.indices)))

    def store(node: Any) -> Any:
        buffer = renewed.get(node.buffer, node.buffer)
        change = indices.get(buffer)
        return node if change is None else tirx.BufferStore(buffer, node.value, change(list(node.indices)))

    def block(node: Any) -> Any:
        def regions(given: Any) -> list[Any]:
            # after the changes the regions say too little; whole buffers are always true
            return [
                tirx.BufferRegion(new, [tvm.ir.Range(0, extent) for extent in new.shape])
                if (new := renewed.get(region.source, region.source)) in indices
                else region
                for region in given
            ]

        kept = {k: v for k, v in dict(node.annotations).items() if k not in (PER_THREAD, SWIZZLE)}
        return SBlock(
            node.iter_vars,
            regions(node.reads),
            regions(node.writes),
            node.name_hint,
            node.body,
            node.init,
            [renewed.get(buffer, buffer) for buffer in node.alloc_buffers],
            node.match_buffers,
            kept,
        )

    return tvm_ffi.structural_map(body, ((ir.TensorLoad, load), (tirx.BufferStore, store), (SBlock, block)))


def _share(body: Any) -> Any:
    """Let the static shared buffers of the main loop and of what follows it in its kernel lie in the same memory.

    TVM merges dynamic shared memory itself.  Static memory of AMD GPUs it merges into a pointer that has lost its
    address space, so that stores go astray; here one buffer is declared, and the others are parts of it.
    """
    inside: list[Any] = []
    outside: list[Any] = []

    def collect(block: Any) -> None:
        where = inside if block.name_hint == MAIN_LOOP else outside
        where.extend(buffer for buffer in block.alloc_buffers if buffer.scope() == "shared")

    root = body.block
    for kernel in root.body.seq if isinstance(root.body, tirx.SeqStmt) else [root.body]:
        tvm_ffi.structural_walk(kernel, (SBlock, collect))
        if inside:
            break
        outside.clear()
    if not inside or len({str(buffer.dtype) for buffer in (*inside, *outside)}) != 1:
        return body
    starts: dict[Any, int] = {}
    total = 0
    for group in (inside, outside):
        start = 0
        for buffer in group:
            starts[buffer] = start
            start += math.prod(int(extent) for extent in buffer.shape)
        total = max(total, start)
    arena = tirx.decl_buffer([total], inside[0].dtype, "shared", scope="shared")

    def flat(buffer: Any, indices: Any) -> list[Any]:
        offset = tirx.const(0, "int32")
        for extent, index in zip(buffer.shape, indices, strict=True):
            offset = offset * extent + index
        return [offset + starts[buffer]]

    def load(node: Any) -> Any:
        return tirx.BufferLoad(arena, flat(node.source, node.indices)) if node.source in starts else node

    def store(node: Any) -> Any:
        return tirx.BufferStore(arena, node.value, flat(node.buffer, node.indices)) if node.buffer in starts else node

    def without(node: Any) -> Any:
        kept = [buffer for buffer in node.alloc_buffers if buffer not in starts]
        reads, writes = (
            [region for region in given if region.source not in starts] for given in (node.reads, node.writes)
        )
        return SBlock(
            node.iter_vars,
            reads,
            writes,
            node.name_hint,
            node.body,
            node.init,
            kept,
            node.match_buffers,
            node.annotations,
        )

    body = tvm_ffi.structural_map(body, ((ir.TensorLoad, load), (tirx.BufferStore, store), (SBlock, without)))
    root = body.block  # TVM moves the allocation in, to where it is used
    block = SBlock([], root.reads, root.writes, root.name_hint, root.body, None, [*root.alloc_buffers, arena], [], {})
    return SBlockRealize(body.iter_values, body.predicate, block)


def _hide_pointers(body: Any) -> Any:
    """Pointers that intrinsics take into shared memory and fragments, as access pointers without a claim to read or
    write.

    TVM then keeps the whole buffer in place, and adds no barriers to those that the main loop has.
    """

    def call(node: Any) -> Any:
        if str(getattr(node.op, "name", "")) != "tirx.address_of":
            return node
        buffer, indices = node.args[0].source, node.args[0].indices
        if not str(buffer.scope()).startswith(("shared", "local")):
            return node
        offset = tirx.const(0, "int32")
        for extent, index in zip(buffer.shape, indices, strict=True):
            offset = offset * extent + index
        return buffer.access_ptr(0, offset=offset, extent=1)

    return tvm_ffi.structural_map(body, (ir.Call, call))
