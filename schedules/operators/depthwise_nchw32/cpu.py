"""Depthwise int8 convolution on the CPU by `depthwise_conv2d.cpu`: what is written there of channels last.

Data are widened as they are copied into a task's buffer: to float32, which holds the sums of up to 1024 products.
"""

from __future__ import annotations

from schedules.operators.depthwise_conv2d import cpu

SCHEDULE = cpu.SCHEDULE
