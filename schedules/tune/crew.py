"""Who does the work of a search: processes that build, and one process for each device that measures.

A crew takes jobs and returns futures of their results.  Whatever a candidate does to its process is a `Failure`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

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

R = TypeVar("R")
INSTALL = "pip install 'te-schedules[tune]'"
PREPARE_TIMEOUT = 600.0  # seconds to compute a reference; no candidate runs meanwhile
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
    one for each core.  Raises UsageError if there is no device, ToolchainError if pebble is not installed.
    """

    def __init__(
        self,
        arch: Arch,
        *,
        builders: int | None = None,
        devices: Sequence[int] | None = None,
        build_timeout: float = 60.0,
        measure_timeout: float = 30.0,
    ) -> None:
        if pebble is None:
            raise ToolchainError(f"pebble, which runs the worker processes, is not installed; {INSTALL}")
        self.arch = arch
        self.builders = builders or len(os.sched_getaffinity(0))
        self.exclusive = not arch.is_gpu
        self._build_timeout, self._measure_timeout = build_timeout, measure_timeout
        self._folder = ScratchFolder()
        try:
            memory = memory_share(self.builders + 1)
            self._building = _pool(self.builders, self._folder.path, memory, {})
            visible = visible_devices(devices) if arch.kind == "cuda" else [""]
            self._slots = [
                _Slot(arch, self._folder.path, None if arch.is_gpu else memory, name, measure_timeout)
                for name in visible
            ]
            self.slots = len(self._slots)
            found = [slot.describe() for slot in self._slots]
            self.device, self.versions = found[0].result()
            if others := sorted({name for future in found[1:] if (name := future.result()[0]) != self.device}):
                raise TuningError(f"the GPUs differ ({self.device}, {others[0]}); tune them apart, with --gpus")
        except BaseException:
            self.close()
            raise
        self._jobs: queue.SimpleQueue[tuple[Job, Future[Any]] | None] = queue.SimpleQueue()
        for slot in self._slots:
            slot.serve(self._jobs)

    def build(self, problem: Problem, candidate: Candidate) -> Future[Artifact | Failure]:
        done: Future[Artifact | Failure] = Future()
        self._build(problem, candidate, done, tries=2)
        return done

    def _build(self, problem: Problem, candidate: Candidate, done: Future[Any], tries: int) -> None:
        task = self._building.schedule(
            evaluate.build_candidate, args=(problem, self.arch, candidate), timeout=self._build_timeout
        )

        def finish(task: Any) -> None:
            if done.cancelled():
                return
            try:
                result = _result(task, "build", self._build_timeout)
            except _Killed as killed:
                if tries > 1:
                    self._build(problem, candidate, done, tries - 1)
                    return
                result = Failure("compile", str(killed))
            except BaseException as error:
                _set(done, error=error)
                return
            _set(done, result)

        task.add_done_callback(finish)

    def measure(self, job: Job) -> Future[Any]:
        done: Future[Any] = Future()
        self._jobs.put((job, done))
        return done

    def state(self) -> list[str]:
        return [slot.state for slot in self._slots]

    def close(self) -> None:
        """Stop every process.  Futures that are not done never will be."""
        if pool := getattr(self, "_building", None):
            pool.stop()
        for slot in getattr(self, "_slots", []):
            slot.close()
        if pool:
            pool.join()
        self._folder.close()


class _Slot:
    """One device: a process that measures on it, and a thread that hands it one job at a time."""

    def __init__(self, arch: Arch, folder: str, memory: int | None, visible: str, timeout: float) -> None:
        self._arch, self._folder, self._memory, self._timeout = arch, folder, memory, timeout
        self._environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
        self._name = visible or "cpu"
        self._thread: threading.Thread | None = None
        self._prepared: set[tuple[Problem, int]] = set()
        self.state = "starting"
        self._closed = False
        self._pool = self._start()

    def _start(self) -> Any:
        self._prepared = set()
        return _pool(1, self._folder, self._memory, self._environment)

    def describe(self) -> Future[tuple[str, dict[str, str]]]:
        """The device's name and versions, when the process has found them."""
        found: Future[tuple[str, dict[str, str]]] = self._pool.schedule(
            evaluate.describe_device, args=(self._arch,), timeout=PREPARE_TIMEOUT
        )
        return found

    def serve(self, jobs: queue.SimpleQueue[tuple[Job, Future[Any]] | None]) -> None:
        self._thread = threading.Thread(target=self._serve, args=(jobs,), daemon=True)
        self._thread.start()

    def _serve(self, jobs: queue.SimpleQueue[tuple[Job, Future[Any]] | None]) -> None:
        while not self._closed:
            self.state = "idle"
            try:
                item = jobs.get(timeout=0.5)
            except queue.Empty:
                continue
            if item is None:
                return
            job, done = item
            if done.set_running_or_notify_cancel():
                try:
                    _set(done, self._run(job))
                except BaseException as error:
                    _set(done, error=error)

    def _run(self, job: Job) -> Any:
        """The result of `job`; a process that something else killed is replaced, and the job tried once more."""
        for last in (False, True):
            try:
                for seed in job.seeds:
                    if (job.problem, seed) not in self._prepared:
                        self.state = "preparing"
                        self._call(evaluate.prepare, (job.problem, self._arch, seed), PREPARE_TIMEOUT)
                        self._prepared.add((job.problem, seed))
                self.state = "measuring"
                result = self._call(
                    job.function, (job.problem, self._arch, *job.arguments), job.timeouts * self._timeout
                )
            except _Killed as killed:
                self._replace()
                if last:
                    return Failure("runtime", str(killed))
                continue
            if isinstance(result, Failure) and (result.fatal or result.outcome == "timeout"):
                self._replace()
            return result
        raise AssertionError("unreachable")

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
        return _result(self._pool.schedule(function, args=arguments, timeout=timeout), "measurement", timeout)

    def _replace(self) -> None:
        """A new process for the old one, whose device context may be beyond repair."""
        self.state = "restarting"
        old, self._pool = self._pool, self._start()
        old.stop()
        old.join()

    def close(self) -> None:
        self._closed = True
        self._pool.stop()
        if self._thread:
            self._thread.join()
        self._pool.join()


class _Killed(Exception):
    """A worker was ended from outside: by a person, or by a system short of memory."""


def _result(task: Any, what: str, timeout: float) -> Any:
    """What a pool's task came to; what a candidate did to its process as a Failure.  Raises _Killed."""
    try:
        return task.result()
    except FutureTimeout:
        return Failure("timeout", f"{what} took longer than {timeout:g} s", fatal=True)
    except pebble.ProcessExpired as expired:
        code = expired.exitcode
        if code in KILLED:
            raise _Killed(f"the process was killed twice ({signal.Signals(-code).name}); out of memory?") from None
        how = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
        return Failure("compile" if what == "build" else "runtime", f"the process died: {how}", fatal=True)
    except (MemoryError, OSError) as error:
        outcome = "compile" if what == "build" else "runtime"
        return Failure(outcome, f"{type(error).__name__}: {error}" if str(error) else "out of memory", fatal=True)


def _set(done: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Finish `done`, which may have been cancelled meanwhile."""
    if isinstance(error, CancelledError) or done.cancelled():
        done.cancel()
    elif error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


def _pool(workers: int, folder: str, memory: int | None, environment: dict[str, str]) -> Any:
    """A pool of processes that start from nothing: a copy of this one would share its threads' locks."""
    logging.getLogger("pebble").setLevel(logging.CRITICAL)
    return pebble.ProcessPool(
        workers,
        initializer=start_worker,
        initargs=(os.getpid(), folder, memory, environment),
        context=multiprocessing.get_context("spawn"),
    )


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
