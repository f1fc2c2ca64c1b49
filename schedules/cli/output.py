"""Printing: JSON, tables and texts; coloured on a terminal, plain when piped."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from schedules.core.text import printable


def emit_json(value: Any) -> None:
    """`value` as JSON on standard output; infinities and NaN, which JSON lacks, as null."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """`value` as JSON has it: keys as text, sequences as lists, numbers that are not finite as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def note(text: str) -> None:
    """A line beside the result, on standard error; none for ""."""
    if text:
        print(f"note: {printable(text)}", file=sys.stderr)


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Rows under headers: a box on a terminal, else columns separated by two spaces or more."""
    headers = [printable(header) for header in headers]
    texts = [[printable(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Column, Table
        from rich.text import Text

        grid = Table(*(Column(Text(header)) for header in headers))
        for row in texts:
            grid.add_row(*(Text(cell) for cell in row))
        Console().print(grid)
        return
    widths = [max(len(cell) for cell in column) for column in zip(headers, *texts, strict=True)]
    for row in [headers, *texts]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def fields(pairs: Mapping[str, Any]) -> None:
    """Name and value on each line; values that are None are left out."""
    shown = {name: value for name, value in pairs.items() if value is not None}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        print(f"{printable(name):{width}}  {printable(str(value))}")


def heading(title: str) -> None:
    """`title` above what belongs to it."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        Console().print(Text(f"\n{title}", "bold underline"))
    else:
        print(f"\n# ---- {title}")


def dimensions(extents: Sequence[int | str]) -> str:
    """``4x8x196``; an extent that is a formula of a run-time value is set apart."""

    def text(extent: int | str) -> str:
        return "[" + re.sub(r"T\.int64\((\d+)\)", r"\1", extent) + "]" if isinstance(extent, str) else str(extent)

    return "x".join(text(extent) for extent in extents)


def code(text: str, lexer: str) -> None:
    """Source text, highlighted on a terminal, where long lines are wrapped."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(text, lexer, background_color="default", word_wrap=True))
    else:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
