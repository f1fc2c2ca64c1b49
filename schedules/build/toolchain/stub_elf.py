"""A shared library of functions that all return one number, written byte by byte.

TVM's CUDA runtime library links against ``libcuda.so.1``, the NVIDIA driver.  Without it TVM cannot create a CUDA
module and silently exports CUDA *source*.  Cross-building needs none of the driver's functions, only that the library
loads; and it has to work where no compiler is installed, hence no C source here.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence

_RETURN = {  # machine code of `return value`, with the place of the 32- or 16-bit immediate filled in
    "x86_64": lambda value: b"\xb8" + struct.pack("<I", value) + b"\xc3",  # mov eax, value; ret
    "aarch64": lambda value: struct.pack("<II", 0x52800000 | (value & 0xFFFF) << 5, 0xD65F03C0),  # mov w0, #value; ret
}
_MACHINE = {"x86_64": 62, "aarch64": 183}
_PAGE = 0x1000
_SYMBOL = 24  # sizeof(Elf64_Sym)


def _align(n: int, to: int = 8) -> int:
    return (n + to - 1) // to * to


def shared_library(soname: str, functions: Sequence[str], value: int, machine: str | None = None) -> bytes:
    """An ELF64 shared object whose `functions` take anything and return the int `value`.

    One loadable segment holds everything; it is writable because older glibc relocates the dynamic section in place.
    Raises KeyError for a machine other than x86_64 and aarch64.
    """
    machine = machine or platform.machine()
    body = _RETURN[machine](value)
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (soname, *functions))
    offset_of = {}
    at = 1
    for name in (soname, *functions):
        offset_of[name] = at
        at += len(name) + 1

    count = len(functions) + 1
    symbols_at = 64 + 3 * 56  # after the ELF header and three program headers
    names_at = symbols_at + count * _SYMBOL
    hash_at = _align(names_at + len(names))
    code_at = _align(hash_at + 4 * (3 + count), 16)
    dynamic_at = _align(code_at + _align(len(body), 16) * len(functions))
    dynamic = [
        (14, offset_of[soname]),
        (4, hash_at),
        (5, names_at),
        (6, symbols_at),
        (10, len(names)),
        (11, _SYMBOL),
        (0, 0),
    ]
    end = dynamic_at + 16 * len(dynamic)

    symbols = bytes(_SYMBOL)
    code = b""
    for i, name in enumerate(functions):
        # a global function (info 0x12) in "section" 1: any index but 0 means defined
        symbols += struct.pack("<IBBHQQ", offset_of[name], 0x12, 0, 1, code_at + i * _align(len(body), 16), len(body))
        code += body.ljust(_align(len(body), 16), b"\0")
    # System V hash table with one bucket: a chain through all symbols
    table = struct.pack(f"<III{count}I", 1, count, 1 if count > 1 else 0, *[0, *range(2, count), 0][:count])

    header = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, _MACHINE[machine], 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0)
    segments = struct.pack("<IIQQQQQQ", 1, 7, 0, 0, 0, end, end, _PAGE)  # PT_LOAD, rwx
    size = 16 * len(dynamic)
    segments += struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, dynamic_at, size, size, 8)  # PT_DYNAMIC
    segments += struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16)  # PT_GNU_STACK: not executable
    image = bytearray(end)
    for start, part in (
        (0, header + segments),
        (symbols_at, symbols),
        (names_at, names),
        (hash_at, table),
        (code_at, code),
        (dynamic_at, b"".join(struct.pack("<QQ", *entry) for entry in dynamic)),
    ):
        image[start : start + len(part)] = part
    return bytes(image)
