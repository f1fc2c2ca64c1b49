"""Philox4x32-10: random numbers that are a function of a key and a counter.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).  Key and counter are those of
cuRAND and of PyTorch on a GPU: the key is the seed, the counter's low half a quarter of the offset, its high half the
subsequence, here a quarter of the number of an element.  The four words of a counter are those of four neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of the counter's first and third word
KEYS = (0x9E3779B9, 0xBB67AE85)  # added to the key's words from round to round
LOW = 0xFFFFFFFF


def words(seed: int, offset: int, elements: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The uint32 of each of `elements`, numbers of elements in order from a multiple of four on, in whole fours."""
    low, half = np.uint64(LOW), np.uint64(32)
    groups = elements[::4].astype(np.uint64) >> np.uint64(2)
    counter = (offset & 2**64 - 1) >> 2
    c0, c1 = (np.full(len(groups), part, np.uint64) for part in (counter & LOW, counter >> 32))
    c2, c3 = groups & low, groups >> half
    key = [seed & LOW, seed >> 32 & LOW]
    for _ in range(ROUNDS):
        first, second = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1 = second >> half ^ c1 ^ np.uint64(key[0]), second & low
        c2, c3 = first >> half ^ c3 ^ np.uint64(key[1]), first & low
        key = [part + step & LOW for part, step in zip(key, KEYS, strict=True)]
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32).reshape(-1)


def threshold(probability: float) -> int:
    """Words below it come with that probability, to within 2**-32; neither none nor all."""
    return min(max(round(probability * 2**32), 1), LOW)
