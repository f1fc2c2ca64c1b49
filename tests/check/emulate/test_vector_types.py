from __future__ import annotations

import numpy as np

from schedules.check.emulate import Emulator

SIZES = {"char": 1, "uchar": 1, "short": 2, "ushort": 2, "int": 4, "uint": 4, "longlong": 8, "ulonglong": 8,
         "float": 4, "double": 8}  # fmt: skip


def test_sizes_and_alignments_are_those_of_cuda(emulator: Emulator) -> None:
    checks = []
    for name, size in SIZES.items():
        for lanes, alignment in ((1, size), (2, 2 * size), (3, size), (4, min(16, 4 * size))):
            kind = f"{name}{lanes}"
            values = ", ".join(str(i) for i in range(lanes))
            member = "xyzw"[lanes - 1]
            checks.append(
                f"sizeof({kind}) == {lanes * size} && alignof({kind}) == {alignment} "
                f"&& make_{kind}({values}).{member} == {lanes - 1}"
            )
    statements = " ".join(f"out[{i}] = {check};" for i, check in enumerate(checks))
    source = f'extern "C" __global__ void k(int* out) {{ {statements} }}'
    (result,) = emulator.launch(source, "k", (1, 1, 1), (1, 1, 1), [np.zeros(len(checks), "int32")], [0])
    assert result.all(), [check for check, good in zip(checks, result, strict=True) if not good]
