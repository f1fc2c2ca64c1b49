"""Inline PTX to C++ statements over the emulator's functions.

Every PTX register is kept in an unsigned C++ integer of its width (`.pred` in a bool); the meaning of the bits comes
from the instruction.  Opcodes are those of the PTX ISA; an instruction missing from the table below, to which
`ptx_hopper` and `ptx_tcgen05` add, raises `UnknownPtxError`, which the caller turns into a failure at run time, not at
translation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


class UnknownPtxError(Exception):
    """PTX that the emulator does not know."""


@dataclass(frozen=True)
class Operand:
    """One operand: kind "value" (register, number or special register), "address" ([..]) or "vector" ({..})."""

    kind: str
    text: str = ""
    elements: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: str = ""  # name of the predicate register
    negated: bool = False
    labels: tuple[str, ...] = ()  # that stand before it


@dataclass
class Program:
    """What one asm statement holds: registers it declares (name to C++ type) and its instructions."""

    registers: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for instruction in self.instructions for label in instruction.labels)


_SPECIAL_REGISTERS = {
    "%laneid": "emu::lane_id()",
    "%nlaneid": "32",
    "%cluster_ctarank": "emu::position.cluster_rank",
    "%cluster_nctarank": "emu::cluster_blocks()",
    **{f"%cluster_nctaid.{axis}": f"emu::position.cluster_size.{axis}" for axis in "xyz"},
    **{f"%cluster_ctaid.{axis}": f"(blockIdx.{axis} % emu::position.cluster_size.{axis})" for axis in "xyz"},
    **{f"%clusterid.{axis}": f"(blockIdx.{axis} / emu::position.cluster_size.{axis})" for axis in "xyz"},
    **{f"%nclusterid.{axis}": f"(gridDim.{axis} / emu::position.cluster_size.{axis})" for axis in "xyz"},
    **{f"%{name}.{axis}": f"{variable}.{axis}" for axis in "xyz" for name, variable in (
        ("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"))},
}  # fmt: skip

_LABEL = re.compile(r"([A-Za-z_$][\w$]*)\s*:(?!:)[{}\s]*")
_STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


def parse(text: str) -> Program:
    """Parses the text of an asm statement (after string concatenation and unescaping).

    Raises:
        UnknownPtxError: for anything that is not a declaration, a label or an instruction.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = text.replace("%=", "")  # a number for each asm statement: labels are local to it here
    program = Program()
    labels: tuple[str, ...] = ()
    for statement in text.split(";"):
        # Braces that open or close a scope stand where a statement begins; those of vectors follow an opcode.
        statement = statement.strip().lstrip("{} \t\n").strip()
        while label := _LABEL.match(statement):
            labels += (label[1].replace("$", "_"),)
            statement = statement[label.end() :]
        if not statement:
            continue
        if statement.startswith(".reg"):
            program.registers.update(_parse_registers(statement))
            continue
        match = _STATEMENT.fullmatch(statement)
        if match is None:
            raise UnknownPtxError(statement)
        negated, guard, opcode, operands = match.groups()
        parsed = tuple(_parse_operand(part) for part in _split(operands))
        program.instructions.append(Instruction(opcode, parsed, guard or "", bool(negated), labels))
        labels = ()
    if labels:  # at the end
        program.instructions.append(Instruction("", (), labels=labels))
    return program


def _parse_registers(statement: str) -> Iterator[tuple[str, str]]:
    match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL)
    if match is None:
        raise UnknownPtxError(statement)
    kind, names = match.groups()
    cxx_type = "bool" if kind == "pred" else "uint64_t" if kind.endswith("64") else "uint32_t"
    for name in (name.strip() for name in names.split(",")):
        counted = re.fullmatch(r"(%?\w+)<(\d+)>", name)
        if counted:
            yield from ((f"{counted[1]}{i}", cxx_type) for i in range(int(counted[2])))
        else:
            yield name, cxx_type


def _split(text: str) -> list[str]:
    """Splits at the commas outside braces and brackets."""
    parts, depth, begin = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append(text[begin:position].strip())
            begin = position + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def _parse_operand(text: str) -> Operand:
    if text.startswith("["):
        return Operand("address", text[1:-1].strip())
    if text.startswith("{"):
        return Operand("vector", elements=tuple(_parse_operand(part) for part in _split(text[1:-1])))
    return Operand("value", text)


class Emitter:
    """C++ for the instructions of one asm statement; `line` is its line in the kernel source."""

    def __init__(self, program: Program, line: int) -> None:
        self.program, self.line = program, line

    def name(self, text: str) -> str:
        """The C++ name (or value) of a register, number or special register."""
        if re.fullmatch(r"%\d+", text):
            return f"emu_{text[1:]}"
        if text in self.program.registers:
            return "ptx_" + text.replace("%", "")
        if text in _SPECIAL_REGISTERS:
            return _SPECIAL_REGISTERS[text]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return f"0x{text[2:]}u"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)[uU]?", text):
            return text
        raise UnknownPtxError(text)

    def value(self, operand: Operand) -> str:
        if operand.kind != "value":
            raise UnknownPtxError(operand.kind)
        return self.name(operand.text)

    def address(self, operand: Operand) -> str:
        match = re.fullmatch(r"(%?\w+)\s*(?:\+\s*(-?\d+))?", operand.text)
        if operand.kind != "address" or match is None:
            raise UnknownPtxError(operand.text)
        return f"({self.name(match[1])} + {match[2] or 0})"

    def vector(self, operand: Operand) -> list[str]:
        return [self.value(element) for element in (operand.elements if operand.kind == "vector" else (operand,))]

    def array(self, name: str, operand: Operand) -> str:
        """Declares a C++ array of the elements."""
        return f"const uint32_t {name}[] = {{{', '.join(f'uint32_t({value})' for value in self.vector(operand))}}};"

    def statement(self, instruction: Instruction) -> str:
        labels = "".join(f"ptx_{label}: " for label in instruction.labels)
        code = self._code(instruction) if instruction.opcode else ";"
        if not instruction.guard:
            return f"{labels}{{ {code} }}"
        negation = "!" if instruction.negated else ""
        return f"{labels}if ({negation}{self.name(instruction.guard)}) {{ {code} }}"

    def _code(self, instruction: Instruction) -> str:
        for pattern, emit_instruction in _TABLE:
            match = re.fullmatch(pattern, instruction.opcode)
            if match is None:
                continue
            try:
                return emit_instruction(self, match, instruction.operands)
            except (IndexError, ValueError) as error:  # not the operands this instruction takes
                raise UnknownPtxError(instruction.opcode) from error
        raise UnknownPtxError(instruction.opcode)


Emit = Callable[[Emitter, "re.Match[str]", Sequence[Operand]], str]
_TABLE: list[tuple[str, Emit]] = []


def defines(pattern: str) -> Callable[[Emit], Emit]:
    """Registers the C++ for the opcodes that match `pattern`; the first registered pattern that matches is taken."""

    def register(emit: Emit) -> Emit:
        _TABLE.append((pattern, emit))
        return emit

    return register


_WORD = re.compile(r"\{(?:(at|has|word) )?(\d|line)\}")


def says(pattern: str, text: str) -> None:
    """Registers `text` for the opcodes that match `pattern`: {0} is the value of operand 0, {at 0} the address in it,
    {word 1} group 1 of the pattern, {has 1} whether it matched (true or false), {line} the line.  It has all operands,
    unless it has no word at all."""

    def emit(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
        taken = {int(word[2]) for word in _WORD.finditer(text) if word[1] in (None, "at") and word[2] != "line"}
        if text and len(taken) != len(operands):
            raise UnknownPtxError(f"{match[0]} with {len(operands)} operands")

        def put(word: re.Match[str]) -> str:
            kind, number = word.groups()
            if number == "line":
                return str(emitter.line)
            if kind == "has":
                return "true" if match[int(number)] else "false"
            if kind == "word":
                return str(match[int(number)])
            return (emitter.address if kind else emitter.value)(operands[int(number)])

        return _WORD.sub(put, text)

    _TABLE.append((pattern, emit))


# ---- Asynchronous copies ----


@defines(r"cp\.async\.c[ag]\.shared(?:::cta)?\.global((?:\.L2::\w+)*)")
def _copy(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, source, size, *rest = operands[:-1] if "cache_hint" in match[1] else operands
    bytes_ = emitter.value(size)
    source_bytes = bytes_
    if rest:
        source_bytes = emitter.value(rest[0])
        if emitter.program.registers.get(rest[0].text) == "bool":  # the `ignore-src` form
            source_bytes = f"({source_bytes} ? 0 : {bytes_})"
    source_pointer = f"(const void*){emitter.address(source)}"
    return f"emu::async_copy({emitter.address(target)}, {source_pointer}, {bytes_}, {source_bytes}, {emitter.line});"


says(r"cp\.async\.commit_group", "emu::async_commit();")
says(r"cp\.async\.wait_group", "emu::async_wait_group({0});")
says(r"cp\.async\.wait_all", "emu::async_wait_all();")


# ---- Matrices ----


@defines(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _ldmatrix(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    targets, count = emitter.vector(operands[0]), int(match[1])
    if len(targets) != count:
        raise UnknownPtxError(match[0])
    transpose = "true" if match[2] else "false"
    stores = " ".join(f"{target} = words[{i}];" for i, target in enumerate(targets))
    address = emitter.address(operands[1])
    return f"uint32_t words[4]; emu::load_matrix(words, {count}, {transpose}, {address}, {emitter.line}); {stores}"


# Input types and accumulator types of each shape that mma.sync knows here.
_FLOAT_SUMS, _INT_SUMS, _BYTES = {"f32"}, {"s32"}, ("s8", "u8")
_MMA: dict[tuple[int, int, int], dict[str, set[str]]] = {
    (16, 8, 16): {"f16": {"f16", "f32"}, "bf16": _FLOAT_SUMS, "s8": _INT_SUMS, "u8": _INT_SUMS},
    (16, 8, 8): {"f16": {"f16", "f32"}, "bf16": _FLOAT_SUMS, "tf32": _FLOAT_SUMS},
    (16, 8, 4): {"tf32": _FLOAT_SUMS},
    (16, 8, 32): {"s8": _INT_SUMS, "u8": _INT_SUMS},
    (8, 8, 16): {"s8": _INT_SUMS, "u8": _INT_SUMS},
}


@defines(r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.row\.col(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)\.(\w+)")
def _mma(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    m, n, k = (int(group) for group in match.groups()[:3])
    saturate, d_type, a_type, b_type, c_type = match.groups()[3:]
    mixed_bytes = a_type in _BYTES and b_type in _BYTES
    sums = _MMA.get((m, n, k), {}).get(a_type, set())
    if d_type != c_type or d_type not in sums or not (a_type == b_type or mixed_bytes):
        raise UnknownPtxError(match[0])
    bits = {"s8": 8, "u8": 8, "f16": 16, "bf16": 16, "tf32": 32}[a_type]
    sum_words = m * n // 32 // (2 if d_type == "f16" else 1)
    targets = emitter.vector(operands[0])
    counts = [len(emitter.vector(operand)) for operand in operands]
    if counts != [sum_words, m * k * bits // 1024, k * n * bits // 1024, sum_words]:
        raise UnknownPtxError(f"{match[0]} with {counts} registers")
    types = ", ".join(f"emu::Element::{name}" for name in (a_type, b_type, d_type))
    arrays = " ".join(emitter.array(name, operand) for name, operand in zip("abc", operands[1:], strict=True))
    stores = " ".join(f"{target} = words[{i}];" for i, target in enumerate(targets))
    return (
        f"static const emu::MatrixShape shape = {{{m}, {n}, {k}, {types}, {'true' if saturate else 'false'}}}; "
        f"uint32_t words[4]; {arrays} emu::multiply_matrices(shape, words, a, b, c, {emitter.line}); {stores}"
    )


says(r"dp4a\.(?:(s)|u)32\.(?:(s)|u)32", "{0} = emu::dot4({1}, {has 1}, {2}, {has 2}, {3});")
says(r"prmt\.b32", "{0} = __byte_perm({1}, {2}, {3});")


# ---- Barriers and fences ----


@defines(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?")
def _barrier(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    identifier = emitter.value(operands[0])
    count = emitter.value(operands[1]) if len(operands) > 1 else "0"
    wait = "true" if match[1] == "sync" else "false"
    return f"emu::named_barrier({identifier}, {count}, {wait}, {emitter.line});"


says(r"bar\.warp\.sync", "emu::sync_warp({0}, {line});")
says(r"(?:fence(?!\.proxy\.async|\.mbarrier_init)|membar|prefetch|prefetchu|griddepcontrol)(?:\.[\w:]+)*", "")


@defines(r"bra(?:\.uni)?")
def _branch(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    (label,) = operands
    name = label.text.replace("$", "_")
    if name not in emitter.program.labels:
        raise UnknownPtxError(f"bra {label.text}")
    return f"goto ptx_{name};"


says(r"activemask\.b32", "{0} = emu::active_mask({line});")


# ---- Loads and stores ----

_MODIFIERS = r"(?:\.(?:weak|nc|volatile|relaxed|cta|gpu|sys|ca|cg|cs|lu|cv|wb|wt|L1::\w+|L2::\w+))*"
_SPACE = r"\.(global|shared|shared::cta|shared::cluster)"


def _memory(emitter: Emitter, space: str, address: Operand, size: int, line: int, what: str) -> str:
    pointer = emitter.address(address)
    if space == "global":
        return f"(char*){pointer}"
    function = "shared_pointer" if space == "shared::cluster" else "own_shared_pointer"
    return f'emu::{function}({pointer}, {size}, {size}, "{what}", {line})'


@defines(rf"ld{_MODIFIERS}{_SPACE}{_MODIFIERS}(?:\.v([24]))?\.[busf](8|16|32|64)")
def _load(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    space, lanes, bits = match[1], int(match[2] or 1), int(match[3])
    targets = emitter.vector(operands[0])
    if len(targets) != lanes:
        raise UnknownPtxError(match[0])
    memory = _memory(emitter, space, operands[1], lanes * bits // 8, emitter.line, "ld.shared")
    loads = " ".join(f"{t} = emu::load<uint{bits}_t>(from + {i * bits // 8});" for i, t in enumerate(targets))
    return f"const char* from = {memory}; {loads}"


@defines(rf"st{_MODIFIERS}{_SPACE}{_MODIFIERS}(?:\.v([24]))?\.[busf](8|16|32|64)")
def _store(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    space, lanes, bits = match[1], int(match[2] or 1), int(match[3])
    values = emitter.vector(operands[1])
    if len(values) != lanes:
        raise UnknownPtxError(match[0])
    memory = _memory(emitter, space, operands[0], lanes * bits // 8, emitter.line, "st.shared")
    stores = " ".join(f"emu::store<uint{bits}_t>(to + {i * bits // 8}, {v});" for i, v in enumerate(values))
    return f"char* to = {memory}; {stores}"


# ---- Registers and arithmetic ----


says(r"cvta\.to\.shared\.u(?:32|64)", "{0} = emu::shared_address((const void*){1}, {line});")
says(r"mov\.[busf](?:16|32|64)|cvt\.u32\.u64|cvt\.u64\.u32|cvta\.to\.global\.u64", "{0} = {1};")


@defines(r"cvt\.rn\.(f16|bf16)x2\.f32")
def _to_halves(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, high, low = (emitter.value(operand) for operand in operands)
    encode = f"emu::{'HalfFormat' if match[1] == 'f16' else 'BFloatFormat'}::encode"
    return f"{target} = uint32_t({encode}(emu::as_float({high}))) << 16 | {encode}(emu::as_float({low}));"


says(r"cvt\.pack\.sat\.s8\.s32\.b32", "{0} = {3} << 16 | emu::saturate_byte({1}) << 8 | emu::saturate_byte({2});")
says(r"cvt\.rna\.tf32\.f32", "{0} = (uint32_t({1}) + 0x1000u) & 0xffffe000u;")


def _typed(value: str, kind: str) -> str:
    """A register read as the type of an instruction."""
    if kind == "f32":
        return f"emu::as_float({value})"
    sign, bits = ("" if kind[0] == "s" else "u"), kind[1:]
    return f"{sign}int{bits}_t({value})"


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@defines(r"setp\.(eq|ne|lt|le|gt|ge)\.([bus](?:16|32|64)|f32)")
def _compare(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, a, b = (emitter.value(operand) for operand in operands)
    return f"{target} = {_typed(a, match[2])} {_COMPARISONS[match[1]]} {_typed(b, match[2])};"


says(r"selp\.[busf](?:16|32|64)", "{0} = {3} ? {1} : {2};")


_INTEGER_OPERATORS = {
    "add": "+",
    "sub": "-",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shl": "<<",
    "shr": ">>",
    "mul.lo": "*",
}


@defines(r"(add|sub|and|or|xor|shl|shr|mul\.lo)\.([bus](?:32|64))")
def _integer(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, a, b = (emitter.value(operand) for operand in operands)
    return f"{target} = {_typed(a, match[2])} {_INTEGER_OPERATORS[match[1]]} {_typed(b, match[2])};"


says(r"mul\.wide\.u32", "{0} = uint64_t(uint32_t({1})) * uint32_t({2});")


_FLOAT_FUNCTIONS = {
    "ex2": "exp2f", "lg2": "log2f", "rcp": "__frcp_rn", "rsqrt": "rsqrtf", "sqrt": "sqrtf", "tanh": "tanhf",
    "sin": "sinf", "cos": "cosf", "abs": "fabsf", "neg": "-",
}  # fmt: skip


@defines(rf"({'|'.join(_FLOAT_FUNCTIONS)})(?:\.approx|\.rn)?(?:\.ftz)?\.f32")
def _float_function(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, value = (emitter.value(operand) for operand in operands)
    return f"{target} = __float_as_uint({_FLOAT_FUNCTIONS[match[1]]}(emu::as_float({value})));"


@defines(r"(add|sub|mul)(?:\.rn)?(?:\.ftz)?\.f32")
def _float_binary(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, a, b = (emitter.value(operand) for operand in operands)
    operator = {"add": "+", "sub": "-", "mul": "*"}[match[1]]
    return f"{target} = __float_as_uint(emu::as_float({a}) {operator} emu::as_float({b}));"


_FMA = "fmaf(emu::as_float({1}), emu::as_float({2}), emu::as_float({3}))"
says(r"fma\.rn(?:\.ftz)?\.f32", f"{{0}} = __float_as_uint({_FMA});")
says(r"fma\.rn\.sat\.f32", f"{{0}} = __float_as_uint(__saturatef({_FMA}));")


def emit(text: str, line: int) -> str:
    """C++ statements, on one line, that do what the PTX `text` does.

    Operand `%i` is the C++ variable `emu_i`, an unsigned integer as wide as the operand.

    Raises:
        UnknownPtxError: if any instruction is not known.
    """
    program = parse(text)
    emitter = Emitter(program, line)
    labels = f"__label__ {', '.join(f'ptx_{label}' for label in program.labels)};" if program.labels else ""
    declarations = [f"{kind} {emitter.name(name)}{{}};" for name, kind in program.registers.items()]
    statements = [*declarations, *(emitter.statement(instruction) for instruction in program.instructions)]
    return f"{{ {labels} {' '.join(statements)} }}" if labels else " ".join(statements)
