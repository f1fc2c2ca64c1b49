"""GPU and CPU operator kernels as TVM tensor expressions with schedules."""

__version__ = "0.1.0"
