"""CPU kernels on PyTorch's threads."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

import schedules.torch as kernels  # noqa: E402
from schedules.core.threads import pool  # noqa: E402

if not pool().parallel:
    pytest.skip("this PyTorch's OpenMP has no GOMP_parallel", allow_module_level=True)
X = torch.rand(64, 1536)  # of a width that shares no build
PROCESS = """
import os, threading, time
before = dict(os.environ)
import torch
import schedules.torch as kernels
x = torch.rand(64, 512)
wanted = torch.softmax(x, 1)
def right():
    return torch.allclose(kernels.softmax(x), wanted)
def tasks():
    return len(os.listdir("/proc/self/task"))
"""
# on one thread no other is started; on several, neither by us nor by PyTorch after us more than PyTorch's own
COUNT = """
more = torch.get_num_threads() + 1
torch.set_num_threads(1)
assert right()  # and is built, by a thread that ends
idle = min(tasks() for _ in range(50) if not time.sleep(0.01))
assert right() and tasks() == idle
torch.set_num_threads(more)
assert right()
team = tasks() - idle
torch.relu(torch.rand(1 << 20))
print(team, tasks() - idle)
"""
FORK = """
assert right()
child = os.fork()
if not child:
    os._exit(0 if right() else 1)
print(os.waitpid(child, 0)[1], right(), dict(os.environ) == before)
"""
LOADER = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return kernels.softmax(x[index])
assert right()
loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")
print(torch.allclose(torch.cat(list(loader)), wanted[:4]))
"""
TOGETHER = """
assert right()
same = []
callers = [threading.Thread(target=lambda: same.append(all(right() for _ in range(50)))) for _ in "ab"]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
print(same)
"""


def ran(then: str) -> str:
    """What a process of its own prints: one that ends, and whose threads can be counted."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "TVM_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROCESS + then], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_threads_are_pytorchs_and_children_and_other_threads_are_served() -> None:
    """In one process, since PyTorch is slow to import."""
    said = ran(COUNT + TOGETHER + FORK + LOADER).splitlines()
    assert said == ["1 1", "[True, True]", "0 True True", "True"]


@pytest.fixture
def teams() -> Iterator[list[int]]:
    """How many threads each parallel region of ours asks for."""
    found, asked = pool(), []
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    real, threads = found.parallel, torch.get_num_threads()

    def parallel(function: int, job: int, number: int, flags: int) -> None:
        asked.append(number)
        region(real)(function, job, number, flags)

    stand_in = region(parallel)
    found.parallel = ctypes.cast(stand_in, ctypes.c_void_p).value
    yield asked
    found.parallel = real
    torch.set_num_threads(threads)


def test_the_number_of_threads_is_asked_for_at_each_call(teams: list[int]) -> None:
    for number in (2, 1, 3):
        torch.set_num_threads(number)
        assert torch.allclose(kernels.softmax(X), torch.softmax(X, 1))
    assert teams == [2, 3]


def test_within_a_parallel_region_no_other_is_begun(teams: list[int]) -> None:
    torch.set_num_threads(2)
    results: list[Any] = []
    task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    region = ctypes.CFUNCTYPE(None, task, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    kernels.softmax(X)
    region(pool().parallel)(task(lambda _: results.append(kernels.softmax(X))), None, 2, 0)
    assert len(results) == 2 and all(torch.allclose(each, torch.softmax(X, 1)) for each in results)
    assert teams == [2, 2]  # the first call's, and the region here
