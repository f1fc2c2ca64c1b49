"""Devices as data: what was measured of one kind of GPU, beside what its architecture allows (`arch`)."""

from __future__ import annotations

from collections.abc import Mapping

# dense TFLOP/s (int8: TOP/s) by device (`records.slug`) and arithmetic, from NVIDIA's H200 datasheet
DENSE_PEAKS: Mapping[str, Mapping[str, float]] = {
    "nvidia-h200": {"float16": 989, "bfloat16": 989, "int8": 1979, "tf32": 494, "float32": 67},
}
