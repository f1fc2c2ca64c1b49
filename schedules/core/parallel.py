"""Independent pieces of work in processes of their own: what one of them does to its process costs no other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from schedules.core.errors import SchedulesError, ToolchainError
from schedules.core.process import ScratchFolder, SpawnContext, start_worker

try:
    import pebble
except ImportError:
    pebble = None

INSTALL = "pip install 'te-schedules[tune]'"
# a process each: their libraries need no threads of their own
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"}


@contextlib.contextmanager
def processes(count: int) -> Iterator[Any]:
    """A `pebble.ProcessPool` of `count` processes, each started from nothing; stopped at once if the body fails, and
    gone with this process, their temporary files too.

    Raises ToolchainError if pebble is not installed.
    """
    if pebble is None:
        raise ToolchainError(f"pebble, which runs the worker processes, is not installed; {INSTALL}")
    with contextlib.closing(ScratchFolder()) as scratch:
        tied = (os.getpid(), scratch.path, None, False, False)
        context = SpawnContext(_ONE_THREAD)
        with pebble.ProcessPool(count, initializer=start_worker, initargs=tied, context=context) as pool:
            try:
                yield pool
            except BaseException:
                pool.stop()
                raise


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """In a worker process: what `function` returns, and why it does not: "" if it does.

    An exception becomes text here, since one that cannot be pickled would take the whole pool with it; one that is no
    SchedulesError is called internal.
    """
    try:
        return function(*arguments), ""
    except SchedulesError as error:
        return None, f"{type(error).__name__}: {error}"
    except Exception as error:  # a fault of this package: the others' work must not be lost
        return None, f"internal: {type(error).__name__}: {error}"


def outcome(task: Any, seconds: float) -> tuple[Any, str]:
    """What a pool's task of `attempt` came to, as it says, or what became of its process.

    `seconds` is the time that it was given.
    """
    try:
        ended: tuple[Any, str] = task.result()
    except FutureTimeout:
        return None, f"took longer than {seconds:g} s"
    except pebble.ProcessExpired as expired:
        return None, f"the process died: exit code {expired.exitcode}"
    return ended
