"""How large the numbers are that commands and plans take, by the names of their options and fields."""

from __future__ import annotations

# beyond these a number is a slip, and some overflow on the way: nothing here lasts a million minutes
MOST = {
    "trials": 10**9,
    "patience": 10**9,
    "minutes": 10**6,
    "timeout": 10**5,  # seconds
    "seconds": 10**4,
    "builders": 1024,
    "count": 10**6,
    "seed": 2**63 - 1,
}


def excess(name: str, value: float) -> str:
    """What the number `value` of `name` must be instead; "" if it is no larger than that, or `name` has no bound."""
    return "" if name not in MOST or value <= MOST[name] else f"must be at most {MOST[name]}"  # NaN is not
