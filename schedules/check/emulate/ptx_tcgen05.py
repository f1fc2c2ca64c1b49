"""Inline PTX of tensor memory, of sm_100a and its like.  Importing it adds to the table of `ptx`.

Section names are those of the PTX ISA, "TensorCore 5th Generation Family Instructions".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from schedules.check.emulate.ptx import Emitter, Operand, UnknownPtxError, defines, says

_GROUP = r"\.cta_group::([12])"

# ---- "Tensor Memory Allocation and Management Instructions" ----


says(
    rf"tcgen05\.alloc{_GROUP}\.sync\.aligned(?:\.shared::cta)?\.b32",
    "emu::tensor_alloc({at 0}, {1}, {word 1}, {line});",
)
says(rf"tcgen05\.dealloc{_GROUP}\.sync\.aligned\.b32", "emu::tensor_dealloc({0}, {1}, {word 1}, {line});")
says(rf"tcgen05\.relinquish_alloc_permit{_GROUP}\.sync\.aligned", "emu::tensor_relinquish({word 1}, {line});")


# ---- Products ----


@defines(rf"tcgen05\.mma{_GROUP}\.kind::(f16|i8)")
def _multiply(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    sums, *others = operands
    if len(others) != 4:  # lanes to leave out, or a scale
        raise UnknownPtxError(f"{match[0]} with {len(operands)} operands")
    a, b, shape, accumulate = (emitter.value(operand) for operand in others)
    numbers = f"{1 if match[2] == 'i8' else 2}, {match[1]}, {emitter.line}"
    return f"emu::tensor_multiply({emitter.address(sums)}, {a}, {b}, {shape}, {accumulate}, {numbers});"


@defines(rf"tcgen05\.commit{_GROUP}\.mbarrier::arrive::one(?:\.shared::cluster)?(\.multicast::cluster)?\.b64")
def _commit(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    mbarrier, *mask = operands
    if bool(mask) != bool(match[2]):
        raise UnknownPtxError(f"{match[0]} with {len(operands)} operands")
    blocks = emitter.value(mask[0]) if mask else "0"
    return f"emu::tensor_commit({emitter.address(mbarrier)}, {blocks}, {match[1]}, {emitter.line});"


# ---- "tcgen05.ld", "tcgen05.wait", "tcgen05.fence" ----


@defines(r"tcgen05\.ld\.sync\.aligned\.(32x32b|16x256b)\.x(\d+)\.b32")
def _load(emitter: Emitter, match: re.Match[str], operands: Sequence[Operand]) -> str:
    targets, address = operands
    wide, units = match[1] == "16x256b", int(match[2])
    count = units * (4 if wide else 1)
    # They are written at the wait: each must be an operand of the statement, which stands for a variable outside.
    names = [element.text for element in targets.elements] or [targets.text]
    if units & (units - 1) or count > 128 or len(names) != count:
        raise UnknownPtxError(f"{match[0]} with {len(names)} registers")
    if not all(re.fullmatch(r"%\d+", name) for name in names):
        raise UnknownPtxError(f"{match[0]} into registers of the statement's own")
    pointers = ", ".join(f"(void*)&{emitter.name(name)}" for name in names)
    return (
        f"void* const targets[] = {{{pointers}}}; "
        f"emu::tensor_load(targets, {count}, {str(wide).lower()}, {emitter.address(address)}, {emitter.line});"
    )


says(r"tcgen05\.wait::ld\.sync\.aligned", "emu::tensor_wait_loads({line});")
says(r"tcgen05\.fence::(?:before|(after))_thread_sync", "emu::tensor_fence({has 1}, {line});")
