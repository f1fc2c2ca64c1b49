from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schedules.core.child import WORKER
from schedules.core.process import child

ROOT = Path(__file__).parents[2]
CODE = """
import sys
import schedules, tvm
assert "torch" not in sys.modules, "imported with TVM"
import torch  # as the main module of a program may do, which every worker imports
print(torch.__file__)
import schedules.build.builder
from tvm import relax as early
assert not [name for name in sys.modules if name.startswith("tvm.relax")], "imported for a build"
import tvm.relax.expr
from tvm import relax
assert relax is not early and early.Call is relax.Call and relax.expr.Function is relax.Function
x = relax.Var("x", relax.TensorType([1], "float32"))
assert isinstance(relax.Function([x], x), early.Function) and not isinstance(x, early.Function)
"""


def test_workers_import_tvm_without_pytorch_and_relax(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", WORKER: "1"}
    found = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).parent == package


def test_so_does_the_command_line(tmp_path: Path) -> None:
    """And `list` imports nothing of TVM."""
    (tmp_path / "torch.py").write_text("raise SystemExit('imported with TVM')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment.pop(WORKER, None)

    def imported(*words: str) -> set[str]:
        command = [sys.executable, "-X", "importtime", "-m", "schedules", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return {line.rpartition(" ")[2] for line in done.stderr.splitlines()}

    built, listed = imported("inspect", "softmax", "rows=3", "cols=5"), imported("list")
    assert "tvm" in built and not [name for name in built if name.startswith("tvm.relax")]
    assert "numpy" in listed and "tvm" not in listed


def started(code: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return child([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_child_gets_no_signal_of_the_terminal_and_is_over_with_the_body() -> None:
    with started("import time; print('ready', flush=True); time.sleep(60)") as running:
        assert running.stdout and running.stdout.readline() == "ready\n"
        for number in (signal.SIGINT, signal.SIGHUP):
            running.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.1)
    assert running.returncode == -signal.SIGTERM
    assert not {signal.SIGINT, signal.SIGHUP} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_child_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedules.core.process.PARTING", 0.1)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )
    with started(deaf) as running:
        assert running.stdout and running.stdout.readline() == "ready\n"
    assert running.returncode == -signal.SIGKILL


def test_a_child_that_ended_has_its_own_exit_code() -> None:
    with started("print('said'); raise SystemExit(3)") as running:
        assert running.communicate() == ("said\n", "")
    assert running.returncode == 3


def test_a_process_ends_with_the_one_that_started_it() -> None:
    """Killed with it; at once where that has ended before it could be asked for."""
    orphan = "import os, time; from schedules.core.process import die_with; die_with({}); print('on', flush=True)"
    code = f"{orphan.format('os.getppid()')}; time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}]).wait()"
    with started(parent) as running:
        assert running.stdout and running.stdout.readline() == "on\n"
        running.kill()
        assert running.stdout.read() == ""  # whose last writer is gone
    with started(orphan.format(os.getpid() + 1)) as late:
        out, err = late.communicate()
    assert (late.returncode, out, err) == (1, "", "")
