"""NCHW convolution by Winograd's tiles: see `schedules.winograd`."""

from __future__ import annotations

from schedules.winograd import cpu
from schedules.winograd.gpu import winograd

SCHEDULE = winograd(channels_along_rows=True)
CPU = cpu.SCHEDULE
