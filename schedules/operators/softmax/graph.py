"""The tensor expression of softmax: a row program over placeholders, and what schedules' graphs of it share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schedules.core.philox import threshold
from schedules.core.problem import Argument
from schedules.core.tvm import PrimExpr, PrimFunc, Schedule, te, tirx
from schedules.operators.softmax.definition import (
    Reduction,
    RowProgram,
    SoftmaxProblem,
    Values,
    row_program,
    row_values,
)


def row_results(
    problem: SoftmaxProblem,
    inputs: dict[str, te.Tensor],
    program: RowProgram,
    results: dict[str, te.Tensor],
    *row: PrimExpr,
) -> Values:
    """What is known of one row (or part of one) as expressions: its numbers in `inputs`, results of reductions read,
    derived ones computed from them."""
    i = row[0]
    values = row_values(problem, lambda name: inputs[name][i], lambda col: inputs["x"][i, col].astype("float32")) | cut(
        problem, inputs, i
    )
    values.update({name: tensor(*row) for name, tensor in results.items()})
    if all(step.of_row or step.name in values for step in program.reductions):
        for name, formula in program.derived:
            if name not in values:
                values[name] = formula(values)
    return values


def placeholders(problem: SoftmaxProblem) -> tuple[PrimExpr, dict[str, te.Tensor]]:
    """The run-time number of rows, and the input tensors by name.  Extents are int64: rows * cols may pass 2**31."""
    rows = te.var("rows", "int64")
    cols = te.var("cols", "int64") if problem.cols_from else tirx.IntImm("int64", problem.cols)

    def shape(argument: Argument) -> tuple[Any, ...]:
        if len(argument.shape) == 2:
            return rows, cols
        return (rows,) if argument.name in problem.of_rows else (cols,) if argument.name == "mask" else argument.shape

    inputs = {
        argument.name: te.placeholder(shape(argument), name=argument.name, dtype=argument.dtype)
        for argument in problem.arguments()
        if not argument.output
    }
    return rows, inputs


def drawn(problem: SoftmaxProblem, inputs: dict[str, te.Tensor], row: PrimExpr, col: PrimExpr) -> Values:
    """What is known of an element's dropout without reading it: 1 or 0, in float32, where the kernel draws it."""
    if not problem.is_drawn:
        return {}
    cols = next(iter(inputs.values())).shape[1]
    below = is_kept(problem, inputs["philox"][0], inputs["philox"][1], row * cols + col)
    return {"drop": tirx.Select(below, tirx.const(1, "float32"), tirx.const(0, "float32"))}


def is_kept(problem: SoftmaxProblem, seed: PrimExpr, offset: PrimExpr, element: PrimExpr) -> PrimExpr:
    """Whether dropout keeps the element of that number."""
    from schedules.lowering import philox

    return philox.word(seed, offset, element) < tirx.const(threshold(problem.keep), "uint32")


def cut(problem: SoftmaxProblem, inputs: dict[str, te.Tensor], row: PrimExpr) -> Values:
    """How many columns of a row count, where the mask says that."""
    if not problem.is_cut:
        return {}
    if problem.mask == "lengths":
        return {"length": inputs["lengths"][row].astype("int64")}
    return {"length": row % problem.queries + (problem.cols - problem.queries + 1)}


def elements(problem: SoftmaxProblem, inputs: dict[str, te.Tensor]) -> dict[str, te.Tensor]:
    """Those of the inputs that have an element for each column."""
    return {argument.name: inputs[argument.name] for argument in problem.of_columns}


def program_of_rows(tensors: Sequence[te.Tensor], beside: str | None) -> PrimFunc:
    """The program of a graph, with the stage "row_out" in the loop over rows of the stage `beside`, if any."""
    if beside is None:
        return te.create_prim_func(list(tensors))
    *others, number = tensors
    sch = Schedule(te.create_prim_func([number, *others]))  # first, or stages that it reads would follow
    sch.merge(*(sch.get_loops(name)[0] for name in ("row_out", beside)))
    made = sch.mod["main"]
    first, *rest = made.params
    return tirx.PrimFunc([*rest, first], made.body, made.ret_type, made.attrs)


def column(tensor: te.Tensor, row: PrimExpr, col: PrimExpr) -> PrimExpr:
    """The element of a (rows, cols) or (cols,) tensor."""
    return tensor[col] if len(tensor.shape) == 1 else tensor[row, col]


def definition(problem: SoftmaxProblem) -> list[te.Tensor]:
    """The TE graph: one stage for each reduction and output.  Returns the arguments in order, outputs last."""
    rows, inputs = placeholders(problem)
    program = row_program(problem)
    cols = next(iter(inputs.values())).shape[1]
    results: dict[str, te.Tensor] = {}

    def at(i: PrimExpr, j: PrimExpr) -> tuple[Values, Values]:
        columns = {name: column(tensor, i, j).astype("float32") for name, tensor in elements(problem, inputs).items()}
        beside = {"col": j, **drawn(problem, inputs, i, j)}
        return {**columns, **beside}, row_results(problem, inputs, program, results, i)

    def reduction(step: Reduction) -> te.Tensor:
        k = te.reduce_axis((tirx.IntImm("int64", 0), cols), name=f"{step.name}_col")
        reduce = te.max if step.kind == "max" else te.sum
        return te.compute((rows,), lambda i: reduce(step.element(*at(i, k)), axis=k), name=step.name)

    for step in program.reductions:
        results[step.name] = reduction(step)
    outputs: list[te.Tensor] = []
    kinds = [argument.dtype for argument in problem.element_outputs]
    if kinds:
        outputs.append(te.compute((rows, cols), lambda i, j: program.output(*at(i, j)).astype(kinds[0]), name="out"))
    if program.dropped is not None:
        (output,) = outputs
        outputs.append(
            te.compute(
                (rows, cols),
                lambda i, j: program.dropped(output[i, j].astype("float32"), at(i, j)[0]["drop"]).astype(kinds[1]),
                name="dropped_out",
            )
        )
    if program.of_row is not None:
        number = program.of_row
        outputs.append(
            te.compute((rows,), lambda i: number(row_results(problem, inputs, program, results, i)), name="row_out")
        )
    return [*inputs.values(), *outputs]
