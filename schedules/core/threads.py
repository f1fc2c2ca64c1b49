"""The threads that run the parallel loops of CPU kernels: PyTorch's where it is loaded, else TVM's.

PyTorch's are those of its OpenMP library, as many as torch.set_num_threads says at each call: two sets of threads would
wait for each other on the same cores.  Without PyTorch, TVM's runtime has threads for each thread that calls, one for
each core, or as many as TVM_NUM_THREADS says; they spin for a while, then sleep.  They stay where TVM binds them, each
to a core, in this package's own measurements, which run alone; `before_call` frees those of an exported kernel unless
TVM_BIND_THREADS is set.  In a forked child, where the threads of its parent are not, loops run in the thread that
calls.  No environment variable is written.

A bundle's load.py holds this module, which therefore needs nothing else of the package.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

THREADS, BIND = "TVM_NUM_THREADS", "TVM_BIND_THREADS"
_TOPOLOGY = Path("/sys/devices/system/cpu")
_SHARE_ALL_CORES = -3  # of TVM's ThreadGroup::AffinityMode
_LIMIT = "_ZN3tvm7runtime9threading17SetMaxConcurrencyEi"  # tvm::runtime::threading::SetMaxConcurrency(int)
# at::get_num_threads(), which knows torch.set_num_threads in every thread; else OpenMP's own number
_NUMBERS = ("_ZN2at15get_num_threadsEv", "omp_get_max_threads")


class Pool(ctypes.Structure):
    """What a kernel reads at each parallel loop; `schedules.lowering.shared_threads` knows the order of the fields."""

    _fields_ = (
        ("parallel", ctypes.c_void_p),  # GOMP_parallel, which LLVM's and Intel's OpenMP have too; null: TVM's threads
        ("threads", ctypes.c_void_p),  # how many it may use
        ("nested", ctypes.c_void_p),  # whether this thread is one of a parallel region already
        ("limit", ctypes.c_void_p),  # tells TVM how many threads it may make for the thread that calls; may be null
        ("most", ctypes.c_int32),  # that number; 0 where the system does not tell its cores
        ("alone", ctypes.c_int32),  # loops run in the thread that calls
    )


def cores() -> int | None:
    """The cores that this process may run on, those that processors share once; None where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    try:
        return len(
            {
                (_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
                for cpu in os.sched_getaffinity(0)
            }
        )
    except OSError:
        return None


def share(module: Any) -> Any:
    """`module`, a CPU kernel that was built or loaded, with its parallel loops on this process's threads."""
    if module.implements_function("use_threads"):  # one without parallel loops has none
        module["use_threads"](ctypes.c_void_p(ctypes.addressof(pool())))
    return module


def pool() -> Pool:
    """The pool of this process.  Kernels that share it already turn to PyTorch's threads too once this finds it."""
    found = _pool()
    if not found.parallel and "torch" in sys.modules:
        _find_openmp(found)
    return found


def before_call() -> None:
    """Before a call of an exported kernel: look for PyTorch, or let TVM's threads for this thread run on any core."""
    found = pool()
    if found.parallel or BIND in os.environ or getattr(_free, "done", False):
        return
    import tvm_ffi

    _free.done = True
    configure = tvm_ffi.get_global_func("runtime.config_threadpool", allow_missing=True)
    if configure and found.limit:
        ctypes.CFUNCTYPE(None, ctypes.c_int32)(found.limit)(found.most)
        configure(_SHARE_ALL_CORES, found.most, [str(cpu) for cpu in sorted(os.sched_getaffinity(0))])


_free = threading.local()


@cache
def _pool() -> Pool:
    made, given = Pool(), os.environ.get(THREADS, "")
    made.most = (int(given) if given.isdigit() else 0) or cores() or 0
    if made.most:
        made.limit = _address(ctypes.CDLL(None), _LIMIT)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: setattr(made, "alone", 1))
    return made


def _find_openmp(found: Pool) -> None:
    """Point `found` at the OpenMP library that PyTorch itself calls, whatever its name, if there is one."""
    folder = Path(getattr(sys.modules["torch"], "__file__", None) or "").parent / "lib"
    library = next((file for ending in ("so", "dylib") if (file := folder / f"libtorch_cpu.{ending}").exists()), None)
    if library is None:
        return
    torch = ctypes.CDLL(str(library))  # is loaded; symbols are looked up in what it needs too
    number = next((address for name in _NUMBERS if (address := _address(torch, name))), None)
    parallel, nested = _address(torch, "GOMP_parallel"), _address(torch, "omp_in_parallel")
    if parallel and nested and number:
        found.threads, found.nested = number, nested
        found.parallel = parallel  # last: kernels may be running


def _address(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(library[name], ctypes.c_void_p).value
    except AttributeError:
        return None
