"""Plans of searches that take a moment."""

from __future__ import annotations

from pathlib import Path

TWO = """
[defaults]
targets = ["llvm"]
trials = 4

[[work]]
problem = "softmax"
set = { rows = 64, cols = 64 }

[[work]]
name = "small-conv"
problem = "tutorial"
set = { n = 32, h = 6, w = 6, ci = 16, co = 32 }
trials = 5
priority = 2
"""


def plan_file(folder: Path, text: str) -> Path:
    file = folder / "plan.toml"
    file.write_text(text)
    return file
