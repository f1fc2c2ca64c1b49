"""HWCN convolution with few input channels and images on tensor cores: windows of pixel rows, as they lie in shared
memory, with the channels of all images."""

from __future__ import annotations

from schedules.windows.schedule import windows_schedule

SCHEDULE = windows_schedule(siblings=("mma",), ranges=False)
