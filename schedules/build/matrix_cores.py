"""The share of time that products could take in an AMD kernel's inner loop, by the cycles that its instructions take of
each unit.  Products are matrix instructions or, in a kernel without any, multiply-adds and dot products of vectors.

An upper bound: waves enough to overlap everything, no waiting, and memory beyond LDS for nothing.  Cycles are from
AMD's ISA guides and whitepapers: a SIMD of CDNA takes 4 cycles for a wave's vector instruction and 16 for a special
function, and its matrix core works beside them once told to; one of RDNA takes 1 and 4, and its matrix instructions run
on the same lanes.  LDS moves 128 bytes a cycle for all SIMDs of a compute unit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from schedules.core.arch import Arch

LDS_BYTES = 128  # of a compute unit, in a cycle
_MATRIX = re.compile(r"v_(s?mfma|wmma)\w*?_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_?(xf32|bf16|f16|f32|iu8|i8|iu4|fp8|bf8)")
_SOURCES = {"f16": "float16", "bf16": "bfloat16", "i8": "int8", "iu8": "int8", "xf32": "tf32", "f32": "float32"}
_VECTOR = re.compile(r"v_(?:(?:pk_|dual_)?(?:fma|fmac|mad|mac)(?:[am]k)?_(?:f32|f16|bf16|mix)|dot\d)")
_SPECIAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
_LDS = re.compile(r"ds_(?:read|write|load|store)(?:_?2(?:addr|st64)*)?\w*?_[biu](\d+)")


@dataclass(frozen=True)
class Busy:
    """Of a SIMD, for one turn of the loop: cycles of its products, and of the unit that takes longest, by name."""

    products: float
    longest: float
    unit: str

    @property
    def share(self) -> float:
        """Of the time that products could take, at most."""
        return self.products / self.longest


def loops(body: str) -> list[str]:
    """The bodies of backward branches in a kernel's assembly."""
    labels = {match[1]: match.start() for match in re.finditer(r"^(\.LBB\w+):", body, re.M)}
    return [
        body[labels[match[1]] : match.start()]
        for match in re.finditer(r"^\s+s_c?branch\w*\s+(\.LBB\w+)", body, re.M)
        if labels.get(match[1], match.start()) < match.start()
    ]


def busy(bodies: Sequence[str], arch: Arch, waits: float = 1) -> Busy | None:
    """That of the shortest loop among those with the most products for their length, or of a whole kernel without such
    a loop; None if there are none, or if the rate of one is not known.  LDS takes `waits` times as long as its bytes
    do."""
    product = next((kind for kind in (_MATRIX, _VECTOR) if any(map(kind.search, bodies))), None)
    if product is None:
        return None
    inner = [loop for body in bodies for loop in loops(body) if product.search(loop)]
    parts = inner or [body for body in bodies if product.search(body)]
    text = max(parts, key=lambda part: len(product.findall(part)) / len(part))
    opcodes: list[str] = re.findall(r"^\s+([a-z]+_\w+)", text, re.M)
    matrix = multiplied = vector = shared = 0.0
    rdna = "mfma" not in arch.features
    issue, special = (1, 4) if rdna else (4, 16)
    for opcode in opcodes:
        if found := _MATRIX.match(opcode):
            m, n, k, blocks = int(found[2]), int(found[3]), int(found[4]), int(found[5] or 1)
            rate = arch.matrix_rates.get(_SOURCES.get(found[6], ""))
            if rate is None:
                return None
            cycles = max(2 * m * n * k * blocks / rate, 0 if rdna else m)
            matrix += cycles
            vector += cycles if rdna else issue
        elif _SPECIAL.match(opcode):
            vector += special
        elif opcode.startswith("v_"):
            vector += issue
            multiplied += issue * bool(_VECTOR.match(opcode))
        elif found := _LDS.match(opcode):
            twice = 2 if re.match(r"ds_(read|write|load|store)_?2", opcode) else 1
            shared += twice * int(found[1]) / 8 * arch.wave / LDS_BYTES
    # one compute unit's LDS serves all its SIMDs, of which RDNA's has two
    units = {"matrix cores": matrix, "LDS": waits * shared * (2 if rdna else arch.simds), "vector instructions": vector}
    unit = max(units, key=lambda name: units[name])
    return Busy(matrix or multiplied, units[unit], unit)
