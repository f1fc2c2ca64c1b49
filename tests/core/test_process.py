from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schedules.core.child import WORKER
from schedules.core.process import lasting_interrupt

ROOT = Path(__file__).parents[2]
CODE = """
import sys
import schedules, tvm
assert "torch" not in sys.modules, "imported with TVM"
import torch  # as the main module of a program may do, which every worker imports
print(torch.__file__)
"""


def test_workers_import_tvm_without_pytorch(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", WORKER: "1"}
    found = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).parent == package


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_is_lost_is_raised_again() -> None:
    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with lasting_interrupt() as check:
        check()
        Finalised()
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is before
    with lasting_interrupt(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
