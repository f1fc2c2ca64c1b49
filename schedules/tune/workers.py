"""The processes in which candidates are built and run, and what becomes of one that a candidate ends.

A crew has them beside itself (`crew.LocalCrew`) or on other machines (`actors`); what they do is the same.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

from schedules.arch import Arch
from schedules.errors import ToolchainError
from schedules.problem import Problem
from schedules.tune import evaluate
from schedules.tune.evaluate import Artifact, Failure
from schedules.tune.process import start_worker
from schedules.tune.strategy import Candidate

try:
    import pebble
except ImportError:
    pebble = None

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


class BuildPool:
    """`workers` processes that build for `arch`, each candidate within `timeout` seconds."""

    def __init__(self, arch: Arch, workers: int, folder: str, memory: int | None, timeout: float) -> None:
        self._arch, self._timeout = arch, timeout
        self._pool = _pool(workers, folder, memory, {})

    def build(self, problem: Problem, candidate: Candidate) -> Future[Artifact | Failure]:
        done: Future[Artifact | Failure] = Future()
        self._build(problem, candidate, done, tries=2)
        return done

    def _build(self, problem: Problem, candidate: Candidate, done: Future[Any], tries: int) -> None:
        task = self._pool.schedule(
            evaluate.build_candidate, args=(problem, self._arch, candidate), timeout=self._timeout
        )

        def finish(task: Any) -> None:
            if done.cancelled():
                return
            try:
                result = _result(task, "build", self._timeout)
            except _Killed as killed:
                if tries > 1:
                    self._build(problem, candidate, done, tries - 1)
                    return
                result = Failure("compile", str(killed))
            except BaseException as error:
                settle(done, error=error)
                return
            settle(done, result)

        task.add_done_callback(finish)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """A call of another function in one of the processes."""
        found: Future[Any] = self._pool.schedule(function, args=arguments, timeout=PREPARE_TIMEOUT)
        return found

    def stop(self) -> None:
        """End the processes; `join` waits for that.  Futures that are not done never will be."""
        self._pool.stop()

    def join(self) -> None:
        self._pool.join()


class DeviceProcess:
    """A process that measures on one device, one job after another, and its successors.

    `visible` is its CUDA_VISIBLE_DEVICES, or "" to leave that as it is; `memory` limits it in bytes.
    """

    def __init__(self, arch: Arch, folder: str, memory: int | None, visible: str, timeout: float) -> None:
        self._arch, self._folder, self._memory, self._timeout = arch, folder, memory, timeout
        self._environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
        self._prepared: set[tuple[Problem, int]] = set()
        self.state = "starting"
        self._lock = threading.Lock()  # no process is started once they are stopped
        self._stopped = False
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

    def run(self, job: Job) -> Any:
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
        task = self._pool.schedule(function, args=arguments, timeout=timeout)
        # a pool that is stopped leaves its tasks unanswered
        while not wait([task], timeout=0.2).done:
            if self._stopped:
                raise CancelledError
        return _result(task, "measurement", timeout)

    def _replace(self) -> None:
        """A new process for the old one, whose device context may be beyond repair."""
        self.state = "restarting"
        with self._lock:
            if self._stopped:
                return
            old, self._pool = self._pool, self._start()
        old.stop()
        old.join()

    def stop(self) -> None:
        """End the process; `join` waits for that."""
        with self._lock:
            self._stopped = True
            self._pool.stop()

    def join(self) -> None:
        self._pool.join()


class _Killed(Exception):
    """A worker was ended from outside: by a person, or by a system short of memory."""


def settle(done: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Finish `done`, which may have been cancelled meanwhile."""
    if isinstance(error, CancelledError) or done.cancelled():
        done.cancel()
    elif error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


def need_pebble() -> None:
    """Raises ToolchainError if what runs the processes is not installed."""
    if pebble is None:
        raise ToolchainError(f"pebble, which runs the worker processes, is not installed; {INSTALL}")


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


def _pool(workers: int, folder: str, memory: int | None, environment: dict[str, str]) -> Any:
    """A pool of processes that start from nothing: a copy of this one would share its threads' locks."""
    logging.getLogger("pebble").setLevel(logging.CRITICAL)
    return pebble.ProcessPool(
        workers,
        initializer=start_worker,
        initargs=(os.getpid(), folder, memory, environment),
        context=multiprocessing.get_context("spawn"),
    )
