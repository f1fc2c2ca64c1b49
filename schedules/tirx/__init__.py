"""What programs written in TIRx share, whatever they compute: names of values, the blocks of a cluster.

TIRx spells threads, barriers and copies out; these are programs and not schedules of a definition, which they are
verified against all the same.
"""

from __future__ import annotations

BARRIER_PAIR_BYTES = 16  # two mbarriers: full and empty of a stage, arrived and free of a consumer
NO_ROUTES = {
    "serial": "a program in TIRx is made of threads that wait for each other, there are no loops to run one by one",
}
