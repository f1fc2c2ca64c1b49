"""What programs written in TIRx share, whatever they compute: names of values, the blocks of a cluster.

TIRx spells threads, barriers and copies out; these are programs and not schedules of a definition, which they are
verified against all the same.
"""

from __future__ import annotations

BARRIER_PAIR_BYTES = 16  # two mbarriers: full and empty of a stage, arrived and free of a consumer
