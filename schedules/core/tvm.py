"""TVM by the field's names for its parts, imported when one of them is first used.

Help, lists and records need no TVM, which takes longest of all to import.  Modules of definitions and schedules, which
they read, take its parts from here, and say so at their top.
"""

from __future__ import annotations

import importlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

__all__ = ["IRBuilder", "LoopRV", "PrimExpr", "PrimFunc", "SBlockRV", "Schedule", "T", "te", "tirx", "tvm"]

if TYPE_CHECKING:
    import tvm
    from tvm import te, tirx
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV, SBlockRV
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx import PrimExpr, PrimFunc
else:

    class Late:
        """The module `module`, or what it has by the name `name`."""

        def __init__(self, module: str, name: str | None = None) -> None:
            self._module, self._name = module, name

        @cached_property
        def _real(self) -> Any:
            module = importlib.import_module(self._module)
            return getattr(module, self._name) if self._name else module

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # which tools ask of whatever a module has
                raise AttributeError(name)
            return getattr(self._real, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._real(*args, **kwargs)

    tvm, te, tirx, T = map(Late, ("tvm", "tvm.te", "tvm.tirx", "tvm.script.tirx"))
    Schedule = Late("tvm.s_tir", "Schedule")
    IRBuilder = Late("tvm.script.ir_builder", "IRBuilder")
    LoopRV = PrimExpr = PrimFunc = SBlockRV = Any  # of annotations
