"""Reductions across the threads of a row on AMD GPUs, in registers.

TVM 0.27 reduces in registers there only where a row has exactly a wave's threads, by one trip through LDS's crossbar a
step (`ds_bpermute`), and else in LDS with a barrier a step.  Here lanes exchange by DPP, which an instruction that adds
takes along; only lanes 16 apart of half a wave of 64 go by `ds_swizzle`.  Where a row has several waves, each leaves
its result in LDS, and after one barrier every thread combines them all.  In a loop the next result would take the place
of one that a slower wave still reads: such reductions by several waves are left to TVM.
Sources: "AMD GCN Assembly: Cross-Lane Operations" (GPUOpen, 2016); the RDNA ISA guides, "V_PERMLANEX16_B32".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from schedules.lowering.statements import integer, joined, of_functions, substitute

# DPP's controls for lanes that are 1, 2, 4 and 8 apart: quad_perm, twice, then mirrors of half a row and of a row, when
# the lanes of a quad, and of half a row, hold the same
_WITHIN_ROW = (0xB1, 0x4E, 0x141, 0x140)
_ROW = 16  # lanes
_SWAPPED_ROWS = 0x401F  # ds_swizzle's lane ^ 16
# DPP's controls on CDNA that hand a row's last lane to the next row, and a half's to the next; the rows that take it
_TO_ODD_ROWS, _TO_UPPER_HALF = (0x142, 0b1010), (0x143, 0b1100)
_ALL = 0b1111  # rows, or banks

Values = list[Any]


def reduced_in_waves(mod: tvm.IRModule) -> tvm.IRModule:
    """Kernels for AMD GPUs with their reductions over threadIdx.x in registers; what does not fit is left to TVM."""
    return of_functions(mod, _reduced, "rocm")


def _reduced(function: tirx.PrimFunc) -> tirx.PrimFunc:
    wave = int(function.attrs["target"].attrs["thread_warp_size"])
    threads: dict[Any, tuple[str, int]] = {}  # by variable: tag and extent
    of_parts: list[Any] = []  # reductions in loops, or by a part of a block: of several rows at once

    def keep(node: Any) -> None:
        tvm_ffi.structural_walk(
            node, (tirx.AttrStmt, lambda scope: of_parts.append(scope) if scope.attr_key == "reduce_scope" else None)
        )

    def thread(scope: Any) -> None:
        if scope.attr_key == "thread_extent" and isinstance(scope.value, tirx.IntImm):
            tag, extent = threads[scope.node.var] = str(scope.node.thread_tag), int(scope.value)
            if tag in ("threadIdx.y", "threadIdx.z") and extent > 1:
                keep(scope)

    tvm_ffi.structural_walk(function.body, (tirx.AttrStmt, thread))
    tvm_ffi.structural_walk(function.body, (tirx.For, keep))

    def visit(scope: Any) -> Any:
        if scope.attr_key != "reduce_scope":
            return scope
        count = len(scope.node.lhs)
        call = scope.body.value
        values, results = list(call.args[1 : 1 + count]), list(call.args[2 + count : 2 + 2 * count])
        condition, over = call.args[1 + count], list(call.args[2 + 2 * count :])
        tag, extent = threads.get(over[0], ("", 0))
        small = extent <= wave and wave % extent == 0 if extent else False
        whole = extent % wave == 0 and not any(map(scope.same_as, of_parts)) if extent else False
        bits = {tvm.DataType(str(value.ty)).bits for value in values}
        if len(over) != 1 or tag != "threadIdx.x" or not (small or whole) or bits != {32}:
            return scope
        given = [
            value if _is_true(condition) else tirx.Select(condition, value, identity)
            for value, identity in zip(values, scope.node.identity_element, strict=True)
        ]
        reduction = _Reduction(scope.node, results, wave)
        lane = tirx.Cast("int32", over[0])
        statements = [*reduction.store(given), *reduction.across(min(extent, wave))]
        if extent > wave:
            statements += reduction.of_waves(lane, extent // wave)
        return joined(statements)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.AttrStmt, visit)))


def _is_true(condition: Any) -> bool:
    return isinstance(condition, tirx.IntImm) and bool(condition.value)


class _Reduction:
    """The statements of one reduction into `results`, elements of registers."""

    def __init__(self, reducer: Any, results: Sequence[Any], wave: int) -> None:
        self.reducer, self.results, self.wave = reducer, results, wave

    def store(self, values: Values) -> list[Any]:
        return [
            tirx.BufferStore(place.source, value, place.indices)
            for place, value in zip(self.results, values, strict=True)
        ]

    def combined(self, ours: Values, theirs: Values) -> Values:
        variables = (*self.reducer.lhs, *self.reducer.rhs)
        known = dict(zip(variables, (*ours, *theirs), strict=True))
        return [substitute(result, known) for result in self.reducer.result]

    def step(self, partner: Any) -> list[Any]:
        """Combine each lane's results with those that `partner` says another lane has; evaluated once each."""
        others = [tirx.decl_buffer([1], str(place.ty), "other", scope="local") for place in self.results]
        taken = [
            statement
            for other, place, identity in zip(others, self.results, self.reducer.identity_element, strict=True)
            for statement in (tirx.AllocBuffer(other), tirx.BufferStore(other, partner(place, identity), [integer(0)]))
        ]
        theirs = [tirx.BufferLoad(other, [integer(0)]) for other in others]
        return [*taken, *self.store(self.combined(list(self.results), theirs))]

    def across(self, lanes: int) -> list[Any]:
        """Leave with every lane what its group of `lanes` neighbours has."""
        statements: list[Any] = []
        for bit, control in enumerate(_WITHIN_ROW):
            if lanes > 1 << bit:
                statements += self.step(lambda value, _, control=control: _moved(value, value, control, _ALL))
        if lanes > _ROW and self.wave == 2 * _ROW:
            statements += self.step(lambda value, _: _other_row(value))
        elif lanes == 2 * _ROW:
            statements += self.step(lambda value, _: _call(value, "llvm.amdgcn.ds.swizzle", integer(_SWAPPED_ROWS)))
        elif lanes > _ROW:
            for control, rows in (_TO_ODD_ROWS, _TO_UPPER_HALF):
                statements += self.step(
                    lambda value, identity, control=control, rows=rows: _moved(identity, value, control, rows)
                )
            statements += self.store(
                [_call(value, "llvm.amdgcn.readlane", integer(lanes - 1)) for value in self.results]
            )
        return statements

    def of_waves(self, thread: Any, waves: int) -> list[Any]:
        """Combine what `waves` waves have, by way of LDS."""
        shared = [tirx.decl_buffer([waves], str(place.ty), "waves", scope="shared") for place in self.results]
        leave = [
            tirx.BufferStore(buffer, place, [tirx.floordiv(thread, self.wave)])
            for buffer, place in zip(shared, self.results, strict=True)
        ]
        total = [tirx.BufferLoad(buffer, [integer(0)]) for buffer in shared]
        statements = [
            *(tirx.AllocBuffer(buffer) for buffer in shared),
            tirx.IfThenElse(tirx.floormod(thread, self.wave) == 0, joined(leave), None),
            tirx.Evaluate(tirx.op.tvm_storage_sync("shared")),
            *self.store(total),
        ]
        for other in range(1, waves):
            theirs = [tirx.BufferLoad(buffer, [integer(other)]) for buffer in shared]
            statements += self.store(self.combined(list(self.results), theirs))
        return statements


def _call(value: Any, name: str, *arguments: Any) -> Any:
    """What the intrinsic `name` of 32-bit integers makes of `value`, of its type."""
    made = tirx.call_llvm_pure_intrin("int32", name, tirx.reinterpret("int32", value), *arguments)
    return tirx.reinterpret(str(value.ty), made)


def _moved(old: Any, value: Any, control: int, rows: int) -> Any:
    """`value` of the lane that DPP's `control` names; `old` in other `rows`."""
    old, value_bits = (tirx.reinterpret("int32", each) for each in (old, value))
    everywhere = tirx.const(rows == _ALL, "bool")
    arguments = (old, value_bits, integer(control), integer(rows), integer(_ALL), everywhere)
    made = tirx.call_llvm_pure_intrin("int32", "llvm.amdgcn.update.dpp", *arguments)
    return tirx.reinterpret(str(value.ty), made)


def _other_row(value: Any) -> Any:
    """`value` of lane ^ 16, in a wave of two rows."""
    bits = tirx.reinterpret("int32", value)
    selected = (tirx.const(0x76543210, "int32"), tirx.const(0xFEDCBA98 - (1 << 32), "int32"))
    no = tirx.const(False, "bool")
    made = tirx.call_llvm_pure_intrin("int32", "llvm.amdgcn.permlanex16", bits, bits, *selected, no, no)
    return tirx.reinterpret(str(value.ty), made)
