"""The operators: one line each."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from schedules.errors import UnknownNameError
from schedules.operator import Operator
from schedules.problem import Problem

OPERATORS = {
    "conv2d_hwcn": "schedules.conv2d_hwcn",
    "conv2d_nchw": "schedules.conv2d_nchw",
    "conv2d_nchw32": "schedules.conv2d_nchw32",
    "conv2d_nhwc": "schedules.conv2d_nhwc",
    "softmax": "schedules.softmax",
}


@lru_cache
def operator(name: str) -> Operator:
    """The operator called `name`.  Raises UnknownNameError with the nearest name."""
    if name not in OPERATORS:
        raise UnknownNameError("operator", name, OPERATORS)
    found: Operator = import_module(OPERATORS[name]).OPERATOR
    return found


def operator_of(problem: Problem) -> Operator:
    """The operator whose problem this is; an operator is named after its folder."""
    return operator(type(problem).__module__.split(".")[1])


def operators() -> list[Operator]:
    return [operator(name) for name in OPERATORS]
