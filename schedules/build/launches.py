"""What a built function launches, as data: enough for a driver's module and launch functions, without TVM's runtime.

Read off the host function that TVM compiles.  A number that depends on extents at run time is a formula: a number, the
name of a size, or [operation, formula, formula] with + - * / % min max, / and % rounding down; nothing is negative.

    sizes       of each name the argument and the axis whose extent it is
    workspaces  memory between the kernels, not initialised: name and bytes
    maps        for TMA, what cuTensorMapEncodeTiled takes besides an address: numbers of its enumerations
    kernels     in order: symbol; what is passed, a buffer or a map by name, or a value and its dtype; grid and cluster
                in blocks, block in threads; bytes of dynamic shared memory; whether it may start while the one before
                runs (`dependent`: programmatic stream serialisation), whether its launch is cooperative
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import ir, tirx

from schedules.core.problem import Argument

Formula = int | str | list[Any]

# fields of TVM's tvm_struct_get
_DATA, _SHAPE, _VALUE, _ELEMENT = 1, 2, 15, 17
_OPERATIONS = {
    tirx.Add: "+",
    tirx.Sub: "-",
    tirx.Mul: "*",
    tirx.Div: "/",
    tirx.FloorDiv: "/",
    tirx.Mod: "%",
    tirx.FloorMod: "%",
    tirx.Min: "min",
    tirx.Max: "max",
}
_AXES = ("blockIdx", "threadIdx", "clusterCtaIdx")
_FLAGS = {"tirx.use_programtic_dependent_launch": "dependent", "tirx.use_cooperative_launch": "cooperative"}  # sic
_SHARED = "tirx.use_dyn_shared_memory"
# of CUtensorMapDataType
_MAP_TYPES = {"uint8": 0, "int8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5}
_MAP_TYPES |= {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}


class _Unknown(Exception):
    """The host function does something that is no launch."""


def launches(host: tvm.IRModule, arguments: tuple[Argument, ...]) -> dict[str, Any]:
    """What the lowered program `host`, a function of `arguments` and its kernels, launches: the words above, or
    {"why": ...} where it does what data cannot say."""
    found = _Host(host, [argument.name for argument in arguments])
    try:
        found.visit(host["main"].body)
    except _Unknown as error:
        return {"why": str(error)}
    return {"sizes": found.sizes, "workspaces": found.workspaces, "maps": found.maps, "kernels": found.kernels}


@dataclass
class _Host:
    """A walk through the host function, in order; `known` has what its variables are."""

    module: tvm.IRModule
    arguments: list[str]
    known: dict[Any, Any] = field(default_factory=dict)
    sizes: dict[str, list[Any]] = field(default_factory=dict)
    workspaces: list[dict[str, Any]] = field(default_factory=list)
    maps: dict[str, dict[str, Any]] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    launching: bool = False  # in the part after the tests of the arguments

    def visit(self, statement: Any) -> None:
        if isinstance(statement, tirx.SeqStmt):
            for each in statement.seq:
                self.visit(each)
        elif isinstance(statement, tirx.AttrStmt):
            self.launching |= statement.attr_key == "compute_scope"
            self.visit(statement.body)
        elif isinstance(statement, tirx.Bind):
            self.known[statement.var] = self._bound(statement.var, statement.value)
        elif isinstance(statement, tirx.DeclBuffer):
            self.known[statement.buffer] = self._of(statement.data)
        elif isinstance(statement, tirx.AllocBuffer) and statement.buffer.scope() == "global":
            self._allocate(statement.buffer)
        elif isinstance(statement, tirx.Evaluate) and isinstance(statement.value, ir.Call):
            self._call(statement.value)
        elif self.launching and not isinstance(statement, tirx.AssertStmt | tirx.Return):
            kind = type(statement).__name__
            raise _Unknown(f"its host code has a statement {kind} between its launches, which is no launch")

    def _bound(self, variable: Any, value: Any) -> Any:
        """What a variable is: ("argument", number), ("shape", number), a size by its name, a tensor map by its name;
        None for what no launch uses."""
        if _is(value, "tirx.tvm_stack_alloca"):
            return str(variable.name)
        inner = value.value if isinstance(value, tirx.Cast) else value
        found = self._of(inner)
        if isinstance(found, tuple) and found[0] == "extent":
            self.sizes[str(variable.name)] = [self.arguments[found[1]], found[2]]
            return str(variable.name)
        if found is None and self.launching:
            return self._formula(value)
        return found

    def _of(self, value: Any) -> Any:
        """What an expression of the host function is, as `_bound` says; a pointer to data is its buffer's name."""
        if isinstance(value, tirx.Var):
            return self.known.get(value)
        if _is(value, "tirx.buffer_data"):
            return self.known.get(value.args[0])
        if _is(value, "prim.if_then_else") or _is(value, "tirx.reinterpret"):
            return self._of(value.args[-1])
        if not _is(value, "tirx.tvm_struct_get"):
            return None
        of, index, kind = value.args[0], int(value.args[1]), int(value.args[2])
        if kind == _VALUE:
            return ("argument", index)
        source = self._of(of)
        if not isinstance(source, tuple):
            return None
        if kind == _ELEMENT and source[0] == "shape":
            return ("extent", source[1], index)
        if source[0] != "argument":
            return None
        return {_DATA: self.arguments[source[1]], _SHAPE: ("shape", source[1])}.get(kind)

    def _allocate(self, buffer: Any) -> None:
        name = str(buffer.name)
        taken = {*self.arguments, *(each["name"] for each in self.workspaces)}
        if name in taken:
            name = next(f"{name}_{n}" for n in range(1, len(taken) + 2) if f"{name}_{n}" not in taken)
        size: Formula = tvm.DataType(str(buffer.dtype)).itemsize
        for extent in buffer.shape:
            size = _times(self._formula(extent), size)
        self.known[buffer] = name
        self.workspaces.append({"name": name, "bytes": size})

    def _call(self, call: Any) -> None:
        if _is(call, "tirx.call_ffi_kernel"):
            self._launch(call)
        elif _is(call, "tirx.tvm_call_packed"):
            name = str(call.args[0].value)
            if name == "runtime.cuTensorMapEncodeTiled":
                self._encode(call.args[1:])
            elif name != "__tvm_set_device":
                raise _Unknown(f"its host code calls {name}")
        elif self.launching:
            raise _Unknown(f"its host code calls {call.op.name}")

    def _encode(self, given: Any) -> None:
        """Its type is the dtype's, if no other is given after all else."""
        dtype, rank = str(given[1].value), int(given[2])
        words = [self._formula(word) for word in given[4:]]
        counts = (rank, rank - 1, rank, rank)
        forced = words.pop() if len(words) == sum(counts) + 5 else -1
        lists = []
        for count in counts:
            lists.append(words[:count])
            words = words[count:]
        names = ("dims", "strides", "box", "element_strides")
        numbers = dict(zip(("interleave", "swizzle", "promotion", "fill"), words, strict=True))
        self.maps[self._name(given[0])] = {
            "buffer": self._name(given[3]),
            "type": _MAP_TYPES[dtype] if forced == -1 else forced,
            **dict(zip(names, lists, strict=True)),
            **numbers,
        }

    def _launch(self, call: Any) -> None:
        symbol = str(call.args[0].value)
        function = self.module[symbol]
        count = len(function.params)
        shape: dict[str, list[Formula]] = {axes: [1, 1, 1] for axes in _AXES}
        told: dict[str, Any] = {"shared": 0, **dict.fromkeys(_FLAGS.values(), False)}
        values = iter(call.args[1 + count :])
        for tag in map(str, function.attrs["tirx.kernel_launch_params"]):
            if tag in _FLAGS:
                told[_FLAGS[tag]] = True
                continue
            value = self._formula(next(values))
            axes, _, axis = tag.partition(".")
            if tag == _SHARED:
                told["shared"] = value
            elif axes in shape and axis in "xyz":
                shape[axes]["xyz".index(axis)] = value
            else:
                raise _Unknown(f"{symbol} is launched with {tag}")
        grid, block, cluster = shape.values()
        passed = [self._passed(*pair) for pair in zip(function.params, call.args[1 : 1 + count], strict=True)]
        where = {"grid": grid, "block": block, "cluster": cluster}
        self.kernels.append({"symbol": symbol, "arguments": passed, **where, **told})

    def _passed(self, parameter: Any, value: Any) -> dict[str, Any]:
        if isinstance(value, tirx.Var) and str(parameter.ty).startswith("T.TensorMap"):
            return {"map": self._name(value)}
        if isinstance(parameter.ty, ir.PointerType):
            return {"buffer": self._name(value)}
        return {"value": self._formula(value), "dtype": str(parameter.ty)}

    def _name(self, pointer: Any) -> str:
        found = self._of(pointer)
        if not isinstance(found, str):
            raise _Unknown(f"its host code passes {pointer}, which is no argument, workspace or tensor map")
        return found

    def _formula(self, value: Any) -> Formula:
        if isinstance(value, tirx.Cast):  # sizes fit
            return self._formula(value.value)
        if isinstance(value, tirx.IntImm):
            return int(value)
        if isinstance(value, tirx.Var) and (known := self.known.get(value)) is not None:
            return known  # type: ignore[no-any-return]
        operation = _OPERATIONS.get(type(value))
        if operation is None:
            raise _Unknown(f"its host code computes {value}, which the formulas of launches do not have")
        return [operation, self._formula(value.a), self._formula(value.b)]


def _times(a: Formula, b: Formula) -> Formula:
    """Their product, numbers multiplied out."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if isinstance(b, int) and isinstance(a, list) and a[0] == "*" and isinstance(a[2], int):
        return ["*", a[1], a[2] * b]
    return a if b == 1 else ["*", a, b]


def _is(value: Any, name: str) -> bool:
    return isinstance(value, ir.Call) and str(getattr(value.op, "name", "")) == name
