"""Targets as data: what each architecture allows, the TVM target it builds with, and the device defaults are meant for.

Limits are from the CUDA C++ Programming Guide ("Compute Capabilities") and AMD's CDNA2, CDNA3 and RDNA3 ISA guides.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from schedules.core.device import GENERIC, H200, Device
from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.quiet import ROCM_WARNINGS, without_lines
from schedules.core.threads import cores

if TYPE_CHECKING:
    from tvm.target import Target

KIB = 1024
MOST_CACHE = 128 * KIB**2
GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)  # blocks along x, y and z of a launch at most, on every GPU


@dataclass(frozen=True)
class Arch:
    """The limits of one architecture.  Sizes in bytes, registers in 32-bit registers.

    `device` is what default configs, search spaces and estimates are made for, in place of the arch's own if `on` named
    another; it makes no config legal or illegal.
    """

    kind: str  # llvm, cuda or rocm
    name: str  # sm_90a, gfx942; for llvm the CPU's name as LLVM knows it
    wave: int = 1  # threads that execute together
    max_threads: int = 1  # threads of a block
    shared_static: int = 0  # shared memory of a block that needs no opt-in
    shared_block: int = 0  # shared memory of a block at most
    shared_sm: int = 0  # shared memory of a multiprocessor
    shared_reserved: int = 0  # what the system takes of it for each block
    registers_thread: int = 0
    registers_sm: int = 0
    threads_sm: int = 0
    blocks_sm: int = 0
    features: frozenset[str] = frozenset()
    device: Device = GENERIC

    def __str__(self) -> str:
        return "llvm" if self.kind == "llvm" and self.name == "host" else f"{self.kind}:{self.name}"

    @property
    def is_gpu(self) -> bool:
        return self.kind != "llvm"

    @property
    def compute_capability(self) -> str:
        """CUDA's "9.0" for sm_90a."""
        digits = self.name.removeprefix("sm_").rstrip("af")
        return f"{digits[:-1]}.{digits[-1]}"

    def on(self, device: Device) -> Arch:
        """The same for another device.  Raises UsageError if it is not of this arch."""
        if device.arch not in ("", self.name):
            raise UsageError(
                f"{device.name} is of {device.arch}, not of {self.name}; choose another device or --target"
            )
        return replace(self, device=device)

    def target(self) -> Target:
        """The TVM target, always with its arch spelled out: TVM's detection would ask a device that may not be
        there."""
        from tvm.target import Target

        if self.kind == "llvm":
            levels = {"unoptimized": 0, "plain": 1}
            level = next(({"opt-level": levels[name]} for name in levels if name in self.features), {})
            return Target({"kind": "llvm", "num-cores": physical_cores(), **level, **host_cpu(self.name)})
        common = {
            "max_threads_per_block": self.max_threads,
            "max_shared_memory_per_block": self.shared_block,
            "thread_warp_size": self.wave,
        }
        key = "arch" if self.kind == "cuda" else "mcpu"
        with without_lines(ROCM_WARNINGS if self.kind == "rocm" else ()):
            return Target({"kind": self.kind, key: self.name, **common}, host={"kind": "llvm"})


def _cuda(
    name: str,
    shared_block: int,
    shared_sm: int,
    threads_sm: int,
    blocks_sm: int,
    *features: str,
    device: Device = GENERIC,
) -> Arch:
    return Arch(
        kind="cuda",
        name=name,
        wave=32,
        max_threads=1024,
        shared_static=48 * KIB,
        shared_block=shared_block * KIB,
        shared_sm=shared_sm * KIB,
        shared_reserved=0 if name == "sm_75" else KIB,
        registers_thread=255,
        registers_sm=64 * KIB,
        threads_sm=threads_sm,
        blocks_sm=blocks_sm,
        features=frozenset(("dp4a", *features)),
        device=device,
    )


def _rocm(name: str, wave: int, registers_thread: int, registers_sm: int, threads_sm: int, *features: str) -> Arch:
    # TVM 0.27 stamps cross-built AMD kernels with a flat work-group size of 256, whatever the target says
    return Arch(
        kind="rocm",
        name=name,
        wave=wave,
        max_threads=256,
        shared_static=64 * KIB,
        shared_block=64 * KIB,
        shared_sm=64 * KIB,
        registers_thread=registers_thread,
        registers_sm=registers_sm,
        threads_sm=threads_sm,
        blocks_sm=32,
        features=frozenset(features),
    )


_AMPERE = ("cp_async", "mma", "bf16")
ARCHES: dict[str, Arch] = {
    str(arch): arch
    for arch in (
        Arch(kind="llvm", name="host"),
        _cuda("sm_75", 64, 64, 1024, 16),
        _cuda("sm_80", 163, 164, 2048, 32, *_AMPERE),
        _cuda("sm_86", 99, 100, 1536, 16, *_AMPERE),
        _cuda("sm_89", 99, 100, 1536, 24, *_AMPERE),
        _cuda("sm_90a", 227, 228, 2048, 32, *_AMPERE, "wgmma", "tma", "cluster", device=H200),
        _rocm("gfx90a", 64, 512, 128 * KIB, 2048, "mfma"),
        _rocm("gfx942", 64, 512, 128 * KIB, 2048, "mfma"),
        _rocm("gfx1100", 32, 256, 192 * KIB, 1024, "wmma"),
    )
}


def parse_arch(text: str) -> Arch:
    """The arch for ``llvm``, ``llvm:<cpu>``, ``cuda:sm_90a``, ``rocm:gfx942``; ``sm_80`` alone is enough.

    Raises UnknownNameError with the nearest name.
    """
    if text in ARCHES:
        return ARCHES[text]
    for prefix in ("cuda:", "rocm:"):
        if prefix + text in ARCHES:
            return ARCHES[prefix + text]
    if text.startswith("llvm:") and text[5:]:
        if text[5:] not in llvm_cpus():
            raise UnknownNameError("CPU", text[5:], llvm_cpus())
        return Arch(kind="llvm", name=text[5:])
    raise UnknownNameError("target", text, ARCHES)


@lru_cache
def llvm_cpus() -> tuple[str, ...]:
    """The CPUs that TVM's LLVM can build for."""
    from tvm.target import Target, codegen

    return tuple(str(cpu) for cpu in codegen.llvm_get_cpu_archlist(Target("llvm")))


@lru_cache
def host_cpu(name: str) -> dict[str, str]:
    """The ``mcpu`` for LLVM; for "host", the CPU this runs on, or the portable baseline if LLVM does not know it."""
    if name != "host":
        return {"mcpu": name}
    from tvm.target import codegen

    cpu = str(codegen.llvm_get_system_cpu())
    return {"mcpu": cpu} if cpu and cpu in llvm_cpus() else {}


@dataclass(frozen=True)
class VectorUnit:
    """The float32 lanes of a CPU's vector registers, and how many registers it has."""

    lanes: int
    registers: int


@lru_cache
def vector_unit(arch: Arch) -> VectorUnit:
    """That of the CPU `arch` builds for, as LLVM knows it: AVX-512, AVX, or registers of 16 bytes as everywhere else
    (32 of them on Arm)."""
    from tvm.target import codegen

    target = arch.target()

    def has(feature: str) -> bool:
        return bool(codegen.target_has_features(feature, target))

    if has("avx512f"):
        return VectorUnit(16, 32)
    return VectorUnit(8, 16) if has("avx") else VectorUnit(4, 32 if has("neon") else 16)


@lru_cache
def physical_cores() -> int:
    """The cores that this process may run on: `threads.cores`, or the processors where that is not told."""
    return cores() or os.cpu_count() or 1


@lru_cache
def last_level_cache() -> int:
    """Bytes of this machine's largest CPU cache; where the system does not tell, and at most, 128 MiB."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = file.read_text().strip()
            sizes.append(int(text.rstrip("KM")) * {"K": KIB, "M": KIB**2}.get(text[-1], 1))
    return min(max(sizes, default=MOST_CACHE), MOST_CACHE)


def shared_room(arch: Arch, blocks_sm: int) -> int:
    """Bytes of shared memory of a block where a multiprocessor holds `blocks_sm`."""
    return min(arch.shared_block, arch.shared_sm // blocks_sm - arch.shared_reserved)


def occupancy(arch: Arch, threads: int, registers: int, shared: int) -> tuple[int, str]:
    """Blocks of one kernel that a multiprocessor holds at once, and what limits them.

    `threads` of a block, `registers` of a thread, `shared` bytes of a block.  CUDA's rule: registers are given to a
    warp in units of 256, shared memory in units of 128 bytes plus what the system reserves.
    """
    warps = -(-threads // arch.wave)
    per_warp = -(-max(registers, 1) * arch.wave // 256) * 256
    limits = {
        "threads": arch.threads_sm // (warps * arch.wave),
        "blocks": arch.blocks_sm,
        "registers": arch.registers_sm // (per_warp * warps),
    }
    if shared:
        limits["shared memory"] = arch.shared_sm // (-(-shared // 128) * 128 + arch.shared_reserved)
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit
