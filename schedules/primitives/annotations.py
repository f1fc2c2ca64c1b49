"""Annotations by which a schedule speaks to `schedules.primitives.lowering`; serial verification drops them."""

from __future__ import annotations

PREFIX = "schedules."
PER_LANE = PREFIX + "per_lane"  # block: the buffer it writes ends in (lane, slot), and a lane touches its own slots
SWIZZLE = PREFIX + "swizzle"  # block: XOR the 16-byte vectors of the rows that it writes
PIPELINE = PREFIX + "stages"  # outermost reduction loop: this many stages of shared memory
ASYNC = PREFIX + "async_copy"  # the same loop: whether cp.async fills them
MIN_BLOCKS = PREFIX + "min_blocks_per_sm"  # function: the second argument of __launch_bounds__
