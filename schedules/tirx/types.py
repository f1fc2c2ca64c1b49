"""TVM's types under the names that signatures of TIRx programs use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tvm import tirx

    Expr: TypeAlias = tirx.PrimExpr
    Index: TypeAlias = tirx.PrimExpr | int  # known when the program is written, or when it runs
    Variable: TypeAlias = tirx.PrimExpr  # a scalar in registers that statements assign to
    Pointer: TypeAlias = tirx.PrimExpr
    Handle: TypeAlias = tirx.Var
    Buffer: TypeAlias = tirx.Buffer
else:  # of annotations, which need no TVM when the program runs
    Expr = Index = Variable = Pointer = Handle = Buffer = Any
Tensors: TypeAlias = Mapping[str, Buffer]  # by argument
