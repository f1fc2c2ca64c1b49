"""Text for people."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with control characters, and all else that a terminal would act on, escaped as Python escapes them."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
