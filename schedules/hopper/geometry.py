"""What an operator tells the skeleton: its tensors, its tiles, and where each comes from and goes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, Generic, TypeVar

from schedules.core.arch import Arch, shared_room
from schedules.core.epilogue import Epilogue
from schedules.core.problem import Argument, Pair
from schedules.core.tvm import T
from schedules.hopper.boxes import Pixel, TurnedData
from schedules.hopper.config import (
    SUM_BYTES,
    WARPGROUP,
    HopperConfig,
)
from schedules.hopper.images import Images
from schedules.hopper.lines import Lines
from schedules.hopper.shared import (
    BlockStaging,
    Columns,
    LineStaging,
    NoStaging,
    PlaneStaging,
    Runs,
    RunStaging,
    SharedTile,
    Slots,
    SlotStaging,
    Staging,
    StripStaging,
    TensorMap,
    aligned,
    beyond_indices,
)
from schedules.hopper.spans import Spans
from schedules.tirx import BARRIER_PAIR_BYTES
from schedules.tirx.types import Expr, Index

Taps = tuple[Index, Index, Index, Index]  # first and last (exclusive) ry, first and last rx


@dataclass(frozen=True)
class Member:
    """The numbers of a thread that multiplies: consumer, its part of the tile, warp of it, lane of the warp, and thread
    of the consumer."""

    consumer: Expr
    part: Index
    warp: Expr
    lane: Expr
    thread: Expr


@dataclass(frozen=True)
class ClusterPlace:
    """Where a block stands in its cluster: its ranks along m, n and the reduction.

    Blocks of the same share of the reduction follow each other, from rank `first` of the cluster, along n and then m;
    `rank_mn` is a block's number among them.
    """

    rank_m: Index
    rank_n: Index
    rank_k: Index
    rank_mn: Expr
    first: Index


@dataclass(frozen=True)
class Load:
    """One TMA box: `offset` bytes into the operand's tile, from the coordinates `at` (innermost first); only `when` it
    is wanted."""

    offset: Index
    at: tuple[Index, ...]
    when: Expr | None = None


@dataclass(frozen=True)
class Operand:
    """An operand's tiles in a stage, one behind the other, and the tensor map of the boxes that fill them; or the lines
    that operand a's rows lie in, or spans of positions, which threads copy; or whole images, by bulk copies; or boxes
    beside the stages, which threads turn.

    No box fills the last `spare` rows of a tile, of whose products nothing is stored, nor the last `spare_k` of the
    reduction of an MN-major one, which are zeros.
    With `by_registers` the consumers' threads bring operand a to wgmma: see `hopper.fragments`.
    Of an operand that is a sum, a stage has the tiles of each of its `addends`, which are the tensor's outermost axis.
    """

    tile: SharedTile
    source: TensorMap | Lines | Images | Spans | TurnedData
    count: int = 1
    by_registers: bool = False
    spare: int = 0
    spare_k: int = 0
    addends: int = 1

    @property
    def pairs_rows(self) -> bool:
        """Whether a thread reads two neighbouring rows at once, whose sums it then has."""
        return self.by_registers and not (isinstance(self.source, Lines | Images) and not self.source.paired)

    @property
    def spreads_rows(self) -> bool:
        """Whether of a warp's rows eight are half of 64 further than the others, as they are read."""
        return self.by_registers and isinstance(self.source, Images) and self.source.order.spread

    @property
    def copied(self) -> bool:
        """Whether all threads of the producer bring it."""
        return isinstance(self.source, Lines | Spans)

    @property
    def turned(self) -> TurnedData | None:
        """What it is turned from beside the stages, if it is."""
        return self.source if isinstance(self.source, TurnedData) else None

    @property
    def tensor_map(self) -> TensorMap | None:
        """Of the boxes that TMA brings, if it does."""
        source = self.source.source if isinstance(self.source, TurnedData) else self.source
        return source if isinstance(source, TensorMap) else None

    @property
    def boxes(self) -> TensorMap:
        """The map of the boxes that TMA brings."""
        assert isinstance(self.source, TensorMap)
        return self.source

    @property
    def nbytes(self) -> int:
        """Of a stage's shared memory."""
        return self.addends * self.addend_bytes if isinstance(self.source, TensorMap) else self.source.nbytes

    @property
    def addend_bytes(self) -> int:
        """Of a stage's shared memory for one addend."""
        return self.count * self.tile.nbytes

    @property
    def loaded(self) -> int:
        """Bytes that come into a stage: by boxes all of them, by threads about as many."""
        if not isinstance(self.source, TensorMap):
            return self.source.loaded
        tile = self.tile
        missing = self.spare * tile.k + (tile.rows - self.spare) * self.spare_k
        return self.nbytes - self.addends * self.count * missing * tile.item

    def all_loads(self, loads: Sequence[Load]) -> Sequence[Load]:
        """`loads` of every addend."""
        if self.addends == 1:
            return loads
        every = product(range(self.addends), loads)
        return [Load(addend * self.addend_bytes + load.offset, (*load.at, addend)) for addend, load in every]

    def check_loads(self, loads: Sequence[Load], parts: int) -> None:
        """That `loads` of an addend, one of `parts` alike, bring as many bytes as a stage expects: its mbarrier counts
        on them, and what is more lies beyond the stage.

        Raises:
            ValueError: if they do not.
        """
        brought = parts * len(loads) * self.addends * self.boxes.box_bytes
        if brought != self.loaded:
            raise ValueError(
                f"{parts} x {len(loads)} boxes of {self.boxes.tensor} bring {brought} bytes of a stage's"
                f" {self.loaded}; mend the schedule's loads or its box"
            )


@dataclass(frozen=True)
class Product:
    """Something that a stage adds to the sums number `sums`: rows of operand a from `a` bytes on, times operand b from
    `b` bytes on."""

    sums: int
    a: int
    b: int


@dataclass(frozen=True)
class Shifts:
    """How the sums of a tile move between the `phases` of its reduction: operand b of each lies `columns` (1, 2 or 4)
    further to the front than that of the one before.  `following` says of each group of eight columns from which one
    its last columns come; None for zeros.

    At last they move `back` by as many columns, which the last phases were too far to the front.  Of the groups in
    `kept`, what then comes first was moved out by as many of the last shifts, each by one column: it waits behind the
    tile's sums."""

    phases: int
    columns: int
    following: tuple[int | None, ...]
    back: int = 0
    kept: tuple[int, ...] = ()

    def sums(self, blocks_m: int) -> int:
        """Of a thread that are kept, of `blocks_m` times ROWS rows."""
        return self.back * len(self.kept) * blocks_m * 2


@dataclass(frozen=True)
class Output:
    """How results leave: elements of `dtype` through the staging memory, by boxes of a tensor map or as runs, or
    straight from registers along columns."""

    dtype: str
    staging: Staging | LineStaging | RunStaging | BlockStaging | SlotStaging | PlaneStaging | StripStaging | NoStaging
    target: TensorMap | Runs | Slots | Columns

    @property
    def by_tma(self) -> bool:
        """Whether a thread has results leave, which must not end before they have been read."""
        return isinstance(self.target, TensorMap) or isinstance(self.staging, PlaneStaging)


@dataclass(frozen=True)
class Added:
    """A residual that comes by TMA (`hopper.residual`): `boxes` side by side along each consumer's columns, each of as
    many `lines` of the tile's rows, of `source`, which lie as its results wait for their stores."""

    source: TensorMap
    boxes: int
    lines: int = 1

    @property
    def box_bytes(self) -> int:
        """Of a box with all its lines."""
        return self.lines * self.source.box_bytes

    @property
    def nbytes(self) -> int:
        """Of a consumer's part of a tile."""
        return self.boxes * self.box_bytes


P = TypeVar("P")  # whatever the operator makes of a tile's number: where the tile lies


class Work(ABC, Generic[P]):
    """A convolution as tiles of a matrix product.  Coordinates are int32 expressions."""

    problem: Any  # with its pixels as tiles count them
    config: HopperConfig
    arguments: tuple[Argument, ...]
    epilogue: Epilogue  # what becomes of a sum before it is stored
    channels_along_rows: ClassVar[bool]  # whether the tile's rows are output channels; else its columns are
    kernel: Pair  # taps, or groups of taps of which a stage holds all
    products: tuple[Product, ...] = (Product(0, 0, 0),)  # of each stage
    slices: int = 1  # of a consumer's columns, each finished by another of the blocks that share a tile's reduction
    margin: int = 0  # columns of a consumer's before the first that is stored, whole groups of eight
    workspace: tuple[Argument, ...] = ()  # tensors of the function's own, which a kernel before fills
    chunks: int  # stages of one tap, or group of them
    shifts: Shifts | None = None  # where the reduction has phases, each of as many of the chunks of all taps
    # sets of sums of a tile, to each of which those of so many stages of a tap `together` are added times a factor
    outputs: int = 1
    together: int = 1
    clusters: int  # tiles of a whole cluster
    # tiles of a cluster side by side with filters of their own, if these are operand b and may stay; else 0
    columns: int = 0
    a: Operand
    b: Operand
    output: Output
    most_clusters: int = 0  # the most of `clusters`, where these are an expression of the images at run time

    def at_run_time(self, n: Expr) -> Work[P]:
        """The same for as many images as the first argument has, `n`, if the problem leaves them open."""
        if not self.problem.n_from:
            return self
        made = self.of_images(n)
        made.most_clusters = self.clusters
        return made

    def of_images(self, n: Expr) -> Work[P]:
        """The same for `n` images, an expression."""
        raise NotImplementedError(f"{type(self).__name__} is for one number of images")

    @property
    def again(self) -> bool:
        """Whether a block may have a second tile."""
        tiles = (self.most_clusters or self.clusters) * self.config.cluster
        return self.config.blocks(tiles) < tiles

    @property
    def leaving(self) -> int:
        """Sets of sums of a tile that each leave for a place of their own."""
        return self.outputs

    @property
    def dtype(self) -> str:
        """Of the operands."""
        return self.b.boxes.dtype

    @property
    def sums(self) -> int:
        """Sets of accumulators."""
        return 1 + max(each.sums for each in self.products)

    @property
    def b_start(self) -> int:
        """Bytes from the start of a stage to operand b."""
        return aligned(self.a.nbytes)

    @property
    def stage_bytes(self) -> int:
        """Bytes from one stage to the next."""
        return self.b_start if self.config.stationary else aligned(self.b_start + self.b.nbytes)

    @property
    def chunks_of_phase(self) -> int:
        """Of the chunks, those of each phase."""
        return self.chunks // self.shifts.phases if self.shifts else self.chunks

    @property
    def mean_taps(self) -> float:
        """Taps, or groups of them, of a tile on average."""
        return math.prod(self.kernel)

    @property
    def stages(self) -> int:
        """Stages of the reduction of a tile that a block multiplies, at most."""
        return -(-math.prod(self.kernel) * self.chunks // self.config.split_k)

    @property
    def stationary_bytes(self) -> int:
        """Shared memory for operand b where it stays."""
        return self.stages * aligned(self.b.nbytes) if self.config.stationary else 0

    @property
    def exchange_bytes(self) -> int:
        """Shared memory for the sums that the other blocks of a tile send: of each slice that this one finishes."""
        config = self.config
        finished = -(-config.consumers * self.slices // config.split_k)
        each = self.sums * config.accumulators // self.slices * WARPGROUP * SUM_BYTES
        return finished * (config.split_k - 1) * each

    @property
    def added(self) -> Added | None:
        """The residual, where it can come by TMA; else threads read it element by element."""
        config, output, terms = self.config, self.output, self.epilogue.of_axis("element")
        target, staging = output.target, output.staging
        if not isinstance(target, TensorMap) or not isinstance(staging, Staging | LineStaging):
            return None
        if self.a.copied or self.a.turned:
            return None
        if self.leaving > 1:
            return None
        if [term.dtype for term in terms] != [output.dtype] or config.split_k > 1 or config.multiplies_apart:
            return None
        source = replace(target, tensor=terms[0].name, promotion=TensorMap.promotion)
        lines = staging.rows // staging.run if isinstance(staging, LineStaging) else 1
        return Added(source, staging.columns // staging.width, lines)

    @property
    def beside_stages(self) -> int:
        """Bytes of shared memory that are no stages."""
        config = self.config
        exchange = self.exchange_bytes + config.consumers * BARRIER_PAIR_BYTES if config.split_k > 1 else 0
        exchange += self.a.turned.beside_stages if self.a.turned else 0
        results = self.output.staging.nbytes
        if self.added:
            results += self.added.nbytes + self.added.boxes * BARRIER_PAIR_BYTES
        return config.consumers * results + exchange + config.barrier_bytes + self.stationary_bytes

    def most_stages(self, arch: Arch) -> int:
        """As many as a block on `arch` has room for, each with its barriers."""
        room = shared_room(arch, self.config.blocks_sm) - self.beside_stages
        return room // (self.stage_bytes + BARRIER_PAIR_BYTES)

    @property
    def least_taps(self) -> int:
        """Taps, or groups of them, that every tile needs at least."""
        return math.prod(self.kernel)

    def reason(self, arch: Arch) -> str | None:
        """Why these tiles cannot be moved, shared out, held on `arch` or finished; None if they can."""
        config, stages = self.config, self.least_taps * self.chunks
        reason = self._check_terms()
        if reason:
            return reason
        for own in self.workspace:
            reason = beyond_indices(own.name, math.prod(own.shape))
            if reason:
                return reason
        of_phase = self.least_taps * self.chunks_of_phase
        if (
            config.split_k > 1
            and self.shifts
            and (self.least_taps < math.prod(self.kernel) or of_phase % config.split_k)
        ):
            return (
                f"split_k={config.split_k} deals stages out, and phases of them, up to {of_phase}, are not equal parts"
            )
        if config.split_k > stages:
            return f"split_k={config.split_k} blocks share a tile of {stages} stages; lower split_k or block_k"
        if config.stationary:
            reason = self._check_stationary()
            if reason:
                return reason
        if config.num_stages > self.most_stages(arch):
            shared = config.num_stages * (self.stage_bytes + BARRIER_PAIR_BYTES) + self.beside_stages
            room = shared_room(arch, config.blocks_sm)
            of_each = f" for each of {config.blocks_sm} blocks" if config.blocks_sm > 1 else ""
            return f"num_stages={config.num_stages} needs {shared} bytes of shared memory, {arch} has {room}{of_each}"
        return self.a.source.reason() or self.b.source.reason() or self.output.target.reason()

    def _check_terms(self) -> str | None:
        """Why the operands of the epilogue cannot be read; None if they can."""
        for term in self.epilogue.operands:
            if term.axis == "element" and self.added:
                continue
            if term.axis == "pixel":
                return f"{term.name} has a number for each pixel, which this kernel does not add"
            if term.axis == "element":
                m, rows = self.config.block_m, self.config.rows
                if rows > WARPGROUP:
                    return f"block_m={m} gives a consumer {rows} rows, with a residual {WARPGROUP} at most"
                argument = next(argument for argument in self.arguments if argument.name == term.name)
                return beyond_indices(term.name, math.prod(argument.shape))
        return None

    def _check_stationary(self) -> str | None:
        """Why operand b cannot stay; None if it can."""
        config = self.config
        if self.columns == 0:
            return "stationary=true keeps filters as operand b, here they are operand a"
        if self.least_taps < math.prod(self.kernel):
            return "stationary=true loads filters with the first tile, and skip_padding=true leaves some of them out"
        clusters = config.blocks(self.clusters * config.cluster) // config.cluster
        if clusters % self.columns:
            return (
                f"stationary=true keeps one of {self.columns} columns of filters, with grid={config.grid} blocks meet"
                f" others; give {self.columns} times a multiple of {config.cluster}"
            )
        return None

    def part_at(self, part: Index) -> tuple[Index, Index]:
        """Where a consumer's part of the tile lies, counted in parts along m and n."""
        each = self.config.consumers_n
        return (T.truncdiv(part, each), T.truncmod(part, each)) if each > 1 else (part, 0)

    @abstractmethod
    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> P:
        """Where tile number `tile` of a cluster lies, for the block at (rank_m, rank_n) of it."""

    def stages_at(self, place: P, rank_k: Index) -> Index:
        """Stages of the tile at `place` that are those of block `rank_k` along the reduction."""
        split, window = self.config.split_k, self.taps(place)
        count = (window[1] - window[0]) * (window[3] - window[2]) * self.chunks
        return T.truncdiv(count + (split - 1) - rank_k, split) if split > 1 else count

    def position_at(self, place: P) -> Expr | None:
        """The number of the tile's first output pixel, where its pixels lie in lines."""
        return None

    def pixel_at(self, place: P, ry: Expr, row: int, more: Expr) -> tuple[Expr, Expr]:
        """For operand a in spans: where in the first channel of the tensor the pixel of its row `row` + `more` is, of
        the same block of rows, for a tap or group of them, and whether there is one."""
        raise NotImplementedError(f"{type(self).__name__} has no operand in spans")

    def pixels_of_runs(self, place: P) -> Pixel:
        """For operand a turned from runs: of the first row of a block of rows and one from there, bytes to its pixel in
        what TMA brought, and whether there is one."""
        raise NotImplementedError(f"{type(self).__name__} has no operand that is turned from runs")

    def taps(self, place: P) -> Taps:
        """First and last (exclusive) ry, first and last rx that a tile needs; at least one tap."""
        return 0, self.kernel[0], 0, self.kernel[1]

    def factors(self, place: P, number: Expr) -> Sequence[Expr]:
        """What sums of tap number `number` of those that a tile needs count in each of its `outputs`."""
        raise NotImplementedError(f"{type(self).__name__} has one set of sums")

    def output_at(self, place: P, number: int) -> tuple[Expr | None, P]:
        """Whether a tile has set number `number` of those `leaving`, None if all have, and its place."""
        raise NotImplementedError(f"{type(self).__name__} has one set of sums")

    @abstractmethod
    def loads_a(self, place: P, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        """The boxes of part number `part` (of cluster_n) of operand a, for a tap and a chunk of the channels."""

    @abstractmethod
    def loads_b(self, place: P, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        """The same for operand b, in cluster_m parts."""

    @abstractmethod
    def store_at(self, place: P, part: Index, column: Index) -> tuple[Index, ...]:
        """Coordinates in the output's tensor map of a part's rows and its stored columns from `column` on."""

    def line_at(self, place: P, part: Index, row: int, column: Index) -> tuple[Index, ...]:
        """The same where stores are of lines: of row `row` of a part, and the columns from `column` on."""
        raise NotImplementedError(f"{type(self).__name__} has no output of lines")

    def run_at(self, place: P, part: Index, row: Expr, column: Index) -> tuple[Expr, Expr]:
        """For an output of runs: where in it the one begins that has row `row` of the consumer's first, in the columns
        from `column` of the block, and how many elements there are to it, 0 or less if none are inside.  Where staging
        memory does not hold whole rows of the tensor, each vector of a row is asked for; where it has blocks of them,
        block number `row`."""
        raise NotImplementedError(f"{type(self).__name__} has no output of runs")

    def slots_at(self, place: P, part: Index) -> tuple[Expr, Expr]:
        """For an output of slots: the first result of a part that is stored, numbered as channels have them, and the
        first beyond; a vector begins at multiples of its length."""
        raise NotImplementedError(f"{type(self).__name__} has no output of slots")

    def slot_of(self, place: P, part: Index, row: Expr) -> tuple[Expr, Expr]:
        """For an output of slots: the number of row `row` of a part, and whether it is stored."""
        raise NotImplementedError(f"{type(self).__name__} has no output of slots")

    def slot_start(self, number: Expr) -> Expr:
        """For an output of slots: where in it result number `number` of the first channel lies."""
        raise NotImplementedError(f"{type(self).__name__} has no output of slots")

    def slot_in(self, place: P, number: Expr) -> tuple[Expr, Expr | None]:
        """The same for a tile at `place`, and whether it is inside; None if all are."""
        return self.slot_start(number), None

    def planes_at(self, place: P) -> tuple[Expr, int, Expr]:
        """For an output of planes: where in it the tile's first image begins in the first channel, how many elements
        further the next does, and how many images there are from it on."""
        raise NotImplementedError(f"{type(self).__name__} has no output of planes")

    def plane_slot(self, place: P, part: Index, row: Expr) -> tuple[Expr, Expr, Expr]:
        """For an output of planes or strips: the image of the tile that row `row` of a part is of, its result there,
        and whether it is one."""
        raise NotImplementedError(f"{type(self).__name__} has no output of planes")

    def strip_at(self, place: P) -> tuple[Expr, Expr, Expr, Expr, int]:
        """For an output of strips: where in it the tile's image begins in the first channel, and whether there is such
        an image; the tile's first result there, the next tile's, and how many there are."""
        raise NotImplementedError(f"{type(self).__name__} has no output of strips")

    def columns_at(self, place: P, part: Index, row: Expr) -> tuple[Expr, int, Expr | None]:
        """For an output of columns: where in it row `row` of the consumer's lies in the first column of the block, how
        many elements further in the next, and how many columns are inside, 0 or less if the row is not; None if all
        are.  The row after `row` lies next to it and is inside if it is."""
        raise NotImplementedError(f"{type(self).__name__} has no output of columns")

    @abstractmethod
    def channel_at(self, place: P, part: Index, index: Expr) -> Expr:
        """The output channel of row number `index` of a part, or of a column of the block, whichever are channels; for
        those beyond the last channel, of which nothing is stored, the last."""

    @abstractmethod
    def row_start(self, place: P, part: Index, row: Expr) -> tuple[Expr, Expr]:
        """Where in the output row `row` of a part begins, and whether it is inside: the element of a row and a column
        is the sum of where these begin."""

    @abstractmethod
    def column_start(self, place: P, part: Index, column: Expr) -> tuple[Expr, Expr]:
        """The same for a stored column."""
