"""Worker processes that are forks of the process that starts them, which has TVM: a second less of CPU for each.

They have a parent, a session, descriptors, an environment and signals as those that start from nothing, which
tests/core/test_child.py and the tests of commands in processes of their own have.  What their parent has in memory they
have too: a test's stand-ins.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
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


# in the place of `subprocess` in `schedules.core.child`
SUBPROCESS = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
