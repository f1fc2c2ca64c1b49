"""What bounds arithmetic on a GPU: the datasheet's peaks, and the matrix products that its libraries reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers.comparison import reason, time_in_turn
from benchmarks.peers.cudnn import torch_module
from schedules.measure.timer import Timer

EXTENT = 8192  # of each side of the products
ARITHMETICS = ("float16", "bfloat16", "int8", "tf32", "float32")


def matmul(arithmetic: str) -> Callable[[], object]:
    """A call of PyTorch's product of two random EXTENT x EXTENT matrices in `arithmetic`, of ARITHMETICS."""
    torch = torch_module()
    shape = (EXTENT, EXTENT)
    if arithmetic == "int8":
        a, b = (torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda") for _ in range(2))
        return lambda: torch._int_mm(a, b.t())
    tf32 = arithmetic == "tf32"
    dtype = torch.float32 if tf32 else getattr(torch, arithmetic)
    a, b = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))

    def call() -> object:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        return a @ b

    return call


def measure_ceilings(timer: Timer, seconds: float) -> dict[str, dict[str, Any]]:
    """The times and TFLOP/s (int8: TOP/s) of `matmul` by arithmetic; ``failed`` with the reason where there is none."""
    found: dict[str, dict[str, Any]] = {}
    for arithmetic in ARITHMETICS:
        try:
            times = time_in_turn(timer, {arithmetic: matmul(arithmetic)}, seconds)[arithmetic]
        except Exception as fault:  # an arithmetic that this PyTorch or GPU lacks must not end the comparison
            found[arithmetic] = {"failed": reason(fault)}
            continue
        found[arithmetic] = {"extent": EXTENT, **times.to_json(), "tflops": round(2 * EXTENT**3 / times.us / 1e6, 1)}
    return found
