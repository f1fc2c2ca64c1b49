"""Reads the device module that TVM serialises into an exported library (`CUDAModule::SaveToBytes`; ROCm's is alike).

The same format comes from a real CUDA module (its code a cubin) and from the one TVM makes on a machine without a
CUDA driver (its code the CUDA source): the emulator needs the kernels' signatures only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

HANDLE_CODE, INT_CODE, UINT_CODE, FLOAT_CODE = 3, 0, 1, 2  # of DLDataTypeCode
_LAUNCH_AXES = {f"{kind}.{axis}" for kind in ("blockIdx", "threadIdx", "clusterCtaIdx") for axis in "xyz"}
_TENSOR_MAP = 1  # of the per-argument storage information


@dataclass(frozen=True)
class ArgumentType:
    """A DLDataType: pointers have the code of a handle."""

    code: int
    bits: int
    lanes: int


@dataclass
class LaunchShape:
    """Extents (x, y, z) of a launch, and its dynamic shared memory."""

    grid: list[int] = field(default_factory=lambda: [1, 1, 1])
    block: list[int] = field(default_factory=lambda: [1, 1, 1])
    cluster: list[int] = field(default_factory=lambda: [1, 1, 1])  # in blocks
    dynamic_shared: int = 0  # bytes


@dataclass(frozen=True)
class KernelSignature:
    """What the host code passes to a kernel."""

    arguments: tuple[ArgumentType, ...]
    launch_tags: tuple[str, ...]  # what the host passes behind the arguments
    tensor_maps: frozenset[int] = frozenset()  # the arguments that are 128 bytes passed by value

    def launch_shape(self, extents: tuple[int, ...]) -> LaunchShape:
        """What the values passed for the launch tags mean.

        Raises:
            ValueError: for a tag the emulator does not know.
        """
        shape = LaunchShape()
        axes = {"blockIdx": shape.grid, "threadIdx": shape.block, "clusterCtaIdx": shape.cluster}
        # a flag, sic, which no value is passed for; without effect where kernels run one after the other
        tags = [tag for tag in self.launch_tags if not tag.endswith("use_programtic_dependent_launch")]
        for tag, extent in zip(tags, extents, strict=True):
            if tag in _LAUNCH_AXES:
                axes[tag[:-2]]["xyz".index(tag[-1])] = extent
            elif tag.endswith("use_dyn_shared_memory"):
                shape.dynamic_shared = extent
            else:
                raise ValueError(f"a launch with {tag!r} is not emulated")
        return shape


class _Reader:
    def __init__(self, blob: bytes) -> None:
        self.blob, self.position = blob, 0

    def unpack(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self.blob, self.position)
        self.position += struct.calcsize(layout)
        return values

    def count(self) -> int:
        return self.unpack("<Q")[0]

    def text(self) -> str:
        size = self.count()
        data = self.blob[self.position : self.position + size]
        if len(data) != size:
            raise ValueError("the device module ends early")
        self.position += size
        return data.decode()


def parse_device_module(blob: bytes) -> dict[str, KernelSignature]:
    """The kernels of a serialised CUDA module, by name.

    Raises:
        ValueError: if the bytes are not such a module.
    """
    reader = _Reader(blob)
    signatures = {}
    try:
        reader.text()  # the format of the code
        for _ in range(reader.count()):
            key = reader.text()
            reader.text()  # the name again
            arguments = tuple(ArgumentType(*reader.unpack("<BBH")) for _ in range(reader.count()))
            tags = tuple(reader.text() for _ in range(reader.count()))
            storage = reader.unpack(f"<{reader.count()}I")
            maps = frozenset(index for index, kind in enumerate(storage) if kind == _TENSOR_MAP)
            signatures[key] = KernelSignature(arguments, tags, maps)
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not a serialised CUDA module: {error}") from error
    return signatures
