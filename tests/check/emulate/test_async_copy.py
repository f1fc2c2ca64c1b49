from __future__ import annotations

import numpy as np
import pytest

from schedules.check.emulate import EmulationMode, Emulator
from schedules.core.errors import EmulationError

LATE, EARLY = EmulationMode(copies="late"), EmulationMode(copies="early")
THREADS, STEPS = 64, 6
DATA = np.arange(STEPS * THREADS, dtype="float32").reshape(STEPS, THREADS)

# Double buffering: while step i is read, the data of step i + 1 are under way.
PIPELINE = """
__forceinline__ __device__ void fetch(float* to, const float* from) {
  unsigned int addr = __cvta_generic_to_shared(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(addr), "l"(from), "n"(4));
}
extern "C" __global__ void k(const float* in, float* out) {
  __shared__ alignas(64) float buffer[2][64];
  int t = threadIdx.x;
  fetch(&buffer[0][t], in + t);
  asm volatile("cp.async.commit_group;");
  for (int i = 0; i < 6; ++i) {
    __syncthreads(); /* the buffer that is filled next has been read */
    if (i < 5) fetch(&buffer[(i + 1) % 2][t], in + (i + 1) * 64 + t);
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads(); /* the data of all threads have landed */
    out[i * 64 + t] = buffer[i % 2][63 - t];
  }
}
"""


def pipeline(emulator: Emulator, source: str, mode: EmulationMode) -> bool:
    """Whether the source copies DATA with the threads reversed."""
    arrays = [DATA, np.zeros_like(DATA)]
    (result,) = emulator.launch(source, "k", (1, 1, 1), (THREADS, 1, 1), arrays, [1], mode=mode)
    return bool((result == DATA[:, ::-1]).all())


@pytest.mark.parametrize("order", ["forward", "reverse", "strided"])
@pytest.mark.parametrize("copies", ["late", "early"])
def test_a_correct_pipeline_is_correct_in_every_mode(copies: str, order: str, emulator: Emulator) -> None:
    assert pipeline(emulator, PIPELINE, EmulationMode(copies, order))  # type: ignore[arg-type]


def test_late_copies_show_a_weak_or_missing_wait(emulator: Emulator) -> None:
    weak = PIPELINE.replace("wait_group 1", "wait_group 2")
    missing = PIPELINE.replace('asm volatile("cp.async.wait_group 1;" ::: "memory");', "")
    for source in (weak, missing):
        assert not pipeline(emulator, source, LATE)
        assert pipeline(emulator, source, EARLY)
    stronger = PIPELINE.replace("cp.async.wait_group 1", "cp.async.wait_all")
    assert pipeline(emulator, stronger, LATE)


def test_early_copies_show_a_buffer_overwritten_while_it_is_read(emulator: Emulator) -> None:
    hazard = PIPELINE.replace("__syncthreads(); /* the buffer", "/* the buffer")
    assert not pipeline(emulator, hazard, EARLY)


def test_a_missing_commit_is_seen(emulator: Emulator) -> None:
    assert not pipeline(emulator, PIPELINE.replace('asm volatile("cp.async.commit_group;");', ""), LATE)


@pytest.mark.parametrize("mode", [LATE, EARLY])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_sizes_zero_fill_and_predicates(size: int, mode: EmulationMode, emulator: Emulator) -> None:
    lanes = size // 4
    registers = "{" + ", ".join(["%4"] * lanes) + "}"
    vector = "" if lanes == 1 else f".v{lanes}"
    source = f"""extern "C" __global__ void k(const char* in, char* out) {{
      __shared__ alignas(64) char s[3 * 4 * {size}];
      int t = threadIdx.x;
      unsigned a = __cvta_generic_to_shared(s + t * {size});
      const char* from = in + t * {size};
      asm volatile("cp.async.ca.shared.global [%0], [%1], {size}, %2;"
        :: "r"(a), "l"(from), "r"(t % 3 == 0 ? {size} : t));
      __asm__ __volatile__(
        "{{\\n"
        " .reg .pred p;\\n"
        " setp.eq.u32 p, %3, 1;\\n"
        " @p cp.async.ca.shared.global.L2::128B [%0], [%1], %2;\\n"
        " @!p st.shared{vector}.u32 [%0], {registers};\\n"
        "}}\\n"
        :: "r"(a + 4 * {size}), "l"(from), "n"({size}), "r"(t == 2), "r"(0)
      );
      asm volatile("{{ .reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.ca.shared.global [%0], [%1], %2; }}"
        : : "r"(a + 8 * {size}), "l"(from), "n"({size}), "r"(t != 1) : "memory");
      asm volatile("cp.async.wait_all;");
      for (int i = 0; i < 3; ++i)
        for (int b = 0; b < {size}; ++b) out[i * 4 * {size} + t * {size} + b] = s[i * 4 * {size} + t * {size} + b];
    }}"""
    data = np.arange(1, 4 * size + 1, dtype="uint8").reshape(4, size)
    arrays = [data, np.zeros((3, 4, size), "uint8")]
    (result,) = emulator.launch(source, "k", (1, 1, 1), (4, 1, 1), arrays, [1], mode=mode)
    part, choice, guarded = data.copy(), np.zeros_like(data), data.copy()
    part[1, 1:], part[2, 2:] = 0, 0
    choice[2] = data[2]
    guarded[1] = 0xFF  # neither copied nor filled
    assert (result == np.stack([part, choice, guarded])).all()


def test_a_source_of_no_bytes_is_not_read(emulator: Emulator) -> None:
    source = """extern "C" __global__ void k(float* out) {
      __shared__ alignas(16) float s[4];
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"((unsigned)__cvta_generic_to_shared(s)), "l"(out + 1000000), "r"(0));
      asm volatile("cp.async.wait_all;");
      out[0] = s[0];
    }"""
    assert emulator.launch(source, "k", (1, 1, 1), (1, 1, 1), [np.ones(1, "float32")], [0])[0][0] == 0


@pytest.mark.parametrize(
    "target, origin, size, message",
    [
        ("s + 1", "in", 16, "cp.async: shared address .* not aligned to 16 bytes"),
        ("s", "in + 1", 8, "cp.async: global address .* not aligned to 8 bytes"),
        ("s + 29", "in", 4, None),
        ("s + 32", "in", 4, "cp.async: 4 bytes at shared address .* outside"),
        ("s", "in + 64", 4, "memory fault: 0 bytes past the end of a device buffer of 256 bytes"),
        ("s", "in", 12, "cp.async of 12 bytes"),
    ],
)
def test_illegal_addresses(target: str, origin: str, size: int, message: str | None, emulator: Emulator) -> None:
    source = f"""extern "C" __global__ void k(const float* in) {{
      __shared__ alignas(64) float s[32];
      asm volatile("cp.async.ca.shared.global [%0], [%1], {size};"
        :: "r"((unsigned)__cvta_generic_to_shared({target})), "l"({origin}));
    }}"""
    arguments = [np.zeros(64, "float32")]
    if message is None:
        emulator.launch(source, "k", (1, 1, 1), (1, 1, 1), arguments, [])
        return
    with pytest.raises(EmulationError, match=message):
        emulator.launch(source, "k", (1, 1, 1), (1, 1, 1), arguments, [])
