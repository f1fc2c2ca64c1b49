"""Which traces may be replayed: a list of the instructions, attributes and annotations that our searches make.

A trace comes from a journal, a plan or a command line, and TVM does what it says: an annotation can have code imported
and linked, and TVM's JSON can name any object that TVM knows.  `Steps` is the only form in which a trace reaches TVM,
and there is none of a trace that is not made of what is listed here.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import dataclass
from typing import Any

from schedules.core.errors import ConfigError

MOST_STEPS = 2000  # the longest trace seen has 160
MOST_BYTES = 1 << 20  # of its JSON; the longest seen has 34 thousand
_REMEDY = "take the config from a journal"
_DAMAGED = f"trace is not one of a search, or damaged; {_REMEDY}"

# Patterns match a step written as `inputs|attributes|outputs`.  Blocks, loops and numbers that steps make are b, l and
# v, an index map is M, a text among the inputs has = before it, all else is JSON.
_COUNT = r"\d{1,9}"
_COUNTS = rf"\[{_COUNT}(, {_COUNT}){{0,31}}\]"
_SHARE = r"[01]\.\d{1,20}"
_SCOPE = r'"(global|local|warp|shared|shared\.dyn|wmma\.(matrix_a|matrix_b|accumulator)|m16n8k8\.matrix[ABC])"'
_INTRINSIC = r'"(wmma|mma)_\w{1,80}"'
_AXIS = r'"((block|thread)Idx\.[xyz]|vthread(\.[xyz])?)"'
# by key: what is annotated, block or loop, and with which value
_ANNOTATIONS = {
    "meta_schedule.tiling_structure": 'b ="[SR]{1,16}"',
    "meta_schedule.parallel": rf"b {_COUNT}",
    "meta_schedule.vectorize": rf"b {_COUNT}",
    "meta_schedule.unroll_explicit": rf"b (v|{_COUNT})",
    "meta_schedule.unroll_implicit": rf"b (v|{_COUNT})",
    "meta_schedule.random_compute_producer": "b 1",
    "meta_schedule.thread_extent_low_inclusive": rf"b {_COUNT}",
    "meta_schedule.thread_extent_high_inclusive": rf"b {_COUNT}",
    "meta_schedule.cooperative_fetch": rf"b (v|{_COUNT})",
    "meta_schedule.auto_tensorize": f"b ={_INTRINSIC}",
    "meta_schedule.auto_tensorize_init": f"b ={_INTRINSIC}",
    "warp_execution": "b 1",
    "software_pipeline_stage": f"l {_COUNTS}",
    "software_pipeline_order": f"l {_COUNTS}",
    "software_pipeline_async_stages": f"l {_COUNTS}",
    "pragma_auto_unroll_max_step": r"l \d{1,4}",
    "pragma_unroll_explicit": "l [01]",
}
_KEY = f'"({"|".join(map(re.escape, _ANNOTATIONS))})"'
_STEPS = {
    "AddUnitLoop": r"[bl]\|\|l",
    "Annotate": "|".join(rf'({value}\|"{re.escape(key)}"\|)' for key, value in _ANNOTATIONS.items()),
    "Bind": rf"l\|{_AXIS}\|",
    "Blockize": r"l\|[01]\|b",
    "CacheRead": rf"b \[(b(, b)*)?\]\|{_COUNT} {_SCOPE}\|b",
    "CacheWrite": rf"b \[(b(, b)*)?\]\|{_COUNT} {_SCOPE}\|b",
    "ComputeAt": r"b l\|[01] -?\d{1,3}\|",
    "ComputeInline": r"b\|\|",
    "DecomposeReduction": r"b l\|\|b",
    "EnterPostproc": r"\|\|",
    "Fuse": r"l( l){0,31}\|[01]\|l",
    "GetChildBlocks": r"b\|\|b( b)*",
    "GetConsumers": r"b\|\|(b( b)*)?",
    "GetLoops": r"b\|\|(l( l)*)?",
    "GetProducers": r"b\|\|(b( b)*)?",
    "GetSBlock": r'\|"[\w.-]{1,400}" "main"\|b',
    "PadEinsum": rf"b\|{_COUNTS}\|",
    "Parallel": r"l\|\|",
    "RFactor": r"l\|-?\d{1,2}\|b",
    "ReIndex": rf"b\|{_COUNT} [01]\|b",
    "Reorder": r"l( l){0,63}\|\|",
    "ReverseComputeAt": r"b l\|[01] -?\d{1,3}\|",
    "ReverseComputeInline": r"b\|\|",
    "SampleCategorical": rf"\|{_COUNTS} \[{_SHARE}(, {_SHARE}){{0,31}}\]\|v",
    "SampleComputeLocation": r"b\|\|l",
    "SamplePerfectTile": rf"l\|{_COUNT} {_COUNT}\|v( v){{0,15}}",
    "SetScope": rf"b\|{_COUNT} {_SCOPE}\|",
    "Split": rf'l( (v|{_COUNT}|"None")){{1,16}}\|(true|false) (true|false)\|l( l){{0,15}}',
    "StorageAlign": r"b\|\d{1,2} -?\d{1,2} \d{1,4} \d{1,4}\|",
    "Tensorize": rf"[bl]\|{_INTRINSIC} [01]\|",
    "TransformBlockLayout": r"b\|M\|",
    "TransformLayout": rf"b M\|{_COUNT} [01] null [01]\|",
    "Unannotate": rf"[bl]\|{_KEY}\|",
    "Unroll": r"l\|\|",
    "Vectorize": r"l\|\|",
}
_PATTERNS = {kind: re.compile(pattern, re.ASCII) for kind, pattern in _STEPS.items()}

# the fields of each kind of node in an index map, and the kinds of the nodes that they name
_ARITHMETIC = {"prim.Add", "prim.Mul", "prim.FloorDiv", "prim.FloorMod"}
_TERMS = {"ir.Var", "ir.IntImm", *_ARITHMETIC}
_LEAF = {"span": {"None"}, "ty": {"ir.PrimType"}}
_NODES: dict[str, dict[str, set[str]]] = {
    "ir.Var": {**_LEAF, "name": {"ffi.String"}},
    "ir.IntImm": {**_LEAF, "value": {"int"}},
    **{kind: {**_LEAF, "a": _TERMS, "b": _TERMS} for kind in _ARITHMETIC},
    "tirx.IndexMap": {"initial_indices": {"ffi.Array"}, "final_indices": {"ffi.Array"}, "inverse_index_map": {"None"}},
}
_MOST_TERMS = 10_000  # of an index map, with the parts that it repeats


@dataclass(frozen=True)
class Steps:
    """A trace as TVM reads it: instructions (kind, inputs, attributes, outputs), and decisions with their places.

    Raises ConfigError for what no search of ours makes.
    """

    instructions: list[list[Any]]
    decisions: list[list[Any]]

    def __post_init__(self) -> None:
        try:
            _check_steps(self.instructions)
            _check_decisions(self.instructions, self.decisions)
        except _Refused as refused:
            raise ConfigError(f"trace is not one of a search, or damaged ({refused}); {_REMEDY}") from None
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):  # not even of the form
            raise ConfigError(_DAMAGED) from None

    @classmethod
    def unpack(cls, packed: str) -> Steps:
        """What `pack` made a text of.  Raises ConfigError."""
        try:
            unpacking = zlib.decompressobj()
            text = unpacking.decompress(base64.b64decode(packed, validate=True), MOST_BYTES)
            if not unpacking.eof:
                raise ValueError
            instructions, decisions = json.loads(text)
        except (ValueError, TypeError, RecursionError, zlib.error):
            raise ConfigError(_DAMAGED) from None
        return cls(instructions, decisions)

    def without(self, kind: str) -> Steps:
        """The steps but those of `kind`, which has no decisions."""
        kept = [at for at, step in enumerate(self.instructions) if step[0] != kind]
        places = {at: place for place, at in enumerate(kept)}
        decisions = [[places[at], decision] for at, decision in self.decisions]
        return Steps([self.instructions[at] for at in kept], decisions)

    def to_json(self) -> list[Any]:
        """As TVM takes it."""
        return [self.instructions, self.decisions]


def pack(steps: list[Any]) -> str:
    """TVM's JSON of a trace as a short text."""
    return base64.b64encode(zlib.compress(json.dumps(steps, separators=(",", ":")).encode(), 9)).decode()


class _Refused(ValueError):
    """Why a trace is not replayed."""


def _check_steps(instructions: list[list[Any]]) -> None:
    """Raise _Refused, or an error of its form, unless every instruction is one of the list."""
    if len(instructions) > MOST_STEPS:
        raise _Refused(f"it has {len(instructions)} steps")
    made = dict[str, str]()  # what each name stands for
    for number, (kind, *parts) in enumerate(instructions):
        inputs, attributes, outputs = parts
        if not all(isinstance(part, list) for part in parts):
            raise _Refused(f"step {number} is not of lists")
        kinds = [_made(name) for name in outputs]
        written = "|".join([_written(inputs, made), _written(attributes, {}), " ".join(kinds)])
        if kind not in _PATTERNS or not _PATTERNS[kind].fullmatch(written):
            raise _Refused(f"step {number}, {json.dumps([kind, inputs, attributes])[:120]}")
        made.update(zip(outputs, kinds, strict=True))
    if sum(step[0] == "EnterPostproc" for step in instructions) > 1:
        raise _Refused("two steps of EnterPostproc")


def _made(name: str) -> str:
    """b, l or v for the name of a block, a loop or a number."""
    if not re.fullmatch(r"[blv]\d{1,6}", name, re.ASCII):
        raise _Refused(f"{name[:20]!r} is made")
    return name[0]


def _written(values: list[Any], made: dict[str, str]) -> str:
    """Inputs or attributes as the patterns have them."""
    return " ".join(_one(value, made) for value in values)


def _one(value: Any, made: dict[str, str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_one(each, made) for each in value)}]"
    if isinstance(value, str):
        if value in made:
            return made[value]
        if value.startswith("{"):
            _check_index_map(json.loads(value))
            return "M"
        if value.startswith('"'):
            return f"={value}"
    return json.dumps(value)


def _check_decisions(instructions: list[list[Any]], decisions: list[list[Any]]) -> None:
    """Every step that draws has one decision, one that it can draw: TVM would divide by a factor of 0."""
    drawn = dict[int, Any]()
    for at, decision in decisions:
        if type(at) is not int or at in drawn:
            raise _Refused(f"a decision of step {str(at)[:20]}")
        drawn[at] = decision
    for at, (kind, _, attributes, outputs) in enumerate(instructions):
        if not kind.startswith("Sample"):
            continue
        decision = drawn.pop(at, None)
        numbers = decision if isinstance(decision, list) else [decision]
        fits = all(type(number) is int and abs(number) < 1 << 40 for number in numbers)
        if fits and kind == "SamplePerfectTile":
            fits = numbers is decision and len(numbers) == len(outputs) and min(numbers) > 0
        elif fits and kind == "SampleCategorical":
            fits = numbers is not decision and 0 <= decision < len(attributes[0])
        if not fits:
            raise _Refused(f"step {at}, {kind}, decides {json.dumps(decision)[:60]}")
    if drawn:
        raise _Refused(f"a decision of step {min(drawn)}, which draws nothing")


def _check_index_map(graph: dict[str, Any]) -> None:
    """Raise _Refused unless TVM's JSON `graph` is an index map of sums, products and quotients of its variables.

    A node names other nodes by their place; here only earlier ones, so that there are no circles.
    """
    nodes, sizes = graph["nodes"], list[int]()
    for at, node in enumerate(nodes):
        kind, data = node["type"], node.get("data")
        named: list[int] = []
        if kind in _NODES:
            fields = _NODES[kind]
            fits = data.keys() == fields.keys() and all(nodes[data[name]]["type"] in fields[name] for name in fields)
            named = list(data.values())
        elif kind == "ffi.Array":
            fits = isinstance(data, list) and bool(data) and all(nodes[place]["type"] in _TERMS for place in data)
            named = data
        elif kind == "ir.PrimType":
            fits = data.keys() == {"span", "dtype"} and data["dtype"] in ("int32", "int64")
            named = [data["span"]]
        elif kind == "ffi.String":
            fits = re.fullmatch(r"\w{1,80}", data, re.ASCII) is not None
        elif kind == "int":
            fits = type(data) is int and 0 < data < 1 << 31  # none divides by 0
        else:
            fits = kind == "None" and data is None
        if not fits or not all(type(place) is int and 0 <= place < at for place in named):
            raise _Refused(f"an index map with {json.dumps(node)[:80]}")
        sizes.append(1 + sum(sizes[place] for place in named))
        if sizes[-1] > _MOST_TERMS:
            raise _Refused("an index map without end")
    root = graph["root_index"]
    if graph.keys() != {"root_index", "nodes", "metadata"} or type(root) is not int or root != len(nodes) - 1:
        raise _Refused("an index map with more in it")
    if nodes[root]["type"] != "tirx.IndexMap":
        raise _Refused("a text that is no index map")
