"""The seats for actors on a cluster's nodes, and the groups of those that do the same work."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from schedules.core.arch import Arch
from schedules.core.errors import SchedulesError
from schedules.tune.actors import Description
from schedules.tune.workers import DOUBTS, PREPARE_TIMEOUT, TRIES, Order

GRACE = 60.0  # seconds that an actor may take beyond its timeouts
SAME = ("te-schedules", "apache-tvm", "apache-tvm-ffi")  # versions that a node must share with this process


@dataclass(eq=False)
class Task:
    """An order, and how it lost the first actor that had it; if it loses two, that is its own doing."""

    order: Order
    done: Future[Any] = field(default_factory=Future)
    lost: str = ""

    @property
    def budget(self) -> float:
        """Seconds after which its actor is given up: more than the actor's own timeouts allow."""
        calls = TRIES + len(DOUBTS)
        return (1 + len(self.order.first)) * PREPARE_TIMEOUT + calls * self.order.timeout + sum(DOUBTS) + GRACE


@dataclass(eq=False)
class Seat:
    """A place for one actor on a node: for one device, or for the node's builders."""

    node: str
    where: str  # the node's name, for people
    builds: bool
    gpus: int
    cpus: float
    capacity: int  # calls at once, at most
    lanes: int = 0  # calls at once
    handle: Any = None
    pending: Any = None  # its description, while it starts
    actor: Any = None  # the handle, once it has described itself
    since: float = 0.0
    losses: int = 0
    not_before: float = 0.0
    refused: bool = False
    group: ActorGroup | None = None
    state: str = "starting"


class ActorGroup:
    """Seats whose actors are alike, and the tasks that they take."""

    def __init__(self, description: Description) -> None:
        self.device, self.versions = description
        self.tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self.seats: list[Seat] = []
        self.seen = time.monotonic()  # when there was somebody last
        self.open = True
        self._lock = threading.Lock()
        self._error: SchedulesError | None = None

    @property
    def lanes(self) -> int:
        return sum(seat.lanes for seat in self.seats if seat.actor)

    def put(self, order: Order) -> Future[Any]:
        task = Task(order)
        self.submit(task)
        return task.done

    def submit(self, task: Task) -> None:
        with self._lock:
            self.tasks.put(task)
            if self._error:
                self._answer_all(self._error)

    def fail(self, error: SchedulesError) -> None:
        """End every task that waits, and all that come, with `error`."""
        with self._lock:
            self._error = error
            self._answer_all(error)

    def _answer_all(self, error: SchedulesError) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                task = self.tasks.get_nowait()
                if task.lost or task.done.set_running_or_notify_cancel():
                    task.done.set_exception(error)


def seats_of(node: Mapping[str, Any], arch: Arch) -> list[Seat]:
    """The places of a node as `ray.nodes()` tells of it: for each device, which takes a CPU, and for the builders."""
    resources = node["Resources"]
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    devices = gpus if arch.is_gpu else min(1, cpus)
    if not devices and not cpus:
        return []
    where = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    own = 1 if cpus >= devices else 0
    spare = cpus - own * devices
    measuring = [Seat(node["NodeID"], where, False, int(arch.is_gpu), own, 1) for _ in range(devices)]
    # with no CPU to spare one process builds all the same, in turn with the device's
    return [*measuring, Seat(node["NodeID"], where, True, 0, spare, max(1, spare))]


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """How the versions of a node differ from ours, and what to do; "" if they do not."""
    differing = [
        f"{name} {there.get(name)} (here {here.get(name)})" for name in SAME if there.get(name) != here.get(name)
    ]
    python = [versions["python"].rpartition(".")[0] for versions in (there, here)]
    if python[0] != python[1]:
        differing.append(f"python {python[0]} (here {python[1]})")
    return f"{', '.join(differing)}; install the same versions on all nodes" if differing else ""
