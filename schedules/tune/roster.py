"""Which actors of a Ray cluster work for a search: one for each device, one for each node that builds.

Nodes are looked at all the time: one that joins is used, one that is lost is done without, and an actor that was lost
on a node that is still there is replaced.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from schedules.core.arch import Arch
from schedules.core.errors import MachineError, SchedulesError, TuningError, UsageError
from schedules.core.versions import versions
from schedules.measure.records import ENVIRONMENT
from schedules.tune.actor_groups import ActorGroup, Seat, difference, seats_of
from schedules.tune.actors import Description, WorkerActor
from schedules.tune.connection import Connection, ray
from schedules.tune.evaluate import Failure

START_TIMEOUT = 120.0  # seconds from asking for an actor to its description
PING_TIMEOUT = 20.0
PATIENCE = 120.0  # seconds without any device, or any builder, until a search is given up
BUSY = 60.0  # seconds until a node that had no room is asked again
LOOK = 1.0  # seconds between two looks at the cluster
REFUSED_AFTER = 3  # actors lost before they had described themselves

Key = tuple[str | None, ...]


class Lost(Exception):
    """An actor is no more, or cannot go on (`error` says why): no fault of what it ran, as far as can be told from
    once."""

    def __init__(self, why: str, error: SchedulesError | None = None) -> None:
        super().__init__(why)
        self.error = error


class Roster:
    """The actors for `arch` on the cluster at `address`, in groups of those that are alike.

    `builders` limits the building processes for each kind of device, by default all CPUs but one for each device.
    `note` is told what a person should know.  Raises UsageError if the cluster cannot be reached or has no device,
    ToolchainError if Ray is not installed.
    """

    def __init__(
        self,
        arch: Arch,
        address: str,
        *,
        builders: int | None,
        note: Callable[[str], None],
    ) -> None:
        self._arch, self._limit, self._note = arch, builders, note
        self.measuring: dict[Key, ActorGroup] = {}
        self.building: dict[Key, ActorGroup] = {}
        self._seats: list[Seat] = []
        self._lanes: list[threading.Thread] = []
        self._nodes: set[str] = set()
        self._refusals: list[str] = []
        self._started = self._closed = False
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._connection = Connection(address)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def builders_for(self, group: ActorGroup) -> ActorGroup | None:
        """The group that builds for the devices of `group`."""
        return self.building.get(self._build_key((group.device, group.versions)))

    def leave(self, group: ActorGroup) -> None:
        """Let the actors of a measuring group go; with the last one, all, and the connection."""
        with self._lock:
            group.open = False
            leaving = list(group.seats)
            for seat in leaving:
                seat.refused = True
        for seat in leaving:
            self._vacate(seat)
        if not any(group.open for group in self.measuring.values()):
            self.close()

    def close(self) -> None:
        """End every actor, and disconnect.  Futures that are not done never will be."""
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        for seat in self._seats:
            self._vacate(seat)
        for lane in self._lanes:
            lane.join()
        self._connection.close()

    def _start(self) -> None:
        """Wait until every actor has described itself, or will not."""
        self._meet()
        if all(seat.builds for seat in self._seats):
            raise UsageError(
                f"no device for {self._arch} in the Ray cluster: no node has a {'GPU' if self._arch.is_gpu else 'CPU'}"
            )
        while self._look():
            time.sleep(0.1)
        if not self.measuring:
            raise UsageError(f"no device for {self._arch} in the Ray cluster: {'; '.join(self._refusals[:3])}")
        for group in self.measuring.values():
            if not self.builders_for(group):
                reason = self._refusals[0] if self._refusals else "it needs a free CPU"
                raise UsageError(f"nothing in the Ray cluster builds for {group.device}: {reason}")
        self._started = True

    def _watch(self) -> None:
        while not self._closed:
            try:
                self._look()
            except Exception as error:  # whatever the connection raises, there is no cluster any more
                if not self._closed:
                    lost = TuningError(f"the Ray cluster is lost ({_line(error)}); run again to go on")
                    for group in self._groups():
                        group.fail(lost)
                return
            self._wake.wait(LOOK)
            self._wake.clear()

    def _look(self) -> bool:
        """Take note of nodes that came or went, and of actors that are ready; ask for those that are missing.

        Returns whether more is to be expected soon.
        """
        self._meet()
        now = time.monotonic()
        for seat in self._seats:
            if not (seat.handle or seat.refused or now < seat.not_before):
                self._hire(seat)
            elif seat.pending and now - seat.since > START_TIMEOUT:
                self._vacate(seat)
                seat.not_before = now + BUSY
                busy = f"no actor within {START_TIMEOUT:g} s; are its CPUs or GPUs in use?"
                self._refuse(seat, busy, "it is asked again")
        waiting = {seat.pending: seat for seat in self._seats if seat.pending}
        if waiting:
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=LOOK)
            for reference in ready:
                self._welcome(waiting[reference], reference)
        for group in self._groups():
            if group.lanes:
                group.seen = now
            elif group.open and self._started and now - group.seen > PATIENCE:
                what = "device" if group in self.measuring.values() else "builder"
                group.fail(TuningError(f"no {what} left in the Ray cluster for {PATIENCE:g} s; run again to go on"))
        return bool(waiting) or any(seat.losses > 0 and not (seat.handle or seat.refused) for seat in self._seats)

    def _meet(self) -> None:
        """Take note of nodes that came or went."""
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for seat in [seat for seat in self._seats if seat.node not in alive]:
            self._seats.remove(seat)
            self._vacate(seat)
            if seat.group:
                seat.group.seats.remove(seat)
                if not seat.builds:
                    self._note(f"node {seat.where} is lost; what it was measuring goes to another")
        for name in set(alive) - self._nodes:
            self._seats += seats_of(alive[name], self._arch)
        self._nodes = set(alive)

    def _hire(self, seat: Seat) -> None:
        """Ask for the actor of `seat`; it describes itself when it is there."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        seat.lanes = lanes = self._room(seat) if seat.builds else 1
        if lanes < 1:
            return
        options = {
            "num_cpus": min(seat.cpus, lanes),
            "num_gpus": seat.gpus,
            "max_restarts": 0,
            "max_concurrency": lanes + 1,  # and a ping
            "scheduling_strategy": NodeAffinitySchedulingStrategy(seat.node, soft=False),
        }
        seat.since, seat.state = time.monotonic(), "starting"
        seat.handle = ray.remote(WorkerActor).options(**options).remote(self._arch, lanes if seat.builds else 0)
        seat.pending = seat.handle.describe.remote()

    def _room(self, seat: Seat) -> int:
        """How many may build at `seat`.  On CPUs a node builds for its like, so it must be known what it is."""
        others = [other for other in self._seats if other.builds and other is not seat and other.handle]
        if not self._arch.is_gpu:
            groups = {other.node: other.group for other in self._seats if not other.builds and other.actor}
            if seat.node not in groups:
                return 0
            others = [other for other in others if groups.get(other.node) is groups[seat.node]]
        limit = seat.capacity if self._limit is None else self._limit - sum(other.lanes for other in others)
        return min(seat.capacity, limit)

    def _welcome(self, seat: Seat, reference: Any) -> None:
        """Read the description of a new actor and add it to the group of its like."""
        seat.pending = None
        try:
            description: Description = ray.get(reference)
        except ray.exceptions.RayError as error:
            self._vacate(seat)
            seat.losses += 1
            seat.not_before = time.monotonic() + 2**seat.losses
            seat.refused = isinstance(error, ray.exceptions.RayTaskError) or seat.losses >= REFUSED_AFTER
            if seat.refused:
                self._refuse(seat, _line(error))
            return
        groups = self.building if seat.builds else self.measuring
        name, its = description
        key = self._build_key(description) if seat.builds else (name, *(its.get(n) for n in ENVIRONMENT))
        other = difference(versions(), its)
        if not other and key not in groups and self._started:
            other = "it is of another kind than those the search began with; tune it in another run"
        if other or (key in groups and not groups[key].open):
            self._vacate(seat)
            seat.refused = True
            if other:
                self._refuse(seat, other)
            return
        group = groups.setdefault(key, ActorGroup(description))
        with self._lock:
            if seat.refused or self._closed:  # its crew has left meanwhile
                return
            seat.group, seat.actor, seat.state = group, seat.handle, "idle"
            if seat not in group.seats:
                group.seats.append(seat)
        self._lanes = [lane for lane in self._lanes if lane.is_alive()]
        for _ in range(seat.lanes):
            lane = threading.Thread(target=self._serve, args=(seat, seat.actor, group), daemon=True)
            lane.start()
            self._lanes.append(lane)

    def _serve(self, seat: Seat, actor: Any, group: ActorGroup) -> None:
        """Hand the actor of `seat` one task after another, until it is lost."""
        while not self._closed and seat.actor is actor:
            try:
                task = group.tasks.get(timeout=0.5)
            except queue.Empty:
                continue
            if not (task.lost or task.done.set_running_or_notify_cancel()):
                continue
            tried = False
            try:
                if task.lost:  # a second loss counts, so it must not be that of an actor already gone
                    self._call(actor.ping, (), PING_TIMEOUT)
                tried = True
                seat.state = "building" if seat.builds else "measuring"
                task.done.set_result(self._call(actor.call, (task.order,), task.budget))
                seat.state, seat.losses = "idle", 0
            except Lost as lost:
                if tried and task.lost and lost.error:
                    task.done.set_exception(lost.error)
                elif tried and task.lost:
                    task.done.set_result(Failure(task.order.outcome, f"lost its process twice: {lost}"))
                else:
                    task.lost = task.lost or str(lost)
                    group.submit(task)
                self._lose(seat, actor, str(lost))
            except Exception as error:
                task.done.set_exception(error)

    def _call(self, method: Any, arguments: tuple[Any, ...], timeout: float) -> Any:
        """What the actor returns; what it raises is raised.  Raises Lost."""
        try:
            return ray.get(method.remote(*arguments), timeout=timeout)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MachineError | TuningError):
                raise Lost(str(error.cause), error.cause) from None
            if isinstance(error.cause, SchedulesError):
                raise error.cause from None
            raise TuningError(f"a worker failed: {_line(error)}") from None
        except ray.exceptions.GetTimeoutError:
            raise Lost(f"no answer within {timeout:g} s") from None
        except ray.exceptions.RayError as error:
            raise Lost(_line(error)) from None

    def _lose(self, seat: Seat, actor: Any, why: str) -> None:
        """Note that the actor of `seat` is lost; the next look brings another, later each time."""
        with self._lock:
            if seat.actor is not actor:
                return
            seat.actor = None
        self._vacate(seat)
        seat.losses += 1
        seat.not_before = time.monotonic() + min(60, 2**seat.losses - 2)
        if not self._closed and not seat.refused:
            self._note(f"lost {'the builders' if seat.builds else 'a device'} on {seat.where} ({why})")
        self._wake.set()

    def _vacate(self, seat: Seat) -> None:
        """End the actor of `seat`, if there is one."""
        with self._lock:
            handle, seat.handle, seat.pending, seat.actor, seat.state = seat.handle, None, None, None, "lost"
        if handle is not None:
            ray.kill(handle)

    def _refuse(self, seat: Seat, why: str, then: str = "it is not used") -> None:
        text = f"node {seat.where}: {why}"
        if text not in self._refusals:
            self._refusals.append(text)
            self._note(f"{text}; {then}")

    def _build_key(self, description: Description) -> Key:
        """What must agree for a build to serve there.  What is built for the very CPU it is built on serves only its
        like."""
        name, its = description
        return (name if self._arch.kind == "llvm" else "", *(its.get(n) for n in ENVIRONMENT if n != "driver"))

    def _groups(self) -> list[ActorGroup]:
        return [*self.measuring.values(), *self.building.values()]


def _line(error: BaseException) -> str:
    """The last line of a message of Ray, where the cause is, without its advice; of an error of ours, the message."""
    if isinstance(cause := getattr(error, "cause", None), SchedulesError):
        return str(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1].partition(" Some common causes")[0][:250]
