"""The schedule of a matrix product on matrix cores, shared by every implicit GEMM.

A block of warps computes a tile of (block_m, block_n).  Tiles of both operands pass through shared memory in stages,
swizzled against bank conflicts; each warp keeps its accumulators in registers and loads fragments one k step ahead.  At
the end the tile goes through the same shared memory, in the output's dtype, so that it leaves in coalesced 16-byte
stores.  Sources: CUTLASS's multistage GEMM; MegEngine's and the K100_AI implicit-GEMM articles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.lds import cycles
from schedules.core.problem import Config, numpy_dtype
from schedules.lowering.annotations import (
    AHEAD,
    ASYNC,
    AT_ONCE,
    PIPELINE,
    PROXY,
    SKIP,
    SWIZZLE,
    TILE_SUMS,
    VECTOR_BYTES,
)
from schedules.steps.fragments import Atom, atom_for, why_no_atom
from schedules.steps.intrinsics import load_doubled, load_matrix, multiply, multiply_split, per_lane, tensorize
from schedules.steps.launch import MinBlocks
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, cooperative_fetch, inline_if_present, widest
from schedules.steps.warpgroup import WarpgroupConfig, multiply_shared

if TYPE_CHECKING:
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV, SBlockRV


@dataclass(frozen=True)
class TensorCoreConfig(MinBlocks, Config):
    """Tiles of rows x columns of an operator's product: which axes these are, its module says."""

    tf32: ClassVar[bool] = False  # whether operands are float32, and rounded to TF32

    block_m: int = 128  # output tile of a block
    block_n: int = 128
    block_k: int = 32  # of the reduction in shared memory at a time
    warps_m: int = 2  # warps along each side of the tile
    warps_n: int = 2
    stages: int = 4  # tiles of the reduction in shared memory at once
    min_blocks: int = 0  # blocks a multiprocessor should hold, for the compiler's register budget; 0 leaves it open

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.block_m, self.block_n, self.block_k

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def fragment_sets(self) -> int:
        """Sets of fragments in registers at once."""
        return 2

    def shared_bytes(self, dtype: str, output: str | None = None, parts: int = 1) -> int:
        """Shared memory of a block for operands of `parts` x `dtype` and an `output` of another dtype or the same;
        the output's tile reuses the operands'."""
        item = parts * numpy_dtype(dtype).itemsize
        operands = self.stages * (self.block_m + self.block_n) * self.block_k * item
        return max(operands, self.block_m * self.block_n * numpy_dtype(output or dtype).itemsize)

    def registers(self, atom: Atom, parts: int = 1) -> int:
        """An estimate for each thread: accumulators, fragments of `parts` of each operand, and addressing; split
        operands are summed apart for each tile."""
        m, n = self.block_m // self.warps_m, self.block_n // self.warps_n
        item = parts * numpy_dtype(atom.source).itemsize
        sums = m * n if parts == 1 else 2 * m * n
        return sums // atom.wave + self.fragment_sets * (m + n) * atom.k * item // 4 // atom.holders + 40

    @classmethod
    def unfit(cls, problem: Any, arch: Arch) -> str | None:
        return why_no_atom(problem.dtype, arch, cls.tf32)

    def check(self, problem: Any, arch: Arch) -> str | None:
        return self.check_tile(problem.dtype, arch)

    def check_tile(self, dtype: str, arch: Arch, output: str | None = None, parts: int = 1) -> str | None:
        """Why the tile is illegal for operands of `parts` x `dtype` on `arch`, whatever the problem; the output is of
        `dtype` if no other is named."""
        for name in (field.name for field in fields(TensorCoreConfig)):
            value = getattr(self, name)
            if value < (name != "min_blocks"):
                return f"{name}={value} must be at least {int(name != 'min_blocks')}"
        reason = why_no_atom(dtype, arch, self.tf32)
        if reason:
            return reason
        atom = atom_for(dtype, arch, self.tf32)
        for name, size, warps, least in (
            ("m", self.block_m, self.warps_m, atom.m),
            ("n", self.block_n, self.warps_n, atom.n),
        ):
            part = size // warps
            if size % warps or part % least or (part > 16 and part % 16):
                several = ", or of 16 beyond 16" if least < 16 else ""
                return (
                    f"block_{name}={size} gives each of {warps} warps {size / warps:g}, "
                    f"not a multiple of {least}{several}"
                )
        if self.block_k % atom.least_k:
            return f"block_k={self.block_k} is not a multiple of {atom.least_k} ({dtype} in rows of 64 bytes)"
        if "cp_async" in arch.features:
            if self.stages < 2:
                return f"stages={self.stages} must be at least 2"
        elif self.stages != 2:
            return f"stages={self.stages}: {arch} has no cp.async, only 2 stages are of use"
        threads = self.warps * atom.wave
        if threads > arch.max_threads:
            sides = f"warps_m={self.warps_m} x warps_n={self.warps_n}"
            return f"{sides} are {threads} threads, {arch} allows {arch.max_threads}"
        shared = self.shared_bytes(dtype, output, parts)
        if shared > arch.shared_block:
            return f"stages={self.stages} needs {shared} bytes of shared memory, {arch} has {arch.shared_block}"
        registers = self.registers(atom, parts)
        if registers > arch.registers_thread:
            tile = f"block_m={self.block_m} x block_n={self.block_n}"
            return f"{tile} needs about {registers} registers a thread, {arch} has {arch.registers_thread}"
        if self.min_blocks * threads > arch.threads_sm:
            return (
                f"min_blocks={self.min_blocks} are {self.min_blocks * threads} threads, {arch} holds {arch.threads_sm}"
            )
        return None


@dataclass(frozen=True)
class Operand:
    """An operand of the product.

    `read` is its place among what the product's block reads; the last axes of that tensor are (rows, k), or (k, rows)
    if `transposed`.  `vector` elements can be loaded at once.  `low` is the place of the low part, if the operand is
    split (`steps.split`).
    """

    read: int
    vector: int
    transposed: bool = False
    low: int | None = None

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.read,) if self.low is None else (self.read, self.low)


def schedule_product(
    sch: Schedule,
    config: TensorCoreConfig | WarpgroupConfig,
    arch: Arch,
    dtype: str,
    m: Operand,
    n: Operand,
    output_vector: int,
    *,
    skip_padding: bool = False,
) -> LoopRV:
    """Schedule the stages ``conv``, ``finished`` and ``output`` of a definition rounded up to whole tiles.

    ``conv`` (.., m, n) = sum over (.., k) of `m` x `n`, in the dtype the matrix cores sum in; ``finished`` the same
    shape, in the output's dtype; ``output`` the part of it that was asked for.  ``columns``, ``padded`` and ``weights``
    are inlined into the loads.  Where both operands are split, `dtype` is that of their parts, and ``conv`` sums
    high x high + high x low + low x high, each tile of the reduction apart from the others: tensor cores cut off
    towards zero, which over long sums costs more than the split.  With `skip_padding` a block leaves out the steps
    whose tiles are all zeros.  With a WarpgroupConfig the instruction is wgmma, which takes a tile of the reduction at
    once, from shared memory as it lies there: operands are then not transposed.

    Returns the loop over blocks.
    """
    atom = atom_for(dtype, arch, config.tf32)
    at_once = isinstance(config, WarpgroupConfig)
    scope = "shared.dyn" if arch.kind == "cuda" else "shared"
    conv, finished, output = (sch.get_sblock(name) for name in ("conv", "finished", "output"))
    threads = (config.warps, atom.wave)

    next_step(sch, "Memory hierarchy: operands go through shared memory into fragments, and results out through it")
    parts = [(name, operand, read) for name, operand in (("a", m), ("b", n)) for read in operand.reads]
    split = len(parts) > 2
    shared = [sch.cache_read(conv, read, scope) for _, _, read in parts]
    fragments = [] if at_once else [sch.cache_read(conv, read, "local") for _, _, read in parts]
    inline_if_present(sch, "padded", "columns", "weights", "columns_low", "weights_low")
    sch.set_scope(conv, 0, "local")
    sch.set_scope(finished, 0, scope)

    next_step(sch, "A tile of the output to each block, and the tile's way out in whole vectors")
    *outer, row, column = sch.get_loops(finished)
    block_row, row = sch.split(row, [None, config.block_m])
    block_column, column = sch.split(column, [None, config.block_n])
    sch.reorder(*outer, block_row, block_column, row, column)
    block = sch.fuse(*outer, block_row, block_column)
    sch.bind(block, "blockIdx.x")
    sch.compute_at(conv, block, preserve_unit_loops=True)
    sch.reverse_compute_at(output, block, preserve_unit_loops=True)
    _leave_registers(sch, row, column, config, atom)
    cooperative_fetch(sch, output, 2, threads, output_vector)

    next_step(sch, "Warps, tiles of the reduction and k steps, down to the extents of one matrix instruction")
    row, column, *reduction, k = sch.get_loops(conv)[1 + len(outer) :]
    warp_row, row, i = sch.split(row, [config.warps_m, None, atom.m])
    warp_column, column, j = sch.split(column, [config.warps_n, None, config.block_n if at_once else atom.n])
    tile, *step, k = sch.split(k, [None, config.block_k] if at_once else [None, config.block_k // atom.k, atom.k])
    sch.reorder(warp_row, warp_column, *reduction, tile, *step, row, column, i, j, k)
    sch.bind(sch.fuse(warp_row, warp_column), "threadIdx.y")
    sch.unroll(row)
    sch.unroll(column)

    next_step(sch, "All threads fetch tiles, swizzled and ahead of their use, and warps load fragments of them")
    for fragment in fragments:
        sch.compute_at(fragment, *step, preserve_unit_loops=True)
    for stage, (_, operand, _) in zip(shared, parts, strict=True):
        sch.compute_at(stage, tile, preserve_unit_loops=True)
        if operand.transposed and not atom.ldmatrix:
            _fetch_transposed(sch, stage, threads, dtype)
        else:
            cooperative_fetch(sch, stage, 2, threads, operand.vector)
    vectors = config.block_k // widest(dtype)
    for stage, line in (*((each, staggered(atom, arch, vectors)) for each in shared), (finished, arch.bank_bytes)):
        if line:
            sch.annotate(stage, SWIZZLE, line)
    first = reduction[0] if reduction else tile
    sch.annotate(first, PIPELINE, config.stages)
    sch.annotate(first, ASYNC, int("cp_async" in arch.features))
    if isinstance(config, WarpgroupConfig):
        sch.annotate(first, AT_ONCE, 1)
        sch.annotate(first, PROXY, 1)
    elif config.fragment_sets == 1 or config.block_k // atom.k % 2:
        sch.annotate(first, AHEAD, 0)
    if skip_padding:
        sch.annotate(first, SKIP, 1)
    if split:
        sch.annotate(first, TILE_SUMS, 1)

    next_step(sch, "Fragments and sums as the matrix instruction wants them, and the instruction itself")
    for fragment, (name, operand, _) in zip(fragments, parts, strict=False):
        _fill_fragment(sch, fragment, atom, name, operand.transposed, scope)
    _lay_out_sums(sch, conv, config, atom)
    start = sch.decompose_reduction(conv, first)
    _clear_sums(sch, start, atom)
    if at_once:
        tensorize(sch, i, multiply_shared(dtype, config.block_n, config.block_k, scope))
    else:
        tensorize(sch, i, multiply_split(atom, arch) if split else multiply(atom, arch))
    return block


def _fetch_transposed(sch: Schedule, stage: SBlockRV, threads: tuple[int, int], dtype: str) -> None:
    """Fetch a tile (k, rows) and store it as (rows, k): neighbouring threads read neighbouring rows, and each writes 16
    bytes of one row.  Source: the K100_AI article's transposed writes, where a thread keeps to one column."""
    sch.transform_layout(stage, ("write", 0), lambda *at: [*at[:-2], at[-1], at[-2]])
    k, row = sch.get_loops(stage)[-2:]
    k, lane = sch.split(k, [None, widest(dtype)])
    sch.reorder(k, row, lane)
    _, ty, tx = sch.split(sch.fuse(k, row), [None, *threads])
    bind(sch, (ty, "threadIdx.y"), (tx, "threadIdx.x"))
    sch.vectorize(lane)


@lru_cache
def staggered(atom: Atom, arch: Arch, vectors: int) -> int:
    """The bytes over which rows of so many 16-byte vectors in shared memory are staggered (`annotations.SWIZZLE`), by
    the conflicts of the lanes that read fragments; 0 where they have fewer as they lie."""
    from schedules.lowering.annotated import swizzle

    if atom.ldmatrix:  # eight rows at a vector
        return arch.bank_bytes

    def taken(line: int) -> int:
        lanes = [(lane % atom.m, lane % atom.holders // atom.m % vectors) for lane in range(atom.wave)]
        places = [row * vectors + (swizzle(row, vector, vectors, line) if line else vector) for row, vector in lanes]
        return cycles([VECTOR_BYTES * place for place in places], VECTOR_BYTES, arch.lds_banks, read=True)[0]

    return min((arch.bank_bytes, 0), key=taken)


def _clear_sums(sch: Schedule, start: SBlockRV, atom: Atom) -> None:
    row, column, i, j = sch.get_loops(start)[-4:]
    products = []
    if int(sch.get(j).extent) > atom.n:  # those that one instruction sums
        several, j = sch.split(j, [None, atom.n])
        sch.reorder(several, i, j)
        products = [several]
    for loop in (row, column, *products, *bind_lanes(sch, i, j, atom)):
        sch.unroll(loop)


def bind_lanes(sch: Schedule, i: LoopRV, j: LoopRV, atom: Atom) -> list[LoopRV]:
    """Deal a sum's (i, j) out to the lanes that hold them; returns the loops over a lane's slots, inner last."""
    if atom.ldmatrix:
        half, i = sch.split(i, [2, 8])
        j, slot = sch.split(j, [4, 2])
        sch.reorder(half, i, j, slot)
        slots = [half, slot]
    else:
        several, i, slot = sch.split(i, [None, atom.row_lanes, atom.run])
        sch.reorder(several, i, j, slot)
        slots = [several, slot]
    sch.bind(sch.fuse(i, j), "threadIdx.x")
    return slots


def _leave_registers(
    sch: Schedule, row: LoopRV, column: LoopRV, config: TensorCoreConfig | WarpgroupConfig, atom: Atom
) -> None:
    """Loops of the stage that reads the sums: each lane its own."""
    warp_row, row, i = sch.split(row, [config.warps_m, None, atom.m])
    warp_column, column, j = sch.split(column, [config.warps_n, None, atom.n])
    sch.reorder(warp_row, warp_column, row, column, i, j)
    sch.bind(sch.fuse(warp_row, warp_column), "threadIdx.y")
    *halves, slot = bind_lanes(sch, i, j, atom)
    for loop in (row, column, *halves):
        sch.unroll(loop)
    if atom.ldmatrix:
        sch.vectorize(slot)
    else:
        sch.unroll(slot)


def _lay_out_sums(sch: Schedule, conv: SBlockRV, config: TensorCoreConfig | WarpgroupConfig, atom: Atom) -> None:
    rows, columns = config.block_m // config.warps_m, config.block_n // config.warps_n

    def layout(*at: Any) -> list[Any]:
        *outer, m, n = at
        tiles = [m // config.block_m, n // config.block_n]
        warps = [m % config.block_m // rows, n % config.block_n // columns]
        products = [m % rows // atom.m, n % columns // atom.n]
        return [*outer, *tiles, *warps, *products, *atom.c(m % atom.m, n % atom.n)]

    sch.transform_layout(conv, ("write", 0), layout, assume_injective_transform=True)
    per_lane(sch, conv, 5, 6)


def _fill_fragment(sch: Schedule, fragment: SBlockRV, atom: Atom, name: str, transposed: bool, scope: str) -> None:
    """The loops and the layout of a stage that loads operand `name` ("a" or "b") from shared memory."""
    rows, place = (atom.m, atom.a) if name == "a" else (atom.n, atom.b)

    def layout(*at: Any) -> list[Any]:
        *outer, x, y = at
        row, k = (y, x) if transposed else (x, y)
        return [*outer, k // atom.k, row // rows, *place(row % rows, k % atom.k)]

    sch.transform_layout(fragment, ("write", 0), layout, assume_injective_transform=True)
    x, y = sch.get_loops(fragment)[-2:]
    row, k = (y, x) if transposed else (x, y)
    extent = int(sch.get(row).extent)
    at_once = 16 if extent % 16 == 0 else extent
    many, row = sch.split(row, [None, at_once])
    sch.unroll(many)
    if atom.ldmatrix:
        sch.reorder(many, k, row) if transposed else sch.reorder(many, row, k)
        intrinsic = load_matrix(atom, name, scope, rows=at_once, transposed=transposed)
        tensorize(sch, k if transposed else row, intrinsic)
        return
    if atom.doubled:
        sch.reorder(many, k, row) if transposed else sch.reorder(many, row, k)
        tensorize(sch, k if transposed else row, load_doubled(atom, scope, transposed=transposed))
        return
    per_lane(sch, fragment)
    k, slot = sch.split(k, [None, atom.word])
    sch.reorder(many, k, row, slot)
    bind(sch, (sch.fuse(k, row), "threadIdx.x"))
    sch.vectorize(slot)


def matrix_schedule(dtype: str, arch: Arch) -> str | None:
    """The name of the schedule for operands of `dtype` on the matrix cores of `arch`; None if it has none for them."""
    return None if why_no_atom(dtype, arch) else "mma"


def whole_steps(block_k: int, dtype: str, arch: Arch) -> int:
    """`block_k`, or more where a tile for the matrix instruction has more."""
    return block_k if why_no_atom(dtype, arch) else max(block_k, atom_for(dtype, arch).least_k)


# (block_m, block_n, warps_m, warps_n) that defaults are chosen from
SHAPES = (
    (128, 128, 2, 2),
    (256, 64, 4, 1),
    (64, 256, 1, 4),
    (128, 64, 2, 2),
    (64, 128, 2, 2),
    (64, 64, 2, 2),
    (256, 32, 4, 1),
    (32, 256, 1, 4),
    (128, 32, 4, 1),
    (32, 128, 1, 4),
    (64, 32, 2, 1),
    (32, 64, 1, 2),
    (128, 16, 4, 1),
    (16, 128, 1, 4),
    (128, 8, 4, 1),
    (64, 8, 4, 1),
    (32, 8, 2, 1),
)
LOAD = 48  # what an element loaded costs, in products
# (k steps of a tile, stages) in the order tried: on an H200 longer tiles in fewer stages were 4 to 6% faster for
# two-byte operands; not tried for int8
DEPTHS = {2: ((4, 3), (2, 4), (2, 3)), 1: ((2, 4), (2, 3))}


def tile_cost(shape: tuple[int, ...], m: int, n: int, count: int, device: Device) -> float:
    """What `count` products of `m` x `n` cost the busiest multiprocessor of `device` with the tile (block_m, block_n,
    ..), in multiply-adds for each k."""
    block_m, block_n, *_ = shape
    blocks = -(-m // block_m) * -(-n // block_n) * count
    return -(-blocks // device.multiprocessors) * (block_m * block_n + LOAD * (block_m + block_n))


def default_tile(m: int, n: int, count: int, dtype: str, arch: Arch) -> dict[str, int]:
    """Fields of a TensorCoreConfig for `count` products of `m` x `n`: the tile with the least work on the busiest
    multiprocessor; none where there is no matrix instruction, which the config's check then says."""
    if why_no_atom(dtype, arch):
        return {}
    atom = atom_for(dtype, arch)

    def words(shape: tuple[int, int, int, int], steps: int = 2, stages: int = 2) -> dict[str, int]:
        names = ("block_m", "block_n", "warps_m", "warps_n")
        return {**dict(zip(names, shape, strict=True)), "block_k": steps * atom.least_k // 2, "stages": stages}

    def legal(shape: tuple[int, int, int, int]) -> bool:
        return TensorCoreConfig(**words(shape)).check_tile(dtype, arch) is None

    shape = min(filter(legal, SHAPES), key=lambda shape: tile_cost(shape, m, n, count, arch.device))
    if "cp_async" not in arch.features:
        return words(shape)
    # as deep as leaves room for two blocks
    for steps, stages in DEPTHS[numpy_dtype(dtype).itemsize]:
        config = TensorCoreConfig(**words(shape, steps, stages))
        if (
            config.check_tile(dtype, arch) is None
            and 2 * (config.shared_bytes(dtype) + arch.shared_reserved) <= arch.shared_sm
        ):
            # of 67 pairs that differ in this alone, on an H200, asking for one block was at most 1.6% slower than for
            # none, and up to 30% faster; the compiler's own register budget can cost a whole block
            return {**words(shape, steps, stages), "min_blocks": 1}
    return words(shape)


@lru_cache
def tiles(dtype: str, arch: Arch) -> tuple[dict[str, int], ...]:
    """Fields of every TensorCoreConfig worth trying, legal or not; none where there is no matrix instruction."""
    if why_no_atom(dtype, arch):
        return ()
    atom = atom_for(dtype, arch)
    others = [
        (128, 256, 2, 4),
        (256, 128, 4, 2),
        (128, 128, 4, 2),
        (128, 128, 2, 4),
        (256, 128, 4, 4),
        (128, 96, 2, 2),
        (96, 128, 2, 2),
        (128, 160, 4, 2),
    ]
    return tuple(
        {
            "block_m": block_m,
            "block_n": block_n,
            "block_k": steps * atom.least_k // 2,
            "warps_m": warps_m,
            "warps_n": warps_n,
            "stages": stages,
            "min_blocks": min_blocks,
        }
        for (block_m, block_n, warps_m, warps_n), steps, stages, min_blocks in product(
            (*SHAPES, *others), (2, 4), (2, 3, 4, 5, 6), (0, 1, 2, 3) if arch.kind == "cuda" else (0,)
        )
    )
