"""TVM's script parser in less time.

It asks for the whole call stack at every function that it parses, parses an inlined function's source at every call of
it, has Python compile each expression that it meets, and takes the types of a primitive's parameters apart each time.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from types import FrameType
from typing import Any, TypeVar

from schedules.core.process import kept_signals

_LOCK = threading.RLock()
_PLAIN = (bool, int, str, bytes, type(None))  # constants whose source is their repr

T = TypeVar("T")


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)`, in a thread of its own.

    TVM's parser leaves call stacks and errors in cycles until Python looks for garbage.  Those of the thread that calls
    have all that its frames hold: a model's activations, or nodes of its gradient, which break a CUDA graph's capture.
    Signals that ask the process to end come when the call is over, as `kept_signals` of a compiler in it needs.
    """
    with kept_signals(signal.SIGINT, signal.SIGTERM), ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()


def outer_frames(frame: Any, context: int = 1) -> list[inspect.FrameInfo]:
    """`inspect.getouterframes` without a search of all modules for each frame's source: the line alone."""
    found: list[inspect.FrameInfo] = []
    at: FrameType | None = frame
    while at:
        code, number = at.f_code, at.f_lineno
        line = linecache.getline(code.co_filename, number, at.f_globals) if context else ""
        known = ([line], 0) if line else (None, None)
        found.append(inspect.FrameInfo(at, code.co_filename, number, code.co_name, *known))
        at = at.f_back
    return found


def source_of(node: Any) -> str:
    """The source of an expression of names and constants, which others are when their parts have been computed, in
    TVM's form of a syntax tree; "" of one that is more."""
    kind = type(node).__name__
    parts: Sequence[str]
    if kind == "Name":
        return str(node.id)
    if kind == "Constant":
        return f"({node.value!r})" if type(node.value) in _PLAIN else ""
    if kind == "Attribute":
        parts = [_operand(node.value)]
        source = f"{parts[0]}.{node.attr}"
    elif kind == "Subscript":
        parts = [_operand(node.value), _operand(node.slice)]
        source = f"{parts[0]}[{parts[1]}]"
    elif kind == "Tuple":
        parts = [*map(_operand, node.elts)]
        source = f"({''.join(f'{part}, ' for part in parts)})"
    elif kind == "Call":
        values, named = [*map(_operand, node.args)], [_operand(each.value) for each in node.keywords]
        names = [f"{each.arg}=" if each.arg else "**" for each in node.keywords]
        parts = [_operand(node.func), *values, *named]
        source = f"{parts[0]}({', '.join([*values, *map(''.join, zip(names, named, strict=True))])})"
    else:
        return ""
    return source if all(parts) else ""


def _operand(node: Any) -> str:
    return source_of(node) if type(node).__name__ in ("Name", "Constant") else ""


@cache
def quicker() -> list[tuple[Any, str, Callable[..., Any]]]:
    """What is quicker: where it lies, by which name, and what is to be there."""
    from tvm.s_tir.schedule import _type_checker
    from tvm.script.parser.core import diagnostics, doc, evaluator, utils
    from tvm.script.parser.core.parser import ScriptMacro

    usual, compiled = evaluator._eval_expr, lru_cache(maxsize=16384)(compile)

    def value_of(node: Any, names: dict[str, Any] | None) -> Any:
        source = source_of(node)
        return eval(compiled(source, "<ast>", "eval"), names) if source and names is not None else usual(node, names)

    def parser_of(_macro: Any) -> Any:
        at: FrameType | None = inspect.currentframe()
        while at and ScriptMacro.parser_object_name not in at.f_globals:
            at = at.f_back
        if at is None:
            raise RuntimeError("an inlined function of TVM's script was called where no script is parsed")
        return at.f_globals[ScriptMacro.parser_object_name]

    def once(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`function`, once for all functions of one source."""
        known: dict[Any, Any] = {}

        def told(subject: Any) -> Any:
            code = getattr(subject, "__code__", subject)
            if code not in known:
                known[code] = function(subject)
            return known[code]

        return told

    return [
        (inspect, "getouterframes", outer_frames),
        (ScriptMacro, "_find_parser_def", parser_of),
        (utils, "_collect_annotation_names", once(utils._collect_annotation_names)),
        (diagnostics, "getsourcelines", once(diagnostics.getsourcelines)),
        (evaluator, "_eval_expr", value_of),
        # a tree is read only, but for decorators of functions inside of functions, which our programs do not have
        (doc, "parse", lru_cache(maxsize=1024)(doc.parse)),
        (_type_checker, "_dispatcher", lru_cache(maxsize=None)(_type_checker._dispatcher)),
    ]


@contextlib.contextmanager
def quick_frames() -> Iterator[None]:
    """Have TVM parse programs, and apply primitives of schedules, in a fraction of their time."""
    with _LOCK:
        changes = quicker()
        usual = [getattr(place, name) for place, name, _ in changes]
        for place, name, function in changes:
            setattr(place, name, function)
        try:
            yield
        finally:
            for (place, name, _), function in zip(changes, usual, strict=True):
                setattr(place, name, function)
