"""What a config says of a kernel's launch."""

from __future__ import annotations

from schedules.core.tvm import tvm
from schedules.lowering.annotations import MIN_BLOCKS


class MinBlocks:
    """A config with the field `min_blocks`: blocks a multiprocessor should hold; 0 leaves it to the compiler."""

    min_blocks: int

    def finish(self, mod: tvm.IRModule) -> tvm.IRModule:
        """`mod` with the function attributes that this config asks for."""
        if not self.min_blocks:
            return mod
        mod = mod.clone()
        mod["main"] = mod["main"].with_attr(MIN_BLOCKS, self.min_blocks)
        return mod
