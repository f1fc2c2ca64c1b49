"""Text for people."""

from __future__ import annotations

import logging
import re
from functools import cache

# control characters, what turns the direction of writing, and halves of characters
_ACTS = re.compile("[\0-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    """`text` with all that a terminal would act on escaped as Python escapes it, but for the characters in `keep`."""
    return _ACTS.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


@cache
def warn_once(text: str) -> None:
    """Log a warning, the first time that it is given."""
    logging.getLogger("schedules").warning("%s", printable(text))
