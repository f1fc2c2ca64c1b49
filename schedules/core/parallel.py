"""Independent pieces of work in processes of their own: what one of them does to its process costs no other."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from schedules.core.child import Child, Ended, Overdue, Stopped
from schedules.core.errors import MachineError, SchedulesError
from schedules.core.process import ScratchFolder, start_worker

# a process each: their libraries need no threads of their own
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"}
TRIES = 3  # of a task whose process somebody stops


class Processes:
    """Processes that take tasks in the order in which they come, with their temporary files in `folder`, copies of
    `origin` if there is one; a thread looks after each."""

    def __init__(self, count: int, folder: str, main: bool, origin: Child | None) -> None:
        self._main, self._origin = main, origin
        self._setup = (folder, None, False, False)
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Any] | None] = queue.SimpleQueue()
        self._stopped = False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def schedule(
        self, function: Callable[..., Any], args: Sequence[Any] = (), timeout: float = float("inf")
    ) -> Future[Any]:
        """The future of a call that may take `timeout` seconds once a process has it."""
        task: Future[Any] = Future()
        self._tasks.put((task, (function, tuple(args), timeout, lambda: self._stopped)))
        return task

    def stop(self) -> None:
        """End every process; what was not done by then never will be."""
        self._stopped = True

    def join(self) -> None:
        """Wait until all tasks are done, unless they were stopped, and the processes gone."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        child: Child | None = None
        while (entry := self._tasks.get()) and not self._stopped:
            task, call = entry
            for again in range(TRIES if task.set_running_or_notify_cancel() else 0):
                try:
                    origin = self._origin if self._origin and self._origin.alive else None
                    child = child or Child(
                        start_worker, self._setup, environment=_ONE_THREAD, main=self._main, origin=origin
                    )
                    task.set_result(child.call(*call))
                except (Ended, Overdue, Stopped, CancelledError) as ended:
                    if child:
                        child.kill()
                    child = None
                    if isinstance(ended, Stopped) and again < TRIES - 1:
                        continue
                    task.set_exception(ended)
                except BaseException as error:
                    task.set_exception(error)
                break
        if child:
            child.kill()


@contextlib.contextmanager
def processes(count: int, main: bool = True, origin: Child | None = None) -> Iterator[Processes]:
    """`count` processes, each a copy of `origin` or started from nothing, and without `main` without the program's main
    module; stopped at once if the body fails, and gone with this process, their temporary files too."""
    with contextlib.closing(ScratchFolder()) as scratch:
        pool = Processes(count, scratch.path, main, origin)
        try:
            yield pool
            pool.join()
        except BaseException:
            pool.stop()
            pool.join()
            raise


@contextlib.contextmanager
def origin(ready: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    """A process to be copied by `processes`, which calls `ready` meanwhile; gone after the body."""
    child = Child(ready, arguments, environment=_ONE_THREAD, main=False)
    try:
        yield child
    finally:
        child.kill()


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


def outcome(task: Future[tuple[Any, str]]) -> tuple[Any, str]:
    """What a task of `attempt` came to, as it says, or what became of its process."""
    try:
        return task.result()
    except (Ended, Overdue, Stopped, MachineError) as error:
        return None, str(error)
