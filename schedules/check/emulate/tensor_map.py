"""What `cuTensorMapEncodeTiled` makes of a tensor for bulk copies (CUDA driver API, "Tensor Map Object Management").

The driver's encoding is not public; this one is read by cxx/tensor_map.h.  The checks are the driver's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MAGIC = 0x70616D5F756D65
_LAYOUT = "<QQ5Q5Q5H5B5B12x"
_SWIZZLE_BYTES = (0, 32, 64, 128)
_MAX_RANK = 5
_TFLOAT32 = 11  # CUtensorMapDataType


@dataclass(frozen=True)
class TensorMap:
    """The tensor map of the array at index `argument`; dimensions run from the innermost.

    strides: in bytes, of all dimensions but the innermost.
    box: elements that one copy spans; with element strides, only every so many of them are copied.
    swizzle: bytes of its pattern: 0, 32, 64 or 128.
    nan_fill: elements outside the tensor are NaN, not zero.
    to_tf32: float32 elements are rounded to TF32 as they are loaded.
    """

    argument: int
    element_bytes: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: int = 0
    nan_fill: bool = False
    to_tf32: bool = False

    def encode(self, address: int) -> bytes:
        """The 128 bytes of the map for a tensor at `address`.

        Raises:
            ValueError: for what the driver refuses, or what the emulator does not know.
        """
        rank = len(self.dims)
        steps = self.element_strides or (1,) * rank
        if not 1 <= rank <= _MAX_RANK:
            raise ValueError(f"a tensor map of rank {rank}")
        if (len(self.strides), len(self.box), len(steps)) != (rank - 1, rank, rank):
            raise ValueError(
                f"a tensor map of rank {rank} with {len(self.strides)} strides and {len(self.box)} extents"
            )
        if address % 16:
            raise ValueError(f"a tensor map of address {address:#x}, which is not 16-byte aligned")
        if any(not 1 <= dim <= 2**32 for dim in self.dims):
            raise ValueError(f"a tensor map of dimensions {self.dims}")
        if any(stride % 16 or not 0 <= stride < 2**40 for stride in self.strides):
            raise ValueError(f"a tensor map of strides {self.strides}: they must be multiples of 16 bytes")
        if any(not 1 <= extent <= 256 for extent in self.box):
            raise ValueError(f"a tensor map of box {self.box}: at most 256 elements a side")
        if any(not 1 <= step <= 8 for step in steps) or steps[0] != 1:
            raise ValueError(f"a tensor map of element strides {steps}")
        row = self.box[0] * self.element_bytes
        if row % 16:
            raise ValueError(f"a tensor map with rows of {row} bytes: they must be multiples of 16")
        if self.swizzle not in _SWIZZLE_BYTES:
            raise ValueError(f"a tensor map with a swizzle of {self.swizzle} bytes")
        if self.swizzle and row > self.swizzle:
            raise ValueError(f"a tensor map with rows of {row} bytes in a swizzle of {self.swizzle}")
        if self.swizzle and row < self.swizzle:
            raise ValueError(f"rows of {row} bytes in a swizzle of {self.swizzle} are not emulated")

        if self.to_tf32 and self.element_bytes != 4:
            raise ValueError(f"a tensor map that rounds elements of {self.element_bytes} bytes to TF32")

        def five(values: Sequence[int], filler: int) -> list[int]:
            return [*values, *[filler] * (_MAX_RANK - len(values))]

        return struct.pack(
            _LAYOUT,
            _MAGIC,
            address,
            *five(self.dims, 1),
            *five((self.element_bytes, *self.strides), 0),
            *five(self.box, 1),
            *five(steps, 1),
            rank,
            self.element_bytes,
            _SWIZZLE_BYTES.index(self.swizzle),
            self.nan_fill,
            self.to_tf32,
        )


def encode_tiled(bits: int, rank: int, address: int, rest: Sequence[Any]) -> bytes:
    """The map for the arguments of TVM's `runtime.cuTensorMapEncodeTiled` behind those named here.

    Args:
        bits: of an element.
        rank: of the tensor.
        address: of its data.
        rest: dims, strides, box, element strides, interleave, swizzle, L2 promotion, fill, and the type of the elements
            that arrive if it is another, of which TF32 is known.

    Raises:
        ValueError: for what the driver refuses, or what the emulator does not know.
    """
    values = [int(value) for value in rest]
    to_tf32 = len(values) == 4 * rank + 4 and values[-1] == _TFLOAT32
    if to_tf32:
        values.pop()
    if len(values) != 4 * rank + 3:
        raise ValueError(f"a tensor map of rank {rank} with {len(values)} numbers, not {4 * rank + 3}")
    dims, strides, box = values[:rank], values[rank : 2 * rank - 1], values[2 * rank - 1 : 3 * rank - 1]
    steps, (interleave, swizzle, _, fill) = values[3 * rank - 1 : 4 * rank - 1], values[4 * rank - 1 :]
    if interleave or not 0 <= swizzle < len(_SWIZZLE_BYTES):
        raise ValueError(f"a tensor map with interleave {interleave} and swizzle {swizzle} is not emulated")
    shape = tuple(dims), tuple(strides), tuple(box), tuple(steps)
    return TensorMap(0, bits // 8, *shape, _SWIZZLE_BYTES[swizzle], bool(fill), to_tf32).encode(address)
