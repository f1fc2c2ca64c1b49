from __future__ import annotations

from schedules.core.text import printable


def test_what_a_terminal_would_act_on_is_escaped() -> None:
    assert printable("a\x1b[31m\n\x9b\u202e\ud800") == r"a\x1b[31m\n\x9b\u202e\ud800"
    assert printable("n=1 \u00d7 \u4e2d \u00a0") == "n=1 \u00d7 \u4e2d \u00a0"
    assert printable("a\nb\t\x07", keep="\n\t") == "a\nb\t\\x07"
