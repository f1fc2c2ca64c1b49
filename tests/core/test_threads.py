from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from schedules.build.builder import build
from schedules.bundle.bundle import write_bundle
from schedules.core import threads
from schedules.core.arch import parse_arch
from schedules.operators.conv2d_nchw.definition import NchwProblem

ROOT = Path(__file__).parents[2]
# each door to a CPU kernel, in a process that has run none: `call` runs it
DOORS = {
    "build": "import schedules; call = schedules.load('conv2d_nchw', dict(PROBLEM))",
    "open": "from schedules.bundle.bundle import Bundle; call = Bundle.open(sys.argv[1]).load()",
    "load.py": "sys.path.insert(0, sys.argv[1]); from load import load; call = load()",
}
PROBLEM = {"n": 1, "ci": 4, "h": 16, "w": 16, "co": 16, "kh": 3, "kw": 3}
CODE = """
import os, sys, threading
import numpy as np
PROBLEM = {problem}
before = dict(os.environ)
{door}
x, w = np.random.rand(1, 4, 16, 16).astype("float32"), np.random.rand(16, 4, 3, 3).astype("float32")

def run():
    y = np.full((1, 16, 14, 14), np.nan, "float32")
    call(x, w, y)
    return y

def affinity(task):
    return os.sched_getaffinity(int(task))

first = run()
{then}
assert dict(os.environ) == before
"""
COUNT = """
import tvm_ffi
tasks = [affinity(task) for task in os.listdir("/proc/self/task")]
print(tvm_ffi.get_global_func("runtime.NumThreads")(), all(task == os.sched_getaffinity(0) for task in tasks))
"""
FORK = """
child = os.fork()
if not child:
    os._exit(0 if (run() == first).all() else 1)
print(os.waitpid(child, 0)[1], (run() == first).all())
"""
TOGETHER = """
same = []
callers = [threading.Thread(target=lambda: same.append(all((run() == first).all() for _ in range(20)))) for _ in "ab"]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
print(same)
"""


def machine(monkeypatch: pytest.MonkeyPatch, folder: Path, siblings: dict[int, str]) -> None:
    """A machine with these processors, each with the list of those that share its core."""
    for cpu, text in siblings.items():
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n")
    monkeypatch.setattr(threads, "_TOPOLOGY", folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(siblings), raising=False)


@pytest.mark.parametrize(
    ("siblings", "cores"),
    [({0: "0", 1: "1"}, 2), ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2), ({2: "0,2", 3: "1,3"}, 2), ({5: "5"}, 1)],
)
def test_processors_that_share_a_core_count_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, siblings: dict[int, str], cores: int
) -> None:
    machine(monkeypatch, tmp_path, siblings)
    assert threads.cores() == cores


def test_cores_that_the_system_does_not_tell_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, {0: "0", 1: "1"})
    monkeypatch.setattr(threads, "_TOPOLOGY", tmp_path / "nowhere")
    assert threads.cores() is None


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build(NchwProblem(**PROBLEM), parse_arch("llvm"))
    return write_bundle(built, tmp_path_factory.mktemp("threads") / "bundle").path


def ran(bundle: Path, door: str, then: str, **given: str) -> str:
    """What a process prints that comes in by `door`, runs the kernel and then this code."""
    own = (threads.THREADS, threads.BIND, "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= given | ({} if door == "load.py" else {"PYTHONPATH": str(ROOT)})
    command = [sys.executable, "-c", CODE.format(problem=PROBLEM, door=DOORS[door], then=then), str(bundle)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(threads.cores() is None, reason="this system does not tell its cores")
@pytest.mark.parametrize(("door", "given"), [*((door, None) for door in DOORS), ("load.py", "1"), ("load.py", "2")])
def test_tvm_takes_every_core_unless_it_is_told(bundle: Path, door: str, given: str | None) -> None:
    count, free = ran(bundle, door, COUNT, **({threads.THREADS: given} if given else {})).split()
    assert count == (given or str(threads.cores())) and (free == "True" or door != "load.py")


@pytest.mark.skipif((threads.cores() or 1) < 2, reason="there are no threads to bind")
def test_threads_of_an_exported_kernel_stay_bound_where_that_is_asked_for(bundle: Path) -> None:
    assert ran(bundle, "load.py", COUNT, **{threads.BIND: "1"}).endswith("False")


@pytest.mark.parametrize("door", ["build", "load.py"])
def test_a_forked_child_runs_kernels_that_its_parent_ran(bundle: Path, door: str) -> None:
    assert ran(bundle, door, FORK) == "0 True"


def test_two_threads_call_a_kernel_at_once(bundle: Path) -> None:
    assert ran(bundle, "load.py", TOGETHER) == "[True, True]"
