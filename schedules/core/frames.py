"""Call stacks for TVM's script parser, which asks for the whole one at every function it parses."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_LOCK = threading.RLock()


def outer_frames(frame: Any, context: int = 1) -> list[inspect.FrameInfo]:
    """`inspect.getouterframes` without a search of all modules for each frame's source: the line alone."""
    found: list[inspect.FrameInfo] = []
    at: FrameType | None = frame
    while at:
        code, number = at.f_code, at.f_lineno
        line = linecache.getline(code.co_filename, number, at.f_globals) if context else ""
        known = ([line], 0) if line else (None, None)
        found.append(inspect.FrameInfo(at, code.co_filename, number, code.co_name, *known))
        at = at.f_back
    return found


@contextlib.contextmanager
def quick_frames() -> Iterator[None]:
    """Have `inspect.stack` and `inspect.getouterframes` take a fraction of their time, which is most of a parse."""
    with _LOCK:
        usual = inspect.getouterframes
        inspect.getouterframes = outer_frames  # type: ignore[assignment]
        try:
            yield
        finally:
            inspect.getouterframes = usual
