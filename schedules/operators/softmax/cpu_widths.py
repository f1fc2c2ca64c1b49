"""Softmax on the CPU for rows of any number of columns up to one: what `cpu` builds for a range of widths.

The program is written out, for TVM cannot prove of a width that it does not know what steps of `s_tir.Schedule` ask of
it.  A row's columns are whole vectors, then ever shorter ones, each under a test of one bit of the width; reductions
keep a partial result for each lane, into whose first lanes the shorter vectors go, and join them by halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.core.problem import Argument
from schedules.operators.softmax.definition import Reduction, RowProgram, SoftmaxProblem, Values
from schedules.operators.softmax.graph import is_kept
from schedules.tirx.types import Buffer, Expr, Index

FIRST = {"max": -3.4028234663852886e38, "sum": 0.0}  # of a lane; the lowest finite float32, as in `definition`
Each = Callable[[Any, Any, int], None]  # of (first column, its number in the row's buffer, how many)


def program(problem: SoftmaxProblem, formulas: RowProgram, vector: int, rows_per_task: int, keep: bool) -> tvm.IRModule:
    """The module with one function "main" that takes ``problem.arguments()``, run-time rows and columns; the rest is
    `cpu`'s config."""
    arguments = problem.arguments()

    def matched(handles: list[Any], rows: Expr, cols: Expr) -> dict[str, Buffer]:
        tensors = {}
        for argument, handle in zip(arguments, handles, strict=False):
            buffer = T.match_buffer(handle, _shape(argument, rows, cols), argument.dtype)
            IRBuilder.name(argument.name, buffer)
            tensors[argument.name] = buffer
        return tensors

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle) -> None:
        rows = T.int64()
        cols = T.int64()
        tensors = T.meta_var(matched([a, b, c, d, e], rows, cols))
        for task in T.parallel((rows + (rows_per_task - 1)) // rows_per_task):
            for turn in T.serial(T.int64(rows_per_task)):
                if task * rows_per_task + turn < rows:
                    row = T.meta_var(_Row(problem, formulas, vector, keep, tensors, cols))
                    row.emit(task * rows_per_task + turn)
    # fmt: on

    function = tirx.PrimFunc(main.params[: len(arguments)], main.body, main.ret_type, main.attrs)
    return tvm.IRModule({"main": function.with_attr("tirx.noalias", True)})


def _shape(argument: Argument, rows: Expr, cols: Expr) -> tuple[Expr, ...]:
    return (rows, cols) if len(argument.shape) == 2 else (cols,) if argument.name == "mask" else argument.shape


class _Row:
    """The body for one row; its methods emit statements."""

    def __init__(
        self,
        problem: SoftmaxProblem,
        formulas: RowProgram,
        vector: int,
        keep: bool,
        tensors: dict[str, Buffer],
        cols: Expr,
    ) -> None:
        self.problem, self.formulas, self.vector, self.keep = problem, formulas, vector, keep
        self.tensors, self.cols = tensors, cols
        self.inputs = problem.of_columns
        self.outputs = [argument for argument in problem.arguments() if argument.output]
        self.results: dict[str, Buffer] = {}
        self.kept: Buffer | None = None
        self.drawn: Buffer | None = None

    def emit(self, row: Index) -> None:
        formulas = self.formulas
        if self.problem.is_drawn:
            self._draw(row)
        for step in formulas.reductions:
            if self.keep and formulas.from_element is not None and step is formulas.reductions[-1]:
                self.kept = self._local("kept", self.problem.cols)
            self._reduce(step, row)
        for name, formula in formulas.derived:
            self._result(name, formula(self._found()))

        def write(column: Any, lane: Any) -> None:
            if self.kept is not None and formulas.from_element is not None:
                value = formulas.from_element(self.kept[column], {}, self._found())
            else:
                value = formulas.output(self._columns(row, column), self._found())
            value = value.astype(self.problem.dtype)
            T.buffer_store(self.tensors[self.outputs[0].name], value, [row, column])
            if formulas.dropped is not None:
                drop = self._columns(row, column)["drop"]
                dropped = formulas.dropped(value.astype("float32"), drop).astype(self.problem.dtype)
                T.buffer_store(self.tensors[self.outputs[1].name], dropped, [row, column])

        self._each(write)

    def _draw(self, row: Index) -> None:
        """What dropout keeps of the row, and of those beside it that share its first and last counter."""
        vector, seed = self.vector, self.tensors["philox"]
        vectors = -(-(self.problem.cols + 3) // (4 * vector))
        self.drawn = self._local("drawn", 4 * vector * vectors, "uint8")
        lies_in = self.shift(row) + self.cols
        with T.serial((lies_in + (4 * vector - 1)) // (4 * vector)) as number:
            for word in range(4):
                with T.vectorized(vector) as lane:
                    at = (number * vector + lane) * 4 + word
                    kept = is_kept(self.problem, seed[0], seed[1], row * self.cols // 4 * 4 + at)
                    T.buffer_store(self.drawn, kept.astype("uint8"), [at])

    def shift(self, row: Index) -> Any:
        """Elements of earlier rows in the row's first counter of four."""
        return row * self.cols % 4

    def _reduce(self, step: Reduction, row: Index) -> None:
        """The number of a row that `step` is, kept in `results`."""
        vector = self.vector
        lanes = self._local(f"{step.name}_lanes", vector)
        with T.vectorized(vector) as lane:
            T.buffer_store(lanes, T.float32(FIRST[step.kind]), [lane])
        join = tirx.max if step.kind == "max" else lambda a, b: a + b
        keep = self.kept if step is self.formulas.reductions[-1] else None

        def add(column: Any, lane: Any) -> None:
            element = step.element(self._columns(row, column), self._found())
            if keep is not None:
                T.buffer_store(keep, element, [column])
                element = keep[column]
            T.buffer_store(lanes, join(lanes[lane], element), [lane])

        self._each(add)
        width = vector
        while width > 1:
            width //= 2
            with T.vectorized(width) as lane:
                T.buffer_store(lanes, join(lanes[lane], lanes[lane + width]), [lane])
        self._result(step.name, lanes[0])

    def _each(self, statement: Callable[[Any, Any], None]) -> None:
        """`statement` of every (column, lane): whole vectors, then shorter ones."""
        vector = self.vector
        with T.serial(self.cols // vector) as number, T.vectorized(vector) as lane:
            statement(number * vector + lane, lane)
        width = vector
        while width > 1:
            width //= 2
            with T.If(self.cols // width % 2 == 1), T.Then():
                first = self.cols // (2 * width) * (2 * width)
                if width == 1:
                    statement(first, T.int32(0))
                else:
                    with T.vectorized(width) as lane:
                        statement(first + lane, lane)

    def _columns(self, row: Index, column: Any) -> Values:
        """The inputs of a column, in float32."""
        found = {
            argument.name: self.tensors[argument.name][(row, column) if len(argument.shape) == 2 else (column,)]
            for argument in self.inputs
        }
        if self.drawn is not None:
            found["drop"] = self.drawn[self.shift(row) + column]
        return {name: value.astype("float32") for name, value in found.items()}

    def _found(self) -> Values:
        return {name: buffer[0] for name, buffer in self.results.items()}

    def _result(self, name: str, value: Expr) -> None:
        self.results[name] = self._local(name, 1)
        T.buffer_store(self.results[name], value, [0])

    def _local(self, name: str, size: int, dtype: str = "float32") -> Buffer:
        buffer = T.alloc_buffer((size,), dtype, scope="local")
        IRBuilder.name(name, buffer)
        return buffer
