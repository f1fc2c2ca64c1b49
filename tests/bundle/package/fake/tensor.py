"""Tensors of a GPU that is not there: an address and what DLPack says of it.  Stands alone."""

from __future__ import annotations

import ctypes
import re
from typing import Any

_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("place", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
    ]


class FakeTensor:
    """`place` is DLPack's device type: 2 for CUDA, 10 for ROCm; strides count elements."""

    def __init__(
        self, address: int, shape: list[int], dtype: str, place: int, index: int = 0, strides: list[int] | None = None
    ) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, (place, index)
        if strides is None:
            strides = [1]
            for extent in reversed(shape[1:]):
                strides.insert(0, strides[0] * extent)
        kind, bits = re.fullmatch(r"([a-z]+)(\d+)", dtype).groups()  # type: ignore[union-attr]
        numbers = [(ctypes.c_int64 * len(shape))(*each) for each in (shape, strides)]
        self.kept = numbers, _DELETER(lambda _: None)
        pointers = [ctypes.cast(each, ctypes.c_void_p) for each in numbers]
        self.managed = _Managed(
            address, place, index, len(shape), _CODES[kind], int(bits), 1, *pointers, 0, None, self.kept[1]
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.managed), b"dltensor", None)
