"""GPU and CPU operator kernels as TVM tensor expressions with schedules."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # the command line begins here: `typing` takes longer to import than all that is before it
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from schedules.core.problem import Problem
    from schedules.measure.loading import Kernel

__version__ = "0.1.0"

if os.environ.get("SCHEDULES_WORKER"):  # a process that this package started; its main module may import TVM next
    from schedules.core.process import import_tvm_alone

    import_tvm_alone()


def load(
    operator: str,
    problem: Mapping[str, Any] | Problem | str | None = None,
    target: str = "llvm",
    *,
    schedule: str | None = None,
    config: Mapping[str, Any] | None = None,
    device: str | None = None,
    logs: Sequence[str | Path] | None = None,
) -> Kernel:
    """The kernel of `operator` for `problem`, built for `target` with the best config that was measured for it.

    `operator` is an operator or a preset; `problem` its fields (in place of the preset's), or a Problem, or a preset's
    name.  The config is that of the best verified record of the device (`device`, by default the one that is here) in
    the journals of the folders `logs`, else the nearest problem's, else its default; ``kernel.choice`` says which.
    `config` (fields in place of the default's) leaves the records aside.  Equal kernels are built once in a process.

    Raises UsageError and its kinds for what cannot be meant, BuildError, JournalError.

    >>> softmax = schedules.load("softmax", dict(rows=4096, cols=1000), "cuda:sm_90a")
    >>> softmax(x, y)  # tensors of the device, in the order of ``problem.arguments()``; y is written
    """
    from schedules.measure.loading import load_kernel

    return load_kernel(operator, problem, target, schedule, config, device, logs)
