from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from schedules.check.emulate.protocol import read_frame, write_frame


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    descriptors = os.pipe()
    yield descriptors
    for descriptor in descriptors:
        try:
            os.close(descriptor)
        except OSError:
            continue


def test_round_trip_of_more_than_a_pipe_holds(pipe: tuple[int, int]) -> None:
    large = os.urandom(1 << 20)
    writer = threading.Thread(target=write_frame, args=(pipe[1], {"a": [1, "x"]}, [b"", large, memoryview(b"end")]))
    writer.start()
    header, payload = read_frame(pipe[0], time.monotonic() + 10)
    writer.join()
    assert header == {"a": [1, "x"]} and payload == [b"", large, b"end"]


def test_timeout_and_end(pipe: tuple[int, int]) -> None:
    with pytest.raises(TimeoutError):
        read_frame(pipe[0], time.monotonic() + 0.05)
    os.write(pipe[1], b"\x05\0")
    with pytest.raises(TimeoutError):
        read_frame(pipe[0], time.monotonic() + 0.05)
    os.close(pipe[1])
    with pytest.raises(EOFError):
        read_frame(pipe[0])
