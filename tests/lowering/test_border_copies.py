from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from schedules.core.arch import parse_arch
from schedules.lowering import pipeline

ROWS, COLUMNS, WIDE = 5, 7, 12


@T.prim_func(s_tir=True)
def border(a: T.Buffer((ROWS, COLUMNS), "float32"), to: T.Buffer((ROWS + 2, WIDE), "float32")) -> None:
    for y in T.parallel(ROWS + 2):
        for x in range(WIDE):
            to[y, x] = T.if_then_else(
                y >= 1 and y < ROWS + 1 and x >= 2 and x < COLUMNS + 2, a[y - 1, x - 2], T.float32(0)
            )


@T.prim_func(s_tir=True)
def strided(a: T.Buffer((ROWS, COLUMNS), "float32"), to: T.Buffer((ROWS, WIDE), "float32")) -> None:
    for y in T.parallel(ROWS):
        for x in range(WIDE):
            to[y, x] = T.if_then_else(x * 2 < COLUMNS + 1 and x * 3 > 1, a[y, x * 2 - 1], T.float32(2))


@T.prim_func(s_tir=True)
def guarded(a: T.Buffer((ROWS, COLUMNS), "float32"), to: T.Buffer((ROWS, WIDE), "float32")) -> None:
    for y in T.parallel(ROWS):
        for x in range(WIDE):
            if y + x // 3 < 4:
                to[y, x] = T.if_then_else(y + x // 2 < COLUMNS // 2, a[y, x], T.float32(0))


@T.prim_func(s_tir=True)
def other(a: T.Buffer((ROWS, COLUMNS), "float32"), to: T.Buffer((ROWS, WIDE), "float32")) -> None:
    for y in T.parallel(ROWS):
        for x in range(WIDE):
            to[y, x] = T.if_then_else(x % 3 == 0 and x < COLUMNS, a[y, x], T.float32(0))


def expected(name: str, a: Any, to: Any) -> Any:
    y, x = np.indices(to.shape)
    columns = {"border": x - 2, "strided": x * 2 - 1}.get(name, x)
    rows = y - 1 if name == "border" else y
    within = {
        "border": (y >= 1) & (y < ROWS + 1) & (x >= 2) & (x < COLUMNS + 2),
        "strided": (x * 2 < COLUMNS + 1) & (x * 3 > 1),
        "guarded": y + x // 2 < COLUMNS // 2,
        "other": (x % 3 == 0) & (x < COLUMNS),
    }[name]
    read = np.where(within, a[rows.clip(0, ROWS - 1), columns.clip(0, COLUMNS - 1)], 2 if name == "strided" else 0)
    return np.where(y + x // 3 < 4, read, to) if name == "guarded" else read


@pytest.mark.parametrize("function", [border, strided, guarded, other], ids=lambda function: function.__name__)
def test_results_are_the_same_without_tests_that_are_understood(function: Any) -> None:
    name = function.__name__
    a = np.random.default_rng(0).random((ROWS, COLUMNS), "float32")
    to = np.full((ROWS + 2 * (name == "border"), WIDE), -1, "float32")
    wanted = expected(name, a, to)
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    with pipeline.lowering(mod) as state, parse_arch("llvm").target() as target:
        built = tvm.tirx.build(mod, target=target, pipeline=pipeline.name_for(mod))
    built["main"](a, to)
    assert np.array_equal(to, wanted)
    assert state.host and bool(re.search(r"\bto\w*\[.*\] = T\.if_then_else", state.host.script())) == (name == "other")
