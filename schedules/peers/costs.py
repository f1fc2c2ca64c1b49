"""Files of what something costs beside the kernels, one for each device, and each kind's table of all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schedules.errors import UsageError
from schedules.peers.markdown import provenance
from schedules.records import now, slug


def read_costs(file: str | Path, kind: str, content: str) -> dict[str, Any]:
    """The content of a file of `kind`, written by the script of that name, with a list `content`.

    Raises UsageError if it is none.
    """
    try:
        found = json.loads(Path(file).read_text())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except ValueError:
        found = None
    wanted = {"device", "date", "versions", content}
    if not isinstance(found, dict) or found.get("kind") != kind or not wanted <= found.keys():
        raise UsageError(f"{file} holds no {kind}; give a file that scripts/{kind}.py wrote")
    return found


def keep_costs(folder: Path, kind: str, device: str, versions: Mapping[str, str], content: Mapping[str, Any]) -> Path:
    """Write the file of `kind` of a device into its folder below `folder`, with today's date; its path."""
    file = folder / slug(device) / f"{kind}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    words = {"kind": kind, "device": device, "date": now(), "versions": dict(versions), **content}
    file.write_text(json.dumps(words, indent=2) + "\n")
    return file


def sources(files: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each file the line of device, date and versions that stands below a table."""
    return [provenance({**file, "cases": [file]}) for file in files]
