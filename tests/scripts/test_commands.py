"""Scripts that documents run by their path start from any folder, whatever the folders of modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(
    path for path in (Path(__file__).resolve().parents[2] / "scripts").glob("*.py") if os.access(path, os.X_OK)
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_starts_anywhere(script: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and script.name in done.stdout and not done.stderr
