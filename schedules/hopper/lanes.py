"""An order of words of shared memory in which the lanes of warps read and store them with few bank conflicts.

A lane reads words and stores their halves, 16 bytes of a row each: one half first, then the other.  A warp reads as
many words at once as there are banks.  Eight lanes store at once, and the swizzle puts rows apart that differ modulo 8.
Words whose halves go into rows side by side are best left in their order, where lanes 4 to 7 of eight store the odd
halves first.  Of others, eight are put together whose rows differ, of even halves and of odd ones, and four times eight
whose banks do.

Lanes that read fragments of wgmma's operand a have an order too (`QuadOrder`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

WARP, BANKS = 32, 32
EIGHT = 8  # lanes that store at once
ROWS = 64  # of wgmma
CHANNELS = 8  # of which a lane reads a word each, and stores the halves together


class Word(NamedTuple):
    """Two neighbours in a channel's box, from element `at` on, and the row that each is turned into, or -1."""

    at: int
    even: int
    odd: int

    @property
    def place(self) -> int:
        return self.at // 2

    @property
    def unwanted(self) -> Word:
        """The same, turned into no row."""
        return self._replace(even=-1, odd=-1)


@dataclass(frozen=True)
class Lanes:
    """The words of the lanes of whole warps; `odd_first` says whether lanes 4 to 7 of eight store odd halves first."""

    words: Sequence[Word]
    odd_first: bool

    @property
    def cycles(self) -> int:
        """In which shared memory gives what they read of eight channels, and takes what they store."""
        found = 0
        for start in range(0, len(self.words), WARP):
            places = {word.place for word in self.words[start : start + WARP]}
            found += CHANNELS * max(Counter(place % BANKS for place in places).values())
        for start in range(0, len(self.words), EIGHT):
            eight = self.words[start : start + EIGHT]
            for late in (0, 1):
                halves = [late ^ (self.odd_first and number >= EIGHT // 2) for number in range(EIGHT)]
                rows = [word[1 + half] for word, half in zip(eight, halves, strict=True)]
                found += max(Counter(row % EIGHT for row in rows if row >= 0).values(), default=0)
        return found


class Eight:
    """Words of eight lanes at most, which are read and stored without conflicts."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self.banks: dict[int, int] = {}
        self._rows: set[tuple[str, int]] = set()

    def add(self, word: Word) -> bool:
        """Add a word if it fits."""
        rows = self._rows_of(word)
        fits = len(self.words) < EIGHT and self.conflicts({word.place % BANKS: word.place}) == 0
        if fits and not rows & self._rows:
            self.force(word)
            return True
        return False

    def force(self, word: Word) -> None:
        """Add a word, whatever waits for it."""
        self.words.append(word)
        self.banks[word.place % BANKS] = word.place
        self._rows |= self._rows_of(word)

    def _rows_of(self, word: Word) -> set[tuple[str, int]]:
        return {(half, row % EIGHT) for half, row in (("even", word.even), ("odd", word.odd)) if row >= 0}

    def conflicts(self, banks: dict[int, int]) -> int:
        """Words that wait for others, which take `banks`."""
        return sum(self.banks.get(bank, place) != place for bank, place in banks.items())


def arranged(words: Sequence[Word]) -> Lanes:
    """A lane for each of `words`, which are in the order of their places, in that order or in one that takes shared
    memory less time."""
    eights = _eights(words)
    found: list[Word] = []
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
        for eight in warp:
            found += _filled(eight.words, EIGHT)
    return min(
        (Lanes(_filled(words, WARP), True), Lanes(_filled(found, WARP), False)),
        key=lambda lanes: lanes.cycles,
    )


def _filled(words: Sequence[Word], size: int) -> list[Word]:
    """`words`, and as many more that no one wants as make it a multiple of `size`."""
    return [*words, *[words[-1].unwanted] * (-len(words) % size)]


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


@dataclass(frozen=True)
class QuadOrder:
    """In which lanes read fragments, or rows of them, from channels that lie apart.

    Lanes stand in quads (PTX ISA, "Register Fragments for wgmma.mma_async"): of a row, or of two that stand side by
    side in memory, a quad has pairs of channels side by side; the quads of a warp have eight neighbours.  With
    `odd_first` the upper two of a quad take the odd channel of a pair first; with `spread` four quads have rows that
    are half of 64 further than those of the others.
    """

    odd_first: bool
    spread: bool

    def wavefronts(self, pitch: int, paired: bool, step: int = 1) -> int:
        """Of shared memory, for both channels of pairs, `pitch` elements of 16 bits apart, whichever element is the
        first: rows are `step` elements apart, or `paired` in words."""
        if paired:
            step = 2
        quads = [number * step for number in range(EIGHT)]
        if self.spread:
            quads = [each + (ROWS // 2 - EIGHT) * (each >= EIGHT) for each in quads]
        found = 0
        for first, late in product(range(0, 2 * BANKS, 1 + paired), (0, 1)):
            channels = [2 * lane + (late ^ (self.odd_first and lane >= 2)) for lane in range(4)]
            words = {(channel * pitch + first + quad) // 2 for channel, quad in product(channels, quads)}
            found += max(Counter(word % BANKS for word in words).values())
        return found


@lru_cache
def quad_order(pitch: int, paired: bool, step: int = 1, spread: Sequence[bool] = (False,)) -> QuadOrder:
    """The plainest one that takes the fewest wavefronts, of those that may or may not `spread`."""
    orders = [QuadOrder(odd_first, wide) for wide, odd_first in product(spread, (False, True))]
    return min(orders, key=lambda order: order.wavefronts(pitch, paired, step))
