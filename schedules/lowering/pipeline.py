"""The lowering that every build uses: TVM's pipeline for scheduled programs, with what 0.27 needs mended."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir.pipeline import finalize_host_passes
from tvm.s_tir.stmt import SBlock
from tvm.script import tirx as T
from tvm.tirx.compilation_pipeline import PIPELINE_MAP, tirx_pipeline

from schedules.core.arch import parse_arch
from schedules.core.problem import Argument
from schedules.lowering import annotated, elementary
from schedules.lowering.accesses import whole_accesses
from schedules.lowering.annotations import APART, MIN_BLOCKS, PREFIX, STREAM, TIRX
from schedules.lowering.barriers import fenced, turns_apart, without_doubled
from schedules.lowering.bfloat16 import bits_in_buffers
from schedules.lowering.border_copies import borders_apart
from schedules.lowering.bounds import bounded
from schedules.lowering.lone_task import lone_tasks_in_caller
from schedules.lowering.order import reordered
from schedules.lowering.past_caches import stores_past_caches
from schedules.lowering.philox import written_out
from schedules.lowering.range_checks import range_checked
from schedules.lowering.shared_threads import on_shared_threads
from schedules.lowering.statements import of_functions, of_nodes
from schedules.lowering.turned import turned
from schedules.lowering.wave_reduce import reduced_in_waves

NAME = "te_schedules"
TIRX_NAME = "te_schedules_tirx"
STACK = 4096  # bytes of a buffer of vectors that lies on a CPU thread's stack
LEAST_BLOCKS = "tirx.launch_bounds_min_blocks_per_sm"  # of a kernel, as TVM's code generator for CUDA reads it


@dataclass
class Lowering:
    """What one run of the pipeline leaves behind: the lowered program, and what the device passes need."""

    arguments: Sequence[Argument] = ()  # with extents at run time that are to be tested
    min_blocks: int = 0
    stream: str = ""
    host: tvm.IRModule | None = None  # the lowered program: the function and its kernels
    device: list[tvm.IRModule] = field(default_factory=list)


_current: ContextVar[Lowering] = ContextVar("lowering")


@contextlib.contextmanager
def lowering(mod: tvm.IRModule, arguments: Sequence[Argument] = ()) -> Iterator[Lowering]:
    """Collect what the pipeline sees while `mod`, whose function takes `arguments`, is built."""
    attrs = dict(mod["main"].attrs or {})
    state = Lowering(arguments, min_blocks=int(attrs.get(MIN_BLOCKS, 0)), stream=str(attrs.get(STREAM, "")))
    token = _current.set(state)
    try:
        yield state
    finally:
        _current.reset(token)


def is_tirx(mod: tvm.IRModule) -> bool:
    """Whether `mod` is a program written in TIRx, threads, barriers and copies spelled out, not a scheduled one."""
    return TIRX in (mod["main"].attrs or {})


def name_for(mod: tvm.IRModule) -> str:
    """The pipeline that lowers `mod`."""
    return TIRX_NAME if is_tirx(mod) else NAME


def config(kind: str, mod: tvm.IRModule) -> dict[str, Any]:
    """PassContext options for a target kind and a scheduled program; a TIRx program takes TVM's own.

    CSE is off: in 0.27 it leaves unused variables in the source and hides warp indices from LowerWarpMemory.  CUDA
    keeps unrolled loops as loops with a pragma, which a person can read and nvcc unrolls.  Where TVM's wmma intrinsics
    are, shared memory is merged by the pass that is for it: StorageRewrite gives a float32 tile the memory of a float16
    one, whose element type the intrinsics' pointers then do not match.
    """
    if is_tirx(mod):
        return {}
    options: dict[str, Any] = {"tirx.disable_cse_tir": True}
    if kind == "cuda":
        options["tirx.UnrollLoop"] = {"explicit_unroll": False}
    if APART in dict(mod["main"].attrs or {}):
        options["tirx.disable_storage_rewrite"] = True
    if uses_wmma(mod):
        options["tirx.merge_static_smem"] = True
    return options


def uses_wmma(mod: tvm.IRModule) -> bool:
    """Whether a scheduled program keeps fragments of TVM's wmma intrinsics."""
    scopes: list[str] = []

    def visit(block: Any) -> None:
        scopes.extend(str(buffer.scope()) for buffer in block.alloc_buffers)

    tvm_ffi.structural_walk(mod["main"].body, (SBlock, visit))
    return any(scope.startswith("wmma.") for scope in scopes)


def _all_on(mod: tvm.IRModule, kind: str) -> bool:
    return all(function.attrs["target"].kind.name == kind for function in mod.functions.values())


def _without_alignment(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` without TVM's promise to LLVM that every argument is aligned to 64 bytes, which NumPy's arrays are not."""

    def visit(statement: Any) -> Any:
        return statement.body if statement.attr_key == "storage_alignment" else statement

    return of_nodes(mod, (tirx.AttrStmt, visit))


def _pass(name: str, change: Callable[[tvm.IRModule], tvm.IRModule]) -> Any:
    """`change` as a pass that those who watch the passes see by name."""

    @tvm.transform.module_pass(opt_level=0, name=PREFIX + name)
    def changed(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return change(mod)

    return changed


def _lowered(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` after the passes of TVM's pipeline "s_tir", with those of ours that have to be between them."""
    scheduled, general = s_tir.transform, tirx.transform
    options = tvm.transform.PassContext.current().config
    on_amd = _all_on(mod, "rocm")
    passes = [
        scheduled.CanonicalizeLoop(),
        scheduled.LowerCrossThreadReduction(),
        scheduled.LowerInitBlock(),
        scheduled.PlanAndUpdateBufferAllocationLocation(),
        scheduled.ConvertBlocksToOpaque(),
        scheduled.LiftThreadBinding(),
        scheduled.ManifestSharedMemoryLocalStage(),
        scheduled.CompactBufferAllocation(),
        scheduled.LowerAutoCopy(),
        scheduled.UnifyThreadBinding(),
        scheduled.LowerMatchBuffer(),
        scheduled.StmtSimplify(),
        scheduled.InjectPermutedLayout(),
        scheduled.AnnotateIrregularLoop(),
        scheduled.InjectSoftwarePipeline(),
        scheduled.TransformMmaBufferLayout(),
        *([_pass("turns_apart", turns_apart)] if on_amd else []),
        scheduled.LowerOpaqueBlock(),
        general.FlattenBuffer(),
        *([_pass("bfloat16", bits_in_buffers)] if on_amd else []),
        general.BF16ComputeLegalize(),
        general.NarrowDataType(32),
        scheduled.LoopPartition(),
        general.VectorizeLoop(True),
        scheduled.InjectVirtualThread(),
        scheduled.InjectDoubleBuffer(),
        *([] if options.get("tirx.disable_storage_rewrite", False) else [general.StorageRewrite()]),
        scheduled.HoistIfThenElse(),
        general.UnrollLoop(),
        scheduled.RenormalizeSplitPattern(),
        general.StmtSimplify(),
        general.RemoveNoOp(),
        scheduled.RewriteUnsafeSelect(),
        *([] if options.get("tirx.disable_cse_tir", False) else [general.CommonSubexprElim()]),
        general.FP8ComputeLegalize(),
        general.VerifyMemory(),
        general.AnnotateEntryFunc(),
        scheduled.ThreadSync("shared"),
        scheduled.ThreadSync("shared.dyn"),
        scheduled.ThreadSync("warp"),
        _pass("own_barriers", without_doubled),
        scheduled.InferFragment(),
        *([_pass("wave_reduce", reduced_in_waves)] if on_amd else []),
        scheduled.LowerThreadAllreduce(),
        scheduled.MergeSharedMemoryAllocations(),
        general.SplitHostDevice(),
        *([_dependent_launches] if _all_on(mod, "cuda") else []),
        general.MakePackedAPI(),
        general.FP8StorageLegalize(),
        general.BF16StorageLegalize(),
    ]
    return tvm.ir.transform.Sequential(passes)(mod)


def _pipeline() -> tuple[Any, Any, Any]:
    @tvm.transform.module_pass(opt_level=0, name="schedules.lower")
    def lower_and_record(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        mod = written_out(mod)
        if annotated.needed(mod):
            mod = annotated.lower(mod)
        mod = bounded(mod, _current.get().arguments)
        mod = range_checked(reordered(_explicit_fma(elementary.written_out(_without_alignment(_lowered(mod))))))
        if _all_on(mod, "llvm"):
            mod = lone_tasks_in_caller(stores_past_caches(mod) if _current.get().stream == "stores" else mod)
            mod = of_nodes(turned(borders_apart(mod)), (tirx.AllocBuffer, _on_stack))
        _current.get().host = mod
        return on_shared_threads(mod) if _all_on(mod, "llvm") else mod

    @tvm.transform.module_pass(opt_level=0, name="schedules.launch_bounds")
    def launch_bounds(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        state = _current.get()
        state.device.append(mod)
        if not state.min_blocks:
            return mod
        # only here: SplitHostDevice drops the function's attributes
        return of_functions(mod, lambda function: function.with_attr(LEAST_BLOCKS, state.min_blocks))

    @tvm.transform.module_pass(opt_level=0, name="schedules.accesses")
    def accesses(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        streaming = _current.get().stream
        return whole_accesses(mod, streaming) if streaming and _all_on(mod, "cuda") else mod

    @tvm.transform.module_pass(opt_level=0, name="schedules.narrow_shuffles")
    def narrow_shuffles(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        # a 64-bit loop bound to threadIdx makes the lane index of a shuffle 64 bits wide, which AMD's ds_bpermute
        # refuses
        return of_nodes(mod, (ir.Call, _narrow_shuffle))

    @tvm.transform.module_pass(opt_level=0, name="schedules.wide_bytes")
    def wide_bytes(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        mod = of_nodes(mod, (tirx.Max, _larger_bytes)) if _all_on(mod, "cuda") else mod
        return of_nodes(mod, (tirx.Broadcast, _wide_byte))

    def finalize_device() -> tvm.transform.Pass:
        # LowerWarpMemory rewrites one warp buffer a run in 0.27: accumulator, both operands, and one to spare
        warp = [tirx.transform.LowerWarpMemory() for _ in range(4)]
        return tvm.ir.transform.Sequential(
            [
                narrow_shuffles,
                wide_bytes,
                *warp,
                tirx.transform.StmtSimplify(),
                tirx.transform.LowerIntrin(),
                accesses,
                _pass("barriers", fenced),
                launch_bounds,
            ]
        )

    return lower_and_record, finalize_host_passes, finalize_device


def _on_stack(allocation: Any) -> Any:
    """Small buffers of vectors on the stack, where LLVM keeps them in registers: what TVM gets from the heap, all over
    1024 bytes, is written to memory too, though nobody reads it there."""
    dtype, shape = tvm.DataType(str(allocation.buffer.dtype)), allocation.buffer.shape
    if dtype.lanes == 1 or not all(isinstance(size, tirx.IntImm) for size in shape):
        return allocation
    if math.prod(map(int, shape)) * dtype.lanes * dtype.bits > 8 * STACK:
        return allocation
    return tirx.AllocBuffer(
        allocation.buffer, {**allocation.annotations, "disable_lower_builtin": tirx.const(1, "bool")}
    )


def _narrow_shuffle(call: Any) -> Any:
    """tvm_warp_shuffle(mask, value, lane, width, warp size), and its up and down variants, with a 32-bit lane."""
    if not str(getattr(call.op, "name", "")).startswith("tirx.tvm_warp_shuffle") or str(call.args[2].ty) == "int32":
        return call
    args = list(call.args)
    args[2] = tirx.Cast("int32", args[2])
    return ir.Call(call.op, args, ret_ty=call.ty)


def _explicit_fma(mod: tvm.IRModule) -> tvm.IRModule:
    """``tirx.fma`` that a definition asks for, as what rounds once on every target: TVM has none for CUDA, and one for
    LLVM that need not fuse.  Registering a lowering would turn every a * b + c into it."""

    def lowered(function: tirx.PrimFunc) -> tirx.PrimFunc:
        on_cuda = function.attrs["target"].kind.name == "cuda"

        def call(node: Any) -> Any:
            if str(getattr(node.op, "name", "")) != "tirx.fma":
                return node
            if on_cuda:
                return tirx.call_pure_extern(node.ty, "fmaf", *node.args)
            return tirx.call_llvm_pure_intrin(node.ty, "llvm.fma", *node.args)

        return function.with_body(tvm_ffi.structural_map(function.body, (ir.Call, call)))

    return of_functions(mod, lowered)


def _wide_byte(vector: Any) -> Any:
    """A vector of 8 or 16 times an int8 that is known as one of int32, which CUDA's int2 and int4 are made of: TVM 0.27
    hands them a byte each."""
    lanes = int(vector.lanes)
    if not isinstance(vector.value, tirx.IntImm) or str(vector.value.ty) != "int8" or lanes not in (8, 16):
        return vector
    word = int.from_bytes(vector.value.value.to_bytes(1, "little", signed=True) * 4, "little", signed=True)
    return tirx.op.reinterpret(vector.ty, tirx.Broadcast(tirx.const(word, "int32"), lanes // 4))


def _larger_bytes(larger: Any) -> Any:
    """The maxima of four int8 as a few instructions, where TVM 0.27 takes them apart.  One compares both halves of a
    word, and the upper byte of a half decides: once as they are, once with the lower bytes in the place of the upper.
    """
    if str(larger.ty) != "int8x4":
        return larger
    words = [tirx.op.reinterpret("uint32", each) for each in (larger.a, larger.b)]
    upper = tirx.call_pure_extern("uint32", "__vmaxs2", *words)
    lower = tirx.call_pure_extern("uint32", "__vmaxs2", *(each << tirx.const(8, "uint32") for each in words))
    both = tirx.call_pure_extern("uint32", "__byte_perm", lower, upper, tirx.const(0x7351, "uint32"))
    return tirx.op.reinterpret("int8x4", both)


_LAUNCH = "tirx.kernel_launch_params"
_DEPENDENT = "tirx.use_programtic_dependent_launch"  # sic


@tvm.transform.module_pass(opt_level=0, name="schedules.dependent_launches")
def _dependent_launches(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """Kernels are launched while the one before runs (programmatic dependent launch): TVM's runtime has a tag for it,
    which nothing in 0.27 sets.

    Those that do not say so themselves begin with waiting: a multiprocessor has their blocks when the one before ends.
    Before that they let the next one be launched, if all of their blocks are there at once; else the next one is
    launched when the last of them end.  Its blocks would be put where the first of these ended, several to a
    multiprocessor while others have none: 83 us for 65 of an H200.
    """

    def tagged(function: Any) -> Any:
        if _LAUNCH not in function.attrs:
            return function
        said = _said(function)
        chip = parse_arch(f"cuda:{function.attrs['target'].attrs['arch']}")
        if not said and "tma" in chip.features:  # which is as old
            said = (
                ["launch_dependents", "wait"]
                if _threads(function) <= chip.device.multiprocessors * chip.threads_sm
                else ["wait"]
            )
            calls = [tirx.Evaluate(T.ptx[f"griddepcontrol.{action}"]()) for action in said]
            function = function.with_body(tirx.SeqStmt([*calls, function.body]))
        if "wait" not in said:
            return function
        return function.with_attr(_LAUNCH, [_DEPENDENT, *function.attrs[_LAUNCH]])

    return of_functions(mod, tagged)


def _threads(function: tirx.PrimFunc) -> float:
    """Of all of a kernel's blocks; infinity if these are known at run time only."""
    extents: dict[str, float] = {}

    def visit(scope: Any) -> None:
        if scope.attr_key == "thread_extent":
            known = isinstance(scope.value, tirx.IntImm)
            extents[str(scope.node.thread_tag)] = int(scope.value) if known else math.inf

    tvm_ffi.structural_walk(function.body, (tirx.AttrStmt, visit))
    return math.prod(extents.values())


def _said(function: tirx.PrimFunc) -> list[str]:
    """What a kernel says of launches beside it."""
    found: list[str] = []

    def visit(call: Any) -> None:
        if str(getattr(call.op, "name", "")) == "tirx.ptx.griddepcontrol":
            found.append(str(call.args[0].value))

    tvm_ffi.structural_walk(function.body, (ir.Call, visit))
    return found


def _tirx_pipeline() -> tuple[Any, Any, Any]:
    """TVM's pipeline "tirx" without common-subexpression elimination, which leaves unused variables in the source."""
    _, finalize_host, finalize_device = tirx_pipeline()
    passes = [
        tirx.transform.LowerTIRx(),
        tvm.s_tir.transform.UnifyThreadBinding(),
        tirx.transform.StmtSimplify(),
        tirx.transform.LowerTIRxOpaque(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.NarrowDataType(32),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.UnrollLoop(),
        tirx.transform.StmtSimplify(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        tirx.transform.SplitHostDevice(),
        _dependent_launches,
        tirx.transform.MakePackedAPI(),
        tirx.transform.BF16StorageLegalize(),
    ]

    @tvm.transform.module_pass(opt_level=0, name="schedules.lower_tirx")
    def lower_and_record(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        mod = bounded(written_out(mod), _current.get().arguments)
        mod = _explicit_fma(tvm.ir.transform.Sequential(passes)(mod))
        _current.get().host = mod
        return mod

    return lower_and_record, finalize_host, finalize_device


PIPELINE_MAP[NAME] = _pipeline
PIPELINE_MAP[TIRX_NAME] = _tirx_pipeline
