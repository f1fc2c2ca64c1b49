"""What Markdown files hold: code blocks, links, headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced code block: the language, what follows it in the info string, and its lines."""

    language: str
    name: str
    text: str

    def commands(self) -> Iterator[list[str]]:
        """The words of each line of a shell block, without comments; lines that end in a backslash go on."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def blocks(text: str) -> list[Block]:
    """The fenced code blocks of a text."""
    return [Block(*_info(match["info"]), match["text"]) for match in _FENCE.finditer(text)]


def _info(words: str) -> tuple[str, str]:
    language, _, name = words.strip().partition(" ")
    return language, name


def prose(text: str) -> str:
    """The text without its code blocks."""
    return _FENCE.sub("", text)


def headings(text: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in found}


def section(text: str, heading: str) -> str:
    """What stands under a heading of the second level.  Raises IndexError if there is none."""
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
