"""Compilers, linkers and disassemblers that are programs of their own."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from schedules.core.errors import BuildError


def run_tool(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """What `command` says and returns, whatever that is.  Raises BuildError if a signal ended it: nobody asked it."""
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise BuildError(f"{Path(command[0]).name} was ended by {name}; is there memory left?")
    return done
