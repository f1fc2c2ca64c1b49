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

from schedules.build import inspect
from schedules.build.builder import Built, build
from schedules.build.toolchain import cuda
from schedules.core import interrupts
from schedules.core.arch import ARCHES, Arch, parse_arch
from schedules.core.errors import ArgumentError, ConfigError
from schedules.core.registry import operators
from scripts.compare_sources import without_addresses
from tests.conftest import CUDA_ARCHES, ROCM_ARCHES, problem_of
from tests.core.test_registry import SAMPLES
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


OTHERS = [arch for arch in ARCHES.values() if arch.is_gpu and arch not in (*CUDA_ARCHES, *ROCM_ARCHES)]


@pytest.mark.parametrize(("number", "arch"), list(enumerate(OTHERS)), ids=str)
def test_every_target_builds(number: int, arch: Arch, request: pytest.FixtureRequest) -> None:
    """What the rule chooses, one operator for each of the targets that no other test builds for; all presets for one
    are `scripts/sweep.py presets --build-only --target ..`."""
    request.getfixturevalue("cuda_compiler" if arch.kind == "cuda" else "amd_linker")
    op = operators()[number % len(operators())]
    fields = {**SAMPLES[op.name], **({"dtype": "float16"} if "float16" in op.problem.dtypes else {})}
    built = build(problem_of(op.name, **fields), arch)
    (code,) = (built.sources[name] for name in ("cubin", "hsaco") if name in built.sources)
    assert isinstance(code, bytes) and code[:4] == b"\x7fELF"
    found = inspect.limits(built)
    assert found.spills == found.scratch == 0 and found.blocks_sm
    if arch.kind == "rocm":
        assert f'amdgcn-amd-amdhsa-hcc-{arch.name}"' in str(built.sources["s"])


@pytest.mark.parametrize("target", ["gfx90a", "gfx1201"])
def test_amd_code_for_large_blocks_keeps_within_their_registers(amd_linker: None, target: str) -> None:
    arch, problem = parse_arch(target), problem_of("softmax", rows=5, cols=70)
    small, large = (build(problem, arch, "block_streaming", {"threads": threads}) for threads in (256, 1024))
    for built, threads in ((small, 256), (large, 1024)):
        assembly, code = str(built.sources["s"]), built.sources["hsaco"]
        assert f".max_flat_workgroup_size: {threads}\n" in assembly
        assert f'"amdgpu-flat-work-group-size"="1,{threads}"' in built.sources["ll"]
        assert isinstance(code, bytes) and code[:4] == b"\x7fELF"
    assert small.sources["hsaco"][48:52] == large.sources["hsaco"][48:52]  # e_flags: for the same processor
    found = inspect.limits(large)
    assert found.blocks_sm and found.registers and found.registers * 1024 <= arch.registers_sm


def test_a_grid_that_nothing_folds_is_refused(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nhwc", dtype="float32", n=2**26, h=64, w=64, ci=1, co=1, kh=1, kw=1)
    with pytest.raises(ConfigError, match="blocks along x, GPUs allow 2147483647; use larger tiles"):
        build(problem, sm_90a, "simt", device_code=False)


@pytest.mark.usefixtures("cuda_compiler")
def test_what_stops_a_build_is_no_fault_of_the_program(sm_90a: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: str, name: str) -> Any:
        raise KeyboardInterrupt  # TVM makes of it a RuntimeError without a message

    monkeypatch.setattr(cuda, "compile_cuda", interrupted)
    monkeypatch.setattr(interrupts, "asked", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        build(problem_of("softmax", rows=5, cols=70), sm_90a, "warp")


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
