"""The banks of shared memory: when lanes of a wave wait for each other.

LDS has 32 banks of four bytes, on some chips 64.  An access of a wave takes as many phases as its bytes fill all banks;
in a phase, lanes that want different words of one bank wait for each other.  A phase has neighbouring lanes, except
that of 16-byte reads by 32 banks on CDNA.
Sources: AMD, "Avoiding LDS Bank Conflicts on AMD GPUs Using CK-Tile Framework" (2025), and CK-Tile's "Understanding AMD
GPU LDS and Bank Conflicts"; LLVM's AMDGPU features, "LDSBankCount".
"""

from __future__ import annotations

from collections.abc import Sequence

WORD = 4  # bytes of a bank
WIDEST = 16  # bytes that a lane reads or writes at once
# the lanes of a phase of such reads; lanes 32 further have the like
_READ_128 = tuple([*range(i, i + 4), *range(j, j + 4)] for i, j in ((0, 20), (4, 16), (8, 28), (12, 24)))


def phases(width: int, lanes: int, banks: int, read: bool) -> Sequence[Sequence[int]]:
    """The lanes of each phase of an access of `width` bytes by a wave of `lanes`."""
    if read and width == WIDEST and banks == 32 and lanes == 64:
        return [[start + lane for lane in group] for start in range(0, lanes, 32) for group in _READ_128]
    together = min(banks * WORD // max(width, WORD), lanes)
    return [range(start, start + together) for start in range(0, lanes, together)]


def cycles(addresses: Sequence[int | None], width: int, banks: int, read: bool) -> tuple[int, int]:
    """Cycles of LDS for a wave whose lane i reads or writes `width` bytes at ``addresses[i]``, None if it does nothing,
    and the cycles that these would take without conflicts."""
    taken = least = 0
    for lanes in phases(width, len(addresses), banks, read):
        starts = [start for lane in lanes if (start := addresses[lane]) is not None]
        words = {word for start in starts for word in range(start // WORD, (start + width - 1) // WORD + 1)}
        if words:
            of_banks = [word % banks for word in words]
            taken += max(map(of_banks.count, set(of_banks)))
            least += 1
    return taken, least
