"""The kernel: blocks that keep their filters and go from tile to tile."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.core.problem import Argument, Conv2dProblem
from schedules.lowering.annotations import TIRX
from schedules.steps.story import part
from schedules.tirx.arguments import flattened, matched
from schedules.tirx.types import Buffer, Expr, Index, Tensors
from schedules.tirx.values import kept, named
from schedules.windows.fetch import PatchFetch, Place, clear, fetch_filters
from schedules.windows.geometry import WORD, Tile, Windows
from schedules.windows.products import Products, WarpPlace
from schedules.windows.results import Results


def program(problem: Conv2dProblem, config: Tile) -> tvm.IRModule:
    """The module with one function "main" that takes ``problem.arguments()``."""
    w, ranged = Windows(problem, config), problem.n_from > 0
    names = [argument.name for argument in problem.arguments()]

    def with_flat(tensors: Tensors, arguments: Sequence[Argument]) -> Tensors:
        return {**tensors, **{f"flat {name}": view for name, view in flattened(arguments, tensors).items()}}

    # fmt: off
    @T.prim_func
    def main(
        a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, f: T.handle, g: T.handle, h: T.handle
    ) -> None:
        n = T.int32()  # images, where the problem leaves them open
        images = T.meta_var(n if ranged else problem.n)
        arguments = T.meta_var(problem.unchecked(n=images).arguments())
        tensors = T.meta_var(matched(arguments, [a, b, c, d, e, f, g, h]))
        T.device_entry()
        part("The launch: blocks, warps and lanes")
        views = T.meta_var(with_flat(tensors, arguments))
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": config.blocks_sm})
        block = T.cta_id([w.launched(images) * w.columns])
        warp = T.warp_id([config.threads // 32])
        lane = T.lane_id([32])
        Kernel(w, views, w.count(images), block, warp, lane).emit()
    # fmt: on

    function = tirx.PrimFunc(main.params[: len(names)], main.body, main.ret_type, main.attrs)
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main").with_attr(TIRX, 1)})


class Kernel:
    """The body of the kernel for one thread; its methods emit statements."""

    def __init__(
        self, w: Windows, tensors: dict[str, Buffer], count: Index, block: Expr, warp: Expr, lane: Expr
    ) -> None:
        self.w, self.tensors, self.count = w, tensors, count  # of tiles
        self.block, self.warp, self.lane = block, warp, lane

    def emit(self) -> None:
        w, config = self.w, self.w.config
        part("Shared memory: patches, and the filters in the order of fragments; zeros where nothing is brought")
        pool = T.SMEMPool()
        memory = pool.alloc((w.shared_bytes,), "uint8", align=128)
        words = T.decl_buffer((w.shared_bytes // WORD,), "uint32", data=memory.data, scope="shared.dyn")
        pool.commit()
        thread = kept("thread", self.warp * 32 + self.lane)
        for stage in range(config.num_stages):
            start = stage * w.patch_words
            clear(memory, range(start + w.unbrought // 4 * 4, start + w.patch_words), thread, config.threads)
        if w.unbrought == 0 or w.unbrought % 4:  # else nothing is brought where zeros are
            T.evaluate(T.cuda.cta_sync())

        part("The block's channels and its first tile; its filters, which stay")
        column = named("column", T.truncmod(self.block, w.columns)) if w.columns > 1 else T.int32(0)
        first = named("first", column * config.block_n)
        tile = T.alloc_local((1,), "int32")
        stage = T.alloc_local((1,), "int32")
        IRBuilder.name("tile", tile)
        IRBuilder.name("stage", stage)
        T.buffer_store(tile, T.truncdiv(self.block, w.columns), [0])
        T.buffer_store(stage, 0, [0])
        filters_at = config.num_stages * w.patch_words
        fetch = PatchFetch(w, self.tensors, memory, thread)
        fetch.emit(self.place(tile[0]), T.int32(0))
        fetch_filters(w, self.tensors, memory, self.warp, self.lane, first, filters_at)
        warps = WarpPlace(
            named("warp_m", T.truncdiv(self.warp, config.warps_n)),
            named("warp_n", T.truncmod(self.warp, config.warps_n)),
        )
        products = Products(w, words, memory, filters_at, warps, self.lane)
        results = Results(w, self.tensors, products, warps, self.lane, first)

        part("Tile after tile: the next patch is on its way while one is multiplied")
        count = self.count
        ahead = config.num_stages == 2
        with T.While(tile[0] < count):
            following = named("following", tile[0] + w.rows)
            to = 1 - stage[0] if ahead else T.int32(0)
            if ahead or fetch.held:
                with T.If(following < count), T.Then():
                    fetch.begin(self.place(following), to)
            if ahead:
                if fetch.copied:
                    with T.If(following < count):
                        with T.Then():
                            T.evaluate(T.ptx.cp.async_.wait_group(1))
                        with T.Else():
                            T.evaluate(T.ptx.cp.async_.wait_group(0))
            elif fetch.copied:
                T.evaluate(T.ptx.cp.async_.wait_group(0))
            T.evaluate(T.cuda.cta_sync())
            products.emit(stage[0] * w.patch_words)
            T.evaluate(T.cuda.cta_sync())
            if not fetch.copied:
                with T.If(following < count), T.Then():
                    fetch.end(self.place(following), to)
            elif not ahead:
                with T.If(following < count), T.Then():
                    fetch.emit(self.place(following), to)
            results.emit(self.place(tile[0]))
            T.buffer_store(tile, following, [0])
            if ahead:
                T.buffer_store(stage, 1 - stage[0], [0])

    def place(self, tile: Expr) -> Place:
        """Where tile number `tile` lies."""
        _, high, wide = self.w.tiles
        c = self.w.config
        x = named("x0", T.truncmod(tile, wide) * c.tile_w)
        rest = named("rest", T.truncdiv(tile, wide))
        y = named("y0", T.truncmod(rest, high) * c.tile_h)
        return Place(named("n", T.truncdiv(rest, high)), y, x)
