"""What can be said of AMD code objects without an AMD GPU."""

from __future__ import annotations

import re

from schedules.build import Built


def assert_fit(built: Built) -> None:
    """One kernel with its symbol, its shared memory within 64 KiB, no scratch, and blocks as launched."""
    assembly, code = str(built.sources["s"]), built.sources["hsaco"]
    assert isinstance(code, bytes) and int.from_bytes(code[18:20], "little") == 224  # EM_AMDGPU
    assert re.search(r"^\s*\.amdhsa_kernel main_kernel$", assembly, re.M)

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        assert found, key
        return int(found[1])

    assert number("group_segment_fixed_size") <= 64 * 1024
    assert number("private_segment_fixed_size") == 0
    assert built.launch and built.launch.threads <= min(256, number("max_flat_workgroup_size"))
