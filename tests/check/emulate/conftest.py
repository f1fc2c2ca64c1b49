"""Kernels and an emulator shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedules.check.emulate import EmulationMode, Emulator, find_cxx
from schedules.core.errors import ToolchainError


def _skip_without_compiler() -> None:
    try:
        find_cxx()
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cxx() -> str:
    _skip_without_compiler()
    return find_cxx()


@pytest.fixture(scope="session")
def emulator(cxx: str) -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


@dataclass(frozen=True)
class Built:
    """A built kernel with inputs and what it should compute from them."""

    library: Path
    source: str
    inputs: list[np.ndarray]
    reference: np.ndarray
    tolerance: float = 1e-5

    def mutate(self, old: str, new: str, occurrence: int = 0) -> Built:
        """The same with one occurrence of a text in the CUDA source replaced, line numbers kept."""
        parts = self.source.split(old)
        assert len(parts) > occurrence + 1, f"{old!r} is not in the source"
        begin, end = old.join(parts[: occurrence + 1]), old.join(parts[occurrence + 1 :])
        return replace(self, source=begin + new + end)

    def error(self, emulator: Emulator, mode: EmulationMode = EmulationMode()) -> float:  # noqa: B008 - frozen
        """The greatest error relative to the greatest value; NaN counts as infinite."""
        output = np.full(self.reference.shape, np.nan, "float32")
        (result,) = emulator.run(self.library, self.source, [*self.inputs, output], [len(self.inputs)], mode=mode)
        error = np.abs(result.astype("float64") - self.reference).max() / np.abs(self.reference).max()
        return float("inf") if np.isnan(error) else float(error)


@pytest.fixture(scope="session")
def tvm() -> Iterator[Any]:
    """The tvm package, with a CUDA compiler that compiles nothing: the emulator is given the source."""
    module = pytest.importorskip("tvm")
    name = "tvm_callback_cuda_compile"
    previous = module.get_global_func(name, allow_missing=True)
    module.register_global_func(name, lambda *_: b"placeholder", override=True)
    yield module
    if previous is not None:
        module.register_global_func(name, previous, override=True)


Build = Callable[..., Built]


@pytest.fixture(scope="session")
def build(tvm: Any, tmp_path_factory: pytest.TempPathFactory) -> Build:
    target = tvm.target.Target(
        {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024, "thread_warp_size": 32}, host="llvm"
    )

    def build(schedule: Any, inputs: list[np.ndarray], reference: np.ndarray, **config: Any) -> Built:
        with target, tvm.transform.PassContext(config=config):
            module = tvm.build(schedule.mod, target=target)
        library = tmp_path_factory.mktemp("library") / "kernel.so"
        module.export_library(str(library))
        return Built(library, module.imports[0].inspect_source(), inputs, reference)

    return build


@pytest.fixture(scope="session")
def convolution(tvm: Any, build: Build) -> Built:
    """A padded 3x3 convolution, layout HWCN, with staging of both inputs in shared memory."""
    from tvm import te

    size, channels, filters, batch, tile, threads, step = 4, 8, 32, 32, 4, 8, 4
    data = te.placeholder((size, size, channels, batch), name="data")
    weight = te.placeholder((3, 3, channels, filters), name="weight")

    def pad(y: Any, x: Any, c: Any, n: Any) -> Any:
        inside = te.all(y >= 1, y - 1 < size, x >= 1, x - 1 < size)
        return te.if_then_else(inside, data[y - 1, x - 1, c, n], te.const(0.0, "float32"))

    padded = te.compute((size + 2, size + 2, channels, batch), pad, name="padded")
    rc, ry, rx = (te.reduce_axis((0, extent)) for extent in (channels, 3, 3))
    output = te.compute(
        (size, size, filters, batch),
        lambda y, x, f, n: te.sum(padded[y + ry, x + rx, rc, n] * weight[ry, rx, rc, f], axis=[ry, rx, rc]),
        name="output",
    )
    sch = tvm.s_tir.Schedule(te.create_prim_func([data, weight, output]))
    block = sch.get_sblock("output")
    staged = [sch.cache_read(block, index, "shared") for index in (0, 1)]
    accumulator = sch.cache_write(block, 0, "local")
    sch.compute_inline("padded")
    y, x, f, n, ry, rx, rc = sch.get_loops(block)
    f_block, f_thread, f_inner = sch.split(f, [None, threads, tile])
    n_block, n_thread, n_inner = sch.split(n, [None, threads, tile])
    rc_outer, rc_inner = sch.split(rc, [None, step])
    sch.reorder(y, x, f_block, n_block, f_thread, n_thread, rc_outer, ry, rx, rc_inner, f_inner, n_inner)
    sch.bind(sch.fuse(y, x), "blockIdx.z")
    axes = {f_block: "blockIdx.y", n_block: "blockIdx.x", f_thread: "threadIdx.y", n_thread: "threadIdx.x"}
    for loop, axis in axes.items():
        sch.bind(loop, axis)
    sch.reverse_compute_at(accumulator, n_thread, preserve_unit_loops=True)
    for stage in staged:
        sch.compute_at(stage, rx, preserve_unit_loops=True)
        fused = sch.fuse(*sch.get_loops(stage)[-4:])
        _, thread_y, thread_x, vector = sch.split(fused, [None, threads, threads, 2])
        sch.bind(thread_y, "threadIdx.y")
        sch.bind(thread_x, "threadIdx.x")
        sch.vectorize(vector)
    sch.decompose_reduction(block, rc_outer)

    rng = np.random.default_rng(0)
    a = rng.standard_normal((size, size, channels, batch)).astype("float32")
    w = rng.standard_normal((3, 3, channels, filters)).astype("float32")
    wide = np.pad(a.astype("float64"), ((1, 1), (1, 1), (0, 0), (0, 0)))
    windows = ((dy, dx) for dy in range(3) for dx in range(3))
    reference = sum(
        np.einsum("yxcn,cf->yxfn", wide[dy : dy + size, dx : dx + size], w[dy, dx].astype("float64"))
        for dy, dx in windows
    )
    return build(sch, [a, w], np.asarray(reference))


@pytest.fixture(scope="session")
def softmax(tvm: Any, build: Build) -> Built:
    """Softmax of rows, one block each, reduced with shuffles inside warps and shared memory between them."""
    from tvm import te

    rows, columns, threads = 5, 512, 128
    data = te.placeholder((rows, columns), name="data")
    k1, k2 = te.reduce_axis((0, columns)), te.reduce_axis((0, columns))
    greatest = te.compute((rows,), lambda i: te.max(data[i, k1], axis=k1), name="greatest")
    exponent = te.compute((rows, columns), lambda i, j: te.exp(data[i, j] - greatest[i]), name="exponent")
    total = te.compute((rows,), lambda i: te.sum(exponent[i, k2], axis=k2), name="total")
    output = te.compute((rows, columns), lambda i, j: exponent[i, j] / total[i], name="output")
    sch = tvm.s_tir.Schedule(te.create_prim_func([data, output]))
    sch.compute_inline("exponent")
    row, column = sch.get_loops("output")
    sch.bind(row, "blockIdx.x")
    sch.bind(sch.split(column, [None, threads])[1], "threadIdx.x")
    for name in ("total", "greatest"):
        sch.compute_at(name, row, preserve_unit_loops=True)
        sch.set_scope(name, 0, "shared")
        sch.bind(sch.split(sch.get_loops(name)[-1], [None, threads])[1], "threadIdx.x")

    a = np.random.default_rng(1).standard_normal((rows, columns)).astype("float32")
    a[:, 96:128] += 300  # a maximum that misses the last warp lets exp overflow
    e = np.exp(a.astype("float64") - a.max(1, keepdims=True))
    return build(sch, [a], e / e.sum(1, keepdims=True))
