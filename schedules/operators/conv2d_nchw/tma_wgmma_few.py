"""NCHW convolution of few filters on Hopper: pixels x (kw, output channels) by TMA and wgmma.

With few filters a matrix product with output channels as rows is mostly padding.  Here pixels are its rows, and the
filters of all taps along a row stand side by side as its columns (rx, co), co rounded up to 8, or to 4: the pixels are
loaded unshifted, as TMA demands (see `hopper.rows`), and multiplied once with all of them; the epilogue adds up the kw
columns of an output channel, each shifted by its tap.  A stage holds the image rows that a tile's kernel rows look at
once, and the kernel's rows are offsets into them.

Rows of wgmma are pixels, so that a shift is a shuffle between lanes; what crosses from one warp's sixteen pixels to the
next's goes through shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.space import ProductSpace
from schedules.definitions.epilogue import unrounded
from schedules.hopper.config import REGISTERS, RESIDENT, ROWS, STAGES, HopperConfig, clusters
from schedules.hopper.pixels import PixelTiles
from schedules.hopper.rows import GROUP, RowTiles, output_map, shifts, whole_rows
from schedules.hopper.shared import STAGING, SharedTile, Staging, TensorMap, aligned
from schedules.hopper.work import Fragment, Load, Member, Operand, Output, Product, Tensors, Work
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.repack import filter_argument, repack, workspace_of
from schedules.tirx import NO_ROUTES

if TYPE_CHECKING:
    import tvm

DTYPES = ("float16", "bfloat16")
ITEM = 2  # bytes
VECTOR = 8  # elements in 16 bytes
WARP_ROWS = 16  # of a wgmma's 64, that lie in one warp


@dataclass(frozen=True)
class PixelStaging(Staging):
    """Where a consumer's results wait for their store as `rows` channels x pixels, `width` of them for each store; then
    `edges` bytes for the sums that warps hand their neighbours."""

    edges: int = 0

    @property
    def together(self) -> int:
        """Stores of a pass, which is whole wgmmas."""
        each = ROWS // self.width
        blocks = self.columns // ROWS
        fits = (n for n in range(1, blocks + 1) if blocks % n == 0 and n * each * self.store_bytes <= STAGING)
        return each * max(fits, default=1)

    @property
    def nbytes(self) -> int:
        return aligned(self.together * self.store_bytes + self.edges)


@dataclass(frozen=True)
class TmaWgmmaFewConfig(HopperConfig):
    """Tiles of (pixels, taps along a row x output channels, input channels)."""

    granule: ClassVar[int] = GROUP

    cluster_m: int = 1

    def pitch(self, problem: NchwProblem) -> int:
        """Columns from one tap to the next, as block_n has them; 0 if it has no taps."""
        found = (pitch for pitch in _pitches(problem) if self.block_n == _columns(problem, pitch))
        return next(found, 0)

    def staging(self, problem: NchwProblem, run: int) -> PixelStaging:
        channels = _channels(problem)
        handed = sum(map(abs, shifts(problem))) * (self.rows // WARP_ROWS)  # rows of sums
        return PixelStaging(channels, min(run, ROWS), ITEM, self.rows, edges=handed * channels * 4)

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        p = problem
        if p.dtype not in DTYPES:
            return f"dtype={p.dtype} is not {' or '.join(DTYPES)}"
        for name, size in (("ci", p.ci), ("w", p.w), ("out_w", p.out_w)):
            if size % VECTOR:
                return f"{name}={size} is not a multiple of {VECTOR}, which TMA needs"
        if p.epilogue.of_axis("element"):
            return "residual=true is not added by this kernel; choose another --schedule"
        if p.stride != (1, 1):
            return f"stride={p.stride} is not 1"
        reach = max(map(abs, shifts(p)))
        if reach > GROUP:
            return f"pad={p.pad[1]}, dilation={p.dilation[1]} reach over {reach} pixels, sums shift by {GROUP} at most"
        if self.pitch(p) == 0:
            ways = " or ".join(str(_columns(p, pitch)) for pitch in _pitches(p))
            return f"block_n={self.block_n} is not {ways}, kw={p.kw} times co={p.co} rounded up to 8 or 4"
        if self.cluster_n != 1:
            return f"cluster_n={self.cluster_n} is not 1, a block has all filters"
        found = whole_rows(p, self.rows) if self.consumers > 0 and self.block_m >= self.consumers else None
        # all rows of a thread need the same few biases, which it keeps
        addressing = 48 if p.epilogue.of_axis("channel") else 40
        reason = self.check_block(p.dtype, arch, addressing=addressing)
        if reason:
            return reason
        if found is None:
            return f"block_m={self.block_m} gives each consumer no whole number of rows of {max(p.w, p.out_w)} pixels"
        pitch = self.pitch(p)
        if self.cluster_m > 1 and pitch % (GROUP * self.cluster_m):
            return f"co={p.co} rounded up to {pitch} is not cluster_m={self.cluster_m} times a multiple of 8"
        return FewWork(p, self).reason(arch)


def _channels(problem: NchwProblem) -> int:
    """Output channels in whole groups of columns."""
    return -(-problem.co // GROUP) * GROUP


def _pitches(problem: NchwProblem) -> list[int]:
    """What a tap's columns may be: output channels in whole groups, or in halves of groups where that makes fewer."""
    whole, half = (-(-problem.co // unit) * unit for unit in (GROUP, GROUP // 2))
    return [whole, half] if _columns(problem, half) < _columns(problem, whole) else [whole]


def _columns(problem: NchwProblem, pitch: int) -> int:
    """Of all taps along a row, in whole groups."""
    return -(-problem.kw * pitch // GROUP) * GROUP


@dataclass(frozen=True)
class Place:
    """A block's tile: its first output pixel."""

    pixel: tuple[Any, Any, Any]


class FewWork(Work):
    config: TmaWgmmaFewConfig

    def __init__(self, problem: NchwProblem, config: TmaWgmmaFewConfig) -> None:
        p = problem
        found = whole_rows(p, config.rows)
        assert found is not None  # checked
        width, run = found
        self.problem, self.config, self.width = p, config, width
        self.arguments = p.arguments()
        self.workspace = workspace_of(p)
        self.kernel = (1, 1)
        self.chunks = -(-p.ci // config.block_k)
        self.channels = _channels(p)
        self.columns = 1
        self.tiles = PixelTiles(p, (1, config.block_m // width, width))
        self.clusters = -(-self.tiles.count // config.cluster_m)
        self.rows = RowTiles(self.tiles, width, (0, 0), run).with_halo()
        self.a = Operand(
            SharedTile(self.rows.pixels, config.block_k, ITEM, run, transposed=True),
            TensorMap(
                "data",
                p.dtype,
                (p.w, p.ci, p.h, p.n),
                (p.h * p.w * ITEM, p.w * ITEM, p.ci * p.h * p.w * ITEM),
                self.rows.box(config.block_k, 1),
                (1, 1, 1, 1),
                run * ITEM,
            ),
        )
        run = min(config.block_k, 128 // ITEM)
        self.pitch = config.pitch(p)
        spare = config.block_n - p.kw * self.pitch
        # of the taps, those that lie as one box leaves them: all, a kernel row's where a tap is several runs of
        # channels or rows are spare, or one where blocks share its output channels
        alone = config.cluster_m == 1
        taps = p.kw if alone else 1, p.kh if alone and config.block_k == run and not spare else 1
        self.b = Operand(
            SharedTile(config.block_n, config.block_k, ITEM, run),
            TensorMap(
                filter_argument(problem).name,
                p.dtype,
                (p.ci, p.co, p.kw, p.kh),
                (p.ci * ITEM, p.co * p.ci * ITEM, p.kw * p.co * p.ci * ITEM),
                (run, self.pitch // config.cluster_m, *taps),
                (1, 1, 1, 1),
                run * ITEM,
            ),
            p.kh,
            spare=spare,
        )
        down = p.dilation[0] * (width // self.rows.run) * self.a.tile.slab
        self.products = tuple(Product(0, ry * down, ry * self.b.tile.nbytes) for ry in range(p.kh))
        staging = config.staging(p, self.rows.run)
        target = output_map(p, staging, self.channels)
        self.staging, self.target = staging, target
        self.output = Output(p.dtype, staging, target)

    def prepare(self, tensors: Tensors) -> None:
        repack(self.problem, tensors)

    def place(self, tile: Any, rank_m: Any, rank_n: Any) -> Place:
        from schedules.tirx.values import named

        n, y, x = self.tiles.start(named("pixels", tile * self.config.cluster_m + rank_m))
        return Place((named("n", n), named("y", y), x))

    def loads_a(self, place: Place, ry: Any, rx: Any, chunk: Any, part: Any) -> Sequence[Load]:
        tile = self.a.tile
        return [
            Load(offset, (x, chunk * tile.k + channel, y - self.problem.pad[0], n))
            for offset, x, channel, y, n in self.rows.loads(tile, place.pixel, 0, 1)
        ]

    def loads_b(self, place: Place, ry: Any, rx: Any, chunk: Any, part: Any) -> Sequence[Load]:
        tile, p = self.b.tile, self.problem
        _, rows, wide, high = self.b.source.box
        found = []
        for run in range(tile.k // tile.run):
            channel = chunk * tile.k + run * tile.run
            for tap_y, tap_x in product(range(0, p.kh, high), range(0, p.kw, wide)):
                row = tap_x * self.pitch + part * rows
                offset = tap_y * tile.nbytes + run * tile.slab + row * tile.swizzle
                found.append(Load(offset, (channel, part * rows, tap_x, tap_y)))
        return found

    def emit_results(
        self, tensors: Tensors, output_map: Any, place: Place, sums: Any, memory: Any, member: Member
    ) -> None:
        from tvm.script import tirx as T

        from schedules.hopper import epilogue
        from schedules.hopper.instructions import pack_16
        from schedules.tirx.values import named

        staging = self.staging
        fragment = _of_taps(self, epilogue.fragment_of(self, sums), member.lane)
        blocks, each = staging.columns // ROWS, ROWS // staging.width
        start = named("start", member.consumer * staging.nbytes)
        edges = start + staging.together * staging.store_bytes
        row, column = named("row", T.truncdiv(member.lane, 4)), named("column", T.truncmod(member.lane, 4) * 2)
        form = epilogue.STORE.format(self.target.rank)
        _hand_over(self, fragment, memory, edges, (member.warp, row, column))
        first_of_pass = staging.together // each
        for block in range(blocks):
            if block % first_of_pass == 0:
                with T.If(member.thread == 0), T.Then():
                    T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
                epilogue.barrier(member.consumer)
            base = start + block % first_of_pass * each * staging.store_bytes
            for group in range(self.channels // GROUP):
                channel = group * GROUP
                biases = [self.column_term(tensors, place, channel + column + j) for j in range(2)]
                words = []
                for half in range(2):
                    totals = _totals(self, fragment, memory, edges, (block, group, half), (member, row, column))
                    values = [
                        self.finish(tensors, place, total, None, bias, channel)
                        for total, bias in zip(totals, biases, strict=True)
                    ]
                    words.append(pack_16(self.problem.dtype, *values))
                # eight lanes have the addresses of the first half's channels, eight those of the second's
                pixel = member.warp * WARP_ROWS + T.truncmod(T.truncdiv(member.lane, GROUP), 2) * GROUP
                store, at = T.truncdiv(pixel, staging.width), T.truncdiv(T.truncmod(pixel, staging.width), VECTOR)
                offset = store * staging.store_bytes + staging.chunk(channel + T.truncmod(member.lane, GROUP), at)
                T.evaluate(T.ptx[_STMATRIX](memory.ptr_to([base + offset]), *words))
            if (block + 1) % first_of_pass == 0:
                T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
                epilogue.barrier(member.consumer)
                with T.If(member.thread == 0), T.Then():
                    for store in range(staging.together):
                        pixel = (block + 1) * ROWS + (store - staging.together) * staging.width
                        source = memory.ptr_to([start + store * staging.store_bytes])
                        to = self.store_at(place, member.part, pixel)
                        T.evaluate(T.ptx[form](T.address_of(output_map), *to, source))
                    T.evaluate(T.ptx.cp.async_.bulk.commit_group())

    def store_at(self, place: Place, consumer: Any, column: int) -> tuple[Any, ...]:
        n, y, x = place.pixel
        down, along = divmod(column, self.width)
        return x + along, 0, y + consumer * (self.config.rows // self.width) + down, n

    def column_term(self, tensors: Tensors, place: Place, column: Any) -> Any:
        from tvm import tirx

        from schedules.tirx.values import named

        p = self.problem
        if not p.epilogue.of_axis("channel"):
            return None
        channel = column if p.co == self.channels else tirx.min(column, p.co - 1)
        return named("bias", tensors["bias"][channel].astype("float32"))

    def finish(self, tensors: Tensors, place: Place, total: Any, of_row: Any, of_column: Any, column: Any) -> Any:
        return unrounded(self.problem.epilogue, total, [] if of_column is None else [of_column])


# four lanes hold eight columns: `behind` are the first four of the next eight, `ahead` the last four of these
_MIDDLE = """
__device__ __forceinline__ float hopper_middle(float ahead, float behind, int lane) {
  return __shfl_xor_sync(0xffffffffu, lane & 2 ? ahead : behind, 2);
}
"""
_STMATRIX = "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16"
_HAND_OVER = """
__device__ __forceinline__ void hopper_hand_over(void* at, float a, float b, bool hand) {
  if (hand) *(float2*)at = make_float2(a, b);
}
"""
# lanes hold rows of eight four by four; `{0}` rows on, the first rows lie in the next eight
_ROWS_ON = """
__device__ __forceinline__ float hopper_sum_{0}_rows_on(float near, float far, int lane) {{
  return __shfl_sync(0xffffffffu, (lane >> 2) < {0} ? far : near, (lane + 4 * {0}) & 31);
}}
"""
_TAKE = """
__device__ __forceinline__ float hopper_take(float own, const void* at, bool take) {
  return take ? *(const float*)at : own;
}
"""


def _of_taps(work: FewWork, fragment: Fragment, lane: Any) -> Fragment:
    """The accumulators by (tap, 64 rows, group of eight output channels, register): `fragment`, or what its lanes hold
    where a tap's columns begin in the middle of a group."""
    from tvm.script import tirx as T

    from schedules.tirx.values import named

    groups = work.config.block_n // GROUP
    found: dict[tuple[int, ...], Any] = {}

    def of_tap(tap: int, block: int, group: int, register: int) -> Any:
        first, rest = divmod(tap * work.pitch + group * GROUP, GROUP)
        if not rest:
            return fragment(0, block, first, register)
        at = tap, block, group, register
        if at not in found:
            ahead = fragment(0, block, first, register)
            behind = fragment(0, block, first + 1, register) if first + 1 < groups else T.float32(0)
            value = T.cuda.func_call(
                "hopper_middle", ahead, behind, lane, source_code=_MIDDLE, return_type="float32"
            )  # fmt: skip
            found[at] = named("middle", value)
        return found[at]

    return of_tap


def _edge(work: FewWork, tap: int, block: int, warp: Any) -> Any:
    """Bytes to the sums of a tap that a warp hands over of wgmma number `block`: as many rows as the tap's shift, from
    the end of the warp's rows if it is to the left, else from their beginning."""
    warps = work.config.rows // WARP_ROWS
    before, rows = (sum(map(abs, found)) for found in (shifts(work.problem)[:tap], shifts(work.problem)[tap : tap + 1]))
    return (before * warps + (block * (ROWS // WARP_ROWS) + warp) * rows) * work.channels * 4


def _hand_over(work: FewWork, fragment: Fragment, memory: Any, edges: Any, at: tuple[Any, Any, Any]) -> None:
    """Write what the neighbouring warps need of each tap's sums: the last rows of those that move right, else the
    first."""
    from tvm.script import tirx as T

    warp, row, column = at
    channels = work.channels
    for tap, shift in enumerate(shifts(work.problem)):
        if shift == 0:
            continue
        half, hand, first = (1, row >= GROUP + shift, GROUP + shift) if shift < 0 else (0, row < shift, 0)
        for block, group in product(range(work.config.rows // ROWS), range(channels // GROUP)):
            element = (row - first) * channels + group * GROUP + column
            sums = [fragment(tap, block, group, 2 * half + j) for j in range(2)]
            target = memory.ptr_to([edges + _edge(work, tap, block, warp) + element * 4])
            T.evaluate(T.cuda.func_call("hopper_hand_over", target, *sums, hand, source_code=_HAND_OVER))


def _totals(
    work: FewWork,
    fragment: Fragment,
    memory: Any,
    edges: Any,
    of: tuple[int, int, int],
    at: tuple[Member, Any, Any],
) -> list[Any]:
    """The two outputs, not yet finished, of a thread in the eight rows 8 * `half` down in 64 number `block`, and in
    channels 8 * group + lane % 4 * 2 + (0, 1): each tap's sums of the pixel `shift` rows down; zeros beyond the row."""
    from tvm import tirx
    from tvm.script import tirx as T

    from schedules.tirx.values import named

    block, group, half = of
    member, row, column = at
    channels, width = work.channels, work.width
    totals: list[Any] = [None, None]
    for tap, shift in enumerate(shifts(work.problem)):
        eights, rows = divmod(shift, GROUP)
        near, far = half + eights, half + eights + 1
        # rows before this one lie in the near eight, from it on in the far
        wraps = row >= GROUP - rows
        outside = [where for where in (near, far)[: 2 if rows else 1] if where not in (0, 1)]
        for j in range(2):

            def sum_of(where: int, j: int = j, tap: int = tap) -> Any:
                return fragment(tap, block, group, 2 * where + j) if where in (0, 1) else T.float32(0)

            value = sum_of(near)
            if rows:
                name, source = f"hopper_sum_{rows}_rows_on", _ROWS_ON.format(rows)
                value = T.cuda.func_call(
                    name, value, sum_of(far), member.lane, source_code=source, return_type="float32"
                )
                value = named("sum", value)
            for where in outside:
                step = -1 if where < 0 else 1
                first = block * ROWS + member.warp * WARP_ROWS + (0 if where < 0 else WARP_ROWS)
                inside = T.truncmod(first, width) != 0
                mine = (wraps if where == far else tirx.Not(wraps)) if rows else T.bool(True)
                source_row = T.truncmod(row + rows, GROUP) - (GROUP + shift if shift < 0 else 0)
                element = source_row * channels + group * GROUP + column + j
                at_edge = edges + _edge(work, tap, block, member.warp + step) + element * 4
                value = T.cuda.func_call(
                    "hopper_take", value, memory.ptr_to([at_edge]), tirx.all(inside, mine),
                    source_code=_TAKE, return_type="float32",
                )  # fmt: skip
                value = named("sum", value)
            totals[j] = value if totals[j] is None else totals[j] + value
    return totals


def schedule(problem: NchwProblem, config: TmaWgmmaFewConfig, arch: Arch) -> tvm.IRModule:
    """The TIRx program for data (n, ci, h, w), filter (kh, kw, co, ci) or (co, ci, kh, kw), bias (co,) if any, output
    (n, co, out_h, out_w)."""
    from schedules.hopper.program import program

    return program(FewWork(problem, config))


def _configs(problem: NchwProblem) -> Iterator[TmaWgmmaFewConfig]:
    ways = product(_pitches(problem), REGISTERS, (1, 2, 3, 4), (64, 32, 16, 128))
    for pitch, (consumers, blocks_sm), blocks_m, block_k in ways:
        rows, columns, grid = ROWS * blocks_m * consumers, _columns(problem, pitch), RESIDENT[1] * blocks_sm
        yield TmaWgmmaFewConfig(rows, columns, block_k, 2, consumers, blocks_sm=blocks_sm, grid=grid)


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaFewConfig:
    """The legal tile with the least loaded by the busiest multiprocessor, as many stages as fit."""
    p = problem
    best: tuple[Any, TmaWgmmaFewConfig] | None = None
    for config in _configs(p):
        if config.blocks_sm > 1 or config.check(p, arch) is not None:
            continue
        work = FewWork(p, config)
        key = -(-work.clusters // RESIDENT[1]) * (work.a.tile.rows + p.kh * config.block_n), -config.consumers
        if best is None or key < best[0]:
            best = key, config
    if best is None:
        return TmaWgmmaFewConfig(128, _columns(p, _channels(p)), 16, 2)  # whose check says what is wrong
    config = best[1]
    work = FewWork(p, config)
    work.fill_shared(arch)
    return work.config


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaFewConfig]:
    return ProductSpace(
        lambda config, stages, eager: replace(config, num_stages=stages, eager=eager),
        list(_ways(problem)),
        STAGES,
        (False, True),
    )


def _ways(problem: NchwProblem) -> Iterator[TmaWgmmaFewConfig]:
    """Every tile and cluster, and what consumers may have of their own."""
    for config in _configs(problem):
        for words in clusters(config.blocks_sm):
            if words["cluster_n"] == 1:
                found = replace(config, **words)
                yield found
                if words["split_k"] == 1 and config.consumers > 1:
                    # tiles of a consumer's rows, with which the filters stay, or a block's
                    own = replace(found, block_m=found.rows, ping_pong=True)
                    yield own
                    yield replace(own, stationary=True)


SCHEDULE = ScheduleSpec(
    name="tma_wgmma_few",
    summary="few filters on Hopper: pixels x (kernel columns x channels), rows by TMA once, wgmma, persistent",
    kinds=("cuda",),
    config=TmaWgmmaFewConfig,
    apply=schedule,
    default=default,
    space=space,
    no_routes=NO_ROUTES,
)
