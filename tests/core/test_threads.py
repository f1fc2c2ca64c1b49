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
from schedules.operators.softmax.definition import SoftmaxProblem

ROOT = Path(__file__).parents[2]
# each door to a CPU kernel, in a process that has run none
DOORS = {
    "build": "schedules.load('softmax', dict(rows=2, cols=8))",
    "load": "from schedules.bundle.bundle import Bundle; Bundle.open(sys.argv[1]).load()",
}
CODE = """
import sys
import schedules
{door}
from tvm import get_global_func
print(get_global_func("runtime.NumThreads")())
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
    monkeypatch.delenv(threads.THREADS, raising=False)
    threads.use_every_core()
    assert os.environ[threads.THREADS] == str(cores)


def test_what_is_set_stays_and_what_is_not_known_is_left_to_tvm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path, {0: "0", 1: "1"})
    monkeypatch.setenv(threads.THREADS, "7")
    threads.use_every_core()
    assert os.environ[threads.THREADS] == "7"
    monkeypatch.delenv(threads.THREADS)
    monkeypatch.setattr(threads, "_TOPOLOGY", tmp_path / "nowhere")
    threads.use_every_core()
    assert threads.THREADS not in os.environ


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    problem = SoftmaxProblem(rows=2, cols=8)
    return write_bundle(build(problem, parse_arch("llvm")), tmp_path_factory.mktemp("threads") / "bundle").path


@pytest.mark.parametrize("given", [None, "1"])
@pytest.mark.parametrize("door", DOORS)
def test_tvm_takes_every_core_unless_it_is_told(bundle: Path, door: str, given: str | None) -> None:
    if threads.cores() is None:
        pytest.skip("this system does not tell its cores")
    environment = {name: value for name, value in os.environ.items() if name != threads.THREADS}
    environment |= {"PYTHONPATH": str(ROOT)} | ({threads.THREADS: given} if given else {})
    command = [sys.executable, "-c", CODE.format(door=DOORS[door]), str(bundle)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == (given or str(threads.cores())), done.stderr
