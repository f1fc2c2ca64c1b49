"""Devices as data: what is fast on one kind of GPU, beside what its architecture allows (`arch`).

``docs/devices.md`` says where each number comes from, how it is measured, and what uses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1024**2


@dataclass(frozen=True)
class LineTimings:
    """Constants of the estimate for int8 convolutions over NCHW32 (`conv2d_nchw32.tma_wgmma`), in clocks of a
    multiprocessor, chosen beside searches on an H200 (tuning_logs/nvidia-h200/conv2d_nchw32.jsonl)."""

    line: float = 2.0  # of TMA for a line of a box, about
    l2: float = 24.0  # bytes that arrive in a clock, about, where all multiprocessors load
    step: float = 40.0  # between stages, about
    finish: float = 6.0 / 128  # of the epilogue for an element: its integer instructions
    hinder: float = 0.1  # of what is done beside the longest is felt, about
    too_few: float = 1.3  # times as long with two stages, about


@dataclass(frozen=True)
class Timings:
    """Constants of the estimates that defaults of Hopper's kernels are chosen by, in nanoseconds and bytes.

    Fitted to 210 trials of four 3x3 convolutions of NHWC data in float16 on an H200, before the estimate counted the
    turn of a stage; the rate of 32-byte rows to 900 of NCHW32 in int8.  `exchange`
    and `sent` are estimates.  `hopper.cost.microseconds` says what each is for.
    """

    fitted_on: str = "NVIDIA H200"
    cycle: float = 0.52  # of a tensor core
    loaded: float = 82.0  # bytes that a multiprocessor gets from L2 in a nanosecond
    loaded_narrow: float = 41.0  # the same by boxes whose rows are 32 bytes
    latency: float = 690.0  # from the load of a stage to its use
    finish: float = 0.104  # of a result of a tile
    overlap: float = 2.46  # the norm's exponent: 1 if nothing overlapped, infinite if everything did
    exchange: float = 1500.0  # until sums of another block are there
    sent: float = 0.2  # of a sum sent
    lines: LineTimings = LineTimings()


@dataclass(frozen=True)
class Device:
    """One kind of GPU.  What is not known is None, or derived; no number here makes a config legal or illegal.

    `peaks` are dense TFLOP/s (int8: TOP/s) by arithmetic.
    """

    name: str  # as the driver says it
    arch: str = ""  # of which it is, sm_90a; "" fits any
    multiprocessors: int = 128
    resident_blocks: Mapping[int, int] = field(default_factory=dict, hash=False)  # by the size of their cluster
    l2_bytes: int | None = None
    bandwidth: float | None = None  # of its memory by clock and bus, GB/s
    watts: int | None = None  # that it may take
    peaks: Mapping[str, float] = field(default_factory=dict, hash=False)
    timings: Timings = Timings()  # the nearest device's where it has none of its own

    def __str__(self) -> str:
        known = {
            f"L2 {(self.l2_bytes or 0) // MIB} MiB": self.l2_bytes,
            f"{self.bandwidth} GB/s": self.bandwidth,
            f"{self.watts} W": self.watts,
        }
        parts = [text for text, value in known.items() if value is not None]
        return ", ".join([self.name, f"{self.multiprocessors} multiprocessors", *parts])

    def resident(self, cluster: int) -> int:
        """Blocks with most of a multiprocessor's shared memory that are on the device at once, in clusters of
        `cluster`: as measured, else one to each multiprocessor, in whole clusters."""
        return self.resident_blocks.get(cluster, self.multiprocessors // cluster * cluster)


def slug(name: str) -> str:
    """A device's name as a folder's: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


# Peaks are from NVIDIA's datasheets.  The rest of both Hopper rows is what the driver said on 2026-11-22
# (`scripts/device_row.py`): not all groups of multiprocessors are of one size, hence fewer blocks in wide clusters.
_HOPPER_PEAKS = {"float16": 989, "bfloat16": 989, "int8": 1979, "tf32": 494, "float32": 67}
_HOPPER_BLOCKS = {1: 132, 2: 132, 4: 120, 8: 120, 16: 112}
H200 = Device(
    name="NVIDIA H200",
    arch="sm_90a",
    multiprocessors=132,
    resident_blocks=_HOPPER_BLOCKS,
    l2_bytes=60 * MIB,
    bandwidth=4814,
    watts=700,
    peaks=_HOPPER_PEAKS,
)
# the SXM module; no search ran on it
H100 = Device(
    name="NVIDIA H100 80GB HBM3",
    arch="sm_90a",
    multiprocessors=132,
    resident_blocks=_HOPPER_BLOCKS,
    l2_bytes=50 * MIB,
    bandwidth=3352,
    watts=700,
    peaks=_HOPPER_PEAKS,
)
# all of it from NVIDIA's datasheet
A100 = Device(
    name="NVIDIA A100-SXM4-80GB",
    arch="sm_80",
    multiprocessors=108,
    l2_bytes=40 * MIB,
    bandwidth=2039,
    watts=400,
    peaks={"float16": 312, "bfloat16": 312, "int8": 624, "tf32": 156, "float32": 19.5},
)
DEVICES: Mapping[str, Device] = {slug(device.name): device for device in (H200, H100, A100)}
GENERIC = Device(name="a generic GPU")  # of an arch without a device of its own here


def find_device(name: str) -> Device | None:
    """The device that a driver, a journal or a person calls `name`; None if it has no row."""
    return DEVICES.get(slug(name))
