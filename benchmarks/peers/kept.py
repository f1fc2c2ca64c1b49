"""Files of what something costs beside the kernels: each is of one script, and says the device, versions and date."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schedules.core.device import slug
from schedules.core.errors import UsageError
from schedules.core.files import read_regular
from schedules.measure.records import now


def read_costs(file: str | Path, kind: str, content: str) -> dict[str, Any]:
    """The content of a file of `kind`, written by the script of that name, with a list `content`.

    Raises UsageError if it is none.
    """
    try:
        found = json.loads(read_regular(file))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError):
        found = None
    wanted = {"device", "date", "versions", content}
    if not isinstance(found, dict) or found.get("kind") != kind or not wanted <= found.keys():
        raise UsageError(f"{file} holds no {kind}; give a file that {kind} wrote")
    return found


def keep_costs(folder: Path, kind: str, device: str, versions: Mapping[str, str], content: Mapping[str, Any]) -> Path:
    """Write the file of `kind` of a device into its folder below `folder`, with the date, a row a line; its path."""
    file = folder / slug(device) / f"{kind}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    words = {"kind": kind, "device": device, "date": now(), "versions": dict(versions), **content}
    text = json.dumps(words, indent=1)
    file.write_text(re.sub(r"\{[^{}]*\}", lambda row: re.sub(r"\n *", " ", row[0]), text) + "\n")
    return file
