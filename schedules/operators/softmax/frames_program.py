"""The kernel of `frames`: a row's packs straight from global memory, under the row program on packs."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.frames_config import FramesConfig
from schedules.operators.softmax.loaded_program import LoadedKernel, LoadedRow
from schedules.operators.softmax.pack_program import module
from schedules.operators.softmax.row_packs import Scalar
from schedules.steps.story import part
from schedules.tirx.values import named


def program(problem: SoftmaxProblem, config: FramesConfig, redux: bool) -> tvm.IRModule:
    """The module with one function "main" that takes ``problem.arguments()``; `redux` if the arch has that."""
    of_block = config.groups * config.rows_per_group

    def blocks(rows: Any) -> Any:
        return T.Cast("int32", T.truncdiv(rows + (of_block - 1), T.int64(of_block)))

    def emit(tensors: dict[str, Any], rows: Any, block: Any, warp: Any, lane: Any) -> None:
        kernel = FramesKernel(problem, config, tensors, rows, warp, lane)
        kernel.redux = redux
        kernel.emit(block)

    return module(problem, config.block // 32, blocks, config.min_blocks, emit)


class FramesKernel(LoadedKernel):
    """The body of the kernel for one thread; its methods emit statements."""

    fused = True

    def __init__(
        self, problem: SoftmaxProblem, config: FramesConfig, tensors: dict[str, Any], rows: Any, warp: Any, lane: Any
    ) -> None:
        super().__init__(problem, config, tensors, rows, warp, lane)
        self.config = config
        self.always = config.groups * config.rows_per_group == 1  # whether there is a row for every group

    def emit(self, block: Any) -> None:
        part("Which rows are whose: a group of threads to each")
        config = self.config
        of_block = config.groups * config.rows_per_group
        # bits of the thread's number, and variables, since TVM would compute it anew in 64 bits for every use
        self.thread = T.thread_id([config.block])
        self.warp, self.lane = T.shift_right(self.thread, 5), T.bitwise_and(self.thread, 31)
        self.of_row, group = self.thread, T.int32(0)
        if config.groups > 1:
            self.of_row = Scalar("of_row", T.bitwise_and(self.thread, config.threads - 1)).value
            group = Scalar("group", T.shift_right(self.thread, config.threads.bit_length() - 1)).value
        if self.wide:
            alternate = self.exchanges == 1 and config.rows_per_group > 1
            self.exchange = T.alloc_shared((self.exchanged * (1 + alternate) * config.threads // 32,), "float32")
            IRBuilder.name("exchange", self.exchange)
            self.turn = Scalar("turn", 0) if alternate else None
        if config.kept == "packed" and self.item < 4:
            self.zero = self.unknown_zero()
        first = T.Cast("int64", block) * of_block + T.Cast("int64", group)
        self.row = Scalar("row", first, "int64")
        if config.rows_per_group == 1:
            self.compute_row()
            return
        end = named("end", (T.Cast("int64", block) + 1) * of_block)
        with T.While(self.row.value < end):
            self.compute_row()
            part("On to the group's next row")
            self.row.set(self.row.value + config.groups)

    def place(self) -> LoadedRow:
        return self.placed(self.row.value)
