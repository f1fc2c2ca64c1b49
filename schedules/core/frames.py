"""TVM's script parser in less time.

It asks for the whole call stack at every function that it parses, parses an inlined function's source at every call of
it, has Python compile each part of each expression that it meets, every time, and takes the types of a primitive's
parameters apart each time.  Here an expression is compiled once, as a whole; what it makes has the place of the
statement in the source, and not of a part.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from types import CodeType, FrameType
from typing import Any, TypeVar

from schedules.core.process import kept_signals

_LOCK = threading.RLock()
_OPERATORS, _CODE = "__schedules_operators__", "__schedules_code__"  # names in scripts, and at nodes of their trees

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


class _Left(Exception):
    """An expression is left to TVM's own evaluator."""


class _Called(ast.NodeTransformer):
    """An expression whose operators are called by name (`_Operators`), for Python to compile it as a whole."""

    known = (
        *(ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.keyword, ast.Starred, ast.Subscript),
        *(ast.Tuple, ast.List, ast.Dict, ast.expr_context),
    )

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, self.known):
            raise _Left
        return super().generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return _call(type(node.op).__name__, self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        return _call(type(node.op).__name__, self.visit(node.operand))

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) > 1:
            raise _Left
        return _call(type(node.ops[0]).__name__, *map(self.visit, (node.left, *node.comparators)))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        first, *others = map(self.visit, node.values)
        return _call(f"{type(node.op).__name__}_then", first, *map(_later, others))

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return _call("if_then_else", self.visit(node.test), *map(_later, map(self.visit, (node.body, node.orelse))))


def _call(name: str, *operands: ast.expr) -> ast.expr:
    return ast.Call(ast.Attribute(ast.Name(_OPERATORS, ast.Load()), name, ast.Load()), [*operands], [])


def _later(node: ast.expr) -> ast.expr:
    """What is computed only when it is called."""
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(nothing, node)


class _Operators:
    """What TVM's script has the operators of an expression mean, each by the name of its class."""

    def __init__(self) -> None:
        from tvm.script.parser.core import doc, evaluator

        self._value = evaluator._eval_op
        for kind in evaluator.DEFAULT_OP:
            setattr(self, kind.__name__, self._operator(kind()))
        self.And_then, self.Or_then = partial(self._joined, doc.And(), False), partial(self._joined, doc.Or(), True)

    def _operator(self, operator: Any) -> Callable[..., Any]:
        return lambda *operands: self._value(operator, list(operands))

    def _joined(self, operator: Any, decided: bool, value: Any, *later: Callable[[], Any]) -> Any:
        for each in later:
            if isinstance(value, bool) and value == decided:
                return value
            value = self._value(operator, [value, each()])
        return value

    @staticmethod
    def if_then_else(test: Any, body: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        from tvm import DataTypeCode, ir, tirx

        if isinstance(test, bool):
            return body() if test else otherwise()
        if ir.is_prim_expr(test) and test.ty.matches_code(DataTypeCode.BOOL):
            return tirx.op.if_then_else(test, body(), otherwise())
        raise TypeError(f"Expected Python bool or TIR bool, but got {type(test)}")


def compiled(node: Any) -> CodeType | None:
    """The code of an expression, in TVM's form of a syntax tree, for `_OPERATORS` among its names, made once; None if
    it has what is left to TVM: slices, lambdas, comprehensions, chains of comparisons."""
    from tvm.script.parser.core import doc

    if not hasattr(node, _CODE):
        code = None
        with contextlib.suppress(_Left):
            whole = ast.fix_missing_locations(ast.Expression(_Called().visit(doc.from_doc(node))))
            code = compile(whole, "<ast>", "eval")
        setattr(node, _CODE, code)
    found: CodeType | None = getattr(node, _CODE)
    return found


@cache
def quicker() -> list[tuple[Any, str, Callable[..., Any]]]:
    """What is quicker: where it lies, by which name, and what is to be there."""
    from tvm.s_tir.schedule import _type_checker
    from tvm.script.parser.core import diagnostics, doc, parser, utils
    from tvm.script.parser.core.parser import ScriptMacro

    usual, operators = parser.eval_expr, _Operators()

    def value_of(parser: Any, node: Any, names: dict[str, Any]) -> Any:
        """`names` are the caller's own copy."""
        if isinstance(node, doc.Name):  # also of what is assigned to, each time as a tree of its own
            return names[node.id] if node.id in names else usual(parser, node, names)
        code = compiled(node)
        if code is None:
            return usual(parser, node, names)
        names[_OPERATORS] = operators
        try:
            return eval(code, names)
        except Exception as error:  # which is raised again as what the script's author is shown
            parser.report_error(node, error)

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
        (parser, "eval_expr", value_of),
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
