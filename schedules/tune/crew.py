"""Who does the work of a search: processes that build, and one process for each device that measures.

A crew takes jobs and returns futures of their results.  Whatever a candidate does to its process is a `Failure`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, Protocol

from schedules.arch import Arch
from schedules.errors import ToolchainError, TuningError
from schedules.problem import Problem
from schedules.tune import evaluate
from schedules.tune.evaluate import Artifact, Failure
from schedules.tune.process import ScratchFolder, memory_share, start_worker
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

    `seeds` are prepared before; `timeouts` is how many times a candidate's timeout it may take.
    """

    function: Callable[..., Any]
    problem: Problem
    arguments: tuple[Any, ...]
    seeds: tuple[int, ...]
    timeouts: int = 1


class Crew(Protocol):
    """Processes that build and measure for one arch on devices of one name."""

    device: str
    versions: dict[str, str]
    slots: int  # devices that measure at once
    builders: int
    exclusive: bool  # building disturbs the timing, so they must take turns

    def build(self, problem: Problem, candidate: Candidate) -> Future[Artifact | Failure]: ...

    def measure(self, job: Job) -> Future[Any]: ...

    def state(self) -> list[str]:
        """For each device what it is doing, in a word."""

    def close(self) -> None: ...


class LocalCrew:
    """The crew of this machine.

    `devices` are the GPUs' numbers as CUDA counts them, by default all; `builders` the processes that build, by default
    one for each core; `memory` the bytes that each process may use, by default its share; timeouts are in seconds.
    Raises UsageError if there is no device, ToolchainError if pebble is not installed.
    """

    def __init__(
        self,
        arch: Arch,
        *,
        builders: int | None = None,
        devices: Sequence[int] | None = None,
        build_timeout: float = 60.0,
        measure_timeout: float = 30.0,
        memory: int | None = None,
    ) -> None:
        if pebble is None:
            raise ToolchainError(f"pebble, which runs the worker processes, is not installed; {INSTALL}")
        self.arch = arch
        self.builders = builders or len(os.sched_getaffinity(0))
        self.exclusive = not arch.is_gpu
        self._build_timeout, self._measure_timeout = build_timeout, measure_timeout
        visible = visible_devices(devices) if arch.kind == "cuda" else [""]
        self.slots = len(visible)
        memory = memory or memory_share(self.builders + 1)
        self._folder = ScratchFolder()
        self._builds: _Queue = queue.SimpleQueue()
        self._measurements: _Queue = queue.SimpleQueue()
        setup = _Setup(self._folder.path, memory, {})
        self._building = [_Worker(arch, setup, self._builds) for _ in range(self.builders)]
        setups = [
            _Setup(self._folder.path, None if arch.is_gpu else memory, {"CUDA_VISIBLE_DEVICES": name} if name else {})
            for name in visible
        ]
        self._measuring = [_Worker(arch, setup, self._measurements) for setup in setups]
        try:
            described = [worker.start(evaluate.describe_device, arch) for worker in self._measuring]
            for worker in self._building:
                worker.start(evaluate.warm_up, arch)
            self.device, self.versions = described[0].result()
            if others := sorted({name for found in described[1:] if (name := found.result()[0]) != self.device}):
                raise TuningError(f"the GPUs differ ({self.device}, {others[0]}); tune them apart, with --gpus")
        except BaseException:
            self.close()
            raise

    def build(self, problem: Problem, candidate: Candidate) -> Future[Artifact | Failure]:
        arguments = (problem, self.arch, candidate)
        return _put(self._builds, _Order(evaluate.build_candidate, arguments, self._build_timeout, "compile"))

    def measure(self, job: Job) -> Future[Any]:
        first = tuple((job.problem, self.arch, seed) for seed in job.seeds)
        timeout = job.timeouts * self._measure_timeout
        arguments = (job.problem, self.arch, *job.arguments)
        return _put(self._measurements, _Order(job.function, arguments, timeout, "runtime", first))

    def state(self) -> list[str]:
        return [worker.state for worker in self._measuring]

    def close(self) -> None:
        """Stop every process.  Futures that are not done never will be."""
        workers = [*self._building, *self._measuring]
        for worker in workers:
            worker.closed = True
        for worker in workers:
            worker.close()
        self._folder.close()


@dataclass
class _Order:
    """A call to make in a worker, once data and reference are there for each of `first`: (problem, arch, seed)."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    timeout: float
    outcome: str  # of a candidate that ends its process
    first: tuple[tuple[Any, ...], ...] = ()
    done: Future[Any] = field(default_factory=Future)


_Queue = queue.SimpleQueue[_Order]


@dataclass(frozen=True)
class _Setup:
    """What a worker process starts with."""

    folder: str
    memory: int | None
    environment: dict[str, str]

    def pool(self) -> Any:
        """A pool of one process, which starts from nothing: a copy of this one would share its threads' locks.

        One pool for each process, because a pool whose process is killed at a bad moment is lost as a whole.
        """
        logging.getLogger("pebble").setLevel(logging.CRITICAL)
        return pebble.ProcessPool(
            1,
            initializer=start_worker,
            initargs=(os.getpid(), self.folder, self.memory, self.environment),
            context=multiprocessing.get_context("spawn"),
        )


class _Worker:
    """A process, and a thread that hands it one order of `orders` at a time."""

    def __init__(self, arch: Arch, setup: _Setup, orders: _Queue) -> None:
        self._arch, self._setup, self._orders = arch, setup, orders
        self._pool = setup.pool()
        self._prepared: set[tuple[Any, ...]] = set()
        self._thread: threading.Thread | None = None
        self.state = "starting"
        self.closed = False

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin to serve, after one order of its own."""
        own = _Order(function, arguments, PREPARE_TIMEOUT, "runtime")
        self._thread = threading.Thread(target=self._serve, args=(own,), daemon=True)
        self._thread.start()
        return own.done

    def _serve(self, order: _Order) -> None:
        self._answer(order)
        while not self.closed:
            self.state = "idle"
            with contextlib.suppress(queue.Empty):
                self._answer(self._orders.get(timeout=0.2))

    def _answer(self, order: _Order) -> None:
        if not order.done.set_running_or_notify_cancel():
            return
        try:
            order.done.set_result(self._run(order))
        except BaseException as error:
            order.done.set_exception(error)

    def _run(self, order: _Order) -> Any:
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

    def _get_ready(self, order: _Order) -> None:
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

    def close(self) -> None:
        self.closed = True
        if self._thread:
            self._thread.join()
        self._pool.stop()
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


def _put(orders: _Queue, order: _Order) -> Future[Any]:
    orders.put(order)
    return order.done


def visible_devices(numbers: Sequence[int] | None) -> list[str]:
    """The GPUs to use, as values of CUDA_VISIBLE_DEVICES; `numbers` count those that this process sees."""
    from schedules.toolchain import devices

    count = len(devices.cuda())
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in outer.split(",")][:count] if outer else [str(index) for index in range(count)]
    if numbers is None:
        return names or [""]
    if wrong := [number for number in numbers if not 0 <= number < count]:
        raise TuningError(f"there is no GPU {wrong[0]}; this machine shows {count}")
    return [names[number] for number in numbers]
