"""Whether a machine is too busy to measure on."""

from __future__ import annotations

from collections import deque

import numpy as np

from schedules.tune.evaluate import SPREAD, Timing

BUSY = 0.15  # threads that others run for each core, over which a machine is not quiet
TRIALS = 6  # that are looked back on


class NoiseWatch:
    """Looks at the last trials of a search, and says once that the machine is too busy."""

    def __init__(self) -> None:
        self._timings: deque[Timing] = deque(maxlen=TRIALS)
        self._said = False

    def look(self, timing: Timing) -> str:
        """What is to be said after `timing`, or ""."""
        self._timings.append(timing)
        if self._said or len(self._timings) < TRIALS:
            return ""
        busy = float(np.mean([each.busy for each in self._timings]))
        widest = max(self._timings, key=lambda each: each.spread)
        noisy = float(np.median([each.spread for each in self._timings])) > SPREAD
        if busy <= BUSY and not noisy:
            return ""
        self._said = True
        seen = [f"others run {busy:.2g} threads for each core"] if busy > BUSY else []
        if noisy:
            seen.append(f"calls of one kernel took {widest.p10_us:.4g} to {widest.p90_us:.4g} us")
        return f"this machine is busy: {', '.join(seen)}; times are uncertain; stop the other work"
