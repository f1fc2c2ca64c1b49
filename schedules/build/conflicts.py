"""Conflicts of the banks of LDS in a kernel for an AMD GPU, counted in its lowered program."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedules.core.arch import Arch
from schedules.core.lds import WIDEST, cycles


@dataclass
class Conflicts:
    """Cycles of LDS for a kernel's accesses, as often as its loops have them, and without conflicts."""

    taken: float = 0
    least: float = 0

    @property
    def share(self) -> float:
        """Of the time of LDS that conflicts take."""
        return 1 - self.least / self.taken if self.taken else 0.0


def conflicts(lowered: str, arch: Arch) -> Conflicts:
    """Those of the kernels of a lowered program, as text.

    What depends on data, blocks or loops counts as in their first turn: mostly it moves all lanes alike.
    """
    found = Conflicts()
    for function in ast.walk(ast.parse(lowered)):
        if isinstance(function, ast.FunctionDef):
            _Kernel(function, arch, found).visit(function, 1, np.True_)
    return found


_BINARY = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.mod,
    ast.BitXor: np.bitwise_xor,
    ast.BitAnd: np.bitwise_and,
    ast.BitOr: np.bitwise_or,
    ast.LShift: np.left_shift,
    ast.RShift: np.right_shift,
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "T.min": np.minimum,
    "T.max": np.maximum,
    "T.if_then_else": np.where,
    "T.Select": np.where,
}


@dataclass
class _Kernel:
    """A function of a program; `visit` adds its accesses to `found`."""

    function: ast.FunctionDef
    arch: Arch
    found: Conflicts
    indices: dict[str, Any] = field(default_factory=dict)  # values, of each thread of a block in order
    threads: int = 1
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)  # where a variable starts, bytes of an element
    # addresses by what accesses of neighbours share: offsets of threads, which of them, bytes, whether they read, times
    pending: dict[tuple[bytes, bytes, int, bool, float], set[int]] = field(default_factory=dict)
    known: dict[tuple[Any, ...], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        axes: dict[str, tuple[str, int]] = {}
        size = 0
        for node in ast.walk(self.function):
            if isinstance(node, ast.withitem):
                target, call = node.optional_vars, node.context_expr
            elif isinstance(node, ast.Assign):
                target, call = node.targets[0], node.value
            else:
                continue
            if not isinstance(target, ast.Name) or not isinstance(call, ast.Call):
                continue
            name, words = ast.unparse(call.func), call.args
            if name == "T.launch_thread" and "threadIdx" in (axis := ast.unparse(words[0])):
                axes[axis] = target.id, int(self.number(words[1]))
            elif name == "T.alloc_shared" and isinstance(words[0], ast.Tuple):
                dtype = ast.unparse(words[1]) if len(words) > 1 else "float32"
                self.shared[target.id] = size, _bytes(dtype)
                size += math.prod(int(self.number(extent)) for extent in words[0].elts) * _bytes(dtype)
        threads = np.arange(math.prod(extent for _, extent in axes.values()))
        self.threads = len(threads)
        for axis in sorted(axes):  # x, y, z
            variable, extent = axes[axis]
            self.indices[variable] = threads % extent
            threads = threads // extent

    def visit(self, node: ast.AST, times: float, active: Any) -> None:
        """`node`, which is run so many times by the threads that are `active`."""
        apart = isinstance(node, ast.For | ast.If | ast.While | ast.FunctionDef) or _is_barrier(node)
        if apart:
            self.count()
        if isinstance(node, ast.If):
            self.visit(node.test, times, active)
            inside = active & (self.number(node.test) != 0)
            for part, where in ((node.body, inside), (node.orelse, active)):
                for statement in part:
                    self.visit(statement, times, where)
                self.count()
            return
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
            times *= float(np.max(self.number(node.iter.args[-1])))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in self.shared:
            self.access(node, times, active)
        for child in ast.iter_child_nodes(node):
            self.visit(child, times, active)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):  # a register
            self.indices[ast.unparse(node.targets[0])] = self.number(node.value)
        if apart:
            self.count()

    def access(self, node: ast.Subscript, times: float, active: Any) -> None:
        """Take up what a thread reads or writes there, by elements."""
        start, item = self.shared[ast.unparse(node.value)]
        at, stride, lanes = node.slice, 1, 1
        if isinstance(at, ast.Slice) and at.lower and at.upper:
            lanes = int(np.max(self.number(at.upper) - self.number(at.lower)))
            at = at.lower
        elif isinstance(at, ast.Call) and ast.unparse(at.func) == "T.Ramp":
            stride, lanes = (int(np.max(self.number(part))) for part in at.args[1:])
            at = at.args[0]
        first, where = np.broadcast_arrays(start + item * self.number(at), active, np.zeros(self.threads))[:2]
        low = int(first.min())
        key = (first - low).tobytes(), where.tobytes(), item, isinstance(node.ctx, ast.Load), times
        places = self.pending.setdefault(key, set())
        places.update(low + item * stride * lane for lane in range(lanes))

    def count(self) -> None:
        """Count the accesses taken up, as wide as the compiler can make those of neighbouring elements."""
        for (offsets, where, item, read, times), places in self.pending.items():
            given = zip(np.frombuffer(offsets, np.int64).tolist(), np.frombuffer(where, np.bool_), strict=True)
            threads = [offset if there else None for offset, there in given]
            waves = [threads[first : first + self.arch.wave] for first in range(0, self.threads, self.arch.wave)]
            aligned = math.gcd(*(offset for offset in threads if offset is not None), WIDEST)
            left = sorted(places, reverse=True)
            while left:
                first = left.pop()
                width = WIDEST
                while width > item:
                    next_ones = list(range(first + width - item, first, -item))
                    if math.gcd(first, aligned) % width == 0 and left[len(left) - len(next_ones) :] == next_ones:
                        del left[len(left) - len(next_ones) :]
                        break
                    width //= 2
                for wave in waves:
                    addresses = tuple(None if offset is None else offset + first for offset in wave)
                    key = addresses, width, read
                    if key not in self.known:
                        self.known[key] = cycles(*key[:2], self.arch.lds_banks, read)
                    taken, least = self.known[key]
                    self.found.taken += times * taken
                    self.found.least += times * least
        self.pending.clear()

    def number(self, node: ast.AST) -> Any:
        """The value of an expression, of each thread where they differ."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, int) else 0
        if isinstance(node, ast.Name | ast.Subscript):
            return self.indices.get(ast.unparse(node), 0)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _BINARY[type(node.op)](self.number(node.left), self.number(node.right))
        if isinstance(node, ast.UnaryOp):
            value = self.number(node.operand)
            return np.logical_not(value) if isinstance(node.op, ast.Not) else -value
        if isinstance(node, ast.BoolOp):
            values = [self.number(value) != 0 for value in node.values]
            together = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return together.reduce(np.broadcast_arrays(*values))
        if isinstance(node, ast.Compare):
            sides = [self.number(side) for side in (node.left, *node.comparators)]
            pairs = zip(node.ops, sides, sides[1:], strict=False)
            held = [_BINARY[type(op)](a, b) for op, a, b in pairs if type(op) in _BINARY]
            return np.logical_and.reduce(np.broadcast_arrays(*held)) if held else 1
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in _CALLS:
                return _CALLS[name](*map(self.number, node.args))
            if name in ("T.Cast", "T.int32", "T.int64", "T.uint32"):
                return self.number(node.args[-1])
        return 0


def _is_barrier(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "T.tvm_storage_sync"


def _bytes(dtype: str) -> int:
    base, _, lanes = dtype.strip("'").partition("x")
    return int("".join(filter(str.isdigit, base)) or 8) // 8 * int(lanes or 1)
