"""What a program is made of, read off its IR: parameters, buffers, blocks, loops, accesses, calls, annotations; and
what differs between two programs, in sentences."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.s_tir.stmt import SBlockRealize

from schedules.core.problem import numpy_dtype
from schedules.lowering.annotations import PREFIX, TIRX

MOST = 6  # things that a sentence names
LETTERS = 60  # of a value
# what of a function's attributes says something of the kernel, beside those of this package
_ATTRIBUTES = ("tirx.launch_bounds_min_blocks_per_sm", "tirx.kernel_launch_params")
_SCOPES = {
    "global": "global memory",
    "shared": "shared memory",
    "shared.dyn": "shared memory",
    "local": "registers",
    "warp": "registers of a warp",
}
# what is no more than arithmetic, a pointer or bookkeeping
_PLAIN_CALLS = re.compile(
    "if_then_else|likely|address_of|tvm_access_ptr|buffer_data|reinterpret|bitwise_.*|shift_.*|large_uint_imm"
    "|exp2?|log|fabs|floor|sqrt|max|min|fma|isnan|isnullptr|ret|shuffle|vector(low|high|combine)|handle_add_byte_offset"
    "|call_llvm_pure_intrin|tvm_struct_[gs]et|tvm_stack_.*|tvm_throw_last_error"
)


@dataclass(frozen=True)
class Buffer:
    """A buffer of a program as it is shown; `shape` as text, since extents may be variables."""

    name: str
    shape: tuple[str, ...]
    dtype: str
    scope: str

    @property
    def nbytes(self) -> int | None:
        """None if an extent is known at run time only."""
        if not all(extent.isdigit() for extent in self.shape):
            return None
        return math.prod(map(int, self.shape)) * numpy_dtype(self.dtype).itemsize if _known(self.dtype) else None

    @property
    def place(self) -> str:
        return _SCOPES.get(self.scope, self.scope)

    @property
    def form(self) -> str:
        return f"({', '.join(self.shape)}{',' * (len(self.shape) == 1)}) {self.dtype}"

    def __str__(self) -> str:
        size = "" if self.nbytes is None else f", {size_text(self.nbytes)}"
        return f"{self.form}{size}"


@dataclass(frozen=True)
class Loop:
    """A loop of a program as it is shown."""

    name: str
    extent: str
    kind: str  # serial, parallel, vectorized, unrolled, or the thread it is bound to

    def __str__(self) -> str:
        return f"{self.name} ({self.extent})"


@dataclass
class Anatomy:
    """What one module is made of."""

    parameters: dict[str, str] = field(default_factory=dict)
    buffers: Counter[Buffer] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)
    homes: dict[str, str] = field(default_factory=dict)  # block -> the innermost loop that it shares with others
    nests: dict[str, tuple[str, ...]] = field(default_factory=dict)  # block that reduces -> the loops around it
    loops: Counter[Loop] = field(default_factory=Counter)
    accesses: Counter[str] = field(default_factory=Counter)  # vector loads and stores, by place and width
    calls: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)  # annotations of loops and blocks
    attributes: dict[str, str] = field(default_factory=dict)  # of the functions
    functions: list[str] = field(default_factory=list)


def size_text(nbytes: int) -> str:
    """``96 bytes``, ``2.5 KiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} bytes"


def _known(dtype: str) -> bool:
    try:
        numpy_dtype(dtype)
    except (TypeError, ValueError, AttributeError):
        return False
    return True


def anatomy(mod: tvm.IRModule) -> Anatomy:
    """What `mod` is made of."""
    found = Anatomy()
    for variable, function in mod.functions.items():
        if isinstance(function, tirx.PrimFunc):
            _Reader(found, function).read(str(variable.name_hint))
    return found


class _Reader:
    """Reads one function into an Anatomy."""

    def __init__(self, found: Anatomy, function: Any) -> None:
        self.found, self.function = found, function
        self.paths: dict[str, list[Any]] = {}
        self.within: Counter[Any] = Counter()  # loop -> blocks in it
        self.reductions: set[str] = set()  # blocks that sum or otherwise reduce

    def read(self, name: str) -> None:
        found = self.found
        found.functions.append(name)
        for parameter in self.function.params:
            if hasattr(parameter, "shape"):
                found.parameters[str(parameter.name)] = _buffer(parameter).form
        for key, value in dict(self.function.attrs or {}).items():
            if (str(key).startswith(PREFIX) and str(key) != TIRX) or str(key) in _ATTRIBUTES:
                found.attributes[str(key)] = _short(str(value))
        self.statement(self.function.body, [])
        self.expressions(self.function.body)
        for block, path in self.paths.items():
            shared = [loop for loop in path if self.within[loop] > 1]
            found.homes[block] = str(shared[-1].loop_var.name) if shared else ""
            if block in self.reductions:
                found.nests[block] = tuple(map(_around, path))

    def statement(self, node: Any, path: list[Any]) -> None:
        found = self.found
        if isinstance(node, tirx.SeqStmt):
            for each in node.seq:
                self.statement(each, path)
        elif isinstance(node, tirx.For):
            found.loops[_loop(node)] += 1
            for key, value in dict(node.annotations).items():
                found.notes[f"loop {node.loop_var.name}: {key} = {_short(str(value))}"] += 1
            self.statement(node.body, [*path, node])
        elif isinstance(node, tirx.IfThenElse):
            self.statement(node.then_case, path)
            if node.else_case is not None:
                self.statement(node.else_case, path)
        elif isinstance(node, SBlockRealize):
            self.block(node.block, path)
        elif isinstance(node, tirx.AttrStmt):
            self.attribute(node)
            self.statement(node.body, path)
        elif isinstance(node, tirx.AllocBuffer):
            found.buffers[_buffer(node.buffer)] += 1
        elif isinstance(node, tirx.While):
            found.loops[Loop("while", "until its condition fails", "serial")] += 1
            self.statement(node.body, path)
        elif hasattr(node, "body"):
            self.statement(node.body, path)

    def block(self, block: Any, path: list[Any]) -> None:
        name = str(block.name_hint)
        for buffer in block.alloc_buffers:
            self.found.buffers[_buffer(buffer)] += 1
        if name not in ("root", ""):
            self.found.blocks[name] += 1
            self.paths[name] = path
            if any(variable.iter_type == tirx.IterVar.CommReduce for variable in block.iter_vars):
                self.reductions.add(name)
            for loop in path:
                self.within[loop] += 1
            for key, value in dict(block.annotations).items():
                self.found.notes[f"block {name}: {key} = {_short(str(value))}"] += 1
        if block.init is not None:
            self.statement(block.init, path)
        self.statement(block.body, path)

    def attribute(self, node: Any) -> None:
        key = str(node.attr_key)
        if key in ("thread_extent", "virtual_thread"):
            tag = str(node.node.thread_tag)
            self.found.loops[Loop(str(node.node.var.name), str(node.value), tag)] += 1

    def expressions(self, body: Any) -> None:
        found = self.found

        def access(dtype: Any, buffer: Any, way: str) -> None:
            if re.search(r"x\d+$", str(dtype)):
                scope = str(buffer.scope())
                found.accesses[f"{way} {dtype} in {_SCOPES.get(scope, scope)}"] += 1

        def load(node: Any) -> None:
            if hasattr(node.source, "scope"):
                access(node.ty, node.source, "loads of")

        def store(node: Any) -> None:
            access(node.value.ty, node.buffer, "stores of")

        def call(node: Any) -> None:
            name = str(getattr(node.op, "name", "")).rpartition(".")[2]
            if name in ("call_extern", "call_pure_extern") or name.endswith("func_call"):
                name = str(node.args[0].value)
            if name and not _PLAIN_CALLS.fullmatch(name):
                found.calls[name] += 1

        tvm_ffi.structural_walk(body, ((ir.TensorLoad, load), (tirx.BufferStore, store), (ir.Call, call)))


def _buffer(buffer: Any) -> Buffer:
    return Buffer(
        str(buffer.name), tuple(_extent(extent) for extent in buffer.shape), str(buffer.dtype), str(buffer.scope())
    )


def _extent(extent: Any) -> str:
    return str(int(extent)) if isinstance(extent, tirx.IntImm) else str(extent)


def _loop(node: Any) -> Loop:
    kind = {
        tirx.ForKind.SERIAL: "serial",
        tirx.ForKind.PARALLEL: "parallel",
        tirx.ForKind.VECTORIZED: "vectorized",
        tirx.ForKind.UNROLLED: "unrolled",
    }.get(node.kind, "")
    return Loop(str(node.loop_var.name), _extent(node.extent), kind or str(node.thread_binding.thread_tag))


def _around(node: Any) -> str:
    loop = _loop(node)
    return loop.name if loop.kind in (loop.name, "serial") else f"{loop.name} ({loop.kind})"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LETTERS else f"{text[:LETTERS]}..."


def listed(items: Iterable[Any], most: int = MOST) -> str:
    """``a, b and 3 more``."""
    texts = [str(item) for item in items]
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[: most - 1])} and {len(texts) - most + 1} more"


def differences(before: Anatomy, after: Anatomy) -> tuple[str, ...]:
    """What `after` has and `before` has not, and the other way round, as sentences; none if nothing is told apart."""
    return tuple(
        [
            *_parameters(before.parameters, after.parameters),
            *_functions(before.functions, after.functions),
            *_buffers(before.buffers, after.buffers),
            *_blocks(before, after),
            *_loops(before, after),
            *_counts("Vector accesses", before.accesses, after.accesses),
            *_counts("Calls", before.calls, after.calls),
            *_notes(before.notes, after.notes),
            *_attributes(before.attributes, after.attributes),
        ]
    )


def _parameters(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    if before and not after:
        return ["Parameters are pointers now; shapes and dtypes are checked before the kernel starts."]
    return [
        f"Parameter {name} is {form} instead of {before[name]}."
        for name, form in after.items()
        if name in before and before[name] != form
    ]


def _functions(before: Sequence[str], after: Sequence[str]) -> list[str]:
    new = [name for name in after if name not in before]
    return [f"New functions: {listed(new)}."] if new and before else []


def _buffers(before: Counter[Buffer], after: Counter[Buffer]) -> list[str]:
    new, gone = after - before, before - after
    sentences = []
    fresh: dict[str, list[str]] = {}
    for buffer in sorted(new, key=lambda each: (each.scope, each.name)):
        old = next((other for other in gone if _same(other, buffer)), None)
        if old is None:
            count = f" ({new[buffer]} of them)" if new[buffer] > 1 else ""
            fresh.setdefault(buffer.place, []).append(f"{buffer.name or 'one'} {buffer}{count}")
            continue
        del gone[old]
        as_now = "" if old.name == buffer.name else f", as {buffer.name}"
        if old.place != buffer.place:
            form = "" if old.form == buffer.form else f": {buffer}"
            sentences.append(f"Buffer {old.name} moves from {old.place} to {buffer.place}{as_now}{form}.")
        elif old.nbytes == buffer.nbytes and old.dtype == buffer.dtype:
            sentences.append(f"Buffer {old.name} in {buffer.place} has another form{as_now}: {buffer}.")
        else:
            sentences.append(f"Buffer {old.name} in {buffer.place} is {buffer}{as_now} instead of {old}.")
    for place, forms in fresh.items():
        sentences.append(f"New {'buffers' if len(forms) > 1 else 'buffer'} in {place}: {'; '.join(forms)}.")
    if gone:
        names = [f"{buffer.name} ({buffer.place}, {buffer})" for buffer in sorted(gone, key=lambda each: each.name)]
        sentences.append(f"Gone: {'buffers' if len(names) > 1 else 'buffer'} {listed(names, 4)}.")
    return sentences


def _same(old: Buffer, new: Buffer) -> bool:
    """Whether `new` is what became of `old`: TVM appends the scope to the name of a buffer that is moved."""
    if old.name == new.name:
        return True
    return old.form == new.form and new.name == f"{old.name}_{new.scope}" and old.scope != new.scope


def _blocks(before: Anatomy, after: Anatomy) -> list[str]:
    if before.blocks and not after.blocks:
        return [f"The blocks dissolve into plain loops and statements: {listed(sorted(before.blocks))}."]
    sentences = []
    if new := sorted(after.blocks - before.blocks):
        sentences.append(f"New {'blocks' if len(new) > 1 else 'block'}: {listed(new)}.")
    if gone := sorted(before.blocks - after.blocks):
        sentences.append(f"Gone: {'blocks' if len(gone) > 1 else 'block'} {listed(gone)}.")
    moved: dict[str, list[str]] = {}
    for block, home in after.homes.items():
        if home and before.homes.get(block, "") != home:
            moved.setdefault(home, []).append(block)
    for home, blocks in moved.items():
        verb = "are" if len(blocks) > 1 else "is"
        sentences.append(f"{listed(blocks)} {verb} computed inside the loop {home}.")
    deepest = max(after.nests, key=lambda block: len(after.nests[block]), default="")
    nest = after.nests.get(deepest, ())
    if before.nests and nest and nest not in before.nests.values():
        sentences.append(f"Loops around {deepest}, from the outside: {', '.join(nest)}.")
    return sentences


_KINDS = {"parallel": "Parallel", "vectorized": "Vectorised", "unrolled": "Unrolled"}


def _loops(before: Anatomy, after: Anatomy) -> list[str]:
    new, gone = after.loops - before.loops, before.loops - after.loops
    sentences = []
    bound: dict[str, list[Loop]] = {}
    for loop in new:
        if loop.kind not in (*_KINDS, "serial", loop.name):
            bound.setdefault(loop.kind, []).append(loop)
    if bound:
        threads = [f"{listed(loops, 3)} to {tag}" for tag, loops in sorted(bound.items())]
        sentences.append(f"Bound: {'; '.join(threads)}.")
    for kind, title in _KINDS.items():
        if loops := sorted((loop for loop in new if loop.kind == kind), key=str):
            sentences.append(f"{title}: {listed(loops)}.")
        lost = {loop.name for loop in gone if loop.kind == kind} - {loop.name for loop in after.loops}
        if lost:
            sentences.append(f"No longer {kind} loops: {listed(sorted(lost))}.")
    serial = [loop for loop in new if loop.kind == "serial"]
    counts = [sum(count for loop, count in each.loops.items() if loop.kind == "serial") for each in (before, after)]
    if counts[0] != counts[1] or serial:
        text = f"Serial loops: {counts[1]}" + (f" instead of {counts[0]}" if counts[0] not in (0, counts[1]) else "")
        sentences.append(f"{text}{f'; new: {listed(sorted(serial, key=str))}' if serial else ''}.")
    return sentences


def _counts(what: str, before: Counter[str], after: Counter[str]) -> list[str]:
    changed = [
        f"{name} {before[name]} -> {after[name]}" if before[name] else f"{name} ({after[name]})"
        for name in sorted(after)
        if after[name] != before[name]
    ]
    gone = [name for name in sorted(before) if not after[name]]
    sentences = [f"{what}: {listed(changed)}."] if changed else []
    return sentences + ([f"No more {what[0].lower()}{what[1:]}: {listed(gone)}."] if gone else [])


def _notes(before: Counter[str], after: Counter[str]) -> list[str]:
    new, gone = sorted(after - before), sorted(before - after)
    sentences = [f"Annotated: {listed(new, 8)}."] if new else []
    kept = {note.split(" = ")[0] for note in after}
    lost = [note.split(" = ")[0] for note in gone if note.split(" = ")[0] not in kept]
    return sentences + ([f"Annotations carried out or dropped: {listed(lost, 8)}."] if lost else [])


def _attributes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    new = [f"{key} = {value}" for key, value in after.items() if before.get(key) != value]
    return [f"The function says: {listed(new, 8)}."] if new else []
