"""What runs on the nodes of a Ray cluster: an actor for each device that measures, one for each node that builds.

An actor runs no candidate itself.  It has the worker processes that a local crew has, so that what a candidate does to
its process is told in the same words, and an actor that is lost was lost with its node or ended by somebody.  However
it ends, the kernel ends its worker processes, and its scratch folder goes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from schedules.core.arch import Arch
from schedules.core.process import ScratchFolder, memory_share
from schedules.tune import evaluate
from schedules.tune.workers import Order, Orders, Setup, Worker

Description = tuple[str, dict[str, str]]  # a device's name, and the versions that a result on it depends on


class WorkerActor:
    """Processes on one node: `builders` that build, or with 0 the one that measures on the device that Ray has made the
    only one to be seen here.
    """

    def __init__(self, arch: Arch, builders: int) -> None:
        _prepare_process()
        self._folder, self._orders = ScratchFolder(), Orders()
        memory = None if arch.is_gpu and not builders else memory_share((builders or 1) + 1)
        setup = Setup(self._folder.path, memory, {}, background=arch.is_gpu and builders > 0)
        workers = [Worker(arch, setup, self._orders) for _ in range(builders or 1)]
        describe = evaluate.describe_builder if builders else evaluate.describe_device
        self._described = [worker.start(describe, arch) for worker in workers]

    def describe(self) -> Description:
        """The device's name, or that of the CPU if what is built here depends on it, else ""; and the versions.

        Raises UsageError if there is no device for the arch, ToolchainError if nothing can be built for it.
        """
        found: Description = self._described[0].result()
        return found

    def ping(self) -> None:
        """Nothing; that it returns is the answer."""

    def call(self, order: Order) -> Any:
        return self._orders.put(order).result()


def _prepare_process() -> None:
    """Take back what Ray sets for programs that share a node: one thread for each reserved CPU.

    The device, and for a CPU that is all its cores, is this actor's; a number that a person has set stays.
    """
    # a new process imports its parent's main module first, and has no use for Ray's
    vars(sys.modules["__main__"]).pop("__file__", None)
    if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in Path("/proc/self/environ").read_bytes().split(b"\0")):
        os.environ.pop("OMP_NUM_THREADS", None)
