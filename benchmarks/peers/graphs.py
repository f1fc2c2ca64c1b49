"""Calls as CUDA graphs, so that what the host takes to launch a call does not hide what the device takes.

PyTorch captures on a stream of its own, which TVM is told to launch on too.  A replay runs on PyTorch's current stream,
by default CUDA's legacy default stream: the one that `measure.CudaTimer` records its events on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.comparison import GRAPH, Call, reason
from benchmarks.peers.cudnn import torch_module
from schedules.core.errors import DeviceError

WARM_UP = 2  # calls before the capture: modules are loaded, algorithms chosen and workspaces allocated by then


@dataclass(frozen=True)
class Replay:
    """A captured call: launches its graph, and keeps what the graph reads and writes alive."""

    graph: Any
    call: Call
    outputs: Sequence[Any]

    def __call__(self) -> Sequence[Any]:
        self.graph.replay()
        return self.outputs


def launching(launch: str) -> Callable[[Call], Call]:
    """What makes of a call one that is launched so: STREAM or GRAPH."""
    return captured if launch == GRAPH else lambda call: call


def captured(call: Call) -> Replay:
    """`call` captured in a CUDA graph; a replay writes the same outputs each time.

    Raises DeviceError if it cannot be captured, or launches on another stream, so that the graph lacks it.
    """
    torch = torch_module()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), tvm_stream(stream.cuda_stream):
        for _ in range(WARM_UP):
            call()
        torch.cuda.synchronize()
        try:
            outputs = _capture(graph, call)
        except Exception as fault:  # PyTorch's, TVM's and other libraries' many types
            raise DeviceError(f"not captured in a CUDA graph: {reason(fault)}") from fault
    torch.cuda.synchronize()
    replay = Replay(graph, call, outputs)
    for output in outputs:
        output.fill_(_poison(output))
    replay()
    if any(bool(_untouched(output)) for output in outputs):
        raise DeviceError("the CUDA graph lacks the call, which was launched on another stream")
    return replay


@contextlib.contextmanager
def tvm_stream(stream: int, device: int = 0) -> Iterator[None]:
    """TVM's functions are launched on `stream` (a cudaStream_t) of a CUDA device in the block."""
    import tvm_ffi

    with tvm_ffi.use_raw_stream(tvm_ffi.device(f"cuda:{device}"), stream):
        yield


def _capture(graph: Any, call: Call) -> Sequence[Any]:
    graph.capture_begin()
    try:
        outputs = call()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # a capture that was broken says so again as it ends
            graph.capture_end()
        raise
    graph.capture_end()
    return outputs


def _poison(output: Any) -> float:
    return float("nan") if output.is_floating_point() else -1


def _untouched(output: Any) -> Any:
    return (output.isnan() if output.is_floating_point() else output == -1).all()
