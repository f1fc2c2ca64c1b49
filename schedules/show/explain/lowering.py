"""The way from a finished program to the text of its kernel: TVM's passes and this package's, in groups that each have
a purpose a reader can follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm.ir.instrument import pass_instrument

FIRST = "The program as the lowering finds it"
_QUIET = ("tirx.BindTarget",)  # adds the target to a function, which no reader need see
LOWERED = ("schedules.lower", "schedules.lower_tirx")  # the passes that contain all others up to code generation

_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Reductions across threads become steps of their own",
        ("s_tir.LowerCrossThreadReduction",),
    ),
    (
        "Buffers move to where they are used and shrink to what lives there at a time",
        (
            "s_tir.CanonicalizeLoop",
            "s_tir.LowerInitBlock",
            "s_tir.PlanAndUpdateBufferAllocationLocation",
            "s_tir.ConvertBlocksToOpaque",
            "s_tir.LiftThreadBinding",
            "s_tir.ManifestSharedMemoryLocalStage",
            "s_tir.CompactBufferAllocation",
            "s_tir.LowerAutoCopy",
            "s_tir.LowerMatchBuffer",
        ),
    ),
    (
        "Swizzle: rows of shared memory are permuted against bank conflicts, fragments dealt to lanes",
        ("schedules.relayout",),
    ),
    (
        "Pipeline: the main loop fetches the tiles of later steps while it multiplies",
        ("schedules.multistage", "s_tir.InjectSoftwarePipeline"),
    ),
    ("Shared memory is used again", ("schedules.share", "schedules.order")),
    (
        "Blocks dissolve: what is left are loops, buffers and statements",
        (
            "s_tir.LowerOpaqueBlock",
            "s_tir.InjectPermutedLayout",
            "s_tir.AnnotateIrregularLoop",
            "s_tir.TransformMmaBufferLayout",
        ),
    ),
    (
        "Flat memory: every buffer has one index, 32 bits where that is enough",
        ("tirx.FlattenBuffer", "tirx.NarrowDataType"),
    ),
    ("bfloat16 is computed in float32", ("tirx.BF16ComputeLegalize",)),
    ("Loops are split where a border test holds throughout", ("s_tir.LoopPartition",)),
    ("Vectorised loops become vector loads and stores", ("tirx.VectorizeLoop",)),
    ("Virtual threads become copies of the code in one thread", ("s_tir.InjectVirtualThread",)),
    (
        "Buffers that are not needed at the same time share their memory",
        ("tirx.StorageRewrite", "s_tir.InjectDoubleBuffer"),
    ),
    (
        "Tests leave loops where they can, short loops are unrolled, and indices simplified",
        (
            "s_tir.HoistIfThenElse",
            "tirx.UnrollLoop",
            "s_tir.RenormalizeSplitPattern",
            "tirx.RemoveNoOp",
            "s_tir.RewriteUnsafeSelect",
        ),
    ),
    ("Barriers where threads read what others wrote", ("s_tir.ThreadSync", "s_tir.InferFragment")),
    ("Reductions across threads become shuffles and exchanges in shared memory", ("s_tir.LowerThreadAllreduce",)),
    ("All shared memory becomes one allocation", ("s_tir.MergeSharedMemoryAllocations",)),
    (
        "Scopes and layouts of TIRx become threads, pointers and plain indices",
        ("tirx.LowerTIRx", "tirx.TilePrimitiveDispatch", "tirx.LowerTIRxCleanup", "tirx.LowerTIRxOpaque"),
    ),
    (
        "Host and device part: a kernel, and a function that checks its arguments and launches it",
        ("tirx.ConvertSSA", "tirx.SplitHostDevice", "tirx.MakePackedAPI"),
    ),
    ("bfloat16 is kept as 16-bit integers", ("tirx.BF16StorageLegalize",)),
    ("No promise of alignment that an argument might break, fused multiply-adds spelled out, blocks in order", LOWERED),
)
_TITLES = {name: title for title, names in _GROUPS for name in names}


@dataclass
class Lowered:
    """A group of passes that changed the program."""

    title: str
    passes: list[str]
    program: tvm.IRModule


@pass_instrument
class Watcher:
    """Collects the programs between groups of passes that change `program`; a pass that no group names belongs to the
    group it follows."""

    def __init__(self, program: tvm.IRModule) -> None:
        self.groups: list[Lowered] = []
        self.program = program
        self.done = False

    def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
        name = str(info.name)
        if self.done:
            return
        self.done = name in LOWERED
        if tvm_ffi.structural_equal(self.program, mod):
            return
        self.program = mod = mod.clone()  # TVM's passes change a module in place
        if name in _QUIET:
            return
        last = self.groups[-1].title if self.groups else FIRST
        title = _TITLES.get(name, last)
        if title != last or not self.groups:
            self.groups.append(Lowered(title, [], mod))
        self.groups[-1].passes.append(name)
        self.groups[-1].program = mod
