"""TVM's types under the names that signatures of TIRx programs use; import them for type checking alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from tvm import tirx

Expr: TypeAlias = tirx.PrimExpr
Index: TypeAlias = tirx.PrimExpr | int  # known when the program is written, or when it runs
Variable: TypeAlias = tirx.PrimExpr  # a scalar in registers that statements assign to
Pointer: TypeAlias = tirx.PrimExpr
Handle: TypeAlias = tirx.Var
Buffer: TypeAlias = tirx.Buffer
Tensors: TypeAlias = Mapping[str, Buffer]  # by argument
