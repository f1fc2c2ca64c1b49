"""Our kernels beside other libraries', in one run: the comparisons behind README's tables.  Not part of the wheel.

Run as modules from the root of a checkout: ``python -m benchmarks.compare_softmax --help``.
"""

import sys

from schedules.core.interrupts import heed

if sys.argv[0] == "-m":  # as it is while Python looks for the module to run, and in no other process
    heed()
