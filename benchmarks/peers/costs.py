"""Files of what something costs beside the kernels, one for each device, and each kind's table of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.markdown import provenance


def sources(files: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each file the line of device, date and versions that stands below a table."""
    return [provenance({**file, "cases": [file]}) for file in files]
