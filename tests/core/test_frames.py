from __future__ import annotations

import importlib.util
import inspect
from types import FrameType
from typing import Any

import pytest
from tvm.script import tirx as T
from tvm.script.parser.core import doc, evaluator

from schedules.core.frames import outer_frames, quick_frames, quicker, source_of


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


class Names(dict[str, Any]):
    """What `x.real`, `f(x)` and the like are of."""

    def __init__(self) -> None:
        super().__init__(x=3, row=[1, 2.5, "a"], more=(4, 5), named=dict(end="!"), f=lambda *a, **k: (a, k), none=None)


# of names and constants; the last are more, or have a constant whose source is not its repr
SHORT = ("x", "7", "'\\n\\''", "None", "True", "x.real", "row[x]", "row[0]", "(x, 1)", "(x,)", "()", "f()", "f(x, 1)")
SHORT += ("f(x, a=row, b=2)", "f(x, **named)", "f(b'\\0')")
LONG = ("-1", "1.5", "...", "row[0:2]", "f(x.real)", "x + 1", "[x]", "f(1e400)", "not x", "{x: 1}", "f(*more, x)")


@pytest.mark.parametrize("source", [*SHORT, *LONG])
def test_an_expression_is_worth_what_it_is_to_python(source: str) -> None:
    """A second time too, with other values."""
    (value_of,) = (function for place, name, function in quicker() if name == "_eval_expr")
    node, names = doc.parse(source, mode="eval").body, Names()
    assert bool(source_of(node)) == (source in SHORT)
    for number in (3, 1):
        names["x"] = number % 3 if "row[x]" in source else number
        assert value_of(node, names) == eval(source, dict(names))
    assert evaluator._eval_expr is value_of


def test_an_error_is_pythons() -> None:
    (value_of,) = (function for place, name, function in quicker() if name == "_eval_expr")
    for source, error in (("x.nothing", AttributeError), ("nobody", NameError), ("row[x]", IndexError)):
        with pytest.raises(error):
            value_of(doc.parse(source, mode="eval").body, Names())


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
