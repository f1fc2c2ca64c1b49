"""What is to be known of a tensor of any library.

A bundle's load.py holds this module, which therefore needs nothing else of the package.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from schedules.bundle.package.driver import ArgumentError

_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}  # of DLPack's types
_KINDS = {"f": "float", "i": "int", "u": "uint", "b": "bool"}  # of NumPy's


class Tensor(NamedTuple):
    """What is to be known of a tensor, from PyTorch's own methods, DLPack, or the CUDA array interface."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    place: int | None  # DLPack's device type, if it is told
    device: int
    contiguous: bool


def _contiguous(shape: Sequence[int], strides: Sequence[int] | None) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides or ()), strict=False):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


class _DLTensor(ctypes.Structure):
    """DLTensor of DLPack, of which a capsule holds a DLManagedTensor that starts with it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_POINTER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def look_at(tensor: Any, name: str) -> Tensor:
    """What is to be known of `tensor`.  Raises ArgumentError for what is no tensor."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        place, index = tensor.__dlpack_device__()
        return Tensor(tensor.data_ptr(), tuple(tensor.shape), dtype, int(place), index, tensor.is_contiguous())
    if hasattr(tensor, "__dlpack__"):
        try:
            return _of_capsule(tensor.__dlpack__())
        except BufferError as error:
            raise ArgumentError(f"{name}: {error}; pass what can be written") from None
    told = getattr(tensor, "__cuda_array_interface__", None)
    if told is None:
        raise ArgumentError(f"{name} is a {type(tensor).__name__}, needed a tensor: of PyTorch, or by DLPack")
    kind, size = told["typestr"][1], int(told["typestr"][2:])
    strides = told.get("strides") and [stride // size for stride in told["strides"]]
    dtype, shape = f"{_KINDS.get(kind, kind)}{8 * size if kind != 'b' else ''}", tuple(map(int, told["shape"]))
    return Tensor(told["data"][0], shape, dtype, None, 0, _contiguous(shape, strides))


def _of_capsule(capsule: Any) -> Tensor:
    found = _DLTensor.from_address(_POINTER(capsule, b"dltensor"))
    shape = tuple(found.shape[: found.ndim])
    strides = found.strides[: found.ndim] if found.strides else None
    dtype = f"{_CODES.get(found.code, found.code)}{found.bits if found.code != 6 else ''}"
    address = (found.data or 0) + found.byte_offset
    return Tensor(address, shape, dtype, found.device_type, found.device_id, _contiguous(shape, strides))
