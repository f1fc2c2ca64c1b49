"""Enough of cuDNN's interface for convolutions by algorithm: descriptors are dictionaries, pointers are addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import cudnn
from schedules.core.problem import Conv2dProblem
from schedules.core.reference import convolve
from tests.benchmarks.peers.fake_torch import machine

NOT_SUPPORTED = 3000


class Library:
    """Algorithm 0 takes everything, 1 nothing; `streams` are those that the handle was set to."""

    def __init__(self) -> None:
        self.streams: list[int | None] = []
        self._descriptors: dict[int, tuple[Any, ...]] = {}
        self.cudnnGetErrorString = _Named(lambda status: b"CUDNN_STATUS_NOT_SUPPORTED")

    def _create(self, made: Any) -> int:
        made._obj.value = len(self._descriptors) + 1
        self._descriptors[made._obj.value] = ()
        return 0

    cudnnCreate = cudnnCreateTensorDescriptor = cudnnCreateFilterDescriptor = _create
    cudnnCreateConvolutionDescriptor = _create

    def _set(self, made: ctypes.c_void_p, *values: Any) -> int:
        self._descriptors[int(made.value or 0)] = values
        return 0

    cudnnSetTensor4dDescriptor = cudnnSetFilter4dDescriptor = cudnnSetConvolution2dDescriptor = _set

    def cudnnSetConvolutionMathType(self, conv: ctypes.c_void_p, kind: int) -> int:
        return 0

    def cudnnSetStream(self, handle: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        self.streams.append(stream.value)
        return 0

    def cudnnGetConvolutionForwardWorkspaceSize(self, *values: Any) -> int:
        values[-1]._obj.value = 128
        return NOT_SUPPORTED if values[-2] else 0

    def cudnnConvolutionForward(self, handle: Any, alpha: Any, x_of: Any, x: Any, w_of: Any, w: Any, *rest: Any) -> int:
        conv_of, _, _, size, beta, y_of, y = rest
        assert size.value == 128 and beta._obj.value == 0
        form, dtype, n, ci, h, width = self._descriptors[x_of.value]
        y_form, y_dtype, _, co, out_h, out_w = self._descriptors[y_of.value]
        # the order that cuDNN documents: data type before format for filters, format before data type for tensors
        w_dtype, w_form, *filters = self._descriptors[w_of.value]
        assert form == y_form == w_form and dtype == y_dtype == w_dtype
        kind, totals = {cudnn.INT8: (ctypes.c_int8, cudnn.INT32), cudnn.FLOAT: (ctypes.c_float, cudnn.FLOAT)}[dtype]
        conv = self._descriptors[conv_of.value]
        pad, stride, dilation, mode, sums = conv[:2], conv[2:4], conv[4:6], conv[6], conv[7]
        assert (mode, sums) == (1, totals)
        problem = Conv2dProblem(n, h, width, ci, co, filters[2], filters[3], stride, pad, dilation)
        assert (problem.out_h, problem.out_w) == (out_h, out_w) and filters[:2] == [co, ci]
        scale = alpha._obj.value

        def lying(c: int, h: int, w: int, images: int) -> tuple[int, ...]:
            return (images, h, w, c) if form == cudnn.NHWC else (images, c, h, w)

        def work() -> None:
            data = _at(x, lying(ci, h, width, n), kind)
            weight = _at(w, lying(ci, filters[2], filters[3], co), kind)
            if form == cudnn.NHWC:
                data, weight = data.transpose(0, 3, 1, 2), weight.transpose(0, 3, 1, 2)
            sums = scale * convolve(problem, data, weight)[0]
            sums = sums.transpose(0, 2, 3, 1) if form == cudnn.NHWC else sums
            sums = np.rint(np.clip(sums, -128, 127)) if dtype == cudnn.INT8 else sums
            _at(y, lying(co, out_h, out_w, n), kind)[...] = sums

        machine.launch(work)
        return 0


class _Named:
    """A function with attributes, as ctypes has them."""

    def __init__(self, function: Any) -> None:
        self.function, self.restype = function, None

    def __call__(self, *values: Any) -> Any:
        return self.function(*values)


def _at(pointer: ctypes.c_void_p, shape: tuple[int, ...], kind: Any) -> Any:
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), shape)


def install(patch: pytest.MonkeyPatch) -> Library:
    found = Library()
    patch.setattr(cudnn, "library", lambda: found)
    cudnn._handle.cache_clear()
    return found
