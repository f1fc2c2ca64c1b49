from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from schedules.check.emulate import EmulationMode, Emulator
from schedules.core.errors import EmulationError

HINTS = get_type_hints(EmulationMode)
MODES = [EmulationMode(*choice) for choice in itertools.product(get_args(HINTS["copies"]), get_args(HINTS["order"]))]
FILL = 'extern "C" __global__ void fill(float* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = 1.5f; }'


def fill(emulator: Emulator) -> None:
    (result,) = emulator.launch(FILL, "fill", (2, 1, 1), (32, 1, 1), [np.zeros(64, "float32")], [0])
    assert (result == 1.5).all()


def is_caught(kernel: Any, emulator: Emulator) -> bool:
    for mode in MODES:
        try:
            if kernel.error(emulator, mode) > kernel.tolerance:
                return True
        except EmulationError:
            return True
    return False


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode.copies}-{mode.order}")
@pytest.mark.parametrize("name", ["convolution", "softmax"])
def test_generated_kernels_are_correct_in_every_mode(
    name: str, mode: EmulationMode, emulator: Emulator, request: pytest.FixtureRequest
) -> None:
    kernel = request.getfixturevalue(name)
    assert kernel.error(emulator, mode) < kernel.tolerance


# TVM puts two barriers into the softmax between a write and a read of thread 0 alone.
@pytest.mark.parametrize("name, redundant", [("convolution", []), ("softmax", [1, 4])])
def test_a_missing_barrier_is_caught(
    name: str, redundant: list[int], emulator: Emulator, request: pytest.FixtureRequest
) -> None:
    kernel = request.getfixturevalue(name)
    count = kernel.source.count("__syncthreads();")
    assert count >= 2
    survivors = [i for i in range(count) if not is_caught(kernel.mutate("__syncthreads();", "", i), emulator)]
    assert survivors == redundant


INDEX_MUTATIONS = {
    "convolution": [("((int)threadIdx.y)", "((int)threadIdx.x)"), ("((int)threadIdx.x)", "(((int)threadIdx.x) + 1)")],
    "softmax": [("((int)threadIdx.x)", "(((int)threadIdx.x) + 32)"), (" * 512", " * 511")],
}


@pytest.mark.parametrize("name", INDEX_MUTATIONS)
def test_a_wrong_index_is_caught(name: str, emulator: Emulator, request: pytest.FixtureRequest) -> None:
    kernel = request.getfixturevalue(name)
    lines = kernel.source.splitlines()
    tried = 0
    for number, line in enumerate(lines):
        for old, new in INDEX_MUTATIONS[name]:
            # the output's index, or that of the staging in shared memory, changed on one side of the assignment only
            target, equals, value = line.partition(" = ")
            if not equals or old not in target or "_ptr" not in target or "cse" in target:
                continue
            mutant = [*lines[:number], target.replace(old, new) + equals + value, *lines[number + 1 :]]
            assert is_caught(replace(kernel, source="\n".join(mutant)), emulator), mutant[number]
            tried += 1
    assert tried >= 2


def test_a_wrong_shuffle_distance_is_caught(softmax: Any, emulator: Emulator) -> None:
    for distance in (16, 8, 4, 2, 1):
        shuffle = "__shfl_down_sync(mask_ptr_2[0], red_buf0_ptr_2[0], "
        assert is_caught(softmax.mutate(f"{shuffle}{distance},", f"{shuffle}{distance * 2},"), emulator)


def test_wrong_shape_is_reported_with_the_text_of_the_host_code(convolution: Any, emulator: Emulator) -> None:
    data, weight = convolution.inputs
    arguments = [data[:-1], weight, np.zeros(convolution.reference.shape, "float32")]
    with pytest.raises(EmulationError, match=r"(?s)shape\[0\].*expected") as caught:
        emulator.run(convolution.library, convolution.source, arguments, [2])
    assert "\n" not in str(caught.value)


def test_missing_library_entry_and_kernel(tmp_path: Path, convolution: Any, emulator: Emulator) -> None:
    arguments = [*convolution.inputs, np.zeros(convolution.reference.shape, "float32")]
    with pytest.raises(EmulationError):
        emulator.run(tmp_path / "missing.so", convolution.source, arguments, [2])
    with pytest.raises(EmulationError, match="other"):
        emulator.run(convolution.library, convolution.source, arguments, [2], entry="other")
    with pytest.raises(EmulationError, match="no kernel 'main_kernel'"):
        emulator.run(convolution.library, FILL, arguments, [2])
    with pytest.raises(EmulationError, match="takes 1 arguments and is given 2"):
        emulator.launch(FILL, "fill", (1, 1, 1), (1, 1, 1), [np.zeros(1, "float32")] * 2, [0])
    fill(emulator)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"])
def test_arguments_of_every_dtype_come_back(dtype: str, emulator: Emulator) -> None:
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    data = np.arange(24).reshape(2, 3, 4).astype(dtype)
    source = f"""extern "C" __global__ void copy(const unsigned char* in, unsigned char* out) {{
      if (threadIdx.x < {data.nbytes}) out[threadIdx.x] = in[threadIdx.x]; }}"""
    strided = np.repeat(data, 2, axis=2)[:, :, ::2]
    _, result = emulator.launch(source, "copy", (1, 1, 1), (192, 1, 1), [strided, np.zeros_like(data)], [0, 1])
    assert result.dtype == data.dtype and (result == data).all()


CRASHES = {
    "device memory overrun": ("out[threadIdx.x + 64] = 0;", "past the end of a device buffer of 256 bytes"),
    "far overrun": ("out[threadIdx.x + 5000] = 0;", "memory fault"),
    "device memory underrun": ("out[(int)threadIdx.x - 2000] = 0;", "memory fault.*before a device buffer"),
    "null pointer": ("*(volatile int*)nullptr = 0;", "memory fault"),
    "division by zero": ("volatile int zero = 0; out[0] = 7 / zero;", "division by zero"),
    "trap": ("__builtin_trap();", "(?i)trap|illegal instruction"),
    "stack": ("volatile char big[400000]; for (int i = 399999; i >= 0; i -= 64) big[i] = 1;", "local variables"),
}


@pytest.mark.parametrize("name", CRASHES)
def test_crash_is_an_error_with_line_block_and_thread_and_the_next_run_works(name: str, emulator: Emulator) -> None:
    body, message = CRASHES[name]
    condition = "if (blockIdx.x == 1 && threadIdx.x == 3)"
    source = f'extern "C" __global__ void crash(float* out) {{\n{condition} {{\n{body}\n}}\n}}'
    with pytest.raises(EmulationError, match=message) as caught:
        emulator.launch(source, "crash", (2, 1, 1), (32, 1, 1), [np.zeros(64, "float32")], [0])
    assert "block (1,0,0), thread (3,0,0)" in str(caught.value)
    if "trap" not in name:
        assert "kernel line 3" in str(caught.value)
    fill(emulator)


def test_unknown_ptx_fails_only_when_executed(emulator: Emulator) -> None:
    source = """extern "C" __global__ void strange(int* flag) {
      if (flag[0]) { int x; asm volatile("tcgen05.fence; mov.u32 %0, 1;" : "=r"(x)); }
      flag[1] = 7;
    }"""
    arguments = [np.array([0, 0], "int32")]
    assert emulator.launch(source, "strange", (1, 1, 1), (1, 1, 1), arguments, [0])[0][1] == 7
    with pytest.raises(EmulationError, match=r"unknown PTX: tcgen05.fence.*kernel line 2, block \(0,0,0\)"):
        emulator.launch(source, "strange", (1, 1, 1), (1, 1, 1), [np.array([1, 0], "int32")], [0])


def test_endless_loop_is_stopped_and_located(emulator: Emulator) -> None:
    source = """extern "C" __global__ void spin(volatile int* flag) {
      while (flag[0] == 0) {
      }
    }"""
    with pytest.raises(EmulationError, match=r"still running after 0.3 s .*block \(0,0,0\)"):
        emulator.launch(source, "spin", (1, 1, 1), (1, 1, 1), [np.zeros(1, "int32")], [0], timeout_s=0.3)
    fill(emulator)


def test_source_that_does_not_compile(emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match=r"kernel.cu:2:.*error") as caught:
        emulator.launch('extern "C" __global__ void k(int* a) {\n a = nonsense; }', "k", (1, 1, 1), (1, 1, 1), [], [])
    assert "\n" not in str(caught.value)


def test_worker_killed_from_outside_is_replaced(emulator: Emulator) -> None:
    fill(emulator)
    assert emulator._worker is not None
    emulator._worker.process.kill()
    emulator._worker.process.wait()
    fill(emulator)


def test_close_ends_the_process_and_a_later_run_starts_another(cxx: str) -> None:
    emulator = Emulator()
    fill(emulator)
    assert emulator._worker is not None
    process = emulator._worker.process
    emulator.close()
    assert process.poll() is not None
    fill(emulator)
    emulator.close()
    emulator.close()


@pytest.fixture(scope="module")
def matmul(tvm: Any, build: Any) -> Iterator[Any]:
    """A tensor core matmul from TVM's own schedule. The import of the intrinsics takes about ten seconds."""
    from tvm import te, tirx
    from tvm.s_tir.tensor_intrin import cuda
    from tvm.testing.tir import mma_schedule

    size = 64
    a, b = (te.placeholder((size, size), name=name, dtype="float16") for name in "AB")
    k = te.reduce_axis((0, size), name="k")

    def product(i: Any, j: Any) -> Any:
        return te.sum(tirx.Cast("float32", a[i, k]) * tirx.Cast("float32", b[k, j]), axis=k)

    c = te.compute((size, size), product, name="C")

    def fragment(i: Any, j: Any) -> Any:
        return (i // 16, j // 16, *cuda.shared_16x16_to_ldmatrix_32x8_layout(i % 16, j % 16))

    sch = mma_schedule(
        te.create_prim_func([a, b, c]), 16, "float16", False, [None, 1, 2, 1, 1], [None, 1, 2, 1, 1], [None, 2, 1],
        fragment, fragment, fragment, cuda.LDMATRIX_f16_A_INTRIN, cuda.LDMATRIX_f16_B_INTRIN,
        cuda.MMA_f16f16f32_INTRIN, cuda.MMA_fill_16x16_f32_INTRIN, cuda.MMA_store_16x16_f32_global_INTRIN,
    )  # fmt: skip
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal((size, size)).astype("float16") for _ in range(2))
    # With common subexpressions shared, LowerWarpMemory leaves the fragments 32 times too large.
    config = {"tirx.disable_cse_tir": True}
    yield build(sch, [x, y], x.astype("float64") @ y.astype("float64"), **config)


def test_tensor_core_matmul(matmul: Any, emulator: Emulator) -> None:
    assert "mma.sync" in matmul.source and "ldmatrix" in matmul.source
    for mode in MODES:
        assert matmul.error(emulator, mode) < matmul.tolerance
    for occurrence in range(matmul.source.count("__syncthreads();")):
        assert is_caught(matmul.mutate("__syncthreads();", "", occurrence), emulator)
    assert is_caught(matmul.mutate("{%4, %5, %6, %7}", "{%5, %4, %6, %7}"), emulator)
