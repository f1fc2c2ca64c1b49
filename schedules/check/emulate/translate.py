"""CUDA C++ as TVM generates it to C++ that g++ compiles against `cxx/emulator.h`.

Three things of CUDA have no C++ counterpart that a macro could give: inline PTX, `__shared__` variables and the
list of kernels.  Everything else passes unchanged, and line numbers stay those of the CUDA source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from schedules.check.emulate import ptx_hopper as ptx_hopper  # adds its instructions to the table of `ptx`
from schedules.check.emulate import ptx_tcgen05 as ptx_tcgen05  # and these theirs
from schedules.check.emulate.ptx import UnknownPtxError, emit

# One token of C++: whatever lies in strings, comments and preprocessor lines must not be mistaken for code.
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      | (?P<directive>^[ \t]*\#(?:[^\n\\]|\\.)*)
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<name>[A-Za-z_]\w*)
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)
      | (?P<space>\s+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_ASM_NAMES = {"asm", "__asm__", "__asm"}
_ASM_QUALIFIERS = {"volatile", "__volatile__", "__volatile", "inline", "goto"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "'": "'"}


class Token(NamedTuple):
    """A token of the source and where it begins."""

    kind: str
    text: str
    begin: int

    @property
    def end(self) -> int:
        return self.begin + len(self.text)

    def is_code(self) -> bool:
        return self.kind not in ("comment", "space", "directive")


@dataclass(frozen=True)
class AsmOperand:
    """An operand of an asm statement."""

    constraint: str  # such as "=r", "+f", "l"
    expression: str


@dataclass(frozen=True)
class AsmStatement:
    """An asm statement: PTX, and the C++ expressions that its operands stand for."""

    text: str  # the PTX, unescaped
    outputs: tuple[AsmOperand, ...]
    inputs: tuple[AsmOperand, ...]


@dataclass(frozen=True)
class Translation:
    """CUDA C++ as the emulator compiles it."""

    source: str
    kernels: tuple[str, ...]  # the names of the __global__ functions


def tokenize(source: str) -> list[Token]:
    """The tokens of `source`, white space and comments included, so that joined they are `source`."""
    return [Token(match.lastgroup or "other", match[0], match.start()) for match in _TOKEN.finditer(source)]


def _closing(tokens: list[Token], opening: int) -> int:
    """Index of the bracket that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(tokens)):
        token = tokens[index]
        if token.kind == "other":
            depth += (token.text in "([{") - (token.text in ")]}")
            if depth == 0:
                return index
    raise ValueError("unbalanced brackets in the CUDA source")


def _split(tokens: list[Token], separator: str) -> list[list[Token]]:
    """Splits at the separators outside all brackets."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "other":
            depth += (token.text in "([{") - (token.text in ")]}")
            if token.text == separator and depth == 0:
                parts.append([])
                continue
        parts[-1].append(token)
    return parts


def _text(tokens: list[Token]) -> str:
    return "".join(token.text if token.kind not in ("space", "comment") else " " for token in tokens).strip()


def _string_value(tokens: list[Token]) -> str:
    quoted = "".join(token.text[1:-1] for token in tokens if token.kind == "string")
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), quoted)


def parse_asm(tokens: list[Token]) -> AsmStatement:
    """Parses what lies between the parentheses of an asm statement: "text" : outputs : inputs : clobbers."""
    # A C++ tokenizer would read `::` as one token; here every colon is its own, so empty lists need no special case.
    sections = _split(tokens, ":")
    operands: list[tuple[AsmOperand, ...]] = []
    for section in [*sections[1:3], [], []][:2]:
        parsed = []
        for part in _split(section, ","):
            code = [token for token in part if token.is_code()]
            if not code:
                continue
            constraint = next(token.text[1:-1] for token in code if token.kind == "string")
            opening = next(index for index, token in enumerate(part) if token.text == "(")
            parsed.append(AsmOperand(constraint, _text(part[opening:])))
        operands.append(tuple(parsed))
    text = _string_value(sections[0])
    if operands[0] or operands[1] or len(sections) > 1:
        text = text.replace("%%", "%")  # only an asm statement with operands escapes the percent sign
    return AsmStatement(text, operands[0], operands[1])


def translate_asm(statement: AsmStatement, line: int) -> str:
    """One C++ statement, without its semicolon, that does what the asm statement does."""
    try:
        body = emit(statement.text, line)
    except UnknownPtxError:
        quoted = re.sub(r"\s+", " ", statement.text).strip().replace("\\", "\\\\").replace('"', '\\"')
        return f'emu::unknown_ptx("{quoted}", {line})'
    operands = [*statement.outputs, *statement.inputs]
    declarations = [f"auto emu_{i} = emu::to_register({o.expression});" for i, o in enumerate(operands)]
    results = [f"emu::from_register({o.expression}, emu_{i});" for i, o in enumerate(statement.outputs)]
    # their results come at a later statement, until which wgmma's A is read
    if "wgmma.mma_async" in statement.text or "tcgen05.ld" in statement.text:
        outputs = [f"auto& emu_{i} = {o.expression};" for i, o in enumerate(statement.outputs)]
        first = len(outputs)
        inputs = [
            f"const auto& emu_{i} = {o.expression};" if o.constraint == "r" else declarations[i]
            for i, o in enumerate(statement.inputs, first)
        ]
        declarations, results = [*outputs, *inputs], []
    return " ".join(["do {", *declarations, body, *results, "} while (0)"])


def translate_shared(tokens: list[Token], kernel: int, number: int, dynamic: bool) -> tuple[str, int]:
    """Translates the declaration after `__shared__`, up to its semicolon, in kernel number `kernel`; returns it and the
    next free number."""
    alignment = "0"
    kept: list[Token] = []
    index = 0
    while index < len(tokens):
        if tokens[index].text in ("alignas", "__align__"):
            opening = next(i for i in range(index, len(tokens)) if tokens[i].text == "(")
            closing = _closing(tokens, opening)
            alignment, index = _text(tokens[opening + 1 : closing]), closing + 1
            continue
        kept.append(tokens[index])
        index += 1
    declarators = _split(kept, ",")
    first = [token for token in declarators[0] if token.is_code()]
    bracket = next((i for i, token in enumerate(first) if token.text == "["), len(first))
    element = " ".join(token.text for token in first[: bracket - 1])
    declarators[0] = first[bracket - 1 :]
    statements = []
    for declarator in declarators:
        name, *extents = (token for token in declarator if token.is_code())
        if dynamic:
            call = f"emu::dynamic_shared<{element}, ({alignment})>()"
            statements.append(f"{element}* {name.text} = {call};")
        else:
            variable = f"{element}{''.join(token.text for token in extents)}"
            statements.append(
                f"auto& {name.text} = emu::shared_variable<{variable}, ({alignment}), {kernel}, {number}>();"
            )
            number += 1
    return " ".join(statements), number


def find_kernels(tokens: list[Token]) -> dict[str, int]:
    """The names of the __global__ functions, in order, and the tokens that their definitions begin with: their last
    declarations."""
    places = [place for place, token in enumerate(tokens) if token.is_code()]
    code = [tokens[place] for place in places]
    names: dict[str, int] = {}
    for start, token in enumerate(code):
        if token.text != "__global__":
            continue
        index = start + 1
        while index + 1 < len(code):
            if code[index + 1].text == "(" and code[index].kind == "name":
                if not code[index].text.startswith("__"):  # an attribute such as __launch_bounds__ otherwise
                    names[code[index].text] = places[start]
                    break
                index = _closing(code, index + 1)
            index += 1
    return names


def translate(source: str) -> Translation:
    """Translates a CUDA source; PTX the emulator does not know fails when it is executed, not here.

    Raises:
        ValueError: if brackets do not match.
    """
    tokens = tokenize(source)
    output: list[str] = []
    index, shared_number, line = 0, 0, 1
    kernels = find_kernels(tokens)
    begins = list(kernels.values())
    pending_extern = -1  # where the `extern` of an `extern __shared__` stands in `output`

    def skip_to(stop: int, replacement: str) -> None:
        """Replaces the tokens up to `stop`, keeping the line count."""
        nonlocal index, line
        lines = sum(token.text.count("\n") for token in tokens[index:stop])
        output.append(replacement + "\n" * lines)
        line += lines
        index = stop

    while index < len(tokens):
        token = tokens[index]
        if token.kind == "name" and token.text in _ASM_NAMES:
            opening = index + 1
            while not tokens[opening].is_code() or tokens[opening].text in _ASM_QUALIFIERS:
                opening += 1
            if tokens[opening].text == "(":
                closing = _closing(tokens, opening)
                skip_to(closing + 1, translate_asm(parse_asm(tokens[opening + 1 : closing]), line))
                continue
        if token.text == "__shared__":
            semicolon = next(i for i in range(index, len(tokens)) if tokens[i].text == ";")
            dynamic = pending_extern >= 0
            if dynamic:
                output[pending_extern] = ""
            # one of a function before all kernels is the first's
            before = [(begin, number) for number, begin in enumerate(begins) if begin <= index]
            _, kernel = max(before, default=(0, 0))
            declaration, shared_number = translate_shared(tokens[index + 1 : semicolon], kernel, shared_number, dynamic)
            skip_to(semicolon + 1, declaration)
            pending_extern = -1
            continue
        if token.is_code():
            pending_extern = len(output) if token.text == "extern" else -1
        output.append(token.text)
        line += token.text.count("\n")
        index += 1
    exports = "".join(f"\nEMU_EXPORT_KERNEL({name}, {number})" for number, name in enumerate(kernels))
    return Translation("".join(output) + exports + "\n", tuple(kernels))
