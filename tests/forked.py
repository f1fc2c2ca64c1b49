"""Worker processes that are forks of the process that starts them, which has TVM: a second less of CPU for each.

They have a parent, a session, descriptors, an environment and signals as those that start from nothing, which
tests/core/test_child.py and the tests of commands in processes of their own have.  What their parent has in memory they
have too: a test's stand-ins.
"""

from __future__ import annotations

import _thread
import faulthandler
import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib import _bootstrap  # type: ignore[attr-defined]
from types import SimpleNamespace
from typing import Any

from schedules.core import child


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, *_: Any,
    ) -> None:  # fmt: skip
        self.pid = os.fork()
        if self.pid == 0:
            _live(*pass_fds, (p2cread, c2pwrite, errwrite), env)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _live(descriptor: int, streams: tuple[int, int, int], environment: Mapping[str, str]) -> None:
    """What a new interpreter would do with the command of a `child.Child`; ends the process."""
    code = 1
    try:
        os.setsid()
        faulthandler.disable()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGPROF):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            if stream >= 0:
                os.dup2(stream, number)
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        _let_go()
        os.environ.clear()
        os.environ.update(environment)
        child.spawn_main(descriptor)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _let_go() -> None:
    """Free what other threads of the parent held, which they never will: modules that they were importing, to be
    imported anew, and the locks that cached properties have before Python 3.12."""
    for name, reference in list(_bootstrap._module_locks.items()):
        lock = reference()
        if lock is not None and lock.owner not in (None, _thread.get_ident()):
            del _bootstrap._module_locks[name]
            sys.modules.pop(name, None)
    _bootstrap._blocking_on.clear()
    classes = {
        each
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "schedules"
        for each in vars(module).values()
        if isinstance(each, type)
    }
    for value in itertools.chain(*(vars(each).values() for each in classes)):
        if isinstance(value, functools.cached_property) and hasattr(value, "lock"):
            value.lock = threading.RLock()


# in the place of `subprocess` in `schedules.core.child`
SUBPROCESS = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
