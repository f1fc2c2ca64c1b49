"""LLVM's own account of what kernels for AMD GPUs use, by the clang of the ziglang package."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from schedules.build.toolchain.link import INSTALL
from schedules.core.arch import Arch
from schedules.core.errors import BuildError, ToolchainError


@dataclass(frozen=True)
class Remark:
    """Of one kernel: registers of a thread, accumulators apart from them, scalar registers of a wave, bytes of LDS, and
    the waves that a SIMD holds at most."""

    registers: int
    accumulators: int
    scalars: int
    shared: int
    waves: int

    def vector(self, arch: Arch) -> int:
        """Registers that a SIMD's are shared by."""
        if "agprs_apart" in arch.features:
            return max(self.registers, self.accumulators)
        return -(-self.registers // 4) * 4 + self.accumulators if self.accumulators else self.registers


def resource_remarks(ll: str, processor: str, threads: int | None = None) -> dict[str, Remark]:
    """The remark on each kernel of LLVM IR `ll`, compiled for blocks of just `threads` if that is given.

    Raises ToolchainError if there is no clang, BuildError if it refuses.
    """
    if importlib.util.find_spec("ziglang") is None:
        raise ToolchainError(f"no clang for AMD GPUs found; {INSTALL}")
    if threads:
        size = r'("amdgpu-flat-work-group-size"=)"\d+,\d+"'
        ll = re.sub(size, rf'\1"{threads},{threads}"', ll)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ll"
        source.write_text(ll)
        command = [sys.executable, "-m", "ziglang", "clang", "-x", "ir", "-target", "amdgcn-amd-amdhsa"]
        command += [
            f"-mcpu={processor}",
            "-nogpulib",
            "-O3",
            "-Xclang",
            "-disable-llvm-passes",
            "-S",
            "-o",
            f"{folder}/kernel.s",
            str(source),
        ]
        command += ["-Wno-override-module", "-Rpass-analysis=kernel-resource-usage"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise BuildError(f"clang refused the kernel: {(errors or ['no message'])[0]}")
    found = {}
    for part in done.stderr.split("Function Name: ")[1:]:
        words = {name: int(value) for name, value in re.findall(r":\d+:\d+: +([^:]+?)(?: \[[^:]*)?: (\d+) \[", part)}
        found[part.split(" ", 1)[0]] = Remark(
            words["VGPRs"], words.get("AGPRs", 0), words["TotalSGPRs"], words["LDS Size"], words["Occupancy"]
        )
    return found
