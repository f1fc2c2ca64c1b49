"""What tests of the Hopper schedules share."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.build.inspect import limits, sums_read_early, view
from schedules.build.toolchain.cuda import disassemble, find_tool
from schedules.check.verify import emulated_runs, judge, poisoned, reduced, verify
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.operator import Array
from schedules.core.registry import operator
from schedules.predict.start import started
from tests.conftest import BY_WGMMA, problem_of

# of the machine's opcodes that matter, what they are in PTX: a disassembler takes three times as long as the compiler
OPCODES = {
    "HGMMA": r"wgmma\.mma_async\S*\.f32\.",
    "IGMMA": r"wgmma\.mma_async\S*\.s32\.",
    "HMMA": r"mma\.sync\S*\.f32\.",
    "IMMA": r"mma\.sync\S*\.s32\.",
    "UTMALDG": r"cp\.async\.bulk\.tensor\.\dd\.shared",
    "UTMASTG": r"cp\.async\.bulk\.tensor\.\dd\.global",
    "USETMAXREG": "setmaxnreg",
    "SHFL": r"shfl\.sync",
    "STSM": "stmatrix",
    "LDG": r"ld\.global",
    "LDGSTS": r"cp\.async\.c[ag]\.shared",
    "UBLKCP": r"cp\.async\.bulk\.shared::cluster\.global",
    "UBLKST": r"cp\.async\.bulk\.global",
    "STG": r"st\.global",
    "LDS": r"ld\.shared",
    "STS": r"st\.shared",
}


def opcodes(built: Built) -> Counter[str]:
    """How many of OPCODES the compiler was given, after it unrolled loops."""
    ptx = str(built.sources["ptx"])
    return Counter({name: len(re.findall(rf"(?<![\w.]){pattern}", ptx)) for name, pattern in OPCODES.items()})


def assert_well_made(built: Built, multiply: str, stored_by_tma: bool = True) -> Counter[str]:
    """No spills, wgmma waited for once, TMA both ways, and the shared memory and registers that the config says.

    `multiply` is wgmma's opcode for the dtype; results leave by TMA, or by stores if not `stored_by_tma`.  Returns the
    opcodes.
    """
    config: Any = built.config
    found, kernel = opcodes(built), limits(built)
    assert all(each.spill_stores == each.spill_loads == each.stack == 0 for each in built.resources)
    assert found[multiply] and not any(found[other] for other in {"HMMA", "IMMA", "HGMMA", "IGMMA"} - {multiply})
    # the boxes of one stage, which ptxas may write out more than once, and those of one tile's results
    boxes = re.findall(r"^ +tvm_builtin_ptx_cp_async_bulk_tensor_(g2s|s2g)", str(built.sources["cu"]), re.M)
    assert found["UTMALDG"] >= boxes.count("g2s") > 0 and found["UTMASTG"] == boxes.count("s2g")
    assert bool(found["UTMASTG"] or found["UBLKST"]) == stored_by_tma != bool(found["STG"])
    # ptxas says so where wgmma cannot overlap, and then waits for each
    assert "ptxas info" in built.log and "C75" not in built.log
    to_be_waited_for(built)
    assert built.launch and built.launch.threads == config.threads and built.launch.cluster == config.cluster
    assert isinstance(built.launch.grid[0], int) and built.launch.grid[0] % config.cluster == 0
    # what a stage gets once filters stay stands last
    stage = re.findall(r"mbarrier_arrive_expect_tx\w*\(.*\D(\d+)\)+;", str(built.sources["cu"]))
    of_stage, persistent = int(stage[0]) + 16, config.grid == built.launch.grid[0]
    needed = of_stage * (config.num_stages if persistent else 1)  # of a lone tile as many as it fills
    assert kernel.shared and needed <= kernel.shared <= built.arch.shared_block
    assert kernel.registers and kernel.registers * config.threads * config.blocks_sm <= built.arch.registers_sm
    assert kernel.blocks_sm and kernel.blocks_sm >= config.blocks_sm
    assert bool(found["USETMAXREG"]) == (config.threads * config.blocks_sm > 256)
    return found


def to_be_waited_for(built: Built) -> None:
    """Sums of wgmma are not read before they are there, as ptxas may do though no source says so: looked at when the
    tests of the module are over, for all its kernels at once."""
    BY_WGMMA.append((f"{built.problem} {built.config}", built.binaries["cubin"]))


def assert_waited_for(kernels: Sequence[tuple[str, bytes]]) -> None:
    """What `to_be_waited_for` says, of all `kernels`: what they compute and their machine code."""
    text = listing([code for _, code in kernels])
    assert len(re.findall(r"[HI]GMMA\.64x", text)) >= len(kernels)
    if sums_read_early(text):
        found = {kernel: sums_read_early(disassemble(code)) for kernel, code in kernels}
        raise AssertionError({kernel: early for kernel, early in found.items() if early})


def listing(cubins: Sequence[bytes]) -> str:
    """The instructions of `cubins` of sm_90a, one after the other: nvdisasm takes as long to start as for twenty."""
    tool = find_tool("nvdisasm")
    assert tool
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(map(instructions, cubins)))
        file.flush()
        return subprocess.run([tool, "-b", "SM90a", file.name], capture_output=True, text=True, check=True).stdout


def instructions(cubin: bytes) -> bytes:
    """What lies in the executable sections of an ELF file."""
    (table,), (count,) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<H", cubin, 60)
    sections = [struct.unpack_from("<8xQ8xQQ", cubin, table + 64 * i) for i in range(count)]
    return b"".join(cubin[begin : begin + size] for flags, begin, size in sections if flags & 4)


def assert_producer_fits(built: Built) -> None:
    """The producer of a kernel that hands registers over uses none that it gave away; ptxas does not look."""
    if opcodes(built)["USETMAXREG"]:
        given, highest = producer_registers(built)
        assert highest < given


def producer_registers(built: Built) -> tuple[int, int]:
    """How many registers a producer keeps, and the highest that the SASS has which it can come to."""
    kernel = next(text for text in view(built, "sass").split("\n.text.") if "USETMAXREG" in text)
    lines = [line.strip() for line in kernel.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.startswith(".L_") and line.endswith(":")}
    begin = next(at for at, line in enumerate(lines) if "USETMAXREG.DEALLOC" in line)
    highest, seen, left = 0, {begin}, [begin + 1]
    while left:
        at = left.pop()
        if at in seen or at >= len(lines):
            continue
        seen.add(at)
        code = lines[at].split(";")[0]
        registers = re.findall(r"\bR(\d+)(\.64)?", code)
        highest = max([highest, *(int(number) + bool(pair) for number, pair in registers)])
        left += [labels[target] for target in re.findall(r"\((\.L_\w+)\)", code)]
        if not re.search(r"\*/\s+(EXIT|BRA) ", code):  # without a condition
            left.append(at + 1)
    return int(lines[begin].split("CTAPOOL ")[1].split(" ")[0], 16), highest


def to_tf32(array: Array) -> Array:
    """Finite float32 rounded to 10 bits of mantissa, to nearest and to even of two."""
    bits = np.ascontiguousarray(array).view("uint32")
    return ((bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)).view("float32")


def assert_emulated(
    name: str,
    fields: dict[str, Any],
    words: dict[str, Any],
    schedule: str = "tma_wgmma",
    compiled: bool = False,
    target: str = "sm_90a",
) -> Built:
    """Right on the emulator, in each of its modes; what was built, with device code if `compiled`."""
    arch = parse_arch(target)
    whole = problem_of(name, **fields)
    _, config = started(whole, arch, schedule, words)
    problem = reduced(whole, arch, config, "emulated")
    built = build(problem, arch, schedule, config, device_code=compiled)
    arrays = list(built.operator.inputs(problem, np.random.default_rng(0)))
    expected = built.operator.reference(problem, arrays)
    for mode, run in emulated_runs(built, str(built.sources["cu"])):
        found = judge(problem, arrays, run([*arrays, *poisoned(problem)]), expected, built.schedule.arithmetic)
        assert found.passed, f"{mode} {built.config} {problem}: {found}"
    return built


def assert_builds_or_says_why(
    name: str, fields: dict[str, Any], words: dict[str, Any], schedule: str = "tma_wgmma"
) -> Built | None:
    """The built problem if the config is legal for it; else its reason is one line."""
    arch = parse_arch("sm_90a")
    problem = problem_of(name, **fields)
    spec = operator(name).schedule(schedule)
    try:
        config = spec.config_for(problem, arch, words)
    except ConfigError as error:
        assert "\n" not in str(error)
        return None
    built = build(problem, arch, schedule, config)
    assert all(kernel.spill_stores == kernel.spill_loads == 0 for kernel in built.resources)
    return built


def assert_correct_on(
    gpu: Arch, name: str, fields: dict[str, Any], words: dict[str, Any], schedule: str = "tma_wgmma"
) -> None:
    """Right on a device for two sets of data; skips where it is not Hopper's, or where the config is illegal."""
    if "wgmma" not in gpu.features:
        pytest.skip(f"{gpu} has no wgmma")
    problem = problem_of(name, **fields)
    try:
        operator(name).schedule(schedule).config_for(problem, gpu, words)
    except ConfigError as error:
        pytest.skip(str(error))
    for check in verify(problem, gpu, schedule, words, routes=["device"], seeds=(0, 1)):
        assert check.passed, f"{words} {check.problem}: {check.detail}"
