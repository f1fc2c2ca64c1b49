from __future__ import annotations

from random import Random

import numpy as np
import pytest

from schedules.core.philox import threshold, words


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as Salmon et al. (2011) have it, section 3.3: S-boxes of the halves of products, a permutation."""
    c, k = list(counter), list(key)
    for step in range(10):
        if step:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
    return c


def of_group(seed: int, offset: int, group: int) -> list[int]:
    """A counter's four words: the offset's number of fours is its low half, the group its high half."""
    fours = offset % 2**64 // 4
    counter = [fours % 2**32, fours >> 32, group % 2**32, group >> 32]
    return philox(counter, [seed % 2**32, seed % 2**64 >> 32])


# Random123's known answers (kat_vectors, philox4x32 10)
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    assert philox(*([int(word, 16) for word in text.split()] for text in (counter, key))) == [
        int(word, 16) for word in answer.split()
    ]


def test_words_are_those_of_the_published_algorithm() -> None:
    r = Random(0)
    for _ in range(20):
        seed, offset, group = (r.randrange(-(2**63), 2**63), r.randrange(2**63), r.randrange(2**42))
        found = words(seed, offset, np.arange(4 * group, 4 * group + 8))
        assert found.dtype == np.uint32
        assert found.tolist() == of_group(seed, offset, group) + of_group(seed, offset, group + 1)


def test_an_offset_counts_in_fours() -> None:
    elements = np.arange(64)
    assert np.array_equal(words(1, 8, elements), words(1, 11, elements))
    assert not np.array_equal(words(1, 8, elements), words(1, 12, elements))


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_as_many_are_below_the_threshold(keep: float) -> None:
    """Within five deviations, and neighbours are independent."""
    count = 2**20
    kept = words(7, 4, np.arange(count)) < threshold(keep)
    assert abs(kept.mean() - keep) < 5 * (keep * (1 - keep) / count) ** 0.5
    for distance in (1, 2, 4, 64):
        both = (kept[distance:] & kept[:-distance]).mean()
        assert abs(both - keep**2) < 5 * (keep**2 * (1 - keep**2) / count) ** 0.5


def test_never_all_or_none() -> None:
    assert threshold(1e-30) == 1 and threshold(1 - 1e-12) == 2**32 - 1 and threshold(0.5) == 2**31
