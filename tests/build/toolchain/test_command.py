from __future__ import annotations

import sys

import pytest

from schedules.build.toolchain.command import run_tool
from schedules.core.errors import BuildError


def test_what_a_tool_says() -> None:
    done = run_tool([sys.executable, "-c", "import sys; print('out'); sys.exit('refused')"])
    assert (done.returncode, done.stdout, done.stderr) == (1, "out\n", "refused\n")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV"])
def test_a_tool_that_a_signal_ends(name: str) -> None:
    with pytest.raises(BuildError, match=f"was ended by {name}"):
        run_tool([sys.executable, "-c", f"import os, signal; os.kill(os.getpid(), signal.{name})"])
