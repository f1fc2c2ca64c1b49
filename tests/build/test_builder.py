"""What a built function takes, and what it answers to anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm

from schedules.build.builder import Built, build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ArgumentError, ConfigError
from scripts.compare_sources import without_addresses
from tests.conftest import problem_of
from tests.documents import ROOT

X = np.arange(32, dtype="float32").reshape(4, 8)


@pytest.fixture(scope="module")
def softmax() -> Built:
    return build(problem_of("softmax", rows=4, cols=8, dtype="float32"), parse_arch("llvm"))


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


WRONG: dict[str, tuple[Any, str]] = {
    "None": (None, "x is a NoneType, needed a tensor"),
    "a list": (X.tolist(), "x is a list"),
    "a number": (1.5, "x is a float"),
    "a NumPy number": (np.float32(1), "x is a float32"),
    "text": ("x", "x is a str"),
    "a memoryview": (memoryview(X), "x is a memoryview"),
    "a dtype": (X.astype("float64"), "x has dtype float64, needed float32"),
    "objects": (X.astype(object), "x has dtype object"),
    "the other byte order": (X.astype(">f4"), "x has dtype >f4"),
    "no axis": (np.array(1, "float32"), r"x has shape \(\), needed"),
    "an axis too few": (X[0], r"x has shape \(8,\), needed \(4, 8\)"),
    "a width": (X[:, :7].copy(), r"x has shape \(4, 7\)"),
    "no rows": (X[:0], r"x has shape \(0, 8\), which is empty"),
    "strides": (np.asfortranarray(X), "x is not contiguous"),
    "backwards": (X[:, ::-1], "x is not contiguous"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_told_in_a_line(softmax: Built, what: str) -> None:
    wrong, message = WRONG[what]
    with pytest.raises(ArgumentError, match=message) as caught:
        softmax(wrong, np.empty_like(X))
    assert "\n" not in str(caught.value)


def test_outputs_are_to_be_written(softmax: Built) -> None:
    with pytest.raises(ArgumentError, match="y is read-only, and the function writes it"):
        softmax(X, read_only(X))
    with pytest.raises(ArgumentError, match="1 tensors given, 2 needed: x, y"):
        softmax(X)


@pytest.mark.parametrize("given", [X, read_only(X), tvm.runtime.tensor(X)], ids=["array", "read-only", "tensor"])
def test_inputs_may_be_read_only(softmax: Built, given: Any) -> None:
    y = np.full_like(X, np.nan)
    softmax(given, y)
    assert np.allclose(y.sum(axis=1), 1)


@pytest.mark.parametrize("make", [np.copy, read_only], ids=["writable", "read-only"])
def test_bfloat16_arrays_are_taken(host: Arch, make: Any) -> None:
    built = build(problem_of("softmax", rows=4, cols=8, dtype="bfloat16"), host)
    y = np.zeros((4, 8), ml_dtypes.bfloat16)
    built(make(np.ones((4, 8), ml_dtypes.bfloat16)), y)
    assert np.all(y.astype("float32") == 0.125)


# what lies along y or z of the grid elsewhere: 90000 pixels, 70000 images
@pytest.mark.parametrize(
    ("name", "target", "schedule", "fields"),
    [
        ("conv2d_hwcn", "sm_75", "tutorial", dict(n=16, h=300, w=300, ci=1, co=8, kh=1, kw=1)),
        ("conv2d_nchw", "gfx90a", "direct", dict(n=70000, h=8, w=8, ci=1, co=1, kh=3, kw=3, pad=1)),
        ("conv2d_nchw", "gfx90a", "simt", dict(n=1, h=1, w=1, ci=1, co=2**23 + 1, kh=1, kw=1)),
    ],
)
def test_no_axis_of_the_grid_is_too_long(name: str, target: str, schedule: str, fields: Any) -> None:
    built = build(problem_of(name, dtype="float32", **fields), parse_arch(target), schedule, device_code=False)
    assert built.launch is not None
    x, y, z = built.launch.grid
    assert max(int(y), int(z)) <= 65535 < int(x)


def test_a_grid_that_nothing_folds_is_refused(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nhwc", dtype="float32", n=2**26, h=64, w=64, ci=1, co=1, kh=1, kw=1)
    with pytest.raises(ConfigError, match="blocks along x, GPUs allow 2147483647; use larger tiles"):
        build(problem, sm_90a, "simt", device_code=False)


KERNELS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("softmax", "llvm", "cpu", dict(rows=64, cols=100)),
    ("conv2d_hwcn", "sm_80", "mma", dict(n=16, h=5, w=5, ci=16, co=16, kh=3, kw=3, dtype="float16", bias=True)),
    ("softmax", "sm_90a", "tiles", dict(rows=64, cols=4096, dtype="float16")),
    ("conv2d_nchw", "sm_90a", "tma_wgmma_few", dict(
        n=2, h=5, w=8, ci=16, co=9, kh=3, kw=3, pad=1, dtype="float16", filter_layout="hwoi", activation="relu"
    )),
]  # fmt: skip
BUILDS = """
import sys
from tests.build.test_builder import programs
print(*programs(int(sys.argv[1])), sep="\\n")
"""


def programs(step: int) -> list[str]:
    """A digest of each kernel's config and source, built in the order that `step` says."""
    found = {}
    for name, target, schedule, fields in KERNELS[::step]:
        built = build(problem_of(name, **fields), parse_arch(target), schedule, device_code=False)
        source = without_addresses(str(built.sources["cu" if built.arch.kind == "cuda" else "ll"]))
        found[name, target] = sha256(f"{built.config}\n{source}".encode()).hexdigest()
    return [found[name, target] for name, target, _, _ in KERNELS]


def test_every_process_makes_the_same_source() -> None:
    """Whatever it built before, and however it orders its sets."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", BUILDS, "-1"]
    other = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    assert other.stdout.split() == programs(1)
