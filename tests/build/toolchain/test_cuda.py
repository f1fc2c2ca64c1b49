from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schedules.build.toolchain import cuda
from schedules.core import interrupts
from schedules.core.errors import BuildError, ToolchainError

ROOT = Path(__file__).parents[3]
KERNEL = """
#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(64) twice(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[63 - threadIdx.x] * INFINITY;
}
"""


@pytest.fixture(params=["nvrtc", "nvcc"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "nvrtc":
        if not cuda.nvrtc_available():
            pytest.skip(f"no NVRTC; {cuda.INSTALL}")
    else:
        if shutil.which("nvcc") is None:
            pytest.skip("no nvcc on PATH")
        monkeypatch.setattr(cuda, "nvrtc_available", lambda: False)
    return str(request.param)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_cubin_ptx_and_resources(compiler: str, arch: str) -> None:
    made = cuda.compile_cuda(KERNEL, arch)
    assert made.compiler.startswith(compiler)
    assert made.cubin[:4] == b"\x7fELF"
    assert int.from_bytes(made.cubin[18:20], "little") == 190  # EM_CUDA
    assert f".target {arch}" in made.ptx
    (kernel,) = cuda.parse_resources(made.log)
    assert kernel.name == "twice"
    assert kernel.shared == 256
    assert 4 <= kernel.registers <= 32
    assert kernel.spill_stores == kernel.stack == 0


def test_a_syntax_error_is_one_line(compiler: str) -> None:
    with pytest.raises(BuildError, match="error") as caught:
        cuda.compile_cuda('extern "C" __global__ void f() { nonsense }', "sm_80")
    assert "\n" not in str(caught.value)


def test_without_a_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "nvrtc_available", lambda: False)
    monkeypatch.setattr(cuda.shutil, "which", lambda _: None)
    with pytest.raises(ToolchainError, match="pip install 'te-schedules"):
        cuda.compile_cuda(KERNEL, "sm_80")


def test_disassembly() -> None:
    if cuda.find_tool("nvdisasm") is None or not cuda.nvrtc_available():
        pytest.skip(f"no nvdisasm or no CUDA compiler; {cuda.INSTALL}")
    assert "BAR.SYNC" in cuda.disassemble(cuda.compile_cuda(KERNEL, "sm_80").cubin)
    with pytest.raises(BuildError):
        cuda.disassemble(b"not a cubin")


def test_spills_are_read() -> None:
    log = """ptxas info    : Compiling entry function 'f' for 'sm_80'
ptxas info    : Function properties for f
    16 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 49152 bytes smem, 380 bytes cmem[0]"""
    assert cuda.parse_resources(log) == (cuda.KernelResources("f", 255, 49152, 16, 20, 24),)


INTERRUPTED = """
from schedules.core import interrupts
interrupts.heed()
import ctypes, os, signal, sys, threading, time
from schedules.build.toolchain import cuda
from schedules.core.frames import apart

C, action = ctypes.CDLL(None), (ctypes.c_void_p * 32)()


def handler():
    C.sigaction(int(sys.argv[1]), None, action)
    return action[0]


def send():
    signal.pthread_sigmask(signal.SIG_BLOCK, interrupts.ASKING)
    while handler() == ours:
        time.sleep(0.0001)
    os.kill(os.getpid(), int(sys.argv[1]))


def main():
    global ours
    ours = handler()
    threading.Thread(target=send, daemon=True).start()
    body = "".join(f"x[{i}] = sinf(x[{i}]);" for i in range(200))
    source = 'extern "C" __global__ void k(float* x) {' + body + "}"
    if sys.argv[2] == "apart":
        apart(cuda._nvrtc, source, "sm_90a")
    else:
        cuda._nvrtc(source, "sm_90a")
    time.sleep(60)


interrupts.run(main)
"""


@pytest.mark.parametrize("where", ["here", "apart"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nvrtc_answers_no_signal(number: int, where: str) -> None:
    """It has handlers of its own while it reads, that end the process; the signal is answered as at any other time."""
    if not cuda.nvrtc_available():
        pytest.skip(f"no NVRTC; {cuda.INSTALL}")
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(int(number)), where],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (interrupts.INTERRUPTED, f"{interrupts.LINE}\n")
