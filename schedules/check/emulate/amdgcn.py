"""LLVM IR for AMD GPUs, as TVM hands it to LLVM's backend, to LLVM IR for this CPU.

Address spaces become plain memory, and variables in LDS such between guard pages.  A call of an intrinsic
`llvm.amdgcn.*` becomes one of the emulator's function of that name (cxx/amdgcn.cc), which is given the result, the
operands in memory and the line of the IR; a name that it lacks is told when the kernel is loaded.  All other
intrinsics are LLVM's own on every target.
"""

from __future__ import annotations

import re

_PAGE, _GUARD = 4096, 256 << 10  # as in cxx/shared_memory.cc
_MOST_SHARED = 256  # as in cxx/launch.h
_DEBUG = 10**6  # the first number of the metadata that is added

_TYPE = r"(?:<\d+ x \w+>|\[[^\]]*\]|\{[^}]*\}|ptr|i\d+|half|bfloat|float|double|void)"
_NAME = r'@("[^"]+"|[\w.$-]+)'
_SPACE = re.compile(r",? addrspace\(\d+\)")
_SHARED = re.compile(rf"{_NAME} = .*?addrspace\(3\) global (.+?) (?:undef|poison|zeroinitializer)(?:, align (\d+))?$")
_DECLARED = re.compile(rf"declare .*?({_TYPE}) @llvm\.amdgcn\.([\w.]+)\((.*)\)(?: #\d+)?$")
_FUNCTION = re.compile(rf"define .*?{_NAME}\((.*?)\)[^()]*\{{$")
_ENDS = re.compile(r"^\S+:|^\s*store |= (?:atomicrmw|cmpxchg) ")  # what a release before it says nothing of
_ACCESS = re.compile(r"(?:= (?:load|atomicrmw|cmpxchg)|^\s*store) ")
_RELEASE = re.compile(r'\s*fence (?:syncscope\("(?:workgroup|agent)"\) )?(?:release|acq_rel|seq_cst)')
_OVERLOAD = re.compile(r"(?:\.(?:v\d+)?(?:i|f|bf|p)\d+)+$")  # types at the end of an intrinsic's name
_FAMILY = re.compile(r"(?:mfma|wmma)\b")  # whose names have types that are none of an overload
_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64}
_VALUE = "{ ptr, i64 }"  # `emu::Value`


def translate_ir(source: str, target: str) -> str:
    """LLVM IR that exports `emu_kernel_<name>` for each kernel of `source`, to be compiled for TVM's `target` (JSON).

    Raises ValueError for what cannot be emulated.
    """
    return _Translation().module(source, target)


class _Translation:
    def __init__(self) -> None:
        self.declarations: dict[str, None] = {}
        self.intrinsics: dict[str, str] = {}  # the functions that stand for them
        self.shared: list[tuple[str, str, int, int]] = []  # name, type, bytes and alignment of variables
        self.kernels: dict[str, list[str]] = {}  # the types of their parameters
        self.metadata = [
            f"distinct !DICompileUnit(language: DW_LANG_C, file: !{_DEBUG + 1}, emissionKind: LineTablesOnly)",
            '!DIFile(filename: "kernel.ll", directory: "/")',
            f"!DISubroutineType(types: !{_DEBUG + 3})",
            "!{}",
        ]
        self.scope = ""  # of the function that is being translated
        self.released = False  # whether stores before this line are waited for

    def module(self, source: str, target: str) -> str:
        self.intrinsic("lockstep", "void", [])
        self.intrinsic("s.barrier.bare", "void", [])
        body = [self.line(line, number) for number, line in enumerate(_without_unused(source), 1)]
        if not self.kernels:
            raise ValueError("the LLVM IR has no amdgpu_kernel")
        kernels = [_exported(name, types) for name, types in self.kernels.items()]
        parts = [*body, *self.intrinsics.values(), self.layout(), *kernels, *self.declarations, self.end(target)]
        return "\n".join(part for part in parts if part) + "\n"

    def line(self, line: str, number: int) -> str:
        if line.startswith(("target ", "attributes ", ";")):
            return ""
        if " asm " in line:
            raise ValueError(f"line {number}: inline assembly of AMD GPUs is not emulated")
        if "addrspace(3) global" in line:
            self.share(line)
            return ""
        if line.startswith("declare "):
            self.declare(line)
            return ""
        if line.startswith("define "):
            return self.define(line, number)
        locked = " volatile " in line and "addrspace(3)" in line
        line = _plain(line)
        if _ENDS.search(line) or _RELEASE.match(line):
            self.released = bool(_RELEASE.match(line))
        if "@llvm.amdgcn." in line:
            if not self.released:
                line = line.replace("@llvm.amdgcn.s.barrier(", "@llvm.amdgcn.s.barrier.bare(")
            opening = line.index("(", line.index("@llvm.amdgcn."))
            closing = _closing(line, opening)
            comma = ", " if closing > opening + 1 else ""
            return f"{line[:closing]}{comma}i32 {number}{line[closing:]}".replace("@llvm.amdgcn.", "@emu.call.")
        if _ACCESS.search(line):
            line += f", !dbg {self.add(f'!DILocation(line: {number}, scope: {self.scope})')}"
        return f"  call void @emu.call.lockstep(i32 {number})\n{line}" if locked else line

    def add(self, metadata: str) -> str:
        self.metadata.append(metadata)
        return f"!{_DEBUG + len(self.metadata) - 1}"

    def share(self, line: str) -> None:
        shared = _SHARED.match(line)
        if not shared:
            raise ValueError(f"LDS of a size that the launch gives is not emulated: {line}")
        kind = _SPACE.sub("", shared[2])
        self.shared.append((shared[1], kind, _bytes(kind), int(shared[3] or 16)))

    def declare(self, line: str) -> None:
        declared = _DECLARED.match(_SPACE.sub("", line))
        if declared:
            self.intrinsic(declared[2], declared[1], _types(declared[3]))
        else:
            self.declarations[_plain(line)] = None

    def define(self, line: str, number: int) -> str:
        line = _plain(line)
        function = _FUNCTION.match(line)
        if not function:
            raise ValueError(f"line {number}: the emulator cannot read {line}")
        name = function[1].strip('"')
        self.scope = self.add(
            f'distinct !DISubprogram(name: "{name}", file: !{_DEBUG + 1}, line: {number}, type: !{_DEBUG + 2}, '
            f"unit: !{_DEBUG}, spFlags: DISPFlagDefinition)"
        )
        if " amdgpu_kernel " in line:
            self.kernels[name] = _types(function[2])
            line = line.replace(" amdgpu_kernel ", " ").replace(" dllexport ", " ")
        return f"{line.removesuffix('{')}!dbg {self.scope} {{"

    def intrinsic(self, name: str, result: str, operands: list[str]) -> None:
        """A function for `llvm.amdgcn.<name>` that puts its operands in memory and calls the emulator's."""
        family = _FAMILY.match(name)
        function = f"@emu.amdgcn.{family[0] if family else _OVERLOAD.sub('', name)}"
        self.declarations[f"declare void {function}(ptr, ptr, ptr, i32)"] = None
        kinds = [*operands, "i8" if result == "void" else result]
        lines = [f"  %values = alloca [{len(kinds)} x {_VALUE}]"]
        for i, kind in enumerate(kinds):
            lines += [
                f"  %m{i} = alloca {kind}",
                f"  %p{i} = getelementptr {_VALUE}, ptr %values, i32 {i}",
                f"  %q{i} = getelementptr {_VALUE}, ptr %values, i32 {i}, i32 1",
                f"  store ptr %m{i}, ptr %p{i}",
                f"  store i64 ptrtoint (ptr getelementptr ({kind}, ptr null, i32 1) to i64), ptr %q{i}",
            ]
        lines += [f"  store {kind} %a{i}, ptr %m{i}" for i, kind in enumerate(operands)]
        last = len(operands)
        lines += [f"  call void {function}(ptr @emu.name.{name}, ptr %p{last}, ptr %values, i32 %line)"]
        lines += ["  ret void"] if result == "void" else [f"  %r = load {result}, ptr %m{last}", f"  ret {result} %r"]
        parameters = [*(f"{kind} %a{i}" for i, kind in enumerate(operands)), "i32 %line"]
        self.intrinsics[name] = "\n".join(
            [
                f'@emu.name.{name} = private constant [{len(name) + 1} x i8] c"{name}\\00"',
                f"define internal {result} @emu.call.{name}({', '.join(parameters)}) {{",
                *lines,
                "}",
            ]
        )

    def layout(self) -> str:
        """The variables in LDS, each before and behind a guard, and `emu::SharedLayout` of them."""
        if len(self.shared) > _MOST_SHARED:
            raise ValueError(f"{len(self.shared)} variables in LDS; at most {_MOST_SHARED} are emulated")
        lines, missing = [], _MOST_SHARED - len(self.shared)
        for name, kind, size, alignment in self.shared:
            pages = max(1, -(-size // _PAGE)) * _PAGE
            offset = _GUARD + (pages - size) // alignment * alignment
            memory = '@"emu.memory.' + name.strip('"') + '"'
            lines += [
                f"{memory} = internal global [{2 * _GUARD + pages} x i8] zeroinitializer, align {_PAGE}",
                f"@{name} = internal alias {kind}, ptr getelementptr (i8, ptr {memory}, i64 {offset})",
            ]
        columns = {
            "i64 size": [f"i64 {size}" for _, _, size, _ in self.shared] + ["i64 0"] * missing,
            "i64 alignment": [f"i64 {alignment}" for *_, alignment in self.shared] + ["i64 0"] * missing,
            "ptr address": [f"ptr @{name}" for name, *_ in self.shared] + ["ptr null"] * missing,
        }
        types = ", ".join(f"[{_MOST_SHARED} x {column.split()[0]}]" for column in columns)
        values = ", ".join(
            f"[{_MOST_SHARED} x {column.split()[0]}] [{', '.join(column_values)}]"
            for column, column_values in columns.items()
        )
        counts = f"i32 {len(self.shared)}, i32 1"
        return "\n".join([*lines, f"@emu.shared = internal global {{ i32, i32, {types} }} {{ {counts}, {values} }}"])

    def end(self, target: str) -> str:
        escaped = target.replace("\\", "\\5C").replace('"', "\\22")
        target_flag = self.add(f'!{{i32 2, !"tvm_target", !"{escaped}"}}')
        debug_flag = self.add('!{i32 2, !"Debug Info Version", i32 3}')
        numbered = [f"!{_DEBUG + index} = {text}" for index, text in enumerate(self.metadata)]
        named = [f"!llvm.dbg.cu = !{{!{_DEBUG}}}", f"!llvm.module.flags = !{{{target_flag}, {debug_flag}}}"]
        return "\n".join([*numbered, *named])


def _without_unused(source: str) -> list[str]:
    """The lines of `source`, empty those of functions that nothing calls: TVM adds conversions of halves to each
    module, whose names a CPU has for others."""
    lines, skipping = source.splitlines(), False
    for index, line in enumerate(lines):
        function = _FUNCTION.match(line) if "amdgpu_kernel" not in line else None
        skipping |= bool(function and len(re.findall(rf"@{re.escape(function[1])}\b", source)) == 1)
        if skipping:
            lines[index], skipping = "", line != "}"
    return lines


def _plain(line: str) -> str:
    """`line` without what only AMD GPUs have."""
    line = re.sub(r" #\d+\b", "", _SPACE.sub("", line)).replace("addrspacecast", "bitcast")
    return re.sub(r"@llvm\.(?!amdgcn)[\w.]+", lambda name: re.sub(r"\.p\d\b", ".p0", name[0]), line)


def _closing(line: str, opening: int) -> int:
    """Where the bracket at `opening` is closed."""
    depth = 0
    for index in range(opening, len(line)):
        depth += (line[index] == "(") - (line[index] == ")")
        if not depth:
            return index
    raise ValueError(f"the emulator cannot read {line.strip()}")


def _types(parameters: str) -> list[str]:
    """The types of a list of parameters, address spaces left out."""
    return re.findall(rf"(?:^|, )({_TYPE})(?![\w)])", parameters)


def _bytes(kind: str) -> int:
    """The size of a variable of LLVM's type `kind`."""
    array = re.fullmatch(r"[\[<](\d+) x (.+)[\]>]", kind)
    if array:
        return int(array[1]) * _bytes(array[2])
    integer = re.fullmatch(r"i(\d+)", kind)
    bits = int(integer[1]) if integer else _BITS.get(kind)
    if not bits:
        raise ValueError(f"a variable in LDS of the type {kind} is not emulated")
    return -(-bits // 8)


def _exported(name: str, types: list[str]) -> str:
    """`emu_kernel_<name>`, an `emu::Kernel`, and the function that unpacks its arguments."""
    lines = []
    for i, kind in enumerate(types):
        lines += [
            f"  %c{i} = getelementptr ptr, ptr %cells, i32 {i}",
            f"  %p{i} = load ptr, ptr %c{i}",
            f"  %a{i} = load {kind}, ptr %p{i}",
        ]
    arguments = ", ".join(f"{kind} %a{i}" for i, kind in enumerate(types))
    kernel = f"{{ ptr @emu.run.{name}, ptr @emu.shared, i32 {len(types)} }}"
    return "\n".join(
        [
            f"define internal void @emu.run.{name}(ptr %cells) {{",
            *lines,
            f"  call void @{name}({arguments})",
            "  ret void",
            "}",
            f"@emu_kernel_{name} = constant {{ ptr, ptr, i32 }} {kernel}",
        ]
    )
