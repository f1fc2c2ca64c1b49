from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
from types import FrameType
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm.script import tirx as T
from tvm.script.parser.core import doc, evaluator
from tvm.script.parser.core.error import ParserError

from schedules.core.frames import compiled, outer_frames, quick_frames, quicker


def plain() -> Any:
    """The module inspect as it came, whatever was put into the one in use."""
    spec = importlib.util.find_spec("inspect")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLAIN = plain()


def here() -> FrameType:
    frame = inspect.currentframe()
    assert frame and frame.f_back
    return frame.f_back


def fields(infos: list[inspect.FrameInfo]) -> list[tuple[object, ...]]:
    return [(info.frame, info.filename, info.lineno, info.function, info.code_context, info.index) for info in infos]


def test_the_frames_are_those_of_inspect() -> None:
    frame = here()
    ways = (PLAIN.getouterframes, outer_frames)
    (usual, quick), (_, without) = ([fields(way(frame, context)) for way in ways] for context in (1, 0))
    assert len(quick) > 10 and quick[0][3] == "test_the_frames_are_those_of_inspect"
    assert quick == usual
    assert all(entry[4:] == (None, None) for entry in without)


def test_they_are_in_place_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "getouterframes", PLAIN.getouterframes)
    with quick_frames():
        assert inspect.getouterframes is outer_frames
        with quick_frames():
            pass
        assert inspect.getouterframes is outer_frames
        assert inspect.stack()[0].function == "test_they_are_in_place_only_meanwhile"
    assert inspect.getouterframes is PLAIN.getouterframes


class Script:
    """What an expression's evaluation asks of the parser, which adds the place in the source."""

    def with_source_span(self, node: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def annotate_current_source_span(self, value: Any) -> Any:
        return value

    def report_error(self, node: Any, error: Exception) -> None:
        raise error


def names() -> dict[str, Any]:
    """What `x.real`, `f(x)` and the like are of: numbers, and `i` and `b` of a program."""
    plain = dict(x=3, row=[1, 2.5, "a"], more=(4, 5), named=dict(end="!"), f=lambda *a, **k: (a, k), none=None)
    return plain | dict(i=INDEX, b=FLAG, yes=True, no=False, fail=lambda: 1 // 0)


INDEX, FLAG = tvm.tirx.Var("i", "int32"), tvm.tirx.Var("b", "bool")
(VALUE_OF,) = (function for place, name, function in quicker() if name == "eval_expr")
WHOLE = r"""
7; '\n\''; None; 1.5; ...; x.real; row[x - 3]; row[0]; (x, 1); (x,); (); f(); f(x, 1); f(x, a=row, b=2); f(x, **named)
f(b'\0'); -1; f(x.real); x + 1; [x]; not x; {x: 1}; f(*more, x); x in row; x is none; i + x * 2; i // 2 % x; -i
i << 1 | x; i < x; x < i; i == 1; i < 3 and b; b or i > 1; not b; no and fail(); yes or fail(); no or b and yes
1 if yes else fail(); fail() if no else i; i if b else x; f(i if i < x else 0)[0]
"""
WHOLE_SOURCES = [each for line in WHOLE.strip().splitlines() for each in line.split("; ")]
LEFT = ("row[0:2]", "(lambda y: y + x)(1)", "[y for y in more]", "1 < x < 5", "f'{x}'", "i < 4 if 0 < x < 2 else b")


@pytest.mark.parametrize("source", ["x", "True", "len", *WHOLE_SOURCES, *LEFT])
def test_an_expression_is_worth_what_it_is_to_tvm(source: str) -> None:
    """A second time too, with other values."""
    script, node, others = Script(), doc.parse(source, mode="eval").body, ast.parse(source, mode="eval").body
    for number in (3, 5 if "row[x" in source else 4):
        told = VALUE_OF(script, node, names() | dict(x=number))
        usual = evaluator.eval_expr(script, doc.to_doc(others), names() | dict(x=number))
        assert type(told) is type(usual)
        assert tvm_ffi.structural_equal(told, usual) if isinstance(told, tvm_ffi.Object) else str(told) == str(usual)
    if not isinstance(node, doc.Name):
        assert (compiled(node) is not None) == (source not in LEFT)


def test_an_error_is_reported() -> None:
    script = Script()
    for source, error in (
        ("x.nothing", AttributeError), ("f(nobody)", NameError), ("row[x]", IndexError), ("nobody", ParserError),
        ("1 if x else 2", TypeError), ("yes and fail()", ZeroDivisionError), ("x and i < 1", AttributeError),
    ):  # fmt: skip
        with pytest.raises(error):
            VALUE_OF(script, doc.parse(source, mode="eval").body, names())


def test_inlined_functions_of_one_text_are_apart() -> None:
    """Each is expanded with what it closes over, and none outside of a script."""

    def program(amount: int) -> Any:
        @T.inline
        def store(buffer: Any) -> None:
            buffer[0] = amount

        with quick_frames():

            @T.prim_func
            def main(a: T.handle) -> None:
                A = T.match_buffer(a, (4,), "int32")
                store(A)

        with pytest.raises(RuntimeError, match="where no script is parsed"), quick_frames():
            store(None)
        return main

    told = [program(amount).script() for amount in (3, 4)]
    assert "A[0] = 3" in told[0] and "A[0] = 4" in told[1]
