"""What the emulator and its worker say to each other: frames of a JSON header and raw bytes, over a pair of pipes.

A frame is a little-endian 32-bit length, that many bytes of JSON, and the payloads whose sizes the header's
"payload" lists.  The runtime library writes the same format when a kernel crashes (`cxx/crash.cc`).
"""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("<I")


def write_frame(descriptor: int, header: dict[str, Any], payload: Sequence[bytes | memoryview] = ()) -> None:
    """Writes one frame.

    Raises:
        BrokenPipeError: if the other side is gone.
    """
    views = [memoryview(part).cast("B") if len(part) else memoryview(b"") for part in payload]
    text = json.dumps({**header, "payload": [view.nbytes for view in views]}).encode()
    for view in [memoryview(_LENGTH.pack(len(text)) + text), *views]:
        while view.nbytes:
            view = view[os.write(descriptor, view) :]


def read_frame(descriptor: int, deadline: float | None = None) -> tuple[dict[str, Any], list[bytearray]]:
    """Reads one frame; `deadline` is a value of `time.monotonic()`.

    Raises:
        EOFError: if the other side closed the pipe.
        TimeoutError: if the frame was not complete at the deadline.
    """
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size, deadline))
    header = json.loads(bytes(_read(descriptor, length, deadline)))
    return header, [_read(descriptor, size, deadline) for size in header.pop("payload", [])]


def _read(descriptor: int, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        if deadline is not None:
            poll = select.poll()  # select() is limited to descriptors below 1024
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
        count = os.readv(descriptor, [view[filled:]])
        if count == 0:
            raise EOFError
        filled += count
    return data
