"""Signals that ask this process to end: none is lost, one line answers them, and the exit code is then 130.

Python answers Ctrl-C with a KeyboardInterrupt, which it loses where exceptions are ignored (in a finaliser, in a
callback from native code), and which waits for as long as native code runs.  A process that heeds signals raises it
again until the main thread unwinds, and is ended by a thread of its own where that takes longer than PATIENCE.

The first thing that a program imports, so it imports only what is compiled into the interpreter.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` itself adds enums, ten times as slow to import
import _thread
import atexit
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

ASKING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # exit code
LINE = "schedules: error: interrupted"
AGAIN = 0.25  # seconds after which a KeyboardInterrupt that was lost is raised again
GRACE = 3.5  # seconds for what is to be finished first: see Deferred
PATIENCE = 6.0  # seconds from the signal until the process is ended, wherever it is
LOOK = 0.5  # seconds between two looks at signals that wait
CLOSING = 1.5  # seconds for its exit functions then, which remove temporary folders
_NOW = 0  # in the pipe of the signals' numbers: end without waiting


class Heeding:
    """Heeds signals from `install` to `remove`, or in the body of a ``with``; in the main thread.

    While it is `starting`, when there is nothing to clean up, a signal ends the process at once; then it raises
    KeyboardInterrupt, or tells the Deferred of `deferred`; while `leaving` it is only counted.
    """

    def __init__(self, starting: bool = False) -> None:
        self.starting = starting
        self.leaving = False
        self.deferred: Deferred | None = None
        self.line = LINE
        self.asked = 0  # signals
        self.code: int | None = None  # that the process ends with if no signal comes
        self._answered = False

    def install(self) -> None:
        global _current
        self._outer, _current = _current, self
        self._before = {number: signal.getsignal(number) for number in (*ASKING, signal.SIGALRM)}
        self._hook, sys.unraisablehook = sys.unraisablehook, self._ignored
        for number in ASKING:
            if number != signal.SIGHUP or self._before[number] != signal.SIG_IGN:  # as nohup asks
                signal.signal(number, self._signalled)
        signal.signal(signal.SIGALRM, lambda number, frame: self._interrupt())
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._pipe_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _thread.start_new_thread(self._watch, (reader,))
        # what was kept until here: see `heed`
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)

    def remove(self) -> None:
        global _current
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._pipe_before)
        os.close(self._writer)  # which ends the thread
        sys.unraisablehook = self._hook
        _current = self._outer

    def __enter__(self) -> Heeding:
        self.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def answer(self, line: str | None = None) -> int:
        """The exit code, after the line that says why; one is enough."""
        if not self._answered:
            self._answered = True
            # past the stream: a handler may have interrupted a write to that
            _attempt(os.write, 2, f"{line or self.line}\n".encode())
        return INTERRUPTED

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        if self.starting:
            os._exit(self.answer())
        if not self.deferred:
            self._interrupt()
        elif self.asked == 1:
            signal.setitimer(signal.ITIMER_REAL, GRACE, AGAIN)
            self._answered = True
            _attempt(self.deferred.tell, number)
        else:
            os.write(self._writer, bytes([_NOW]))

    def _interrupt(self) -> None:
        """Raise KeyboardInterrupt, again and again unless the main thread is unwinding or leaving."""
        if self.leaving or _unwinding():
            return
        signal.setitimer(signal.ITIMER_REAL, AGAIN, AGAIN)
        raise KeyboardInterrupt

    def _ignored(self, unraisable: Any) -> None:
        if not self.asked:
            self._hook(unraisable)

    def _watch(self, reader: int) -> None:
        """End the process if it has not ended in time.  The numbers come from C, whatever the main thread does."""
        import select  # in this thread: no need to wait for it

        # a signal that the main thread keeps for later (`process.kept_signals`) is to wait, not to come to this one
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            left = LOOK if deadline is None else min(LOOK, max(0.0, deadline - time.monotonic()))
            numbers = b""
            if select.select([reader], [], [], left)[0]:
                numbers = os.read(reader, 256)
                if not numbers:
                    os.close(reader)
                    return
                if _NOW in numbers:
                    break
            if deadline is None and any(number in ASKING for number in (*numbers, *signal.sigpending())):
                deadline = time.monotonic() + PATIENCE
        self._end()

    def _end(self) -> None:
        """End the process from another thread than the main one."""
        self.asked = self.asked or 1
        done = _thread.allocate_lock()
        done.acquire()

        def close() -> None:
            atexit._run_exitfuncs()
            done.release()

        _thread.start_new_thread(close, ())
        done.acquire(timeout=CLOSING)
        self.end()

    def end(self) -> NoReturn:
        """End this process at once, and its children: one that is about to start would complain of what is gone."""
        for child in _children():
            # what a worker runs is of its group; the tracker of semaphores ignores this signal, and cleans up after us
            _attempt(os.killpg, child, signal.SIGTERM)
            _attempt(os.kill, child, signal.SIGTERM)
        os._exit(self.answer())


class Deferred:
    """In the body of the ``with``, the first signal is told to `tell`, by its number, in place of KeyboardInterrupt; a
    second one ends the process at once.

    What is to be finished first has GRACE seconds; then the body is interrupted after all.
    """

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.tell = tell

    def __enter__(self) -> Callable[[], bool]:
        self._own = _current is None
        self._heeding = heeding = _current or Heeding()
        if self._own:
            heeding.install()
        heeding.deferred = self
        if heeding.asked:  # before, and it was lost
            self.__exit__()
            raise KeyboardInterrupt
        return lambda: heeding.asked > 0

    def __exit__(self, *exception: object) -> None:
        self._heeding.deferred = None
        if self._own:
            self._heeding.remove()


_current: Heeding | None = None


def heed() -> None:
    """Heed signals from here on, until `run` ends the process.

    Before this the interpreter starts, and answers in its own ways; where that matters, ``env --block-signal=INT``
    before the command keeps for it what comes meanwhile.
    """
    if not _current:
        Heeding(starting=True).install()
        atexit.register(_last)  # the first to be registered, and so the last to run
        os.register_at_fork(after_in_child=_forked)


def asked() -> bool:
    """Whether a signal asked this process to end."""
    return bool(_current and _current.asked)


def answer(line: str) -> int:
    """The exit code of what was interrupted, after `line` on standard error unless another one was there."""
    if _current:
        return _current.answer(line)
    print(line, file=sys.stderr)
    return INTERRUPTED


def run(main: Callable[[], int], line: str = LINE) -> NoReturn:
    """Exit with what `main` returns; if a signal came before the very end, with `line` on standard error, and 130."""
    heeding = _current or Heeding()  # which heeds none, where nothing did before
    heeding.line = line
    try:
        heeding.starting = False
        heeding.code = main()
        heeding.leaving = True
    except BaseException as error:
        heeding.leaving = True
        if not heeding.asked and not isinstance(error, KeyboardInterrupt):
            raise
    signal.setitimer(signal.ITIMER_REAL, 0)
    if heeding.asked or heeding.code is None:
        heeding.code = answer(line)
    sys.exit(heeding.code)


def _last() -> None:
    """End the process here, once its exit functions have run: what is left could only be interrupted, or fail."""
    for stream in (sys.stdout, sys.stderr):
        _attempt(stream.flush)
    if _current and _current.asked:
        _current.end()
    if _current and _current.code is not None:
        os._exit(_current.code)


def _forked() -> None:
    """In a copy of this process signals do what they did before, and are not told to this one's thread."""
    if _current:
        _current.remove()


def _unwinding() -> bool:
    """Whether the main thread, in a handler, is on its way out for a KeyboardInterrupt."""
    error = sys.exc_info()[1]
    while error and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _children() -> list[int]:
    """The processes that this one started and that are there yet, as Linux tells."""
    found = []
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []:
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                found += [int(number) for number in file.read().split()]
        except OSError:  # the thread ended
            continue
    return found


def _attempt(tell: Callable[..., object], *arguments: object) -> None:
    """Call what tells somebody who may be gone."""
    try:
        tell(*arguments)
    except (OSError, ValueError):
        return
