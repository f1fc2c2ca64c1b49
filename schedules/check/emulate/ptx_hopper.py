"""Inline PTX of sm_90: mbarriers, bulk copies, clusters, wgmma.  Importing it adds to the table of `ptx`.

Section names are those of the PTX ISA.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from schedules.check.emulate.ptx import Emitter, Operand, UnknownPtxError, defines, says

_SHARED = r"\.shared(?:::cta|::cluster)?"
_ORDER = r"(?:\.(?:release|acquire|relaxed)\.(?:cta|cluster))?"

# ---- "Parallel Synchronization and Communication Instructions: mbarrier" ----


def _result(emitter: Emitter, operand: Operand, expression: str) -> str:
    """Assigns to a register, or to nothing where the operand is `_`."""
    return f"{expression};" if operand.text == "_" else f"{emitter.value(operand)} = {expression};"


says(rf"mbarrier\.init{_SHARED}\.b64", "emu::mbarrier_init({at 0}, {1}, {line});")
says(rf"mbarrier\.inval{_SHARED}\.b64", "emu::mbarrier_invalidate({at 0}, {line});")


@defines(rf"mbarrier\.(arrive|arrive_drop){_ORDER}{_SHARED}\.b64")
def _arrive(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    # A remote arrival may leave out the state.
    state, address, *rest = operands if operands[0].kind == "value" else (Operand("value", "_"), *operands)
    count = emitter.value(rest[0]) if rest else "1"
    return _result(emitter, state, f"emu::mbarrier_{match[1]}({emitter.address(address)}, {count}, {emitter.line})")


@defines(rf"mbarrier\.arrive\.expect_tx{_ORDER}{_SHARED}\.b64")
def _arrive_expect(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    state, address, size = operands if operands[0].kind == "value" else (Operand("value", "_"), *operands)
    call = f"emu::mbarrier_arrive_expect({emitter.address(address)}, {emitter.value(size)}, {emitter.line})"
    return _result(emitter, state, call)


says(
    rf"mbarrier\.(expect|complete)_tx(?:\.relaxed\.(?:cta|cluster))?{_SHARED}\.b64",
    "emu::mbarrier_{word 1}({at 0}, {1}, {line});",
)


@defines(rf"mbarrier\.(try|test)_wait(\.parity)?{_ORDER}{_SHARED}\.b64")
def _wait(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, address, state = operands[:3]  # a fourth is a time limit: waits never end early
    function = f"emu::mbarrier_{match[1]}_wait{'_parity' if match[2] else ''}"
    return f"{emitter.value(target)} = {function}({emitter.address(address)}, {emitter.value(state)}, {emitter.line});"


says(rf"cp\.async\.mbarrier\.arrive(\.noinc)?{_SHARED}\.b64", "emu::async_arrive({at 0}, {has 1}, {line});")


# ---- Clusters, elections, registers ----


says(rf"mapa{_SHARED}\.u(?:32|64)", "{0} = emu::shared_address_in({1}, {2}, {line});")
says(
    r"barrier\.cluster\.(arrive|wait)(?:\.release|\.acquire|\.relaxed)?(?:\.aligned)?", "emu::cluster_{word 1}({line});"
)


@defines(r"elect\.sync")
def _elect(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    targets, mask = operands
    leader, predicate = targets.text.split("|")
    if leader.strip() != "_":
        raise UnknownPtxError("elect.sync with the leader's lane")
    target = emitter.name(predicate.strip())
    return f"{target} = emu::elect({emitter.value(mask)}, {emitter.line});"


says(r"setmaxnreg\.(?:(inc)|dec)\.sync\.aligned\.u32", "emu::set_registers({0}, {has 1}, {line});")


# ---- "Proxies": fences ----


says(r"fence\.mbarrier_init\.release\.cluster", "emu::fence_mbarriers();")
says(r"fence\.proxy\.async\.global", "")
says(r"fence\.proxy\.async(?:\.shared::cta|\.shared::cluster)?", "emu::fence_mbarriers(); emu::fence_async_proxy();")


# ---- "cp.async.bulk", "cp.async.bulk.tensor", "st.async" ----

_BYTES = r"\.mbarrier::complete_tx::bytes"
_HINT = r"(\.L2::cache_hint)?"


def _without_hint(match: re.Match[str], operands: Sequence[Operand]) -> Sequence[Operand]:
    return operands[:-1] if ".L2::cache_hint" in match[0] else operands


@defines(rf"cp\.async\.bulk\.shared::(?:cluster|cta)\.global{_BYTES}(\.multicast::cluster)?{_HINT}")
def _bulk_load(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, source, size, mbarrier, *mask = _without_hint(match, operands)
    blocks = emitter.value(mask[0]) if match[1] else "0"
    source_pointer = f"(const void*){emitter.address(source)}"
    return (
        f"emu::bulk_load({emitter.address(target)}, {source_pointer}, {emitter.value(size)}, "
        f"{emitter.address(mbarrier)}, {blocks}, {emitter.line});"
    )


says(
    rf"cp\.async\.bulk\.shared::cluster\.shared::cta{_BYTES}",
    "emu::bulk_copy_shared({at 0}, {at 1}, {2}, {at 3}, {line});",
)


@defines(rf"st\.async(?:\.weak)?\.shared::cluster{_BYTES}(?:\.v([24]))?\.[busf](32|64)")
def _store_async(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, source, mbarrier = operands
    lanes, size = int(match[1] or 1), int(match[2]) // 8
    values = emitter.vector(source)
    if len(values) != lanes:
        raise UnknownPtxError(match[0])
    stores = " ".join(f"emu::store<uint{8 * size}_t>(data + {i * size}, {v});" for i, v in enumerate(values))
    return (
        f"char data[{lanes * size}]; {stores} emu::store_async({emitter.address(target)}, data, {lanes * size}, "
        f"{emitter.address(mbarrier)}, {emitter.line});"
    )


@defines(rf"cp\.async\.bulk\.global\.shared::cta\.bulk_group{_HINT}")
def _bulk_store(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, source, size = _without_hint(match, operands)
    pointer = f"(void*){emitter.address(target)}"
    return f"emu::bulk_store({pointer}, {emitter.address(source)}, {emitter.value(size)}, {emitter.line});"


def _tensor(emitter: Emitter, operand: Operand, rank: int) -> tuple[str, str]:
    """The C++ declaration of the coordinates in `[map, {x, y, ...}]`, and the pointer to the map."""
    match = re.fullmatch(r"(%?\w+)\s*,\s*\{(.*)\}", operand.text, re.DOTALL)
    if operand.kind != "address" or match is None:
        raise UnknownPtxError(operand.text)
    values = [emitter.name(name.strip()) for name in match[2].split(",")]
    if len(values) != rank:
        raise UnknownPtxError(f"{len(values)} coordinates of {rank}")
    declaration = f"const int32_t at[] = {{{', '.join(f'int32_t({value})' for value in values)}}};"
    return declaration, f"(const void*){emitter.name(match[1])}"


@defines(
    rf"cp\.async\.bulk\.tensor\.([1-5])d\.shared::(?:cluster|cta)\.global(?:\.tile)?{_BYTES}"
    rf"(\.multicast::cluster)?(\.cta_group::[12])?{_HINT}"
)
def _tensor_load(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, source, mbarrier, *mask = _without_hint(match, operands)
    declaration, tensor_map = _tensor(emitter, source, int(match[1]))
    blocks = emitter.value(mask[0]) if match[2] else "0"
    pair = "true" if match[3] == ".cta_group::2" else "false"
    return (
        f"{declaration} emu::bulk_load_tensor({emitter.address(target)}, {tensor_map}, at, {match[1]}, "
        f"{emitter.address(mbarrier)}, {blocks}, {pair}, {emitter.line});"
    )


@defines(rf"cp\.async\.bulk\.tensor\.([1-5])d\.global\.shared::cta(?:\.tile)?\.bulk_group{_HINT}")
def _tensor_store(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    target, source = _without_hint(match, operands)
    declaration, tensor_map = _tensor(emitter, target, int(match[1]))
    address = emitter.address(source)
    return f"{declaration} emu::bulk_store_tensor({tensor_map}, at, {match[1]}, {address}, {emitter.line});"


says(r"cp\.async\.bulk\.commit_group", "emu::bulk_commit();")
says(r"cp\.async\.bulk\.wait_group(\.read)?", "emu::bulk_wait_group({0}, {has 1}, {line});")


# ---- Matrices ----


@defines(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _stmatrix(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    count = int(match[1])
    if len(emitter.vector(operands[1])) != count:
        raise UnknownPtxError(match[0])
    transpose = "true" if match[2] else "false"
    address = emitter.address(operands[0])
    words = emitter.array("words", operands[1])
    return f"{words} emu::store_matrix(words, {count}, {transpose}, {address}, {emitter.line});"


# Of "wgmma.mma_async": operand types and depth; sums are 32 bits wide.
_WGMMA = {("f32", "f16", "f16"): 16, ("f32", "bf16", "bf16"): 16, ("f32", "tf32", "tf32"): 8}
_WGMMA |= {("s32", a, b): 32 for a in ("s8", "u8") for b in ("s8", "u8")}


@defines(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)(\.satfinite)?")
def _wgmma(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    n, k, types = int(match[1]), int(match[2]), (match[4], match[5], match[6])
    saturate = bool(match[3] or match[7])
    if _WGMMA.get(types) != k or n % 8 or not 8 <= n <= 256 or saturate:
        raise UnknownPtxError(match[0])
    d, a, b, accumulate, *immediates = operands
    targets = [element.text for element in d.elements]
    # They are written after this statement: each must be an operand of it, which stands for a variable outside.
    if len(targets) != n // 2 or not all(re.fullmatch(r"%\d+", target) for target in targets):
        raise UnknownPtxError(f"{match[0]} with {len(targets)} accumulators")
    in_registers = a.kind == "vector"
    numbers = [int(emitter.value(immediate)) for immediate in immediates]
    # signs of both operands, then whether each that is in shared memory is MN-major, which only 16 bits may be
    if len(numbers) != {16: 3 if in_registers else 4, 8: 2, 32: 0}[k]:
        raise UnknownPtxError(f"{match[0]} with {len(numbers)} immediates")
    signs, transposed = numbers[:2] or [1, 1], numbers[2:]
    # Registers of A are read until it is waited for: they are operands too.
    if in_registers and (len(a.elements) != 4 or not all(re.fullmatch(r"%\d+", e.text) for e in a.elements)):
        raise UnknownPtxError(f"{match[0]} with A in {len(a.elements)} registers")
    transpose_a, transpose_b = [0, 0, *transposed][-2:]
    shape = ", ".join([
        str(n), f"emu::Element::{types[1]}", f"emu::Element::{types[2]}", str(bool(transpose_a)).lower(),
        str(bool(transpose_b)).lower(), str(signs[0]), str(signs[1]),
    ])  # fmt: skip
    names = [emitter.value(element) for element in a.elements]
    fragment = f"const void* const a[] = {{{', '.join(f'(const void*)&{name}' for name in names)}}};" if names else ""
    a_descriptor, a_pointer = ("0", "a") if in_registers else (emitter.value(a), "nullptr")
    return (
        f"static const emu::WarpgroupShape shape = {{{shape}}}; {fragment} "
        f"void* const d[] = {{{', '.join(f'(void*)&{emitter.name(target)}' for target in targets)}}}; "
        f"emu::wgmma(shape, d, {a_descriptor}, {a_pointer}, {emitter.value(b)}, {emitter.value(accumulate)}, "
        f"{emitter.line});"
    )


says(r"wgmma\.fence\.sync\.aligned", "emu::wgmma_fence();")
says(r"wgmma\.commit_group\.sync\.aligned", "emu::wgmma_commit();")
says(r"wgmma\.wait_group\.sync\.aligned", "emu::wgmma_wait({0}, {line});")
