"""Generated CUDA C++, or LLVM IR for AMD GPUs, run on the CPU: one fiber per GPU thread, in an order that shows missing
synchronisation."""

from __future__ import annotations

from schedules.check.emulate.emulator import EmulationMode, Emulator
from schedules.check.emulate.tensor_map import TensorMap
from schedules.check.emulate.toolchain import find_cxx

__all__ = ["EmulationMode", "Emulator", "TensorMap", "find_cxx"]
