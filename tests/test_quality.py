"""The gates that need no run of the code: ruff, its formatter, mypy, and docstrings."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.documents import ROOT

PACKAGE = ROOT / "schedules"
# functions that every command or schedule has, whose meaning `cli.Command` and `ScheduleSpec` state
ROLES = {"add_arguments", "run", "space", "default", "graph"}


def tool(name: str, *words: str) -> None:
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed; pip install 'te-schedules[dev]'")
    done = subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff() -> None:
    tool("ruff", "check", "--output-format=concise", ".")


def test_format() -> None:
    tool("ruff", "format", "--check", ".")


@pytest.mark.slow
def test_mypy() -> None:
    tool("mypy")


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """As pytest does by itself with those called build."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {folder for file in (ROOT / "tests").rglob("test_*.py") for folder in file.relative_to(ROOT).parts[:-1]}
    assert "build" in folders
    assert not [folder for folder in folders for pattern in patterns if fnmatch(folder, pattern)]


def undocumented(tree: ast.Module) -> Iterator[str]:
    """The public classes and functions of a module that say nothing of themselves.

    A class may leave it to the base that it extends, a function of a role to where the role is stated.
    """
    if not ast.get_docstring(tree) and tree.body:
        yield "the module"
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        told = node.name in ROLES if isinstance(node, ast.FunctionDef) else bool(node.bases)
        if not told and not ast.get_docstring(node):
            yield node.name


@pytest.mark.parametrize(
    "folder", [PACKAGE, *sorted(p for p in PACKAGE.iterdir() if (p / "__init__.py").exists())], ids=lambda p: p.name
)
def test_public_names_have_docstrings(folder: Path) -> None:
    files = folder.glob("*.py") if folder == PACKAGE else folder.rglob("*.py")
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sorted(files)
        for name in undocumented(ast.parse(file.read_text()))
    ]
    assert not found, "\n".join(found)


def test_a_missing_docstring_is_noticed() -> None:
    text = "class A: ...\nclass B(A): ...\ndef f(): ...\ndef _g(): ...\ndef run(): ...\n"
    assert list(undocumented(ast.parse(text))) == ["the module", "A", "f"]
