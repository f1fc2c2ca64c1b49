"""The implicit matrix product on int8 matrix cores: the program of `mma`.

A block computes a tile of pixels x channels.  A step of the reduction, over (ci/32, kh, kw), brings `block_k` input
channels of both operands into shared memory: rows of 32 channels as they lie in global memory, four rows to a line of
all banks, their 16-byte vectors XOR-staggered from line to line.  Each warp multiplies fragments into its accumulators
and stores them, finished, straight from registers: `Rounding` orders the columns so that a thread holds eight
neighbouring channels and a warp stores whole neighbouring pixels.
Source: MegEngine's int8 tensor-core convolution, with the second of the improvements it leaves open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.problem import Config
from schedules.core.tvm import SBlockRV, Schedule, tirx, tvm
from schedules.lowering.annotations import AHEAD, ASYNC, MIN_BLOCKS, PIPELINE, SWIZZLE
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.operators.conv2d_nchw32.tiled import QUADS, Rounding, schedule_output, tiled_definition
from schedules.steps.fragments import Atom, atom_for, why_no_atom
from schedules.steps.intrinsics import load_doubled, load_matrix, multiply, per_lane, tensorize
from schedules.steps.story import next_step
from schedules.steps.tensor_core import bind_lanes, staggered
from schedules.steps.tiles import bind, cooperative_fetch, inline_if_present

VECTOR = 16  # int8 elements of a 128-bit load
PIXELS = 16  # of one matrix instruction


@dataclass(frozen=True)
class MatrixConfig(Config):
    block_m: int = 128  # pixels of a block
    block_n: int = 128  # output channels of a block
    block_k: int = 64  # input channels in shared memory at a time
    warps_m: int = 2
    warps_n: int = 2
    stages: int = 4  # tiles of the reduction in shared memory at once
    min_blocks: int = 0  # blocks a multiprocessor should hold, for the compiler's register budget; 0 leaves it open

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def warp_tile(self) -> tuple[int, int]:
        """A warp's (pixels, channels)."""
        return self.block_m // self.warps_m, self.block_n // self.warps_n

    def shared_bytes(self) -> int:
        return self.stages * (self.block_m + self.block_n) * self.block_k

    def registers(self, atom: Atom) -> int:
        """An estimate for each thread: accumulators, two sets of fragments, and addressing."""
        m, n = self.warp_tile
        return m * n // atom.wave + (m + n) * atom.k // 2 // atom.holders + 40

    def check(self, problem: Nchw32Problem, arch: Arch) -> str | None:
        if problem.not_groups:
            return problem.not_groups
        for name, value in self.to_json().items():
            if value < (name != "min_blocks"):
                return f"{name}={value} must be at least {int(name != 'min_blocks')}"
        reason = why_no_atom("int8", arch)
        if reason:
            return reason
        atom = atom_for("int8", arch)
        for axis, size, warps, least in (
            ("m", self.block_m, self.warps_m, PIXELS),
            ("n", self.block_n, self.warps_n, GROUP),
        ):
            if size % warps or size // warps % least:
                return f"block_{axis}={size} gives each of {warps} warps {size / warps:g}, not a multiple of {least}"
        if self.block_k % (2 * GROUP):
            return f"block_k={self.block_k} is not a multiple of {2 * GROUP} (two groups of channels)"
        if "cp_async" in arch.features:
            if self.stages < 2:
                return f"stages={self.stages} must be at least 2"
        elif self.stages != 2:
            return f"stages={self.stages}: {arch} has no cp.async, only 2 stages are of use"
        threads = self.warps * atom.wave
        if threads > arch.max_threads:
            return (
                f"warps_m={self.warps_m} x warps_n={self.warps_n} are {threads} threads, {arch} has {arch.max_threads}"
            )
        if self.shared_bytes() > arch.shared_block:
            return f"stages={self.stages} needs {self.shared_bytes()} bytes shared, {arch} has {arch.shared_block}"
        if self.registers(atom) > arch.registers_thread:
            return (
                f"block_m={self.block_m} x block_n={self.block_n} needs about {self.registers(atom)} registers, "
                f"{arch} has {arch.registers_thread}"
            )
        if self.min_blocks * threads > arch.threads_sm:
            return f"min_blocks={self.min_blocks} are {self.min_blocks * threads} threads, {arch} has {arch.threads_sm}"
        return None


def fitting(
    problem: Nchw32Problem, tiles: Sequence[tuple[int, int, int, int]], stages: int, device: Device
) -> MatrixConfig:
    """The first of `tiles` (pixels, channels, warps of each) that leaves no channel tile mostly empty and still makes
    a block for each multiprocessor of `device`; the last if none does."""
    channels = problem.co_groups * GROUP
    for tile in tiles:
        block_m, block_n, *_ = tile
        columns = -(-channels // block_n)
        blocks = columns * -(-problem.pixels // block_m)
        if channels * 4 >= columns * block_n * 3 and blocks >= device.multiprocessors:
            break
    block_m, block_n, warps_m, warps_n = tile
    return MatrixConfig(block_m, block_n, 2 * GROUP, warps_m, warps_n, stages)


def rounding_of(config: MatrixConfig, atom: Atom) -> Rounding:
    """How `config` cuts the product into what a thread of `atom` holds."""
    chunk = config.block_k // GROUP
    if atom.ldmatrix:
        return Rounding(config.block_m, config.block_n, chunk, 2, atom.wave // QUADS)
    lanes = atom.row_lanes
    return Rounding(config.block_m, config.block_n, chunk, atom.run, atom.n, lanes, atom.m // lanes)


def graph(problem: Nchw32Problem, config: MatrixConfig, arch: Arch) -> tirx.PrimFunc:
    """The product, with channels as rows on AMD, pixels on NVIDIA."""
    atom = atom_for("int8", arch)
    return tiled_definition(problem, rounding_of(config, atom), transposed=not atom.ldmatrix)


def schedule(problem: Nchw32Problem, config: MatrixConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program; AMD's instruction takes the channels as its rows, NVIDIA's the pixels, so that in both a
    thread's results are neighbouring channels."""
    atom = atom_for("int8", arch)
    transposed = not atom.ldmatrix
    scope = "shared.dyn" if arch.kind == "cuda" else "shared"
    threads = (config.warps, atom.wave)
    sch = Schedule(graph(problem, config, arch))
    conv = sch.get_sblock("conv")
    if atom.k > GROUP:  # the instruction sums several groups
        together = atom.k // GROUP
        sch.transform_block_layout(conv, lambda i, j, g, y, x, k: [i, j, g // together, y, x, g % together * GROUP + k])

    next_step(sch, "Memory hierarchy: operands go through shared memory into fragments, the sums stay in registers")
    shared = [sch.cache_read(conv, i, scope) for i in (0, 1)]
    fragments = [sch.cache_read(conv, i, "local") for i in (0, 1)]
    inline_if_present(sch, "rows", "columns")
    sch.set_scope(conv, 0, "local")

    next_step(sch, "Blocks, warps and lanes; the epilogue in the lane that holds the sums")
    schedule_output(sch, problem, rounding_of(config, atom), (config.warps_m, config.warps_n), quads_first=transposed)

    next_step(sch, "The reduction: all threads fetch tiles, swizzled and ahead of their use; warps load fragments")
    i, j, *taps, k = sch.get_loops(conv)[-6:]
    warps = (config.warps_n, config.warps_m) if transposed else (config.warps_m, config.warps_n)
    warp_i, many_i, i = sch.split(i, [warps[0], None, atom.m])
    warp_j, many_j, j = sch.split(j, [warps[1], None, atom.n])
    first, step = sch.split(taps[0], [None, config.block_k // max(GROUP, atom.k)])
    half, k = sch.split(k, [None, atom.k])
    warp = (warp_j, warp_i) if transposed else (warp_i, warp_j)
    sch.reorder(first, *taps[1:], *warp, step, half, many_i, many_j, i, j, k)
    inner = i
    sch.bind(sch.fuse(*warp), "threadIdx.y")
    step = sch.fuse(step, half)
    sch.unroll(many_i)
    sch.unroll(many_j)
    for fragment in fragments:
        sch.compute_at(fragment, step, preserve_unit_loops=True)
    for stage in shared:
        sch.compute_at(stage, taps[-1], preserve_unit_loops=True)
        cooperative_fetch(sch, stage, 5, threads, VECTOR)
        if line := staggered(atom, arch, GROUP // VECTOR):
            sch.annotate(stage, SWIZZLE, line)

    next_step(sch, "Fragments as the matrix instruction wants them, and the instruction itself")
    for name, fragment in zip("ab", fragments, strict=True):
        _fill(sch, fragment, atom, name, scope)
    sch.transform_layout(
        conv,
        ("write", 0),
        lambda x, y: [x // atom.m, y // atom.n, *atom.c(x % atom.m, y % atom.n)],
        assume_injective_transform=True,
    )
    per_lane(sch, conv)
    *_, i, j = sch.get_loops(sch.decompose_reduction(conv, first))
    sch.annotate(first, PIPELINE, config.stages)
    sch.annotate(first, ASYNC, int("cp_async" in arch.features))
    sch.annotate(first, AHEAD, int(config.block_k // atom.k % 2 == 0))
    bind_lanes(sch, i, j, atom)  # zeros, each lane its own
    tensorize(sch, inner, multiply(atom, arch))
    if config.min_blocks:
        sch.mod["main"] = sch.mod["main"].with_attr(MIN_BLOCKS, config.min_blocks)
    return sch.mod


def _fill(sch: Schedule, fragment: SBlockRV, atom: Atom, name: str, scope: str) -> None:
    """Loops and layout of the stage that loads operand `name` ("a" or "b") from shared memory."""
    rows, place = (atom.m, atom.a) if name == "a" else (atom.n, atom.b)

    def layout(g: Any, y: Any, x: Any, row: Any, k: Any) -> list[Any]:
        together = max(GROUP, atom.k) // GROUP
        k = g % together * GROUP + k
        return [g // together, y, x, k // atom.k, row // rows, *place(row % rows, k % atom.k)]

    sch.transform_layout(fragment, ("write", 0), layout, assume_injective_transform=True)
    *_, group, _, _, row, k = sch.get_loops(fragment)
    many, row = sch.split(row, [None, 16])
    sch.unroll(many)
    if atom.ldmatrix or atom.doubled:
        tensorize(sch, row, load_matrix(atom, name, scope) if atom.ldmatrix else load_doubled(atom, scope))
        return
    per_lane(sch, fragment)
    k, slot = sch.split(k, [None, atom.word])
    lanes = [group, k, row] if atom.k > GROUP else [k, row]
    sch.reorder(many, *lanes, slot)
    bind(sch, (sch.fuse(*lanes), "threadIdx.x"))
    sch.vectorize(slot)
