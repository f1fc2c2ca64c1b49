"""Searches on a real Ray cluster of this machine: a head that gives nothing, and nodes of two CPUs that come and go."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from schedules.core import child
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ToolchainError, TuningError, UsageError
from schedules.core.problem import Problem
from schedules.core.registry import EXTRA
from schedules.measure.journal import journal_file, read_journal
from schedules.measure.records import Record
from schedules.tune import connection, evaluate, roster
from schedules.tune.actor_groups import difference, seats_of
from schedules.tune.cluster import RayCrew
from schedules.tune.crew import Job
from schedules.tune.crews import CrewOptions
from schedules.tune.evaluate import Artifact, Failure
from schedules.tune.session import Work, tune, tune_each
from schedules.tune.strategy import Candidate
from schedules.tune.tuner import Limits, Result, Silent, Status
from tests.conftest import problem_of
from tests.tune.faulty import OUTCOMES, FaultyConfig

ray = pytest.importorskip("ray", reason=f"Ray is not installed; {connection.INSTALL}")
LONG = 240.0  # seconds after which what a test waits for has failed
LLVM = parse_arch("llvm")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="worker processes are tied to their parents on Linux")


@dataclass
class Nodes:
    """A cluster whose processes all carry a mark in their environment, and its temporary files."""

    temporary: Path
    cluster: Any = None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=2, **SMALL)

    def send_away(self, node: Any) -> None:
        self.cluster.remove_node(node)

    def lose(self, node: Any) -> None:
        """As a power cut does: nothing is said to anybody."""
        self.cluster.remove_node(node, allow_graceful=False)

    def workers(self) -> list[int]:
        """The actors, and the processes that work for them."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    ours = f"CLUSTER={self.mark}".encode() in (entry / "environ").read_bytes()
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue  # it ended meanwhile
                if ours and (b"WorkerActor" in command or b"spawn_main" in command):
                    found.append(int(entry.name))
        return found

    def assert_clean(self) -> None:
        until(lambda: not self.workers(), "the workers' processes end")
        until(lambda: not list(self.temporary.iterdir()), "their folders go")


SMALL = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
NOTES: list[str] = []


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    from ray.cluster_utils import Cluster

    found = Nodes(tmp_path_factory.mktemp("workers"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTER", found.mark)
        patch.setenv("RAY_TMPDIR", tempfile.gettempdir())  # a socket's path must be short
        patch.setenv("TMPDIR", str(found.temporary))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.setenv(EXTRA, "faulty=tests.tune.faulty")
        found.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
        for _ in range(2):
            found.add()
        # its threads stay when it is shut down: no copy of this process is to be made any more
        child.subprocess = subprocess  # type: ignore[attr-defined]
        yield found
        found.cluster.shutdown()


@pytest.fixture(scope="class")
def crew(nodes: Nodes) -> Iterator[RayCrew]:
    """One crew for all tests that leave it two devices; afterwards nothing may be left of it."""
    crew = RayCrew(LLVM, nodes.address, build_timeout=20, measure_timeout=4, note=NOTES.append)
    yield crew
    crew.close()
    assert not ray.is_initialized()
    nodes.assert_clean()


class Spy(Silent):
    """Calls `act` when `count` trials are done."""

    def __init__(self, count: int, act: Callable[[], object]) -> None:
        self.count, self.act = count, act

    def trial(self, record: Record, status: Status) -> None:
        if status.done == self.count:
            self.act()


def work(trials: int) -> Work:
    return Work(problem_of("faulty", n=1000), LLVM, Limits(trials=trials), search="random")


def assert_whole(result: Result, folder: Path, trials: int) -> None:
    """The total is reached, all are correct, and the journal of the device has each once."""
    assert result.finished and result.best
    records, bad = read_journal(journal_file(folder, result.status.device, "faulty"))
    keys = Counter(record.key for record in records if record.stage == "trial")
    assert not bad and set(keys.values()) == {1}
    assert len(keys) == len(result.trials) == trials
    assert all(record.correct and record.device == result.status.device for record in records)


def until(happened: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < deadline, f"waited {LONG:g} s that {what}"
        time.sleep(0.05)


def kill_the_actor(problem: Problem, arch: Arch, flag: str) -> str:
    """In a worker: end the actor, the first time or (with no flag) each time."""
    if not flag or not Path(flag).exists():
        if flag:
            Path(flag).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(LONG)
    return "done"


def outcome(crew: RayCrew, fault: str) -> tuple[str, str]:
    """What becomes of a candidate with `fault`, and why."""
    problem, candidate = problem_of("faulty", n=1000), Candidate("cpu", FaultyConfig(0, fault))
    built = crew.build(problem, candidate).result(LONG)
    if isinstance(built, Artifact):
        job = Job(evaluate.measure_candidate, problem, (built, 0, float("inf")), seeds=(0,))
        built = crew.measure(job).result(LONG)
    return (built.outcome, built.reason) if isinstance(built, Failure) else ("correct", "")


class TestOneCrew:
    def test_a_search(self, crew: RayCrew, tmp_path: Path) -> None:
        assert (crew.slots, crew.builders, crew.state(), crew.exclusive) == (2, 2, ["idle", "idle"], True)
        assert_whole(tune(work(6), crew, folder=tmp_path), tmp_path, 6)

    @pytest.mark.parametrize("fault", ["segfault", "spin", "crash", "none"])
    def test_a_fault_costs_only_its_candidate(self, crew: RayCrew, fault: str) -> None:
        came_to, why = outcome(crew, fault)
        assert came_to == OUTCOMES[fault]
        assert why == {"spin": "took longer than 4 s", "none": ""}.get(fault, "the process died: SIGSEGV")
        assert crew.slots == crew.builders == 2

    def test_a_lost_actor_only_queues_its_trial_again(self, crew: RayCrew, tmp_path: Path) -> None:
        job = Job(kill_the_actor, problem_of("faulty", n=1000), (str(tmp_path / "flag"),), seeds=())
        NOTES.clear()
        assert crew.measure(job).result(LONG) == "done"
        assert len(NOTES) == 1 and NOTES[0].startswith("lost a device on ")
        until(lambda: crew.slots == 2, "the actor is replaced")

    def test_two_lost_actors_are_the_candidates_fault(self, crew: RayCrew) -> None:
        result = crew.measure(Job(kill_the_actor, problem_of("faulty", n=1000), ("",), seeds=())).result(LONG)
        assert isinstance(result, Failure) and result.outcome == "runtime"
        assert result.reason.startswith("lost its process twice: ")
        until(lambda: crew.slots == 2, "the actors are replaced")

    def test_a_node_that_joins_and_is_lost(
        self, crew: RayCrew, nodes: Nodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        node = nodes.add()
        until(lambda: crew.slots == crew.builders == 3, "the new node is used")
        spy = Spy(3, lambda: nodes.lose(node))
        assert_whole(tune(work(14), crew, folder=tmp_path, watcher=spy), tmp_path, 14)
        until(lambda: crew.slots == crew.builders == 2, "the node is missed")
        assert capfd.readouterr() == ("", "")  # where a progress view or --json is, Ray says nothing


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core all nodes are alike")
def test_devices_that_differ_are_kept_apart(nodes: Nodes, tmp_path: Path) -> None:
    nodes.send_away(min(nodes.cluster.worker_nodes, key=id))  # two are enough
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # inherited: the node's CPU is one with fewer cores
    try:
        node = nodes.add()
    finally:
        os.sched_setaffinity(0, cores)
    found = CrewOptions(ray=nodes.address).open_all(LLVM)
    try:
        assert [crew.slots for crew in found] == [1, 1]
        assert [crew.builders for crew in found] == [1, 1]
        assert [crew.device.rpartition(" x")[2] for crew in found] == ["1", str(len(cores))]
        results = tune_each(work(3), found, folder=tmp_path)
        for result in results:
            assert_whole(result, tmp_path, 3)
        assert [result.status.device for result in results] == [crew.device for crew in found]
        assert len(list(tmp_path.glob("*/faulty.jsonl"))) == 2
    finally:
        for crew in found:
            crew.close()
        nodes.send_away(node)
    with pytest.raises(UsageError, match=r"these devices: .*; choose one with --device"):
        RayCrew(LLVM, nodes.address, device="Some GPU")


def test_other_versions_are_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "versions", lambda: {"python": "3.10.1", "apache-tvm": "0.1"})
    notes: list[str] = []
    with pytest.raises(UsageError, match=r"no device for llvm in the Ray cluster: node .*apache-tvm .* \(here 0\.1\)"):
        RayCrew(LLVM, nodes.address, note=notes.append)
    assert notes and "install the same versions on all nodes; it is not used" in notes[0]
    nodes.assert_clean()


def test_no_device_of_the_target(nodes: Nodes) -> None:
    with pytest.raises(UsageError, match="no device for cuda:sm_90a in the Ray cluster: no node has a GPU"):
        RayCrew(parse_arch("cuda:sm_90a"), nodes.address)


def test_nobody_left(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(roster, "PATIENCE", 1.0)
    crew = RayCrew(LLVM, nodes.address, builders=1)
    try:
        assert crew.builders == 1
        monkeypatch.setattr(roster, "seats_of", lambda node, arch: [])
        for node in list(nodes.cluster.worker_nodes):
            nodes.lose(node)
        with pytest.raises(
            TuningError, match="no (device|builder) left in the Ray cluster for 1 s; run again to go on"
        ):
            tune(work(10), crew, folder=tmp_path)
    finally:
        crew.close()


def test_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UsageError, match=rf"no Ray cluster at {address}: .*; start one with: ray start --head"):
        RayCrew(LLVM, address)
    with pytest.raises(UsageError, match="'nonsense' is no address of a Ray cluster"):
        RayCrew(LLVM, "nonsense")
    monkeypatch.setattr(connection, "ray", None)
    with pytest.raises(ToolchainError, match=r"pip install 'te-schedules\[cluster\]'"):
        RayCrew(LLVM, address)


def test_versions_that_differ() -> None:
    here = {"te-schedules": "1", "apache-tvm": "2", "apache-tvm-ffi": "3", "numpy": "4", "python": "3.11.7"}
    assert difference(here, {**here, "numpy": "5", "python": "3.11.9"}) == ""
    assert difference(here, {**here, "apache-tvm": "9"}).startswith("apache-tvm 9 (here 2); install")
    assert "python 3.12 (here 3.11)" in difference(here, {**here, "python": "3.12.7"})


@pytest.mark.parametrize(
    ("target", "cpus", "gpus", "seats"),
    [
        ("llvm", 8, 2, [(False, 0, 1), (True, 0, 7)]),
        ("cuda:sm_90a", 8, 2, [(False, 1, 1), (False, 1, 1), (True, 0, 6)]),
        ("cuda:sm_90a", 1, 2, [(False, 1, 0), (False, 1, 0), (True, 0, 1)]),
        ("cuda:sm_90a", 4, 0, [(True, 0, 4)]),
        ("llvm", 1, 0, [(False, 0, 1), (True, 0, 0)]),
        ("llvm", 0, 0, []),
    ],
)
def test_seats_of_a_node(target: str, cpus: int, gpus: int, seats: list[tuple[bool, int, int]]) -> None:
    node = {
        "NodeID": "1",
        "NodeManagerHostname": "here",
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {name: float(count) for name, count in (("CPU", cpus), ("GPU", gpus)) if count},
    }
    found = seats_of(node, parse_arch(target))
    assert [(seat.builds, seat.gpus, seat.cpus) for seat in found] == seats
    assert all(seat.capacity >= 1 for seat in found)
