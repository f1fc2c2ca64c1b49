"""What every worker process does first, and what is left to do when its parent is killed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from schedules.core.errors import MachineError

SCRATCH = "SCHEDULES_SCRATCH"  # in a worker's environment, the folder that the workers of a crew share
BACKGROUND = 10  # what is added to the niceness of processes that build while others measure
_PR_SET_PDEATHSIG = 1
_RELAX = "tvm.relax"
PARTING = 3.0  # seconds for a child to end by itself
# Its own child does the work: a system that ends a process may end the children of it too (Ray does), not theirs
_JANITOR = """
import os, shutil, sys, time
os.fork() and os._exit(0)
sys.stdin.read()
for _ in range(100):  # a compiler that outlives its worker may write once more
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]): break
    time.sleep(0.1)
"""


def import_tvm_alone() -> None:
    """Have TVM, when it is imported, come without PyTorch, which TVM imports where it is installed, and without Relax,
    TVM's graphs of networks: neither the command line nor a worker needs them, and they are most of the time that a
    process takes to start, the more where many start at once.

    For a process of this package alone, before it has imported any of them; PyTorch and Relax can be imported later.
    """
    if "torch" not in sys.modules and "tvm_ffi" not in sys.modules:
        sys.meta_path.insert(0, _TvmAlone())


class _TvmAlone(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == "tvm" else None
        if spec and spec.loader:
            spec.loader.exec_module = partial(_alone, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _alone(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    if "torch" in sys.modules:
        return execute(module)
    sys.modules["torch"] = None  # type: ignore[assignment]
    sys.modules[_RELAX] = later = ModuleType(_RELAX)
    # what TVM's parser asks of all that it read; else it is Relax itself that is asked
    later.Function = _FunctionOfRelax("Function", (), {})  # type: ignore[attr-defined]
    later.__getattr__ = lambda name: getattr(importlib.import_module(_RELAX), name)  # type: ignore[method-assign]
    collects = gc.isenabled()
    gc.disable()  # nothing of TVM is garbage yet, and a tenth of the time would go into looking for it
    try:
        execute(module)
    finally:
        if collects:
            gc.enable()
        del sys.modules["torch"], sys.modules[_RELAX]


class _FunctionOfRelax(type):
    """Of the class in Relax; there are none of it before Relax is imported."""

    def __instancecheck__(cls, value: Any) -> bool:
        return _RELAX in sys.modules and isinstance(value, sys.modules[_RELAX].Function)


def die_with(parent: int) -> None:
    """Have this process killed when `parent`, which started it, ends; it exits at once if that has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


@contextlib.contextmanager
def shielded_children() -> Iterator[None]:
    """Processes that start in the body get no signal of the terminal, which goes to every process of it: what becomes
    of them is the starting one's to say."""
    with kept_signals(signal.SIGINT, signal.SIGHUP):
        yield


@contextlib.contextmanager
def kept_signals(*numbers: int) -> Iterator[None]:
    """Signals of these numbers, to this thread or to one that starts in the body, come once that is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is over when the body is: asked to end if it is not, and killed if it does not."""
    with shielded_children():
        process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PARTING)
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


def start_worker(folder: str, memory: int | None, background: bool = False, silent: bool = True) -> None:
    """Send this process's temporary files to `folder`, and let it go first if memory is short.

    `memory` limits its data in bytes; with CUDA none is set, since the driver maps far more than it uses.  A process in
    the `background` leaves the cores to the others.
    """
    if background:
        os.nice(BACKGROUND)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if silent and not os.environ.get("SCHEDULES_DEBUG"):
        # a candidate's last words (a native stack, a driver's complaint) would tear the progress view apart
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    os.environ["TMPDIR"] = os.environ[SCRATCH] = tempfile.tempdir = folder


class ScratchFolder:
    """A folder for temporary files that is gone when this process is, however it ends.

    A process that does nothing else waits for its standard input to close, which the kernel does for the dead.
    Raises MachineError if it cannot be made.
    """

    def __init__(self) -> None:
        try:
            self.path = tempfile.mkdtemp(prefix="schedules-tune-")
        except OSError as error:
            raise MachineError(
                f"no temporary folder can be made: {error.strerror or error}; free some space, or set TMPDIR"
            ) from error
        try:
            janitor = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _JANITOR, self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a signal to the terminal's processes must not reach it
            )
        except OSError as error:
            os.rmdir(self.path)
            raise MachineError(f"no process can be started: {error.strerror or error}; end some others") from error
        except BaseException:  # interrupted
            os.rmdir(self.path)
            raise
        self._lifeline: IO[bytes] | None = janitor.stdin
        janitor.wait()

    def close(self) -> None:
        lifeline, self._lifeline = self._lifeline, None
        if lifeline:
            shutil.rmtree(self.path, ignore_errors=True)
            lifeline.close()


def memory_share(processes: int) -> int:
    """Bytes that each of `processes` may use of this machine's memory; no less than 2 GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(2 * 2**30, int(total * 0.8) // processes)
