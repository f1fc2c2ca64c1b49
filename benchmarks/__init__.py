"""Our kernels beside other libraries', in one run: the comparisons behind README's tables.  Not part of the wheel.

Run as modules from the root of a checkout: ``python -m benchmarks.compare_softmax --help``.
"""
