"""Values of a TIRx program under a name: what the generated source calls them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from schedules.core.tvm import IRBuilder, T, tirx, tvm


def named(name: str, value: Any) -> Any:
    """`value` bound to a variable of that name."""
    if not isinstance(value, tvm.ir.Expr) or isinstance(value, tirx.IntImm):
        return value
    variable = T.Bind(value)
    IRBuilder.name(name, variable)
    return variable


@contextlib.contextmanager
def where(condition: Any) -> Iterator[None]:
    """Emit what follows under `condition`; None is always true."""
    if condition is None:
        yield
        return
    with T.If(condition), T.Then():
        yield


def when(condition: Any, body: Callable[[], None]) -> None:
    """Emit `body` under `condition`, without a branch where that is known."""
    if condition is not False:
        with where(None if condition is True else condition):
            body()


_KEPT = """
__device__ __forceinline__ int hopper_kept(int value) {
  int r; asm volatile("mov.b32 %0, %1;" : "=r"(r) : "r"(value)); return r;
}
"""


def kept(name: str, value: Any) -> Any:
    """The int32 `value` computed here and now, bound to a variable: not earlier, and not again where it is used."""
    return named(name, T.cuda.func_call("hopper_kept", value, source_code=_KEPT, return_type="int32"))
