"""What can be said of AMD code objects without an AMD GPU."""

from __future__ import annotations

import re

from schedules.build.builder import Built


def assert_fits(built: Built) -> str:
    """One kernel with its symbol, within the LDS of a block, no scratch, and blocks as launched; returns its
    assembly."""
    assembly, code = str(built.sources["s"]), built.sources["hsaco"]
    assert isinstance(code, bytes) and int.from_bytes(code[18:20], "little") == 224  # EM_AMDGPU
    assert re.search(r"^\s*\.amdhsa_kernel main_kernel$", assembly, re.M)

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        assert found, key
        return int(found[1])

    assert number("group_segment_fixed_size") <= built.arch.shared_block
    assert number("private_segment_fixed_size") == 0
    assert built.launch and built.launch.threads <= number("max_flat_workgroup_size")
    return assembly


def loops(assembly: str) -> list[str]:
    """The bodies of backward branches."""
    labels = {match[1]: match.start() for match in re.finditer(r"^(\.LBB\w+):", assembly, re.M)}
    return [
        assembly[labels[match[1]] : match.start()]
        for match in re.finditer(r"s_c?branch\w*\s+(\.LBB\w+)", assembly)
        if labels[match[1]] < match.start()
    ]
