"""Independent pieces of work in processes of their own: what one of them does to its process costs no other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from schedules.errors import SchedulesError, ToolchainError
from schedules.tune.process import SpawnContext

try:
    import pebble
except ImportError:
    pebble = None

INSTALL = "pip install 'te-schedules[tune]'"
# a process each: their libraries need no threads of their own
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"}


@contextlib.contextmanager
def processes(count: int) -> Iterator[Any]:
    """A `pebble.ProcessPool` of `count` processes, each started from nothing; stopped at once if the body fails.

    Raises ToolchainError if pebble is not installed.
    """
    if pebble is None:
        raise ToolchainError(f"pebble, which runs the worker processes, is not installed; {INSTALL}")
    with pebble.ProcessPool(count, context=SpawnContext(_ONE_THREAD)) as pool:
        try:
            yield pool
        except BaseException:
            pool.stop()
            raise


def outcome(task: Any, seconds: float) -> tuple[Any, str]:
    """What a task of a pool returned, and why it did not: "" if it did.  `seconds` is the time that it was given.

    Any exception counts: one that is no SchedulesError is called internal.
    """
    try:
        return task.result(), ""
    except FutureTimeout:
        return None, f"took longer than {seconds:g} s"
    except SchedulesError as error:
        return None, f"{type(error).__name__}: {error}"
    except Exception as error:  # the process died, or a fault of this package: the others' work must not be lost
        known = pebble is not None and isinstance(error, pebble.ProcessExpired)
        return None, f"{'' if known else 'internal: '}{type(error).__name__}: {error}"
