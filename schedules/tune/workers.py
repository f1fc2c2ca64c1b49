"""The processes in which candidates are built and run, and what becomes of one that a candidate ends.

A crew has them beside itself (`crew.LocalCrew`) or on other machines (`actors`); what they do is the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from schedules.core.arch import Arch
from schedules.core.errors import ToolchainError, TuningError
from schedules.core.problem import Problem
from schedules.core.process import SpawnContext, start_worker
from schedules.tune import evaluate
from schedules.tune.evaluate import Failure
from schedules.tune.strategy import Candidate

try:
    import pebble
except ImportError:
    pebble = None

INSTALL = "pip install 'te-schedules[tune]'"
PREPARE_TIMEOUT = 600.0  # seconds to compute a reference; no candidate runs meanwhile
TRIES = 3  # of an order whose process is killed from outside
STARTS = 10  # of a process that is killed before it is given a candidate
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # how a process ends that something else ended


@dataclass(frozen=True)
class Job:
    """A call of a function of `evaluate` on the device: (problem, arch, *arguments).

    `seeds` are prepared before; `timeouts` is how many times a candidate's timeout it may take, beside `seconds`.
    """

    function: Callable[..., Any]
    problem: Problem
    arguments: tuple[Any, ...]
    seeds: tuple[int, ...]
    timeouts: int = 1
    seconds: float = 0.0


@dataclass(frozen=True)
class Order:
    """A call to make in a worker, once data and reference are there for each of `first`: (problem, arch, seed)."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    timeout: float
    outcome: str  # of a candidate that ends its process
    first: tuple[tuple[Any, ...], ...] = ()

    @classmethod
    def build(cls, arch: Arch, problem: Problem, candidate: Candidate, timeout: float) -> Order:
        return cls(evaluate.build_candidate, (problem, arch, candidate), timeout, "compile")

    @classmethod
    def measure(cls, arch: Arch, job: Job, timeout: float) -> Order:
        first = tuple((job.problem, arch, seed) for seed in job.seeds)
        limit = job.timeouts * timeout + job.seconds
        return cls(job.function, (job.problem, arch, *job.arguments), limit, "runtime", first)


class Orders:
    """Orders that wait for the next free of the workers that share them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Order, Future[Any]]] = queue.SimpleQueue()

    def put(self, order: Order) -> Future[Any]:
        done: Future[Any] = Future()
        self._queue.put((order, done))
        return done

    def get(self, timeout: float) -> tuple[Order, Future[Any]]:
        """Raises queue.Empty."""
        return self._queue.get(timeout=timeout)


@dataclass(frozen=True)
class Setup:
    """What a worker process starts with."""

    folder: str
    memory: int | None
    environment: dict[str, str]
    background: bool = False  # others, which measure, have the cores first

    def pool(self) -> Any:
        """A pool of one process, which starts from nothing: a copy of this one would share its threads' locks.

        One pool for each process, because a pool whose process is killed at a bad moment is lost as a whole.
        Raises ToolchainError if pebble is not installed.
        """
        if pebble is None:
            raise ToolchainError(f"pebble, which runs the worker processes, is not installed; {INSTALL}")
        logging.getLogger("pebble").setLevel(logging.CRITICAL)
        return pebble.ProcessPool(
            1,
            initializer=start_worker,
            initargs=(os.getpid(), self.folder, self.memory, self.background),
            context=SpawnContext(self.environment),
        )


class Worker:
    """A process, and a thread that hands it one order of `orders` at a time."""

    def __init__(self, arch: Arch, setup: Setup, orders: Orders) -> None:
        self._arch, self._setup, self._orders = arch, setup, orders
        self._pool = setup.pool()
        self._prepared: set[tuple[Any, ...]] = set()
        self._thread: threading.Thread | None = None
        self.state = "starting"
        self.closed = False

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin to serve, after one order of its own."""
        own, done = Order(function, arguments, PREPARE_TIMEOUT, "runtime"), Future[Any]()
        self._thread = threading.Thread(target=self._serve, args=(own, done), daemon=True)
        self._thread.start()
        return done

    def _serve(self, order: Order, done: Future[Any]) -> None:
        self._answer(order, done)
        while not self.closed:
            self.state = "idle"
            with contextlib.suppress(queue.Empty):
                self._answer(*self._orders.get(timeout=0.2))

    def _answer(self, order: Order, done: Future[Any]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(self._run(order))
        except BaseException as error:
            done.set_exception(error)

    def _run(self, order: Order) -> Any:
        """The result of `order`; a process that something else killed is replaced, and the order tried again."""
        for tries in range(1, TRIES + 1):
            self._get_ready(order)
            try:
                self.state = "measuring" if order.first else "building"
                result = self._call(order.function, order.arguments, order.timeout, order.outcome)
            except _Killed as killed:
                self._replace()
                if tries == TRIES:
                    return Failure(order.outcome, str(killed))
                continue
            if isinstance(result, Failure) and result.fatal:
                self._replace()
            return result
        raise AssertionError("unreachable")

    def _get_ready(self, order: Order) -> None:
        """Start the process and prepare what `order` needs; no candidate is to blame if it is killed meanwhile."""
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(evaluate.warm_up, (self._arch,))]
        calls += [(evaluate.prepare, each) for each in order.first]
        for _ in range(STARTS):
            try:
                for call in calls:
                    if call not in self._prepared:
                        self.state = "preparing"
                        found = self._call(call[0], call[1], PREPARE_TIMEOUT, order.outcome)
                        if isinstance(found, Failure):
                            raise TuningError(f"the problem's data and reference cannot be prepared: {found.reason}")
                        self._prepared.add(call)
                return
            except _Killed:
                self._replace()
        raise TuningError(f"worker processes are killed as they start, {STARTS} times in turn; is there memory left?")

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float, outcome: str) -> Any:
        if self.closed:
            raise CancelledError
        try:
            task = self._pool.schedule(function, args=arguments, timeout=timeout)
        except RuntimeError:  # the pool broke when its process was killed
            raise _Killed from None
        while not wait([task], timeout=0.2).done:
            if self.closed:
                raise CancelledError  # a pool that is stopped leaves its tasks unanswered
            if not self._pool.active:
                raise _Killed
        return _result(task, timeout, outcome)

    def _replace(self) -> None:
        """A new process for the old one, which is gone, or whose device context may be beyond repair."""
        self.state = "restarting"
        old, self._pool, self._prepared = self._pool, self._setup.pool(), set()
        old.stop()
        old.join()

    def stop(self) -> None:
        """Begin to end the process; `close` waits for it.

        The pool is told first: the process dies with the thread that started it, and would be replaced.
        """
        self.closed = True
        self._pool.stop()

    def close(self) -> None:
        self.stop()
        if self._thread:
            self._thread.join()
        self._pool.stop()  # the thread may have been about to replace it
        self._pool.join()


class _Killed(Exception):
    """A worker was ended from outside: by a person, or by a system short of memory."""

    def __init__(self, how: str = "SIGKILL") -> None:
        super().__init__(f"the process was killed {TRIES} times ({how}); out of memory?")


def _result(task: Any, timeout: float, outcome: str) -> Any:
    """What a pool's task came to; what a candidate did to its process as a Failure.  Raises _Killed."""
    try:
        return task.result()
    except FutureTimeout:
        return Failure("timeout", f"took longer than {timeout:g} s", fatal=True)
    except pebble.ProcessExpired as expired:
        code = expired.exitcode
        if code in KILLED:
            raise _Killed(signal.Signals(-code).name) from None
        how = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
        return Failure(outcome, f"the process died: {how}", fatal=True)
    except BrokenProcessPool:
        raise _Killed from None
    except (MemoryError, OSError) as error:
        return Failure(outcome, f"{type(error).__name__}: {error}" if str(error) else "out of memory", fatal=True)
