"""The operators: one line each.

Operators that live elsewhere are named by SCHEDULES_EXTRA_OPERATORS, as ``name=module,name=module``; worker processes
inherit it.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from schedules.core.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from schedules.core.operator import Operator
    from schedules.core.problem import Problem

EXTRA = "SCHEDULES_EXTRA_OPERATORS"
OPERATORS = {
    "conv2d_hwcn": "schedules.operators.conv2d_hwcn",
    "conv2d_nchw": "schedules.operators.conv2d_nchw",
    "conv2d_nchw32": "schedules.operators.conv2d_nchw32",
    "conv2d_nhwc": "schedules.operators.conv2d_nhwc",
    "depthwise_conv2d": "schedules.operators.depthwise_conv2d",
    "depthwise_nchw32": "schedules.operators.depthwise_nchw32",
    "pack_nchw32": "schedules.operators.pack_nchw32",
    "pool2d": "schedules.operators.pool2d",
    "softmax": "schedules.operators.softmax",
}


@lru_cache
def operator(name: str) -> Operator:
    """The operator called `name`.  Raises UnknownNameError with the nearest name."""
    modules = operator_modules()
    if name not in modules:
        raise UnknownNameError("operator", name, modules)
    try:
        module = import_module(modules[name])
    except ModuleNotFoundError as error:
        raise UsageError(f"operator {name} of {EXTRA}: {error}") from None
    if not hasattr(module, "OPERATOR"):
        raise UsageError(f"operator {name}: module {modules[name]} has no OPERATOR; define it there")
    offered: Operator = module.OPERATOR
    if offered.name != name:
        raise UsageError(f"operator {name}: {modules[name]}.OPERATOR calls itself {offered.name}; use one name")
    return offered


def operator_of(problem: Problem) -> Operator:
    """The operator whose problem this is: the one whose folder, or module, the problem is defined in."""
    home = type(problem).__module__
    modules = operator_modules()
    for name, module in modules.items():
        if home == module or home.startswith(module + "."):
            return operator(name)
    raise UnknownNameError("operator", home, modules)


def operators() -> list[Operator]:
    """Every operator, those that live elsewhere last."""
    return [operator(name) for name in operator_modules()]


def operator_modules() -> dict[str, str]:
    """The module of each operator by its name, those that live elsewhere last.

    Raises UsageError if SCHEDULES_EXTRA_OPERATORS is malformed.
    """
    return {**OPERATORS, **_extra(os.environ.get(EXTRA, ""))}


@lru_cache
def _extra(text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in text.split(",") if item]
    if wrong := [name for name, _, module in pairs if not (name and module)]:
        raise UsageError(f"{EXTRA} has {wrong[0]!r}; write name=module,name=module")
    return {name: module for name, _, module in pairs}
