"""Measured results as data: one JSON line each, under <folder>/<device>/<operator>.jsonl."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from schedules.build import Built
from schedules.errors import UsageError
from schedules.measure import Measurement
from schedules.versions import versions


def record(built: Built, measured: Measurement, error: float, **extra: Any) -> dict[str, Any]:
    """Everything needed to tell what was measured, where, when and with what.  Times in microseconds; `error` is the
    worst element's, in units of the tolerance."""
    seconds = measured.median_us * 1e-6
    return {
        "device": measured.device,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {**versions(), "compiler": built.compiler},
        "operator": built.operator.name,
        "problem": built.problem.words(),
        "schedule": built.schedule.name,
        "config": built.config.words(),
        "target": str(built.arch),
        "median_us": measured.median_us,
        "p10_us": measured.p10_us,
        "p90_us": measured.p90_us,
        "runs": measured.runs,
        "tflops": built.problem.flops / seconds / 1e12,
        "gbytes_per_s": built.problem.min_bytes / seconds / 1e9,
        "error": error,
        **extra,
    }


def slug(device: str) -> str:
    """A device's name as a folder's: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def append(folder: str | Path, entry: dict[str, Any]) -> Path:
    """Add `entry` as one line to the log of its device and operator.  Raises UsageError if that cannot be written."""
    file = Path(folder) / slug(entry["device"]) / f"{entry['operator']}.jsonl"
    line = json.dumps(entry, allow_nan=False) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # one write of a whole line to a file opened for appending: several processes may log at once
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}; choose another folder for the log") from error
    return file
