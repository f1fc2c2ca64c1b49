"""Depthwise int8 convolution on a GPU by `depthwise_conv2d.windows`: what is written there of channels last.

On CUDA four taps of a kernel row are one ``dp4a``: the bytes of four pixels are permuted to a word for each channel,
once for all kernel rows that meet it, and for two neighbouring outputs where it has room for a shifted filter.

Counted in SASS for sm_90a, an output of a 3x3 kernel of stride 1 takes 13.5 instructions of a thread in tiles of 4 x 4:
3 dp4a, 2.1 permutations (0.75 of them put results together), 5 from sum to byte, 0.7 loads and 0.6 of their tests.  132
multiprocessors issue 128 in a clock: at 1.7 GHz that is 2.1e12 outputs a second, 4.2e12 bytes read and written, about
what memory moves.  Nine multiply-adds would take the place of the dp4a and 1.3 permutations, and widen bytes first.  A
5x5 kernel takes 30, 10 of them dp4a: half of what memory could feed.
"""

from __future__ import annotations

from dataclasses import replace

from schedules.operators.depthwise_conv2d import windows

SCHEDULE = replace(windows.SCHEDULE, summary="windows in registers; on CUDA four taps of a kernel row by one dp4a")
