"""PyTorch's benchmark mode (`torch.backends.cudnn.benchmark`), in which it times cuDNN's algorithms at a shape's first
call: here kernels that are predicted to be fast are timed in turn, with nothing of an earlier call in L2.

All must agree with the first of them, which serves without this mode.  The clock is PyTorch's, which knows its streams:
`measure.timer` needs CUDA's Python bindings, and imports the compiler.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from schedules.core.cpu import MOST_CACHE
from schedules.core.errors import SchedulesError
from schedules.core.problem import Argument
from schedules.core.tolerance import TOLERANCES
from schedules.measure.contest import hold, percentile_of
from schedules.predict.rank import RANKED

logger = logging.getLogger("schedules")

MOST = RANKED  # kernels of a shape that are timed: all that the ranking hands back
SECONDS, LONGEST = 0.1, 0.5  # of their timing where that tells them apart, and at most
CALLS = 2  # of a kernel in its turn
FLUSH_BYTES = 2 * MOST_CACHE  # more than any L2
FLUSHES = 2  # while the host queues a call
SUMMED = 2.0**-12  # of the largest result, by which sums in another order may differ
HIGHEST = 3  # random integers are less far from zero
SEED = 0

Run = Callable[..., Any]


class Kernel(Protocol):
    """What makes functions of contiguous inputs; the last of its arguments is the result."""

    @property
    def arguments(self) -> tuple[Argument, ...]: ...

    @property
    def made(self) -> str: ...

    def launch(self, device: torch.device, *outputs: tuple[Sequence[int], torch.dtype]) -> Run: ...


@dataclass(frozen=True)
class Fastest:
    """The number of a kernel, and why it is the one."""

    number: int
    why: str


def is_asked(device: torch.device) -> bool:
    """Whether the mode is on, for a device that it is about, and nothing asks for the same bits in each process."""
    cudnn = torch.backends.cudnn
    fixed = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return device.type == "cuda" and bool(cudnn.benchmark) and not fixed


def most() -> int:
    """Kernels that are timed at most: `torch.backends.cudnn.benchmark_limit`, 10 unless a program sets it; 0 means
    all."""
    return min(torch.backends.cudnn.benchmark_limit or MOST, MOST)


def fastest(kernels: Sequence[Kernel], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Fastest:
    """Time `kernels` of one problem on a device; those that fail, or differ from the first, are left out.

    The first wins unless another is faster for sure.  `clock` gives the host's seconds.  Raises torch.OutOfMemoryError
    where there is no room for their tensors.
    """
    on_gpu = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_gpu, torch.no_grad(), _disable_current_modes():
        *inputs, result = [
            (argument.shape, getattr(torch, argument.dtype), argument.dtype) for argument in kernels[0].arguments
        ]
        draw = torch.Generator(device).manual_seed(SEED)  # a program's own random numbers stay as they are
        given = [_random(shape, dtype, draw) for shape, dtype, _ in inputs]
        calls: dict[int, Callable[[], Any]] = {}
        expected: Any = None
        for number, kernel in enumerate(kernels):
            run = kernel.launch(device, result[:2])
            try:
                found = run(*given)
            except SchedulesError as error:
                if number == 0:
                    raise
                logger.warning("%s is left out: %s", kernel.made, error)
                continue
            if number == 0:
                expected = found
            elif not _agree(found, expected, result[2]):
                logger.warning("%s is left out: its results are not those of %s", kernel.made, kernels[0].made)
                continue
            calls[number] = functools.partial(run, *given)
        with _timer(device, clock) as times:
            numbers = list(calls)
            contest = hold(
                lambda place: times(calls[numbers[place]]),
                len(numbers),
                holder=0,
                seconds=SECONDS,
                longest=LONGEST,
                clock=clock,
            )
    us = percentile_of(contest.calls[contest.winner], 50)
    return Fastest(numbers[contest.winner], f"the fastest of {len(numbers)} that were timed here, {us:.1f} us")


def _random(shape: Sequence[int], dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    """Normal numbers, or integers around zero."""
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=draw, device=draw.device).to(dtype)
    lowest = 1 - HIGHEST if dtype.is_signed else 0
    whole = torch.randint(lowest, HIGHEST, tuple(shape), generator=draw, device=draw.device, dtype=torch.int32)
    return whole.to(dtype)


def _agree(one: torch.Tensor, other: torch.Tensor, dtype: str) -> bool:
    """Whether results differ by roundings alone; NaN stand where the `other` has them."""
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    one, other = one.float(), other.float()
    size = other.abs()
    near = 2 * TOLERANCES[dtype].rounding * size + SUMMED * size.nan_to_num(0.0, 0.0).max()
    return bool((((one - other).abs() <= near) | (one == other) | (one.isnan() & other.isnan())).all())


@contextlib.contextmanager
def _timer(
    device: torch.device, clock: Callable[[], float]
) -> Iterator[Callable[[Callable[[], Any]], Sequence[float]]]:
    """A function that gives the microseconds of CALLS calls."""
    if device.type == "cpu":
        yield lambda call: [_clocked(call, clock) for _ in range(CALLS)]
        return
    trash = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(CALLS)]

    def times(call: Callable[[], Any]) -> Sequence[float]:
        for start, stop in pairs:
            for _ in range(FLUSHES):
                trash.zero_()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize(device)
        return [1e3 * start.elapsed_time(stop) for start, stop in pairs]

    yield times


def _clocked(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return 1e6 * (clock() - start)
