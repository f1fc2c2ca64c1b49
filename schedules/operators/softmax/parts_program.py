"""The kernels of `parts`: the reductions of each part of a row, and the outputs of what they come to together."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.operators.softmax.definition import SoftmaxProblem, Values, row_program
from schedules.operators.softmax.loaded_program import LoadedKernel, LoadedRow
from schedules.operators.softmax.pack_program import module
from schedules.operators.softmax.parts_config import PartsConfig
from schedules.operators.softmax.row_packs import where
from schedules.steps.story import inside_part, part
from schedules.tirx.values import kept, named
from schedules.tirx.words import read

PARTIALS = "partials"


def program(problem: SoftmaxProblem, config: PartsConfig, overlapped: bool, redux: bool) -> tvm.IRModule:
    """The module with one function "main" that takes ``problem.arguments()``; the second kernel is launched while the
    first runs if `overlapped`; `redux` if the arch has that."""
    parts, warps = config.parts(problem), config.threads // 32
    numbers = len(row_program(problem).reductions) + problem.is_loss  # with the target's element

    def blocks(rows: Any) -> Any:
        return T.Cast("int32", rows) * parts

    def written(rows: Any) -> Any:
        return blocks(rows) if problem.element_outputs else T.Cast("int32", rows)

    def sums(tensors: dict[str, Any], rows: Any) -> dict[str, Any]:
        """The first kernel.  Numbers of a kind lie together: (number, row, part)."""
        partials = T.alloc_buffer((numbers, rows, parts), "float32", scope="global")
        IRBuilder.name(PARTIALS, partials)
        with inside_part("A kernel before: each part's reductions"), T.attr({"tirx.device_entry": True}):
            block, warp, lane = T.cta_id([blocks(rows)]), T.warp_id([warps]), T.lane_id([32])
            if overlapped:
                T.evaluate(T.ptx["griddepcontrol.launch_dependents"]())
            kernel = SumsKernel(problem, config, tensors, rows, warp, lane)
            kernel.redux = redux
            kernel.emit(block, partials, False)
        return {**tensors, PARTIALS: partials}

    def outputs(tensors: dict[str, Any], rows: Any, block: Any, warp: Any, lane: Any) -> None:
        given = {name: buffer for name, buffer in tensors.items() if name != PARTIALS}
        kernel = OutputsKernel(problem, config, given, rows, warp, lane)
        kernel.redux = redux
        kernel.emit(block, tensors[PARTIALS], overlapped)

    return module(problem, warps, written, config.min_blocks, outputs, before=sums)


class PartsKernel(LoadedKernel):
    """The body of either kernel for one thread; its methods emit statements."""

    fused = True
    always = True
    divided = True  # whether blocks have parts of rows

    def __init__(
        self, problem: SoftmaxProblem, config: PartsConfig, tensors: dict[str, Any], rows: Any, warp: Any, lane: Any
    ) -> None:
        super().__init__(problem, config, tensors, rows, warp, lane)
        self.config = config
        self.parts, self.least = config.parts(problem), config.least(problem)
        self.steps = self.program.reductions

    def emit(self, block: Any, partials: Any, waits: bool) -> None:
        part("Which part of which row is the block's")
        self.partials, self.waits = partials, waits
        self.thread = self.of_row = named("thread", self.warp * 32 + self.lane)
        parts = self.parts if self.divided else 1
        self.row_number = named("row", T.Cast("int64", T.truncdiv(block, parts)))
        self.number_of_part = named("part", T.truncmod(block, parts))
        if self.item < 4:
            self.zero = self.unknown_zero()
        self.compute_row()

    def place(self) -> LoadedRow:
        return self.placed(self.row_number, named("before", self.number_of_part * self.config.part), self.config.part)

    def at(self, number: int, part: Any) -> tuple[Any, ...]:
        """Where number `number` of part `part` of the row is."""
        return T.int64(number), self.row_number, T.Cast("int64", part)


class SumsKernel(PartsKernel):
    """The first kernel."""

    def __init__(
        self, problem: SoftmaxProblem, config: PartsConfig, tensors: dict[str, Any], rows: Any, warp: Any, lane: Any
    ) -> None:
        super().__init__(problem, config, tensors, rows, warp, lane)
        if not problem.is_grad:  # what is dropped is dropped of the output
            self.inputs = tuple(argument for argument in self.inputs if argument.name != "drop")

    def read_names(self) -> list[str]:
        return [name for name in super().read_names() if name != "drop" or self.problem.is_grad]

    def compute(self, row: LoadedRow) -> None:
        part("Reduce a part: each thread the packs it has, its warp by shuffles, the warps through shared memory")
        self.know(row)
        self.exchange = T.alloc_shared((self.exchanged * self.threads // 32,), "float32")
        self.allocate()
        results = self.reduce_gradient(row) if self.problem.is_grad else self.reduce_online(row)
        with where(self.thread == 0):
            for number, step in enumerate(self.steps):
                T.buffer_store(self.partials, results[step.name], list(self.at(number, self.number_of_part)))
            if self.problem.is_loss:
                T.buffer_store(self.partials, self.known["picked"], list(self.at(len(self.steps), self.number_of_part)))


class OutputsKernel(PartsKernel):
    """The second kernel."""

    @property
    def divided(self) -> bool:  # type: ignore[override]
        return bool(self.outputs)

    @property
    def leads(self) -> Any:
        return tirx.all(self.thread == 0, self.number_of_part == 0)

    def compute(self, row: LoadedRow) -> None:
        part("Bring the part into registers, and only then wait for the kernel before")
        self.exchange = T.alloc_shared((self.exchanged * self.threads // 32,), "float32")
        self.fresh = False
        if self.outputs:
            self.allocate()
            self.read_row(row)
        if self.waits:
            if self.outputs:
                self.stay()
            T.evaluate(T.ptx["griddepcontrol.wait"]())
        self.know(row)
        self.write(row, self.finished(self.of_parts()))

    def element_of_row(self, row: LoadedRow, col: Any) -> Any:
        """Of the kernel before: here another block may have written over it."""
        return read(self.partials, self.at(len(self.steps), 0), True)

    def stay(self) -> None:
        """Keep the compiler from loading only where words are used, which is behind the wait."""
        for words in self.words.values():
            for k in range(int(words.shape[0])):
                T.buffer_store(words, T.Cast("uint32", kept("word", T.Cast("int32", words[k]))), [k])

    def of_parts(self) -> Values:
        """The reductions over the row: each thread those of its parts, then across the block."""
        part("Combine what the row's parts came to: each thread some of them, then its warp, then the warps")
        rounds = -(-self.parts // self.threads)
        numbers = []
        for k in range(rounds):
            i = self.thread + self.threads * k
            sure = self.threads * (k + 1) <= self.parts
            of_part = {}
            for number, step in enumerate(self.steps):
                value = read(self.partials, self.at(number, i if sure else T.min(i, self.parts - 1)), True)
                counts = sure or step.kind == "max"  # the last part's once more: no maximum is another for that
                value = value if counts else T.Select(i < self.parts, value, T.float32(0))
                of_part[step.name] = named(step.name, value)
            numbers.append(of_part)
        return self.merged([self.over_warps(self.merged(numbers, 32, "_of_warp"), None)], self.shares)
