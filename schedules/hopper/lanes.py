"""An order of words of shared memory in which the lanes of warps read and store them without bank conflicts.

A lane reads words and stores their halves, 16 bytes of a row each: one half first, then the other.  A warp reads as
many words at once as there are banks.  Eight lanes store at once, and the swizzle puts rows apart that differ modulo 8.
So eight words are put together whose rows differ so, in an order of halves that is found for each, and four times eight
whose banks do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

WARP, BANKS = 32, 32
EIGHT = 8  # lanes that store at once
CHANNELS = 8  # of which a lane reads a word each, and stores the halves together


class Word(NamedTuple):
    """Two neighbours in a channel's box, from element `at` on, and the row that each is turned into, or -1."""

    at: int
    even: int
    odd: int

    @property
    def place(self) -> int:
        return self.at // 2


class Lane(NamedTuple):
    """What a lane turns: the pixel that is stored first, element `at` of a channel's box, into row `first`, or none,
    and its neighbour of the same word into row `second`."""

    at: int
    first: int
    second: int

    @property
    def place(self) -> int:
        return self.at // 2

    @property
    def idle(self) -> Lane:
        """That reads the same, and stores nothing."""
        return self._replace(first=-1, second=-1)


def lane_of(word: Word, odd_first: bool = False) -> Lane:
    return Lane(word.at + 1, word.odd, word.even) if odd_first else Lane(*word)


class Eight:
    """Words of eight lanes at most, which are read and stored without conflicts."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self.banks: dict[int, int] = {}
        # for the rows, as bits, that are stored first and second: of each word whether its odd half is first
        self._ways: dict[tuple[int, int], tuple[bool, ...]] = {(0, 0): ()}

    def add(self, word: Word) -> bool:
        """Add a word if it fits."""
        bank = word.place % BANKS
        if len(self.words) == EIGHT or self.banks.get(bank, word.place) != word.place:
            return False
        ways = {}
        for (first, second), orders in self._ways.items():
            for odd_first in (True, False):
                one, other = (1 << row % EIGHT if row >= 0 else 0 for row in lane_of(word, odd_first)[1:])
                if not first & one and not second & other:
                    ways[first | one, second | other] = (*orders, odd_first)
        if ways:
            self._put(word, ways)
        return bool(ways)

    def force(self, word: Word) -> None:
        """Add a word that does not fit, whatever waits for it."""
        self._put(word, {rows: (*orders, False) for rows, orders in self._ways.items()})

    def _put(self, word: Word, ways: dict[tuple[int, int], tuple[bool, ...]]) -> None:
        self._ways = ways
        self.words.append(word)
        self.banks[word.place % BANKS] = word.place

    @property
    def lanes(self) -> list[Lane]:
        orders = next(iter(self._ways.values()))
        found = [lane_of(word, odd_first) for word, odd_first in zip(self.words, orders, strict=True)]
        return found + [found[-1].idle] * (EIGHT - len(found))

    def conflicts(self, banks: dict[int, int]) -> int:
        """Words that wait for others of a warp which has `banks`."""
        return sum(banks.get(bank, place) != place for bank, place in self.banks.items())


def arranged(words: Sequence[Word]) -> Sequence[Lane]:
    """A lane for each of `words`, which are in the order of their places, and idle ones to fill warps: in that order,
    every other four with their odd halves first, or in one that takes shared memory less time."""
    eights = _eights(words)
    found: list[Lane] = []
    while eights:
        warp = [eights.pop(0)]
        banks = dict(warp[0].banks)
        while len(warp) < WARP // EIGHT and eights:
            # one that begins in the bank after the last leaves room for others
            after = max(word.place for word in warp[-1].words) + 1
            best = min(eights, key=lambda eight: (eight.conflicts(banks), (eight.words[0].place - after) % BANKS))
            eights.remove(best)
            warp.append(best)
            banks |= best.banks
        found += [lane for eight in warp for lane in eight.lanes]
    as_they_lie = [lane_of(word, number % EIGHT >= EIGHT // 2) for number, word in enumerate(words)]
    for lanes in (found, as_they_lie):
        lanes += [lanes[-1].idle] * (-len(lanes) % WARP)
    return min(as_they_lie, found, key=cycles)


def _eights(words: Sequence[Word]) -> list[Eight]:
    """As few as hold `words`: first of neighbours, then of what is left of these."""
    found: list[Eight] = []
    left: list[Word] = []
    eight = Eight()
    for before, word in zip([words[0], *words], words, strict=False):
        if word.at != before.at + 2:
            left, eight = left + eight.words, Eight()
        if not eight.add(word):
            left.append(word)
        if len(eight.words) == EIGHT:
            found.append(eight)
            eight = Eight()
    left += eight.words
    others = [Eight() for _ in range(-(-len(words) // EIGHT) - len(found))]
    for word in left:
        if not any(eight.add(word) for eight in others):
            next(eight for eight in others if len(eight.words) < EIGHT).force(word)
    return found + [eight for eight in others if eight.words]


def cycles(lanes: Sequence[Lane]) -> int:
    """In which shared memory gives what `lanes` read of eight channels, and takes what they store."""
    found = 0
    for start in range(0, len(lanes), WARP):
        places = {lane.place for lane in lanes[start : start + WARP]}
        found += CHANNELS * max(Counter(place % BANKS for place in places).values())
    for start in range(0, len(lanes), EIGHT):
        for rows in list(zip(*lanes[start : start + EIGHT], strict=True))[1:]:
            found += max(Counter(row % EIGHT for row in rows if row >= 0).values(), default=0)
    return found
