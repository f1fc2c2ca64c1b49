"""NCHW convolution with few input channels on tensor cores: windows of pixel rows, as they lie in shared memory."""

from __future__ import annotations

from schedules.windows.schedule import windows_schedule

SCHEDULE = windows_schedule(siblings=("mma",))
