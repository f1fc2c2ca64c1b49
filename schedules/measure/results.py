"""Files of results beside the journals: comparisons with other libraries, and what something costs beside the kernels.

`benchmarks/` writes them; reports and tables read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schedules.core.arithmetic import FLOAT32
from schedules.core.errors import UsageError
from schedules.core.files import read_regular

SCHEMA = 1
KINDS = ("softmax", "convolution", "cpu")  # what a file of comparisons with other libraries compares
LANGUAGES = "languages"  # the kind of a comparison of ours in TIRx with ours in TE


def read_results(file: str | Path) -> dict[str, Any]:
    """The content of a results file.  Raises UsageError if it is none."""
    try:
        found = json.loads(read_regular(file))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise UsageError(f"{file} is not JSON; give a file that a comparison (benchmarks/compare_*.py) wrote") from None
    wanted = {"device": str, "versions": dict, "cases": list, "kind": str}
    schema = found.get("schema") if isinstance(found, dict) else None
    typed = schema == SCHEMA and all(isinstance(found.get(name), kind) for name, kind in wanted.items())
    if not typed or found["kind"] not in (*KINDS, LANGUAGES):
        raise UsageError(
            f"{file} is not a comparison of schema {SCHEMA}; give one that a comparison (benchmarks/compare_*.py) wrote"
        )
    return dict(found)


def is_comparison(file: str | Path) -> bool:
    """Whether `file` says that it compares with other libraries, in whatever schema; other data lie beside them."""
    try:
        found = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and str(found.get("kind")) in KINDS and "cases" in found


def arithmetic_of(case: Mapping[str, Any]) -> str:
    """The name of the arithmetic that ours was computed in."""
    return str(case.get("arithmetic", FLOAT32.name))
