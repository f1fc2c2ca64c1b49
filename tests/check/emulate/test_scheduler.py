from __future__ import annotations

import numpy as np
import pytest

from schedules.check.emulate import EmulationMode, Emulator
from schedules.core.errors import EmulationError


def run(
    emulator: Emulator, body: str, block: tuple[int, int, int] = (64, 1, 1), grid: tuple[int, int, int] = (1, 1, 1),
    order: str = "forward",
) -> np.ndarray:  # fmt: skip
    source = f"""extern "C" __global__ void k(int* out) {{
      int t = threadIdx.x;
      {body}
    }}"""
    mode = EmulationMode(order=order)  # type: ignore[arg-type]
    return emulator.launch(source, "k", grid, block, [np.full(1024, -7, "int32")], [0], mode=mode, timeout_s=10)[0]


def test_index_variables(emulator: Emulator) -> None:
    body = """int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 100 + thread + 0 * t;"""
    result = run(emulator, body, block=(3, 2, 4), grid=(2, 3, 2))
    assert (result[: 12 * 24].reshape(12, 24) == np.arange(12)[:, None] * 100 + np.arange(24)).all()


@pytest.mark.parametrize("order", ["forward", "reverse", "strided"])
def test_barrier_orders_the_warps(order: str, emulator: Emulator) -> None:
    body = "__shared__ int s[96]; s[t] = t; __syncthreads(); out[t] = s[(t + 32) % 96];"
    result = run(emulator, body, block=(96, 1, 1), order=order)
    assert (result[:96] == (np.arange(96) + 32) % 96).all()
    result = run(emulator, body.replace("__syncthreads();", ""), block=(96, 1, 1), order=order)
    assert (result[:96] == -1).any()


def test_voting_barriers(emulator: Emulator) -> None:
    body = """out[t] = __syncthreads_count(t % 3 == 0) * 100;
      out[t] += __syncthreads_or(t == 63) * 10 + __syncthreads_and(t < 63);"""
    assert (run(emulator, body)[:64] == 22 * 100 + 10).all()


def test_named_barriers_let_two_halves_go_their_own_ways(emulator: Emulator) -> None:
    body = """__shared__ int s[128];
      int half = t / 64;
      for (int round = 0; round < 1 + 2 * half; ++round) {
        s[t] = t + round;
        asm volatile("bar.sync %0, 64;" : : "r"(half + 1));
        out[t] = s[half * 64 + (t + 32) % 64];
        asm volatile("barrier.sync %0, %1;" :: "r"(half + 1), "n"(64) : "memory");
      }"""
    result = run(emulator, body, block=(128, 1, 1))[:128].reshape(2, 64)
    expected = (np.arange(64) + 32) % 64
    assert (result[0] == expected).all() and (result[1] == 64 + expected + 2).all()


def test_producer_arrives_without_waiting(emulator: Emulator) -> None:
    body = """__shared__ int s[32];
      if (t < 32) { asm volatile("bar.sync 3, 64;"); out[t] = s[t]; }
      else { s[t - 32] = t; asm volatile("bar.arrive 3, 64;"); out[t] = 1; }"""
    result = run(emulator, body)
    assert (result[:32] == np.arange(32) + 32).all() and (result[32:64] == 1).all()


def test_a_spin_loop_that_sleeps_lets_others_run(emulator: Emulator) -> None:
    body = """__shared__ volatile int flag; if (t == 0) flag = 0; __syncthreads();
      if (t == 0) { while (flag == 0) __nanosleep(20); out[0] = flag; }
      if (t == 40) flag = 5;"""
    for order in ("forward", "reverse"):
        assert run(emulator, body, order=order)[0] == 5


@pytest.mark.parametrize(
    "body, message",
    [
        ("if (t < 32) __syncthreads();", "__syncthreads: reached by only 32 of 64 threads; 32 threads have exited"),
        ("if (t < 40)\n __syncthreads();\n else\n __syncthreads();", "divergent __syncthreads"),
        ("if (t < 32) __syncthreads();\n else __shfl_sync(~0u, t, 0);\n __syncthreads();", "divergent __syncthreads"),
        ('if (t < 32) asm volatile("bar.sync 1, 64;");', "divergent barrier: reached by only 32"),
        ('if (t != 7) asm volatile("bar.sync 1, 32;");', "barrier 1 expects 32 threads and got 63"),
        ('if (t < 8 || t >= 40) asm volatile("bar.sync 1, 32;");', "only a part of warp"),
        ('asm volatile("bar.sync 16, 64;");', "barrier 16 does not exist"),
        ('asm volatile("bar.sync 1, 33;");', "33 threads: not a multiple"),
        ('asm volatile("bar.sync 1, 96;");', "expects 96 threads, the block has 64"),
        ('if (t < 32) asm volatile("bar.sync 1, 32;"); else asm volatile("bar.sync 1, 64;");', "used with 64 threads"),
    ],
)  # fmt: skip
def test_misused_barriers_are_errors(body: str, message: str, emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match=message) as caught:
        run(emulator, body)
    assert "kernel line " in str(caught.value)


def test_impossible_launches(emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match="a block of 32 x 33 x 1 threads"):
        run(emulator, "", block=(32, 33, 1))
    with pytest.raises(EmulationError, match="a grid of 1 x 0 x 1 blocks"):
        run(emulator, "", grid=(1, 0, 1))
