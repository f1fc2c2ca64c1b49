"""What is said of the difference between two programs."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from schedules.show.explain.anatomy import anatomy, differences, listed, size_text


def module(scope: str, kind: str, width: int = 1) -> tvm.IRModule:
    loop = {"serial": T.serial, "unroll": T.unroll, "parallel": T.parallel}[kind]

    @T.prim_func(s_tir=True)
    def main(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")) -> None:
        with T.sblock("root"):
            held = T.sblock_alloc_buffer((64,), "float32", scope=scope)
            for i in loop(64):
                with T.sblock("held"):
                    v = T.axis.spatial(64, i)
                    held[v] = a[v] * T.float32(width)
            for j in range(64):
                with T.sblock("b"):
                    v = T.axis.spatial(64, j)
                    b[v] = held[v]

    return tvm.IRModule({"main": main})


def said(before: tvm.IRModule, after: tvm.IRModule) -> tuple[str, ...]:
    return differences(anatomy(before), anatomy(after))


def test_nothing_is_said_of_equals() -> None:
    assert said(module("global", "serial"), module("global", "serial")) == ()
    # constants are none of what is told apart
    assert said(module("global", "serial"), module("global", "serial", width=2)) == ()


def test_buffers_and_loops() -> None:
    assert said(module("global", "serial"), module("shared", "unroll")) == (
        "Buffer held moves from global memory to shared memory.",
        "Unrolled: i (64).",
        "Serial loops: 1 instead of 2.",
    )
    assert said(module("local", "parallel"), module("local", "serial")) == (
        "Serial loops: 2 instead of 1; new: i (64).",
    )
    assert said(tvm.IRModule({}), module("shared", "serial"))[0] == (
        "New buffer in shared memory: held (64,) float32, 256 bytes."
    )


def test_words() -> None:
    assert [size_text(n) for n in (96, 2048, 2560, 3 * 2**20, 2**31)] == [
        "96 bytes",
        "2 KiB",
        "2.5 KiB",
        "3 MiB",
        "2 GiB",
    ]
    assert listed("abc") == "a, b, c" and listed("abcdefgh") == "a, b, c, d, e and 3 more"
