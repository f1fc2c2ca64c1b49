"""Devices as data: what is fast on one kind of GPU, beside what its architecture allows (`arch`).

``docs/devices.md`` says where each number comes from, how it is measured, and what uses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
    moved: float = 0.016  # of one that moves to another lane: 32 in a cycle
    overlap: float = 2.46  # the norm's exponent: 1 if nothing overlapped, infinite if everything did
    exchange: float = 1500.0  # until sums of another block are there
    sent: float = 0.2  # of a sum sent
    lines: LineTimings = LineTimings()


@dataclass(frozen=True)
class Device:
    """One kind of GPU.  What is not known is None, or derived; no number here makes a config legal or illegal.

    `multiprocessors` are what blocks run on: of AMD's RDNA, work-group processors of two compute units; of a package of
    two GPUs, those of one.  `peaks` are dense TFLOP/s (int8: TOP/s) by arithmetic, 16-bit products summed in float32.
    """

    name: str  # as the driver says it
    arch: str = ""  # of which it is, sm_90a; "" fits any
    multiprocessors: int = 128
    resident_blocks: Mapping[int, int] = field(default_factory=dict, hash=False)  # by the size of their cluster
    l2_bytes: int | None = None
    bandwidth: float | None = None  # of its memory by clock and bus, GB/s
    watts: int | None = None  # that it may take
    by_datasheet: bool = False  # all of it is from its vendor's documents; nothing was measured on it
    peaks: Mapping[str, float] = field(default_factory=dict, hash=False)
    timings: Timings = Timings()  # the nearest device's where it has none of its own

    def __str__(self) -> str:
        known = {
            f"L2 {(self.l2_bytes or 0) // MIB} MiB": self.l2_bytes,
            f"{self.bandwidth} GB/s": self.bandwidth,
            f"{self.watts} W": self.watts,
        }
        parts = [text for text, value in known.items() if value is not None]
        parts += ["not measured"] * self.by_datasheet
        return ", ".join([self.name, f"{self.multiprocessors} multiprocessors", *parts])

    @property
    def measured(self) -> bool:
        """Whether it is a known kind of GPU that something was measured on."""
        return bool(self.arch) and not self.by_datasheet

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


def _listed(
    name: str,
    arch: str,
    multiprocessors: int,
    l2: int,
    bandwidth: float,
    watts: int,
    bfloat16: bool = True,
    **peaks: float,
) -> Device:
    """By datasheets, NVIDIA's architecture whitepapers and AMD's of CDNA and RDNA; `l2` in MiB, `bandwidth` in GB/s;
    `bfloat16`, if there is such, has float16's peak."""
    return Device(
        name=name,
        arch=arch,
        multiprocessors=multiprocessors,
        l2_bytes=l2 * MIB,
        bandwidth=bandwidth,
        watts=watts,
        by_datasheet=True,
        peaks={"float16": peaks["float16"], **({"bfloat16": peaks["float16"]} if bfloat16 else {}), **peaks},
    )


T4 = _listed("Tesla T4", "sm_75", 40, 4, 320, 70, bfloat16=False, float16=65, int8=130, float32=8.1)
A100 = _listed("NVIDIA A100-SXM4-80GB", "sm_80", 108, 40, 2039, 400, float16=312, int8=624, tf32=156, float32=19.5)
RTX_3090 = _listed("NVIDIA GeForce RTX 3090", "sm_86", 82, 6, 936, 350, float16=71, int8=284, tf32=35.6, float32=35.6)
RTX_4090 = _listed(
    "NVIDIA GeForce RTX 4090", "sm_89", 128, 72, 1008, 450, float16=165.2, int8=660.6, tf32=82.6, float32=82.6
)
L40S = _listed("NVIDIA L40S", "sm_89", 142, 96, 864, 350, float16=362, int8=733, tf32=183, float32=91.6)
# its timings are the H200's, but that the peak at 1.85 GHz is two of Hopper's products in a clock: a cycle of these is
# half a clock
B200 = replace(
    _listed("NVIDIA B200", "sm_100a", 148, 126, 8000, 1000, float16=2250, int8=4500, tf32=1125, float32=75),
    timings=Timings(cycle=0.27, lines=LineTimings(line=4.0, l2=12.0, step=80.0, finish=12.0 / 128)),
)
RTX_5090 = _listed(
    "NVIDIA GeForce RTX 5090", "sm_120a", 170, 96, 1792, 575, float16=209.5, int8=838, tf32=104.8, float32=104.8
)
MI210 = _listed("AMD Instinct MI210", "gfx90a", 104, 8, 1638, 300, float16=181, int8=181, float32=22.6)
# one of the two GPUs of a package, which share the watts
MI250X = _listed("AMD Instinct MI250X", "gfx90a", 110, 8, 1638, 560, float16=191.5, int8=191.5, float32=23.9)
# L2 of eight chiplets, 4 MiB each
MI300X = _listed("AMD Instinct MI300X", "gfx942", 304, 32, 5300, 750, float16=1307, int8=2615, tf32=654, float32=163.4)
RX_7900_XTX = _listed("AMD Radeon RX 7900 XTX", "gfx1100", 48, 6, 960, 355, float16=122.8, int8=122.8, float32=61.4)
_ROWS = (H200, H100, T4, A100, RTX_3090, RTX_4090, L40S, B200, RTX_5090, MI210, MI250X, MI300X, RX_7900_XTX)
DEVICES: Mapping[str, Device] = {slug(device.name): device for device in _ROWS}
GENERIC = Device(name="a generic GPU")  # of an arch without a device of its own here


def find_device(name: str) -> Device | None:
    """The device that a driver, a journal or a person calls `name`; None if it has no row."""
    return DEVICES.get(slug(name))
