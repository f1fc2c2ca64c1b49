"""Softmax kernels in Triton, after the idea of its fused-softmax tutorial.

A program keeps whole rows in registers, in a block of the next power of two; short rows share a program.

Rows too long for that are read twice, the first time with a running maximum and sum for each lane, as are those of
cross-entropy, which is written after the idea of Liger-Kernel's: loss and gradient in one kernel.  Imports Triton.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

REGISTER_COLS = 32768  # of the widest row that a program holds: 32 elements a thread
TILE = 2048  # elements of a program of short rows
STREAM = 8192  # elements that a program of a long row has in flight
LOSS_BLOCK = 32768  # of cross-entropy, as in Liger-Kernel


@triton.jit
def forward(x, y, rows, cols, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Softmax, or its logarithm, of ROWS rows of up to BLOCK columns each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row[:, None] * cols + col[None, :]
    value = tl.load(x + at, mask=inside, other=-float("inf")).to(tl.float32)
    value = value - tl.max(value, axis=1)[:, None]
    power = tl.exp(value)
    total = tl.sum(power, axis=1)[:, None]
    result = value - tl.log(total) if LOG else power / total
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def gradient(y, dy, dx, rows, cols, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of `forward`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row[:, None] * cols + col[None, :]
    output = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    change = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if LOG:
        result = change - tl.exp(output) * tl.sum(change, axis=1)[:, None]
    else:
        result = output * (change - tl.sum(output * change, axis=1)[:, None])
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def forward_long(x, y, cols, LOG: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Softmax, or its logarithm, of one row in steps of BLOCK columns."""
    start = tl.program_id(0).to(tl.int64) * cols
    lane = tl.arange(0, BLOCK)
    # finite, so that the difference from a column of -inf is no NaN
    peak = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, cols, BLOCK):
        col = first + lane
        value = tl.load(x + start + col, mask=col < cols, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(peak, value)
        total = total * tl.exp(peak - larger) + tl.exp(value - larger)
        peak = larger
    row_peak = tl.max(peak, axis=0)
    row_total = tl.sum(total * tl.exp(peak - row_peak), axis=0)
    for first in range(0, cols, BLOCK):
        col = first + lane
        value = tl.load(x + start + col, mask=col < cols, other=-float("inf")).to(tl.float32) - row_peak
        result = value - tl.log(row_total) if LOG else tl.exp(value) / row_total
        tl.store(y + start + col, result.to(y.dtype.element_ty), mask=col < cols)


@triton.jit
def gradient_long(y, dy, dx, cols, LOG: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of `forward_long`."""
    start = tl.program_id(0).to(tl.int64) * cols
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, cols, BLOCK):
        col = first + lane
        change = tl.load(dy + start + col, mask=col < cols, other=0.0).to(tl.float32)
        if LOG:
            total += change
        else:
            total += change * tl.load(y + start + col, mask=col < cols, other=0.0).to(tl.float32)
    row_total = tl.sum(total, axis=0)
    for first in range(0, cols, BLOCK):
        col = first + lane
        output = tl.load(y + start + col, mask=col < cols, other=0.0).to(tl.float32)
        change = tl.load(dy + start + col, mask=col < cols, other=0.0).to(tl.float32)
        result = change - tl.exp(output) * row_total if LOG else output * (change - row_total)
        tl.store(dx + start + col, result.to(dx.dtype.element_ty), mask=col < cols)


@triton.jit
def cross_entropy(x, target, dloss, dx, loss, cols, scale, ignored, GRAD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The loss of one row in steps of BLOCK columns, and its gradient by the row's `dloss`."""
    row = tl.program_id(0).to(tl.int64)
    start = row * cols
    lane = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, cols, BLOCK):
        col = first + lane
        value = tl.load(x + start + col, mask=col < cols, other=-float("inf")).to(tl.float32) * scale
        larger = tl.maximum(peak, value)
        total = total * tl.exp(peak - larger) + tl.exp(value - larger)
        peak = larger
    row_peak = tl.max(peak, axis=0)
    log_sum = row_peak + tl.log(tl.sum(total * tl.exp(peak - row_peak), axis=0))
    label = tl.load(target + row)
    counts = label != ignored
    named = tl.load(x + start + label, mask=counts, other=0.0).to(tl.float32) * scale
    tl.store(loss + row, tl.where(counts, log_sum - named, 0.0))
    if GRAD:
        weight = tl.where(counts, tl.load(dloss + row) * scale, 0.0)
        for first in range(0, cols, BLOCK):
            col = first + lane
            value = tl.load(x + start + col, mask=col < cols, other=0.0).to(tl.float32) * scale
            result = (tl.exp(value - log_sum) - tl.where(col == label, 1.0, 0.0)) * weight
            tl.store(dx + start + col, result.to(dx.dtype.element_ty), mask=col < cols)


def launch_loss(tensors: dict[str, Any], rows: int, cols: int, scale: float, ignored: int) -> None:
    """Run `cross_entropy` on contiguous tensors by their names in the problem; the gradient where there is a dx."""
    x, grad = tensors["x"], "dx" in tensors
    given = x, tensors["target"], tensors.get("dloss", x), tensors.get("dx", x), tensors["loss"]
    block = min(LOSS_BLOCK, triton.next_power_of_2(cols))
    cross_entropy[(rows,)](*given, cols, scale, ignored, GRAD=grad, BLOCK=block, num_warps=32)


def launch(function: str, tensors: list[Any], rows: int, cols: int) -> None:
    """Run softmax, log_softmax or the gradient of either on contiguous (rows, cols) tensors of one dtype: x, y, or y,
    dy, dx."""
    log, grad = function.startswith("log_"), function.endswith("_grad")
    if cols > REGISTER_COLS:
        long = gradient_long if grad else forward_long
        long[(rows,)](*tensors, cols, LOG=log, BLOCK=STREAM, num_warps=16)
        return
    block = triton.next_power_of_2(cols)
    shared = max(1, TILE // block)
    kernel = gradient if grad else forward
    grid = (triton.cdiv(rows, shared),)
    kernel[grid](*tensors, rows, cols, LOG=log, ROWS=shared, BLOCK=block, num_warps=_warps(shared * block))


def _warps(elements: int) -> int:
    """For 8 to 64 elements a thread."""
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16 if elements <= 16384 else 32
