"""Annotations by which a schedule speaks to `lowering.annotated`; serial verification drops them."""

from __future__ import annotations

from schedules.core.arch import ARCHES, Arch

PREFIX = "schedules."
PER_THREAD = (
    PREFIX + "per_thread"
)  # block: axes, counted from the end, of the buffer it writes; each thread has its own
TURNS_APART = "turns_apart"  # loop: on AMD GPUs, LLVM does not unroll it, nor any around it
# block: XOR the 16-byte vectors of the rows that it writes, over so many bytes of all banks
SWIZZLE = PREFIX + "swizzle"
PIPELINE = PREFIX + "stages"  # outermost reduction loop: this many stages of shared memory
ASYNC = PREFIX + "async_copy"  # the same loop: whether cp.async fills them
AHEAD = PREFIX + "fragments_ahead"  # the same loop: whether fragments are loaded a k step ahead; they are, if unsaid
TILE_SUMS = PREFIX + "tile_sums"  # the same loop: so many tiles are summed apart, and then added to the sums; or 0
AT_ONCE = PREFIX + "at_once"  # the same loop: a tile's product is one statement, which reads shared memory by itself
PROXY = PREFIX + "async_proxy"  # the same loop: that product goes on beside the threads and reads by the async proxy
SKIP = PREFIX + "skip_zeros"  # the same loop: whether steps that a block finds nothing but padding in are left out
INSIDE_FIRST = PREFIX + "inside_first"  # loop over blockIdx.x: what `order.inside_first` takes
MIN_BLOCKS = PREFIX + "min_blocks_per_sm"  # function: the second argument of __launch_bounds__
TIRX = PREFIX + "tirx"  # function: written in TIRx, for its own pipeline; there is no schedule to replay serially
STREAM = PREFIX + "streaming"  # function: how global accesses use the caches; see accesses, and past_caches
APART = PREFIX + "buffers_apart"  # function: no buffer takes the place of another that is no longer needed
STREAMING = ("no", "stores", "both", "evict_last")  # what streams: see accesses; or loads that L2 evicts last
LEAST = 16  # bytes of the narrowest store that a CPU has go past its caches
VECTOR_BYTES = 16  # of the widest access of a thread
LANE_AXIS = 2  # of a fragment, counted from the end: (.., lane, slot)


def default_streaming(arch: Arch) -> str:
    """How accesses of kernels that read and write once use the caches: as was fastest on an H200, on arches only whose
    own device was measured."""
    return "evict_last" if ARCHES.get(str(arch), arch).device.measured else "no"


def check_streaming(streaming: str, arch: Arch) -> str | None:
    """Why accesses can not use the caches of `arch` as `streaming` says, or None."""
    if streaming not in STREAMING:
        return f"streaming={streaming} is not one of {', '.join(STREAMING)}"
    if streaming != "no" and arch.kind != "cuda" and (streaming, arch.kind) != ("stores", "llvm"):
        return f"streaming={streaming} is for CUDA" + ("; a CPU has streaming=stores" if arch.kind == "llvm" else "")
    if streaming == "evict_last" and "cp_async" not in arch.features:
        return f"streaming={streaming} needs sm_80 or newer, not {arch}"
    return None
