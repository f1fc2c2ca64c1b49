"""The distributions: built offline, complete, and used from where they are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import schedules
from schedules.measure.journal import DEFAULT_FOLDER

ROOT = Path(__file__).parents[1]
FOLDERS = ("schedules", "benchmarks", "docs", "scripts", "tests", "examples", "tuning_logs")
OTHERS = ("LICENSE", "MANIFEST.in", "Makefile", "pyproject.toml", "setup.py")
MADE = ("PKG-INFO", "setup.cfg", "te_schedules.egg-info")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the repository holds, for what a build leaves beside it."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for file in (*ROOT.glob("*.md"), *(ROOT / name for name in OTHERS)):
        shutil.copy(file, copy)
    return copy


@pytest.fixture(scope="module")
def files(tree: Path) -> set[str]:
    return {str(file.relative_to(tree)) for file in tree.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def distributions(tree: Path, files: set[str], package_tools: None) -> tuple[Path, Path]:
    """The source distribution, and the wheel built from it."""
    out = tree.with_name("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


pytestmark = pytest.mark.slow


def test_the_source_distribution_is_the_repository(distributions: tuple[Path, Path], files: set[str]) -> None:
    with tarfile.open(distributions[0]) as archive:
        found = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert {name for name in found if not name.startswith(MADE)} == files
    assert {"LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "tests/test_packaging.py"} < found


def test_the_wheel_is_the_package_and_its_journals(distributions: tuple[Path, Path], files: set[str]) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        found = set(archive.namelist())
        about = f"te_schedules-{schedules.__version__}.dist-info"
        metadata = archive.read(f"{about}/METADATA").decode()
    package = {name for name in files if name.startswith("schedules/")}
    journals = {f"schedules/{name}" for name in files if name.startswith("tuning_logs/") and name.endswith(".jsonl")}
    journals = {name for name in journals if name.count("/") == 3}
    assert {name for name in found if not name.startswith(about)} == package | journals
    assert (
        len(journals) >= 5
        and {
            "schedules/core/presets.toml",
            "schedules/bundle/package/loader.py",
            "schedules/py.typed",
            "schedules/check/emulate/cxx/fiber.h",
            "schedules/bundle/package/__main__.py",
        }
        < found
    )
    lines = metadata.splitlines()
    assert f"Version: {schedules.__version__}" in lines and "License-Expression: Apache-2.0" in lines
    assert f"{about}/licenses/LICENSE" in found and "# te-schedules" in lines


# what is installed lists, builds for the CPU, and knows the records that it came with
USE = """
import json, sys
from pathlib import Path
import schedules
from schedules.core.arch import parse_arch
from schedules.cli import main
from schedules.measure.choice import choose, log_folders
from schedules.core.presets import preset
assert Path(schedules.__file__).is_relative_to(sys.argv[1]), schedules.__file__
assert main(["build", "softmax", "rows=4", "cols=32", "--out", "out/softmax"]) == 0
assert main(["verify", "out/softmax"]) == 0
found = choose(preset("tutorial").problem(), parse_arch("cuda:sm_90a"), device="NVIDIA H200")
print(json.dumps([list(map(str, log_folders())), found.source, str(found)]))
"""


def test_the_wheel_is_installed_and_used(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(target), str(distributions[1])], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "SCHEDULES_LOGS"}
    environment["PYTHONPATH"] = str(target)

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    listed = json.loads(run(str(target / "bin" / "schedules"), "list", "--json"))
    assert {"softmax", "conv2d_hwcn"} <= {op["name"] for op in listed["operators"]} and len(listed["presets"]) > 80
    folders, source, why = json.loads(run("-c", USE, str(target)).splitlines()[-1])
    assert folders == [str(target / "schedules" / DEFAULT_FOLDER)]
    # with another TVM or compiler than the records' they are passed over, and it is said
    assert source == "record" and "on NVIDIA H200" in why or "records of" in why, why


def test_the_version_is_stated_once(files: set[str], tree: Path) -> None:
    stated = f'"{schedules.__version__}"'
    assert f"__version__ = {stated}" in (tree / "schedules" / "__init__.py").read_text()
    assert "version = " not in (tree / "pyproject.toml").read_text().split("[project.optional")[0].replace(
        "target-version", ""
    )
    assert f"## [{schedules.__version__}]" in (tree / "CHANGELOG.md").read_text()
