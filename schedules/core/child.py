"""A process that makes calls for this one, started from nothing, and what becomes of it.

What a call does to its process costs the caller nothing: it is told that the process ended, took too long, or was
stopped by somebody.  Limits begin when the call is sent and go by the monotonic clock.  Time in which the process could
not run does not count: while this process was stopped as well, or others had the cores.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from multiprocessing import process, spawn
from multiprocessing.connection import Connection, Pipe
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from schedules.core.errors import MachineError, SchedulesError
from schedules.core.process import die_with

WORKER = "SCHEDULES_WORKER"  # in a child's environment from its first instruction: see process.import_tvm_alone
LOOK = 0.2  # seconds between two looks at a process that is at work
STALL = 1.0  # seconds between two looks count as this at most: this process was stopped itself, or all stood still
STOPPED = 10.0  # seconds that a process may be stopped by a signal until it is given up
STARVED = 9  # times its limit that a call may wait for a core besides
_COMMAND = "import sys; sys.path[:] = {path!r}; from schedules.core.child import spawn_main; spawn_main({descriptor})"


class Ended(Exception):
    """The process ended during a call; `exitcode` is negative for a signal."""

    def __init__(self, exitcode: int, words: str = "") -> None:
        how = signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"
        super().__init__(f"the process died: {how}{words and f' ({words})'}")
        self.exitcode = exitcode


class Stopped(Exception):
    """Somebody stopped the process and did not let it go on; it was ended."""

    def __init__(self) -> None:
        super().__init__("the process was stopped by a signal and did not go on")


class Overdue(Exception):
    """The call took longer than its limit; the process was ended."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"took longer than {seconds:g} s")


class Child:
    """A process that first calls `initializer`, then makes one call at a time.

    It has `environment` from its first instruction, besides what this process has: a driver may read a variable once,
    and importing the program's main module, which comes before any call, is enough to make it.  With `quiet` its output
    is kept for the errors' text until the initializer sends it elsewhere.  Without `main` it does not import the
    program's main module, and can be asked for nothing that is defined there.  It ends with the thread that made it.
    As a copy of `origin`, which has one thread, it has in memory what that has, environment and output too, and ends
    with it.
    Raises MachineError if no process can be started.
    """

    def __init__(
        self,
        initializer: Callable[..., None] | None = None,
        arguments: tuple[Any, ...] = (),
        *,
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
        main: bool = True,
        origin: Child | None = None,
    ) -> None:
        self._words = -1
        self._connection: Connection | None = None
        self._talker: threading.Thread | None = None
        self._asking = threading.Lock()  # of what makes copies
        try:
            self._connection, theirs = Pipe()
            with theirs:
                if quiet:
                    self._words = os.memfd_create("words")
                output = self._words if quiet else None
                command = _COMMAND.format(path=sys.path, descriptor=theirs.fileno())
                self._popen: subprocess.Popen[bytes] | _Copy
                if origin:
                    self._popen = _Copy(origin, theirs.fileno())
                else:
                    self._popen = subprocess.Popen(
                        [sys.executable, "-c", command],
                        env={**os.environ, WORKER: "1", **(environment or {})},
                        pass_fds=(theirs.fileno(),),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,  # what it starts can be ended with it; no key of a terminal reaches it
                    )
        except OSError as error:
            self._close()
            raise MachineError(f"no process can be started: {error.strerror or error}; end some others") from error
        preparation = spawn.get_preparation_data("worker")
        del preparation["authkey"]  # which is not to be written anywhere, nor needed
        if not main:
            preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main")}
        parent = origin.pid if origin else os.getpid()
        with contextlib.suppress(OSError):  # it has ended, which a call tells
            for message in ((preparation, parent), (initializer, arguments)):
                self._connection.send_bytes(pickle.dumps(message, protocol=5))

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def call(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...] = (),
        seconds: float = float("inf"),
        cancelled: Callable[[], bool] = lambda: False,
        descriptor: int | None = None,
    ) -> Any:
        """What `function` returns there, after which `descriptor` is sent; what it raises is raised.

        Raises Ended, Stopped, Overdue, and CancelledError once `cancelled` says so, after which the process is gone.
        """
        answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        message = pickle.dumps((function, arguments), protocol=5)
        # a process that is stopped neither reads nor writes: what waits for it is not what looks after it
        self._talker = threading.Thread(target=self._talk, args=(message, answers, descriptor), daemon=True)
        self._talker.start()
        spent = stopped = 0.0
        last = time.monotonic()
        delays = _core_delays(self.pid)
        while True:
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=LOOK)
                break
            if cancelled():
                self.kill()
                raise CancelledError
            if not self.alive:
                answer = None
                with contextlib.suppress(queue.Empty):
                    answer = answers.get(timeout=LOOK)  # it may have answered with its last breath
                break
            now = time.monotonic()
            passed, last = min(now - last, STALL), now
            spent += passed
            stopped = stopped + passed if _state(self.pid) == "T" else 0.0
            if stopped and stopped >= min(STOPPED, seconds):
                self.kill()
                raise Stopped
            if spent > seconds and spent > seconds + min(_waited(delays, self.pid), STARVED * seconds):
                self.kill()
                raise Overdue(seconds)
        if answer is None:
            raise self._ended()
        succeeded, found, trace = pickle.loads(answer)
        if succeeded:
            return found
        found.__cause__ = RemoteTraceback(trace)
        raise found

    def kill(self) -> None:
        """End the process and what it started, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds ends when that lets it go
            self._popen.wait(5)
        self._close()

    def _close(self) -> None:
        if self._talker:
            self._talker.join(LOOK)  # which the end of the process ends
        if self._connection and not (self._talker and self._talker.is_alive()):
            self._connection.close()
            self._connection = None
        if self._words >= 0:
            os.close(self._words)
            self._words = -1

    def _talk(self, message: bytes, answers: queue.SimpleQueue[bytes | None], descriptor: int | None) -> None:
        answer = None
        connection = self._connection
        with contextlib.suppress(OSError, EOFError):
            if connection:
                connection.send_bytes(message)
                if descriptor is not None:
                    send_handle(connection, descriptor, self.pid)
                answer = connection.recv_bytes()
        answers.put(answer)

    def _ended(self) -> Ended:
        words = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(5)
        if self._words >= 0:
            size = os.fstat(self._words).st_size
            said = os.pread(self._words, 4096, max(0, size - 4096)).decode(errors="replace").split("\n")
            words = next((line.strip() for line in reversed(said) if line.strip()), "")[:200]
        self.kill()
        return Ended(self._popen.returncode if self._popen.returncode is not None else -signal.SIGKILL, words)


class _Copy:
    """What `subprocess` would say of a process that is not this one's child but its `origin`'s."""

    def __init__(self, origin: Child, descriptor: int) -> None:
        self._origin = origin
        self.returncode: int | None = None
        self.pid: int = self._asked(_copy, descriptor=descriptor)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._asked(_exit_code, (self.pid,))
            except (Ended, Stopped):  # and with it all copies
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float) -> None:
        """Raises subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("copy", timeout)
            time.sleep(0.002)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _asked(self, *call: Any, **options: Any) -> Any:
        with self._origin._asking:
            return self._origin.call(*call, **options)


_connection: Connection  # of a child, with its parent


def _copy() -> int:
    """In a child: another process with all that is in its memory, to be asked by the descriptor that is sent."""
    descriptor = recv_handle(_connection)
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        os.setsid()
        _connection.close()
        spawn_main(descriptor)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _exit_code(pid: int) -> int | None:
    """In a child: of a copy that has ended."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def spawn_main(descriptor: int) -> None:
    """The life of a child: its program's main module, the initializer, then calls, until nobody asks any more."""
    global _connection
    # Ctrl-C goes to every process of the terminal; what becomes of this one is its parent's to say
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # a handler written in Python never runs while native code spins
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.set_inheritable(descriptor, False)
    _connection = connection = Connection(descriptor)
    preparation, parent = pickle.loads(_received(connection))
    die_with(parent)
    current: Any = process.current_process()
    current._inheriting = True  # a main module that starts processes as it is imported is told so
    spawn.prepare(preparation)  # imports the main module, which what comes next may name
    del current._inheriting
    initializer, arguments = pickle.loads(_received(connection))
    if initializer:
        initializer(*arguments)
    while True:
        answer = _answer(_received(connection))
        with contextlib.suppress(OSError):
            connection.send_bytes(answer)


def _received(connection: Connection) -> bytes:
    """The next message; without one, nobody asks any more."""
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)


def _answer(message: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(message)
        return pickle.dumps((True, function(*arguments), ""), protocol=5)
    except BaseException as error:
        return pickle.dumps((False, _portable(error), traceback.format_exc()))


def _portable(error: BaseException) -> BaseException:
    """`error`, or where that cannot be sent, its text in the nearest kind of error that can."""
    ours = isinstance(error, SchedulesError)
    made: list[Callable[[], BaseException]] = [lambda: error]
    made += [lambda kind=kind: kind(str(error)) for kind in type(error).__mro__ if ours]  # type: ignore[misc]
    for make in made:
        with contextlib.suppress(Exception):
            return pickle.loads(pickle.dumps(make()))  # type: ignore[no-any-return]
    return RuntimeError(f"{type(error).__name__}: {error}")


def _state(pid: int) -> str:
    """A letter: R runs, S sleeps, T is stopped; "" where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _core_delays(pid: int) -> dict[str, int]:
    """The nanoseconds that each thread of a process has waited for a core so far."""
    found = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found[task] = int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[1])
    return found


def _waited(before: Mapping[str, int], pid: int) -> float:
    """The seconds since `before` that the thread that waited most has waited for a core."""
    return max((now - before.get(task, 0) for task, now in _core_delays(pid).items()), default=0) / 1e9
