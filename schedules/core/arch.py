"""Targets as data: what each architecture allows, the TVM target it builds with, and the device defaults are meant for.

Limits are from the CUDA C++ Programming Guide ("Compute Capabilities") with cuda_occupancy.h, and from AMD's ISA guides
(CDNA 1 to 4, RDNA 2 to 4) with LLVM's AMDGPU guide.  Code asks for a feature, never for a name.  The features:

- `mma`: products of m16n8k16 (int8: m16n8k32) by a warp; `bf16`: of bfloat16, and bfloat16's arithmetic;
- `cp_async`; `redux`: an integer reduced over a warp by an instruction; `tma`, with it mbarriers that count bytes;
  `cluster` of blocks; `wgmma`; `tcgen05` with tensor memory, `tcgen05_i8` also of int8;
- `dp4a`, `sdot4`, `sudot4`: how a sum of four int8 products is written;
- `mfma` by a wave of 64, of float32 (16x16x4) and float16 (16x16x16), and of these: `mfma_i8_k16`, `mfma_i8_k32`,
  `mfma_i8_k64`, `mfma_bf16_k8`, `mfma_bf16_k16` (the instruction named 1k), `mfma_f16_k32` (and bfloat16), `mfma_xf32`
  (of float32 cut to TF32);
- `wmma` by a wave of 32, 16x16x16 of float16, bfloat16 and int8: `wmma_doubled` where both halves of the wave hold the
  operands, `wmma_split` where each holds one half of k;
- `agprs`: 256 accumulation registers beside the vector registers; `agprs_apart`: these are a file of their own, so that
  occupancy is by the larger number and not by the sum.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from schedules.core.cpu import KIB, cpu_features
from schedules.core.device import (
    A100,
    B200,
    GENERIC,
    H200,
    MI210,
    MI300X,
    RTX_3090,
    RTX_4090,
    RTX_5090,
    RX_7900_XTX,
    T4,
    Device,
)
from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.quiet import ROCM_WARNINGS, without_lines
from schedules.core.threads import cores

if TYPE_CHECKING:
    from tvm.target import Target

GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)  # blocks along x, y and z of a launch at most, on every GPU


@dataclass(frozen=True)
class Arch:
    """The limits of one architecture.  Sizes in bytes, registers in 32-bit registers.

    A multiprocessor is what a block runs on: NVIDIA's SM, CDNA's compute unit, RDNA's work-group processor of two
    compute units.  Its waves, and their registers, are on `simds` of them.
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
    shared_unit: int = 128  # bytes that shared memory is given out in
    shared_reserved: int = 0  # what the system takes of it for each block
    lds_banks: int = 32  # of shared memory, of four bytes each
    registers_thread: int = 0
    registers_simd: int = 0  # of a lane, which the waves of a SIMD share
    registers_unit: int = 8  # that a lane is given at a time
    scalars_simd: int = 0  # scalar registers that the waves of a SIMD share; 0 where they limit nothing
    simds: int = 4
    waves_simd: int = 0  # waves that a SIMD holds
    blocks_sm: int = 0  # blocks that a multiprocessor holds
    barriers_sm: int = 0  # and blocks of several waves, each of which needs a barrier
    cluster: int = 1  # blocks of a cluster at most
    tegra: bool = False  # code for it runs on no other compute capability, and no other's on it
    features: frozenset[str] = frozenset()
    # operations of a SIMD's matrix core in a cycle, by the dtype of its operands; where it is not known, none
    matrix_rates: Mapping[str, int] = field(default_factory=dict, hash=False)
    device: Device = GENERIC

    def __str__(self) -> str:
        return "llvm" if self.kind == "llvm" and self.name == "host" else f"{self.kind}:{self.name}"

    @property
    def is_gpu(self) -> bool:
        return self.kind != "llvm"

    @property
    def bank_bytes(self) -> int:
        """Bytes of a line over all banks of shared memory."""
        return 4 * self.lds_banks

    @property
    def threads_sm(self) -> int:
        """Threads that a multiprocessor holds."""
        return self.simds * self.waves_simd * self.wave

    @property
    def registers_sm(self) -> int:
        """Registers of a multiprocessor, for all lanes."""
        return self.simds * self.registers_simd * self.wave

    @property
    def compute_capability(self) -> str:
        """CUDA's "9.0" for sm_90a."""
        digits = self.name.removeprefix("sm_").rstrip("af")
        return f"{digits[:-1]}.{digits[-1]}"

    def runs_on(self, capability: str) -> bool:
        """Whether code for it runs on a GPU of this compute capability ("9.0") or AMD processor ("gfx942").

        A cubin runs on its own compute capability and on later minor ones of the same major, except that an
        architecture-specific one ("sm_90a") runs on its own only, and that Tegra and desktop GPUs run none of the
        other's.  An AMD code object runs on its own processor only.
        """
        if self.kind != "cuda":
            return capability == self.name
        if capability == self.compute_capability:
            return True
        tegra = self.tegra or any(arch.tegra and arch.compute_capability == capability for arch in ARCHES.values())
        (major, minor), (mine, least) = (text.split(".") for text in (capability, self.compute_capability))
        return not tegra and self.name[-1].isdigit() and major == mine and int(minor) >= int(least)

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
    cluster: int = 1,
    tegra: bool = False,
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
        shared_unit=128 if "cp_async" in features else 256,
        shared_reserved=KIB if "cp_async" in features else 0,
        registers_thread=255,
        registers_simd=512,
        waves_simd=threads_sm // 128,
        blocks_sm=blocks_sm,
        barriers_sm=blocks_sm,
        cluster=cluster,
        tegra=tegra,
        features=frozenset(("dp4a", *features)),
        device=device,
    )


_AMD = {"gfx90a": MI210, "gfx942": MI300X, "gfx1100": RX_7900_XTX}


def _rates(simds: int, float16: int, bfloat16: int, int8: int, **others: int) -> Mapping[str, int]:
    """From the operations of a compute unit's `simds` in a cycle."""
    rates = {"float16": float16, "bfloat16": bfloat16, "int8": int8, **others}
    return {dtype: rate // simds for dtype, rate in rates.items()}


def _rocm(name: str, *features: str, rates: Mapping[str, int], **limits: int) -> Arch:
    common: dict[str, Any] = {"max_threads": 1024, "shared_static": 64 * KIB, "shared_block": 64 * KIB, **limits}
    device = _AMD.get(name, GENERIC)
    return Arch(kind="rocm", name=name, features=frozenset(features), matrix_rates=rates, device=device, **common)


def _cdna(name: str, rates: Mapping[str, int], *features: str, **limits: int) -> Arch:
    words = {"shared_sm": 64 * KIB, "shared_unit": 512, "registers_thread": 512, "registers_simd": 512}
    words |= {"waves_simd": 8, "blocks_sm": 32, "barriers_sm": 16, "scalars_simd": 800}
    return _rocm(name, "sdot4", "mfma", "agprs", *features, rates=rates, **{"wave": 64, **words, **limits})


def _rdna(name: str, registers_simd: int, registers_unit: int, *features: str, rates: Mapping[str, int]) -> Arch:
    """In waves of 32; blocks may lie on both compute units of a work-group processor, as LLVM builds by default."""
    limits = {"registers_simd": registers_simd, "registers_unit": registers_unit, "registers_thread": 256}
    limits |= {"shared_sm": 128 * KIB, "shared_unit": 512, "waves_simd": 16, "blocks_sm": 64, "barriers_sm": 32}
    return _rocm(name, *features, rates=rates, wave=32, **limits)


_AMPERE = ("cp_async", "redux", "mma", "bf16")
_BULK = (*_AMPERE, "tma", "cluster")  # clusters of 8 are portable; the largest GPUs have of 16, if a kernel says so
_RDNA3 = ("sudot4", "wmma", "wmma_doubled")
_WMMA_3 = _rates(2, 512, 512, 512)
_WMMA_4 = _rates(2, 1024, 1024, 2048)
_RDNA4 = ("sudot4", "wmma", "wmma_split")
ARCHES: dict[str, Arch] = {
    str(arch): arch
    for arch in (
        Arch(kind="llvm", name="host"),
        _cuda("sm_75", 64, 64, 1024, 16, device=T4),
        _cuda("sm_80", 163, 164, 2048, 32, *_AMPERE, device=A100),
        _cuda("sm_86", 99, 100, 1536, 16, *_AMPERE, device=RTX_3090),
        _cuda("sm_87", 163, 164, 1536, 16, *_AMPERE, tegra=True),
        _cuda("sm_89", 99, 100, 1536, 24, *_AMPERE, device=RTX_4090),
        _cuda("sm_90a", 227, 228, 2048, 32, *_BULK, "wgmma", cluster=16, device=H200),
        _cuda("sm_100a", 227, 228, 2048, 32, *_BULK, "tcgen05", "tcgen05_i8", cluster=16, device=B200),
        _cuda("sm_103a", 227, 228, 2048, 32, *_BULK, "tcgen05", cluster=16),
        _cuda("sm_110a", 227, 228, 1536, 24, *_BULK, "tcgen05", "tcgen05_i8", cluster=8, tegra=True),
        _cuda("sm_120a", 99, 100, 1536, 24, *_BULK, cluster=8, device=RTX_5090),
        _cdna(
            "gfx908",
            _rates(4, 1024, 512, 1024, float32=256),
            "mfma_i8_k16",
            "mfma_bf16_k8",
            "agprs_apart",
            registers_thread=256,
            registers_simd=256,
            registers_unit=4,
            waves_simd=10,
            blocks_sm=40,
        ),
        _cdna("gfx90a", _rates(4, 1024, 1024, 1024, float32=256), "mfma_i8_k16", "mfma_bf16_k8", "mfma_bf16_k16"),
        _cdna(
            "gfx942", _rates(4, 2048, 2048, 4096, float32=256, tf32=1024), "mfma_i8_k32", "mfma_bf16_k16", "mfma_xf32"
        ),
        _cdna(
            "gfx950",
            _rates(4, 4096, 4096, 8192, float32=256),
            "mfma_i8_k64",
            "mfma_bf16_k16",
            "mfma_f16_k32",
            shared_static=160 * KIB,
            shared_block=160 * KIB,
            shared_sm=160 * KIB,
            shared_unit=1280,
            lds_banks=64,
        ),
        _rdna("gfx1030", 1024, 16, "sdot4", rates={}),
        _rdna("gfx1100", 1536, 24, *_RDNA3, rates=_WMMA_3),
        _rdna("gfx1101", 1536, 24, *_RDNA3, rates=_WMMA_3),
        _rdna("gfx1102", 1024, 16, *_RDNA3, rates=_WMMA_3),
        _rdna("gfx1103", 1024, 16, *_RDNA3, rates=_WMMA_3),
        _rdna("gfx1150", 1024, 16, *_RDNA3, rates=_WMMA_3),
        _rdna("gfx1151", 1536, 24, *_RDNA3, rates=_WMMA_3),
        _rdna("gfx1200", 1536, 24, *_RDNA4, rates=_WMMA_4),
        _rdna("gfx1201", 1536, 24, *_RDNA4, rates=_WMMA_4),
    )
}


def parse_arch(text: str) -> Arch:
    """The arch for ``llvm``, ``llvm:<cpu>``, ``cuda:sm_90a``, ``rocm:gfx942``; ``sm_80`` alone is enough.

    Raises UnknownNameError with the nearest name; of the name of a GPU, one whose code that GPU runs.
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
    known: Iterable[str] = ARCHES
    if chip := re.fullmatch(r"(?:cuda:)?sm_(\d+)(\d)[af]?|(?:rocm:)?(gfx\d+[0-9a-f]{2})", text):
        capability = chip[3] or f"{chip[1]}.{chip[2]}"
        kind = "rocm" if chip[3] else "cuda"
        runs = [name for name, arch in ARCHES.items() if arch.kind == kind and arch.runs_on(capability)]
        if not runs:
            raise UsageError(f"unknown target {text!r}; {capability} runs no target's code; `schedules list` has them")
        known = runs[-1:]
    raise UnknownNameError("target", text, known)


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


# as LLVM names them; from Intel's optimization manual and AMD's guide for family 1Ah
WIDE_PIPES = (
    *("skylake-avx512", "cascadelake", "cooperlake", "icelake-server"),
    *("sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "diamondrapids"),
    "znver5",
)
# of CPUs with such pipes, by Linux's names: where a hypervisor shows the number of another model, LLVM goes by that
WIDE_FEATURES = frozenset({"amx_tile", "avx512_fp16"})


@dataclass(frozen=True)
class VectorUnit:
    """The float32 lanes of a CPU's vector registers, how many registers it has, and on how many lanes each of its two
    pipes multiplies and adds in a cycle: of registers of 64 bytes half, except where the CPU is one of WIDE_PIPES, or
    this one, with one of WIDE_FEATURES."""

    lanes: int
    registers: int
    pipe: int


@lru_cache
def vector_unit(arch: Arch) -> VectorUnit:
    """That of the CPU `arch` builds for, as LLVM knows it: AVX-512, AVX, or registers of 16 bytes as everywhere else
    (32 of them on Arm)."""
    from tvm.target import codegen

    target = arch.target()

    def has(feature: str) -> bool:
        return bool(codegen.target_has_features(feature, target))

    if has("avx512f"):
        wide = host_cpu(arch.name).get("mcpu") in WIDE_PIPES
        wide |= arch.name == "host" and not WIDE_FEATURES.isdisjoint(cpu_features() or ())
        return VectorUnit(16, 32, 16 if wide else 8)
    return VectorUnit(8, 16, 8) if has("avx") else VectorUnit(4, 32 if has("neon") else 16, 4)


@lru_cache
def physical_cores() -> int:
    """The cores that this process may run on: `threads.cores`, or the processors where that is not told."""
    return cores() or os.cpu_count() or 1


def shared_room(arch: Arch, blocks_sm: int) -> int:
    """Bytes of shared memory of a block where a multiprocessor holds `blocks_sm`."""
    return min(arch.shared_block, arch.shared_sm // blocks_sm - arch.shared_reserved)


def occupancy(arch: Arch, threads: int, registers: int, shared: int, scalars: int = 0) -> tuple[int, str]:
    """Blocks of one kernel that a multiprocessor holds at once, and what limits them.

    `threads` of a block, `registers` of a thread, `shared` bytes of a block, `scalars` registers of a wave.  Shared
    memory is given out in units, and blocks come whole.  Source: cuda_occupancy.h, whose numbers these are.
    """
    waves = -(-threads // arch.wave)
    limits = {
        "threads": arch.simds * arch.waves_simd // waves,
        "blocks": arch.barriers_sm if waves > 1 else arch.blocks_sm,
        "registers": arch.simds * waves_by_registers(arch, registers, scalars) // waves,
    }
    if shared:
        limits["shared memory"] = arch.shared_sm // (_whole(shared, arch.shared_unit) + arch.shared_reserved)
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def waves_by_registers(arch: Arch, registers: int, scalars: int = 0) -> int:
    """Waves of a SIMD that its registers, given out in units, are enough for: vector registers of a thread, scalar ones
    of a wave.  Source: LLVM's AMDGPUBaseInfo."""
    waves = min(arch.waves_simd, arch.registers_simd // _whole(max(registers, 1), arch.registers_unit))
    return min(waves, arch.scalars_simd // scalars) if arch.scalars_simd and scalars else waves


def waves_by_llvm(arch: Arch, threads: int, registers: int, shared: int, scalars: int = 0) -> int:
    """Waves of a SIMD as LLVM's remarks on kernels for AMD GPUs count them: each limit apart, so that registers may be
    enough for a part of a block, and shared memory by the byte."""
    waves = -(-threads // arch.wave)
    blocks = min(arch.simds * arch.waves_simd // waves, arch.barriers_sm if waves > 1 else arch.blocks_sm)
    blocks = min(blocks, arch.shared_sm // shared) if shared else blocks
    return min(waves_by_registers(arch, registers, scalars), max(1, -(-blocks * waves // arch.simds)))


def _whole(number: int, unit: int) -> int:
    return -(-number // unit) * unit
