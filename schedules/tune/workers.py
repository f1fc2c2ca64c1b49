"""The processes in which candidates are built and run, and what becomes of one that a candidate ends.

A crew has them beside itself (`crew.LocalCrew`) or on other machines (`actors`); what they do is the same.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from schedules.core.arch import Arch
from schedules.core.child import Child, Ended, Overdue, Stopped
from schedules.core.errors import MachineError, SchedulesError, TuningError
from schedules.core.machine import OUT_OF_MEMORY, complaint, prove_machine, prove_memory
from schedules.core.problem import Problem
from schedules.core.process import start_worker
from schedules.tune import evaluate
from schedules.tune.evaluate import Failure
from schedules.tune.strategy import Candidate

PREPARE_TIMEOUT = 600.0  # seconds to compute a reference; no candidate runs meanwhile
TRIES = 3  # of an order whose process is killed or stopped from outside
STARTS = 10  # of a process that is killed before it is given a candidate
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # how a process ends that something else ended
OWN_FAULTS = ("constraints", "correctness")  # of a candidate, whatever the machine is like
DIED = "died"  # what makes a failure doubtful, if the process died: a signal may have come from outside
# seconds before each new try of what failed in the machine's words though it is well: a disk may be full for a while
DOUBTS = (0.0, 2.0, 8.0)
LONGEST_PAUSE = 30.0  # seconds between two looks at a machine that is at fault


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

    def child(self) -> Child:
        """A process that starts from nothing: a copy of this one would share its threads' locks.

        Raises MachineError if none can be started.
        """
        return Child(
            start_worker,
            (self.folder, self.memory, self.background),
            environment=self.environment,
            quiet=not os.environ.get("SCHEDULES_DEBUG"),
        )


class Worker:
    """A process, and a thread that hands it one order of `orders` at a time.

    A failure is its candidate's only if the machine is proven well after it.  Otherwise the order ends with a
    MachineError, and no other is taken until the machine is well.
    """

    def __init__(self, arch: Arch, setup: Setup, orders: Orders) -> None:
        self._arch, self._setup, self._orders = arch, setup, orders
        self._child: Child | None = None
        self._prepared: set[tuple[Any, ...]] = set()  # in this process
        self._known: set[tuple[Any, ...]] = set()  # in any process so far
        self._thread: threading.Thread | None = None
        self.state = "starting"
        self.closed = False

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin to serve, after one order of its own.  Raises MachineError if there is no thread to be had."""
        own, done = Order(function, arguments, PREPARE_TIMEOUT, "runtime"), Future[Any]()
        thread = threading.Thread(target=self._serve, args=(own, done), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise MachineError(f"no thread can be started ({error}); end some processes") from error
        self._thread = thread
        return done

    def _serve(self, order: Order, done: Future[Any]) -> None:
        try:
            self._answer(order, done)
            while not self.closed:
                self.state = "idle"
                with contextlib.suppress(queue.Empty):
                    self._answer(*self._orders.get(timeout=0.2))
        finally:
            self._end()

    def _answer(self, order: Order, done: Future[Any]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(self._run(order))
        except MachineError as error:
            done.set_exception(error)
            self._recover(order)
        except BaseException as error:
            done.set_exception(error)

    def _run(self, order: Order) -> Any:
        """The result of `order`; a process that something else killed or stopped is replaced, and the order tried
        again.  Raises MachineError."""
        lost = 0
        doubts: Iterator[float] | None = None
        while True:
            self._get_ready(order)
            try:
                self.state = "measuring" if order.first else "building"
                result = self._call(order.function, order.arguments, order.timeout, order.outcome)
            except (_Killed, Stopped) as error:
                self._end()
                lost += 1
                if lost < TRIES:
                    continue
                if isinstance(error, Stopped):
                    raise MachineError(f"{error}, {TRIES} times in turn; end what stops it") from None
                result = Failure(order.outcome, str(error))
            if not isinstance(result, Failure) or result.outcome in OWN_FAULTS:
                return result
            if result.fatal:
                self._end()
            self._prove(order)
            doubts = doubts or iter(_waits(result.suspect))
            wait = next(doubts, None) if result.suspect else None
            if wait is None:
                return result
            self._sleep(wait)

    def _get_ready(self, order: Order) -> None:
        """Start the process and prepare what `order` needs; no candidate is to blame for what happens meanwhile.

        Raises MachineError, and TuningError for what never worked.
        """
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(evaluate.warm_up, (self._arch,))]
        calls += [(evaluate.prepare, each) for each in order.first]
        stops = 0
        for _ in range(STARTS):
            try:
                if not self._child or not self._child.alive:
                    self._end()
                    self._child = self._setup.child()
                for call in calls:
                    if call not in self._prepared:
                        self.state = "preparing"
                        self._prepare(call, order)
                return
            except _Killed:
                self._end()
            except (Stopped, _Crashed) as lost:
                self._end()
                stops += 1
                if stops == TRIES:
                    stopped = MachineError(f"{lost}, {TRIES} times in turn; end what stops it")
                    raise getattr(lost, "fault", stopped) from None
        raise self._fault(
            calls[-1], f"worker processes are killed as they start, {STARTS} times in turn; is there memory left?"
        )

    def _prepare(self, call: tuple[Callable[..., Any], tuple[Any, ...]], order: Order) -> None:
        try:
            found = self._call(call[0], call[1], PREPARE_TIMEOUT, order.outcome)
        except (SchedulesError, CancelledError, _Killed, Stopped):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {evaluate.line_of(error)}"
            found = Failure(order.outcome, text, fatal=True, suspect=complaint(error))
        if isinstance(found, Failure):
            self._end()
            begun = call[0] is evaluate.warm_up
            what = "a worker process cannot start" if begun else "the problem's data and reference cannot be prepared"
            fault = self._fault(call, f"{what}: {found.reason}", found.suspect)
            raise _Crashed(fault) if found.suspect == DIED else fault
        self._prepared.add(call)
        self._known.add(call)

    def _fault(self, call: tuple[Any, ...], text: str, suspect: str = "") -> MachineError | TuningError:
        """The machine's, if it could do `call` before, or says so itself.  Raises MachineError if memory is short."""
        prove_memory()
        ours = call in self._known or call[0] is evaluate.warm_up or suspect not in ("", DIED, *OUT_OF_MEMORY)
        return MachineError(text) if ours else TuningError(text)

    def _prove(self, order: Order) -> None:
        """Raises MachineError unless the machine, and the device that `order` needs, do what they should."""
        self._get_ready(order)
        self.state = "preparing"
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(prove_machine, ())]
        calls += [(evaluate.prove_device, each) for each in order.first[:1]]
        for call in calls:
            try:
                found = self._call(call[0], call[1], PREPARE_TIMEOUT, order.outcome)
            except (SchedulesError, CancelledError):
                raise
            except Exception as error:
                found = Failure(order.outcome, f"{type(error).__name__}: {evaluate.line_of(error)}")
            if isinstance(found, Failure):
                self._end()
                raise MachineError(f"what worked before fails without any candidate: {found.reason}")

    def _recover(self, order: Order) -> None:
        """Wait until the machine is well again."""
        pause = 1.0
        while not self.closed:
            self.state = "waiting"
            self._sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                return self._prove(order)
            except MachineError:
                continue
            except (SchedulesError, CancelledError):
                return  # the next order says so

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.closed and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.2, left))

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float, outcome: str) -> Any:
        """What `function` returns; what a candidate did to the process as a Failure.  Raises _Killed and Stopped."""
        if self.closed or not self._child:
            raise CancelledError
        try:
            return self._child.call(function, arguments, timeout, lambda: self.closed)
        except Overdue as overdue:
            return Failure("timeout", str(overdue), fatal=True)
        except Ended as ended:
            if ended.exitcode in KILLED:
                raise _Killed(signal.Signals(-ended.exitcode).name) from None
            return Failure(outcome, str(ended), fatal=True, suspect=complaint(str(ended)) or DIED)
        except (MemoryError, OSError) as error:
            text = f"{type(error).__name__}: {error}" if str(error) else "out of memory"
            return Failure(outcome, text, fatal=True, suspect=complaint(error))

    def _end(self) -> None:
        """End the process, which is gone, or whose device context may be beyond repair."""
        child, self._child = self._child, None
        self._prepared = set()
        if child:
            self.state = "restarting"
            child.kill()

    def stop(self) -> None:
        """Begin to end the process; `close` waits for it."""
        self.closed = True

    def close(self) -> None:
        self.stop()
        if self._thread:
            self._thread.join()


class _Killed(Exception):
    """A worker was ended from outside: by a person, or by a system short of memory."""

    def __init__(self, how: str = "SIGKILL") -> None:
        super().__init__(f"the process was killed {TRIES} times ({how}); out of memory?")


class _Crashed(Exception):
    """A worker died before it had a candidate; `fault` is what that comes to if the next ones do too."""

    def __init__(self, fault: MachineError | TuningError) -> None:
        super().__init__(str(fault))
        self.fault = fault


def _waits(suspect: str) -> tuple[float, ...]:
    """Seconds to wait before each new try of what failed, with the machine well after it."""
    return DOUBTS[:1] if suspect in (DIED, *OUT_OF_MEMORY) else DOUBTS
