"""The connection of this process to a Ray cluster: made once, shared, and ended with its last user."""

from __future__ import annotations

import logging
import socket
import threading
import warnings
from typing import Any

from schedules.core.errors import ToolchainError, UsageError

try:
    import ray
    import ray.exceptions
except ImportError:
    ray = None

INSTALL = "pip install 'te-schedules[cluster]'"
PROBE_TIMEOUT = 5.0  # seconds; Ray itself would go on trying for minutes

_lock = threading.Lock()
_users = 0
_ours = False  # made here, not by a program that had connected itself


class Connection:
    """One use of the cluster at `address`: host:port, or auto for the one that this machine is a node of.

    A connection that the program has made before is used, and left as it is.  Raises ToolchainError if Ray is not
    installed, UsageError if there is no cluster.
    """

    def __init__(self, address: str) -> None:
        global _users, _ours
        if ray is None:
            raise ToolchainError(f"Ray is not installed; {INSTALL}")
        with _lock:
            if ray.is_initialized():
                _same(address)
            else:
                _connect(address)
                _ours = True
            _users += 1
        self._open = True

    def close(self) -> None:
        """Disconnect, if this was the last use; the cluster goes on."""
        global _users, _ours
        with _lock:
            if not self._open:
                return
            self._open = False
            _users -= 1
            if not _users and _ours:
                _ours = False
                ray.shutdown()


def _connect(address: str) -> None:
    remedy = "start one with: ray start --head"
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((_own(host), int(port)), PROBE_TIMEOUT).close()
        except OSError as error:
            raise UsageError(f"no Ray cluster at {address}: {error.strerror or error}; {remedy}") from None
    elif address != "auto":
        raise UsageError(f"{address!r} is no address of a Ray cluster; give HOST:PORT or auto")
    _silence()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that are to change in later versions
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"cannot join the Ray cluster at {address}: {lines[0][:200]}; {remedy}") from error


def _same(address: str) -> None:
    """Raises UsageError unless `address` is that of the cluster this process is connected to."""
    connected = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    if address in ("auto", connected) or f"{_own(host)}:{port}" == connected:
        return
    raise UsageError(f"this process is connected to the Ray cluster at {connected}, not to {address}")


def _own(host: str) -> str:
    """The address that Ray listens on for `host`: for this machine's loopback, the machine's own."""
    return ray.util.get_node_ip_address() if host in ("localhost", "127.0.0.1") else host


def _silence() -> None:
    """Messages about nodes go to the log: Ray prints them to standard output, with `log_to_driver` or without.

    There is no public way, so where this version of Ray keeps its printer elsewhere it prints.
    """

    def log(data: dict[str, Any], *_: object, **__: object) -> None:
        logging.getLogger("ray").info("%s", "\n".join(data.get("lines", ())))

    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = log
