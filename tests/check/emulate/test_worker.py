from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from schedules.check.emulate.device_module import ArgumentType
from schedules.check.emulate.worker import _argument_cell

ROOT = Path(__file__).resolve().parents[3]

PARENT = """
import sys, numpy as np
from schedules.check.emulate import Emulator
emulator = Emulator()
source = 'extern "C" __global__ void k(volatile float* a) { while (a[0] == 0) { } }'
ready = 'extern "C" __global__ void k(float* a) { a[0] = 1; }'
emulator.launch(ready, "k", (1, 1, 1), (1, 1, 1), [np.zeros(1, "float32")], [0])
print(emulator._worker.process.pid, flush=True)
if sys.argv[1] == "busy":
    emulator.launch(source, "k", (1, 1, 1), (1, 1, 1), [np.zeros(1, "float32")], [0])
sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_the_worker_dies_with_its_parent(state: str, cxx: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    assert is_running(worker)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(worker)


@pytest.mark.parametrize(
    "value, kind, expected",
    [
        (ctypes.c_void_p(4096), ArgumentType(3, 64, 1), ctypes.c_void_p),
        (-1, ArgumentType(0, 32, 1), ctypes.c_int32),
        (7, ArgumentType(1, 64, 1), ctypes.c_uint64),
        (1, ArgumentType(0, 1, 1), ctypes.c_int8),
        (0.5, ArgumentType(2, 32, 1), ctypes.c_float),
        (0.5, ArgumentType(2, 64, 1), ctypes.c_double),
    ],
)
def test_argument_cells(value: Any, kind: ArgumentType, expected: Any) -> None:
    cell = _argument_cell(value, kind)
    assert type(cell) is expected
    assert cell.value == getattr(value, "value", value)
