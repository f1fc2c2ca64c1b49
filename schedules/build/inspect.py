"""Looking at a kernel: the texts it went through on its way to the device, and a count of what is in them.

A kernel comes as a `Built` or as a `Bundle`; both are read as one `Material`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from schedules.build import conflicts, matrix_cores
from schedules.build.toolchain import cuda
from schedules.core.arch import Arch, occupancy, waves_by_llvm
from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.operator import Operator
from schedules.core.problem import Problem
from schedules.core.tvm import te, tirx

if TYPE_CHECKING:
    from schedules.build.builder import Built
    from schedules.build.library import Launch


@dataclass(frozen=True)
class Material:
    """All texts of one kernel.  `sources` by file ending: cu, ptx, cubin, s, ll, hsaco."""

    title: str
    arch: Arch
    launch: Launch | None
    resources: tuple[cuda.KernelResources, ...]
    definition: str = field(repr=False)
    scheduled: str = field(repr=False)
    lowered: str = field(repr=False)
    sources: dict[str, str | bytes] = field(repr=False)

    def text(self, ending: str) -> str | None:
        found = self.sources.get(ending)
        return found if isinstance(found, str) else None


class HasMaterial(Protocol):
    """A built kernel or a bundle."""

    def material(self) -> Material: ...


def definition_text(operator: Operator, problem: Problem, program: tirx.PrimFunc | None = None) -> str:
    """The operator's tensor expression for `problem`, or the `program` that a schedule starts from, as the loop nest
    that TVM makes of it before any schedule."""
    program = program or te.create_prim_func(list(operator.definition(problem)))
    return f"# {operator.name}: {operator.summary}\n# {problem}\n{program.script()}\n"


def material(kernel: Built | HasMaterial | Material) -> Material:
    """`kernel` as its texts."""
    if isinstance(kernel, Material):
        return kernel
    if hasattr(kernel, "material"):
        return kernel.material()
    return Material(
        title=f"{kernel.operator.name} {kernel.problem}, {kernel.schedule.name} for {kernel.arch}",
        arch=kernel.arch,
        launch=kernel.launch,
        resources=kernel.resources or amdgcn_resources(kernel.sources.get("s"), kernel.arch),
        definition=definition_text(
            kernel.operator,
            kernel.problem,
            kernel.schedule.definition(kernel.operator, kernel.problem, kernel.config, kernel.arch),
        ),
        scheduled=kernel.scheduled.script(),
        lowered=kernel.lowered,
        sources=kernel.sources,
    )


@dataclass(frozen=True)
class View:
    """One text: how to get it (None: this kernel has none), and the highlighter's name for its language."""

    name: str
    summary: str
    lexer: str
    get: Callable[[Material], str | None]


def _sass(kernel: Material) -> str | None:
    cubin = kernel.sources.get("cubin")
    return cuda.disassemble(cubin) if isinstance(cubin, bytes) else None


def _assembly(kind: str) -> Callable[[Material], str | None]:
    return lambda kernel: kernel.text("s") if kernel.arch.kind == kind else None


VIEWS = {
    view.name: view
    for view in (
        View("definition", "the tensor expression", "python", lambda kernel: kernel.definition),
        View("scheduled", "TIR after the schedule", "python", lambda kernel: kernel.scheduled),
        View("lowered", "TIR as handed to code generation", "python", lambda kernel: kernel.lowered),
        View("cuda", "generated CUDA C++", "cuda", lambda kernel: kernel.text("cu")),
        View("ptx", "PTX", "ptx", lambda kernel: kernel.text("ptx")),
        View("sass", "machine code of an NVIDIA GPU", "gas", _sass),
        View("llvm", "LLVM IR", "llvm", lambda kernel: kernel.text("ll")),
        View("amdgcn", "assembly of an AMD GPU", "gas", _assembly("rocm")),
        View("asm", "assembly of the CPU", "gas", _assembly("llvm")),
    )
}
# the file that each view of a target is made from
_ENDING = {"cuda": "cu", "ptx": "ptx", "sass": "cubin", "llvm": "ll"}


def available(kernel: Built | HasMaterial | Material) -> list[str]:
    """The names of the views that this kernel has."""
    made = material(kernel)

    def has(name: str) -> bool:
        return _ENDING[name] in made.sources if name in _ENDING else VIEWS[name].get(made) is not None

    return [name for name in VIEWS if has(name)]


def view(kernel: Built | HasMaterial | Material, name: str) -> str:
    """The text called `name`.

    Raises UnknownNameError; UsageError if this kernel's target has no such text; ToolchainError if it is SASS and there
    is no disassembler.
    """
    if name not in VIEWS:
        raise UnknownNameError("view", name, VIEWS)
    made = material(kernel)
    text = VIEWS[name].get(made)
    if text is None:
        raise UsageError(f"a kernel for {made.arch} has no {name}; it has {', '.join(available(made))}")
    return text


@dataclass(frozen=True)
class Summary:
    """What one kernel uses and what its instructions are.

    `registers` of a thread, `shared` bytes of a block, `spills` and `scratch` bytes of a thread; `blocks_sm` blocks
    that a multiprocessor holds at once, limited by `limit`; `occupancy` is the share of its threads then in use.
    `counts` are instructions in the text, not executions; `counted_in` names the text.
    Of AMD GPUs: `accumulators` among the registers, `scalars` of a wave, `waves` of a SIMD as LLVM counts them, and
    `busy`, the share of the time that matrix cores, or multiply-adds where there are none, could run in the inner
    loop, where `busy_limit` takes the longest (`matrix_cores`); `conflicts`, the share of LDS's time that conflicts of
    its banks take (`build.conflicts`).
    """

    title: str
    threads: int | None = None
    grid: tuple[int | str, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = None
    shared: int | None = None
    spills: int | None = None
    scratch: int | None = None
    accumulators: int | None = None
    scalars: int | None = None
    waves: int | None = None
    blocks_sm: int | None = None
    occupancy: float | None = None
    limit: str | None = None
    busy: float | None = None
    busy_limit: str | None = None
    conflicts: float | None = None
    counted_in: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def summary(kernel: Built | HasMaterial | Material) -> Summary:
    """Resources, occupancy and instruction counts of a kernel."""
    made = material(kernel)
    counted_in, counts, notes = _count(made)
    found = replace(limits(made), counted_in=counted_in, counts=counts, notes=notes)
    if made.arch.kind != "rocm":
        return found
    banks = conflicts.conflicts(made.lowered, made.arch)
    found = replace(found, conflicts=banks.share if banks.least else None)
    busy = matrix_cores.busy(_kernels(made.text("s") or ""), made.arch, 1 / (1 - banks.share))
    return replace(found, busy=busy.share, busy_limit=busy.unit) if busy else found


def limits(kernel: Built | HasMaterial | Material) -> Summary:
    """Resources and occupancy of a kernel; its instructions are not counted, which takes a disassembler."""
    made = material(kernel)
    if made.launch is None:
        return Summary(made.title)
    fields: dict[str, Any] = {}
    if made.resources:
        shared = max(r.shared for r in made.resources) + dynamic_shared(made.lowered)
        registers = max(r.registers for r in made.resources)
        own: dict[str, int] = {}
        if made.arch.kind == "rocm":
            own = amdgcn_registers(made.text("s") or "")
            own["waves"] = waves_by_llvm(made.arch, made.launch.threads, registers, shared, own.get("scalars", 0))
        blocks, limit = occupancy(made.arch, made.launch.threads, registers, shared, own.get("scalars", 0))
        fields = {
            **own,
            "registers": registers,
            "shared": shared,
            "spills": max(r.spilled for r in made.resources),
            "scratch": max(r.stack for r in made.resources),
            "blocks_sm": blocks,
            "occupancy": blocks * made.launch.threads / made.arch.threads_sm,
            "limit": limit,
        }
    return Summary(made.title, threads=made.launch.threads, grid=made.launch.grid, block=made.launch.block, **fields)


def dynamic_shared(lowered: str) -> int:
    """Bytes of shared memory that the launch asks for; lowering merges all of it into one buffer of bytes, and of a
    program in TIRx, which divides a buffer without an extent, says at the launch how many they are."""
    launched = re.findall(r', (\d+), launch_params=\[[^]]*"tirx.use_dyn_shared_memory"\]', lowered)
    if launched:
        return max(map(int, launched))
    return sum(int(size) for size in re.findall(r'alloc_buffer\(\((\d+),\), "uint8", scope="shared\.dyn"\)', lowered))


def _count(made: Material) -> tuple[str, dict[str, int], tuple[str, ...]]:
    kind, notes = made.arch.kind, tuple[str, ...]()
    if kind == "cuda":
        if "cubin" in made.sources and cuda.find_tool("nvdisasm"):
            return "SASS", count_sass(_sass(made) or ""), notes
        if ptx := made.text("ptx"):
            return "PTX", count_ptx(ptx), ("no SASS disassembler found; pip install nvidia-cuda-nvdisasm",)
        return "", {}, ("built without device code",)
    assembly = made.text("s") or ""
    if kind == "rocm":
        return "AMDGCN", count_amdgcn(assembly), notes
    return "assembly", count_cpu(assembly), notes


Rule = tuple[str, str]  # name of the count, pattern of the whole opcode
_SASS: tuple[Rule, ...] = (
    ("global load 128-bit", r"LDG\.(.*\.)?128(\..*)?"),
    ("global load", r"LDG(\..*)?"),
    ("global store 128-bit", r"STG\.(.*\.)?128(\..*)?"),
    ("global store", r"STG(\..*)?"),
    ("shared load 128-bit", r"LDS\.(.*\.)?128(\..*)?"),
    ("shared load 64-bit", r"LDS\.(.*\.)?64(\..*)?"),
    ("shared load", r"LDS(\..*)?"),
    ("shared store 128-bit", r"STS\.(.*\.)?128(\..*)?"),
    ("shared store 64-bit", r"STS\.(.*\.)?64(\..*)?"),
    ("shared store", r"STS(\..*)?"),
    ("local load (spill or indexed)", r"LDL(\..*)?"),
    ("local store (spill or indexed)", r"STL(\..*)?"),
    ("wgmma", r"[HIQB]GMMA(\..*)?"),
    ("tcgen05", r"UTC[HIQO]MMA(\..*)?"),
    ("mma", r"[HIQBD]MMA(\..*)?"),
    ("dot product", r"IDP(\..*)?"),
    ("ldmatrix", r"LDSM(\..*)?"),
    ("stmatrix", r"STSM(\..*)?"),
    ("cp.async", r"LDGSTS(\..*)?"),
    ("tma", r"U(TMALDG|TMASTG|TMAREDG|BLKCP)(\..*)?"),
    ("shuffle", r"SHFL(\..*)?"),
    ("barrier", r"BAR\.(SYNC|ARV|RED).*"),
    ("mbarrier", r"SYNCS(\..*)?"),
    ("fp32 multiply-add", r"FFMA2?(\..*)?"),
    ("special function", r"MUFU(\..*)?"),
)
_PTX: tuple[Rule, ...] = (
    ("global load 128-bit", r"ld\.global\.(.*\.)?(v4\.[a-z]+32|v2\.[a-z]+64)"),
    ("global load", r"ld\.global\..*"),
    ("global store 128-bit", r"st\.global\.(.*\.)?(v4\.[a-z]+32|v2\.[a-z]+64)"),
    ("global store", r"st\.global\..*"),
    ("shared load 128-bit", r"ld\.shared\.(.*\.)?(v4\.[a-z]+32|v2\.[a-z]+64)"),
    ("shared load 64-bit", r"ld\.shared\.(.*\.)?(v4\.[a-z]+16|v2\.[a-z]+32|[a-z]+64)"),
    ("shared load", r"ld\.shared\..*"),
    ("shared store 128-bit", r"st\.shared\.(.*\.)?(v4\.[a-z]+32|v2\.[a-z]+64)"),
    ("shared store 64-bit", r"st\.shared\.(.*\.)?(v4\.[a-z]+16|v2\.[a-z]+32|[a-z]+64)"),
    ("shared store", r"st\.shared\..*"),
    ("local load (spill or indexed)", r"ld\.local\..*"),
    ("local store (spill or indexed)", r"st\.local\..*"),
    ("wgmma", r"wgmma\.mma_async\..*"),
    ("tcgen05", r"tcgen05\.mma\..*"),
    ("mma", r"(mma\.sync|wmma\.mma\.sync)\..*"),
    ("dot product", r"dp[24]a\..*"),
    ("ldmatrix", r"ldmatrix\..*"),
    ("stmatrix", r"stmatrix\..*"),
    ("tma", r"cp\.async\.bulk\.(tensor|shared|global)\..*"),
    ("cp.async", r"cp\.async\.c[ag]\..*"),
    ("shuffle", r"shfl\..*"),
    ("barrier", r"(bar|barrier)\.(cta\.)?(sync|arrive|red)\b.*"),
    ("mbarrier", r"mbarrier\..*"),
    ("fp32 multiply-add", r"fma\.rn(\.ftz)?\.f32(x2)?"),
    ("special function", r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.approx\..*"),
)
_GLOBAL = r"(global|flat|buffer)"
_AMDGCN: tuple[Rule, ...] = (
    ("global load 128-bit", _GLOBAL + r"_load_(dwordx4|b128)"),
    ("global load", _GLOBAL + r"_load_.*"),
    ("global store 128-bit", _GLOBAL + r"_store_(dwordx4|b128)"),
    ("global store", _GLOBAL + r"_store_.*"),
    ("shared load 128-bit", r"ds_(read|load)(_b128|_?2(addr|st64)?.*_b64)"),
    ("shared load 64-bit", r"ds_(read|load)(_b64|_?2(addr|st64)?.*_b32)"),
    ("shared load", r"ds_(read|load)_.*"),
    ("shared store 128-bit", r"ds_(write|store)(_b128|_?2(addr|st64)?.*_b64)"),
    ("shared store 64-bit", r"ds_(write|store)(_b64|_?2(addr|st64)?.*_b32)"),
    ("shared store", r"ds_(write|store)_.*"),
    ("scratch (spill or indexed)", r"scratch_.*"),
    ("mfma", r"v_mfma_.*"),
    ("wmma", r"v_wmma_.*"),
    ("dot product", r"v_dot.*"),
    ("shuffle", r"(ds_b?permute|ds_swizzle|v_permlane|v_readlane).*|.*_dpp"),
    ("barrier", r"s_barrier(_signal.*)?"),  # of gfx12 in two: signal and wait
    ("fp32 multiply-add", r"v_(pk_|dual_)?(fma|fmac|mad|mac)[amk]*_f32.*"),
    ("special function", r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_.*"),
    ("other vector instruction", r"v_.*"),
    ("wait", r"s_(barrier_)?wait.*"),
)


def _tally(opcodes: Iterable[str], rules: tuple[Rule, ...]) -> dict[str, int]:
    """How many `opcodes` match each rule; the first that matches counts."""
    found: Counter[str] = Counter()
    for opcode, times in Counter(opcodes).items():
        for name, pattern in rules:
            if re.fullmatch(pattern, opcode):
                found[name] += times
                break
    return {name: found[name] for name, _ in rules if found[name]}


def count_sass(text: str) -> dict[str, int]:
    """Instructions by kind in nvdisasm's listing: ``/*0010*/  @!P0 LDG.E.128 R4, ...``."""
    return _tally(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text), _SASS)


def sums_read_early(text: str) -> list[str]:
    """Instructions of nvdisasm's listing that read or write sums of wgmma before these have been waited for.

    No source says so: wgmma runs beside what follows it, and ptxas has moved conversions of its sums above the wait.
    In the order of the listing, whose loops have their ends behind their beginnings.
    """
    flying: set[int] = set()
    found = []
    for line, opcode, operands in re.findall(
        r"/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?))\s*;", text
    ):
        first = re.match(r"R(\d+)", operands)
        if product := re.match(r"[A-Z]+GMMA\.64x(\d+)x", opcode):
            assert first
            flying |= set(range(int(first[1]), int(first[1]) + int(product[1]) // 2))
        elif opcode == "EXIT" or opcode.startswith("WARPGROUP.DEPBAR") and operands.endswith("0x0"):
            flying.clear()
        elif any(int(register) in flying for register in re.findall(r"\bR(\d+)", operands)):
            found.append(" ".join(line.split()))
    return found


def count_ptx(text: str) -> dict[str, int]:
    """Instructions by kind in PTX: ``@%p1 ld.global.v4.f32 {...}``; inline assembly has no indentation."""
    return _tally(re.findall(r"^[\s{]*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)+)", text, re.M), _PTX)


def count_amdgcn(text: str) -> dict[str, int]:
    """Instructions by kind in the kernels of LLVM's AMDGPU assembly; helper functions TVM adds are left out."""
    opcodes = (opcode for body in _kernels(text) for opcode in re.findall(r"^\s+([a-z]+_\w+)", body, re.M))
    return _tally(opcodes, _AMDGCN)


def _kernels(text: str) -> list[str]:
    """The body of each kernel in AMDGPU assembly."""
    names = re.findall(r"^\s*\.amdhsa_kernel (\w+)", text, re.M)
    found = (re.search(rf"^{name}:\n(.*?)^\.Lfunc_end", text, re.M | re.S) for name in names)
    return [body[1] for body in found if body]


def count_cpu(text: str) -> dict[str, int]:
    """Floating-point vector instructions by width and kind in x86 assembly (AT&T order), or in AArch64's for NEON."""
    widths = {"zmm": 512, "ymm": 256, "xmm": 128}
    found: Counter[tuple[int, str]] = Counter()
    for opcode, operands in re.findall(r"^\s+(v?[a-z][a-z0-9]*)\s+([^#\n]*%[xyz]mm[^#\n]*)", text, re.M):
        if re.search(r"p[sdh]$|broadcast|gather", opcode):  # packed: the rest is scalar or integer bookkeeping
            bits = next(bits for name, bits in widths.items() if name in operands)
            found[bits, _cpu_kind(opcode, operands)] += 1
    for opcode in re.findall(r"^\s+(fmla|ldr|ldp|str|stp)\s+[vq]\d+", text, re.M):
        kind = {"fm": "multiply-add", "ld": "load", "st": "store"}[opcode[:2]]
        found[128, kind] += 2 if opcode in ("ldp", "stp") else 1
    order = ("multiply-add", "load", "store", "broadcast", "gather", "move", "other")
    return {f"{key[0]}-bit {key[1]}": found[key] for key in sorted(found, key=lambda k: (-k[0], order.index(k[1])))}


def _cpu_kind(opcode: str, operands: str) -> str:
    if re.match(r"vfn?m(add|sub)", opcode):
        return "multiply-add"
    for kind in ("broadcast", "gather"):
        if kind in opcode:
            return kind
    if "mov" not in opcode:
        return "other"
    if re.search(r"\)\s*({%k\d})?\s*$", operands):  # the destination comes last
        return "store"
    return "load" if "(" in operands else "move"


def amdgcn_resources(assembly: str | bytes | None, arch: Arch) -> tuple[cuda.KernelResources, ...]:
    """Resource use from the metadata of AMDGPU assembly.  `registers` are what a SIMD's are shared by: accumulators are
    among them, or, where they are a file of their own, the larger number counts.  Spills are counted once, as
    stored."""
    if arch.kind != "rocm" or not isinstance(assembly, str):
        return ()
    found = []
    for part in re.split(r"^ {2}- ", assembly, flags=re.M)[1:]:
        words = dict(re.findall(r"^\s*\.(\w+): +(\w+)", part, re.M))
        if "vgpr_count" not in words:
            continue
        found.append(
            cuda.KernelResources(
                name=words.get("name", ""),
                registers=max(int(words[name]) for name in ("vgpr_count", "agpr_count") if name in words),
                shared=int(words.get("group_segment_fixed_size", 0)),
                stack=int(words.get("private_segment_fixed_size", 0)),
                spill_stores=4 * int(words.get("vgpr_spill_count", 0)),
                spill_loads=0,
            )
        )
    return tuple(found)


def amdgcn_registers(assembly: str) -> dict[str, int]:
    """The most `accumulators` of a thread and `scalars` of a wave that a kernel's metadata has."""
    names = {"accumulators": "agpr_count", "scalars": "sgpr_count"}
    found = {name: re.findall(rf"^[\s-]*\.{key}: +(\d+)", assembly, re.M) for name, key in names.items()}
    return {name: max(map(int, numbers)) for name, numbers in found.items() if numbers}
