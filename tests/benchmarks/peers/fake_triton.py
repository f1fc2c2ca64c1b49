"""Enough of Triton to run a kernel's source in NumPy, one program after the other."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import benchmarks.peers


class Block(np.ndarray):
    """A Triton tensor."""

    def to(self, dtype: Any) -> Block:
        return self.astype(dtype)


def block(value: Any) -> Block:
    return np.asarray(value).view(Block)


class Pointer:
    """Into a flat array; accesses beyond it raise IndexError."""

    def __init__(self, array: Any, at: Any = 0) -> None:
        self.array, self.at = array, at
        self.dtype = SimpleNamespace(element_ty=array.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.at + offset)


def load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Block:
    at, mask = np.broadcast_arrays(pointer.at, mask)
    found = np.full(at.shape, other, pointer.array.dtype)
    assert (at[mask] >= 0).all()
    found[mask] = pointer.array[at[mask]]
    return block(found)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, mask, value = np.broadcast_arrays(pointer.at, mask, value)
    assert (at[mask] >= 0).all()
    pointer.array[at[mask]] = value[mask]


class Kernel:
    def __init__(self, function: Callable[..., None], program: list[int]) -> None:
        self._function, self._program = function, program

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps in (1, 2, 4, 8, 16, 32)
            given = [Pointer(a.reshape(-1)) if isinstance(a, np.ndarray) else a for a in arguments]
            for index in itertools.product(*map(range, grid)):
                self._program[:] = index
                with np.errstate(all="ignore"):
                    self._function(*given, **constants)

        return launch


@contextmanager
def installed(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import triton` gives this, and the kernels' module is imported anew, within the block."""
    triton, language, program = ModuleType("triton"), ModuleType("triton.language"), [0, 0, 0]
    names: dict[str, Any] = dict(
        program_id=lambda axis: block(program[axis]),
        arange=lambda start, end: block(np.arange(start, end)),
        full=lambda shape, value, dtype: block(np.full(shape, value, dtype)),
        zeros=lambda shape, dtype: block(np.zeros(shape, dtype)),
        max=lambda value, axis: block(np.max(value, axis=axis)),
        sum=lambda value, axis: block(np.sum(value, axis=axis, dtype=np.float32)),
        exp=lambda value: block(np.exp(value)),
        log=lambda value: block(np.log(value)),
        where=lambda condition, a, b: block(np.where(condition, a, b)),
        maximum=lambda a, b: block(np.maximum(a, b)),
        load=load,
        store=store,
        float32=np.float32,
        int64=np.int64,
        constexpr=object,
    )
    for name, value in names.items():
        setattr(language, name, value)
    extra: dict[str, Any] = dict(
        jit=lambda function: Kernel(function, program),
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
        language=language,
    )
    for name, value in extra.items():
        setattr(triton, name, value)
    ours = "benchmarks.peers.triton_softmax"
    with patch.context() as inner:
        inner.setitem(sys.modules, "triton", triton)
        inner.setitem(sys.modules, "triton.language", language)
        inner.delitem(sys.modules, ours, raising=False)
        yield
        sys.modules.pop(ours, None)

        if hasattr(benchmarks.peers, "triton_softmax"):
            delattr(benchmarks.peers, "triton_softmax")
