"""Every schedule of softmax on values that are not ordinary (`special`), and in bfloat16."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.build.inspect import amdgcn_resources, material, summary
from schedules.build.toolchain import cuda
from schedules.check.verify import RUNNERS, emulated_runs, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.operator import ScheduleSpec
from schedules.core.registry import operator
from schedules.core.tolerance import compare
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem
from tests.conftest import CUDA_ARCHES, ROCM_ARCHES, assert_correct, problem_of
from tests.operators.softmax import special

SOFTMAX = operator("softmax")
SCHEDULES = {spec.name: spec for spec in SOFTMAX.schedules}
GPU = [name for name, spec in SCHEDULES.items() if "cuda" in spec.kinds]
AMD = [name for name, spec in SCHEDULES.items() if "rocm" in spec.kinds]
DTYPES = SoftmaxProblem.dtypes


def legal(spec: ScheduleSpec, problem: SoftmaxProblem, arch: Arch) -> bool:
    return spec.default(problem, arch).check(problem, arch) is None


def wrong_rows(problem: SoftmaxProblem, arrays: list[Any], names: list[str], outputs: list[Any]) -> dict[str, str]:
    """What is wrong by the name of the row."""
    found = {}
    for output, expected in zip(outputs, SOFTMAX.reference(problem, arrays), strict=True):
        for i, name in enumerate(names):
            row = replace(
                expected,
                values=expected.values[i : i + 1],
                magnitude=np.broadcast_to(expected.magnitude, expected.values.shape)[i : i + 1],
            )
            difference = compare(output[i : i + 1], row, problem.dtype)
            if not difference.passed:
                found[name] = str(difference)
    return found


def check(
    route: str,
    schedule: str,
    arch: Arch,
    function: str,
    cols: int,
    dtype: str,
    config: dict[str, Any] | None = None,
    **fields: Any,
) -> None:
    """Run the special rows by one route, with `fields` of the problem: a full mask is 0, or -inf in columns of its
    own, and the last row's is -inf throughout."""
    names, arrays = special.arrays(function, cols, dtype)
    rng = np.random.default_rng(5)
    problem = SoftmaxProblem(len(names), cols, function, dtype, **fields)
    if not legal(SCHEDULES[schedule], problem, arch):
        pytest.skip(f"{schedule} does not take this on {arch}")
    if problem.mask == "full":
        mask = np.where(rng.random((len(names), cols)) < 0.3, -np.inf, 0.0)
        mask[:, 0], mask[-1] = 0, -np.inf
        arrays.append(mask.astype(arrays[0].dtype))
    if problem.is_drawn:
        arrays.append(rng.integers(2**63, size=2))
    elif problem.has_dropout:
        arrays.append((rng.random((len(names), cols)) < problem.keep).astype(np.uint8))
    _, run = next(runs(route, problem, arch, schedule, config))
    assert not wrong_rows(problem, arrays, names, run([*arrays, *poisoned(problem)]))


def runs(
    route: str, problem: SoftmaxProblem, arch: Arch, schedule: str, config: dict[str, Any] | None
) -> Iterator[tuple[str, Any]]:
    if route != "host":
        yield from RUNNERS[route](problem, arch, schedule, config)
    else:
        built = build(problem, arch, schedule, config)

        def run(arrays: list[Any]) -> list[Any]:
            import tvm

            tensors = [tvm.runtime.tensor(array) for array in arrays]
            built.module["main"](*tensors)
            return [tensor.numpy() for tensor in tensors[-sum(a.output for a in problem.arguments()) :]]

        yield "host", run


# (cols, further fields) of each function: whole packs, ragged ones, one column, and a mask, scale and dropout with it
FORWARD: list[tuple[int, dict[str, Any]]] = [
    (72, {}),
    (300, dict(scale=-0.3)),
    (96, dict(mask="full", keep=0.8)),
    (70, dict(keep=0.8, drop="drawn")),
    (1, {}),
]
BACKWARD: list[tuple[int, dict[str, Any]]] = [
    (72, {}),
    (300, dict(scale=-0.3, keep=0.8)),
    (1, dict(keep=0.5, drop="drawn")),
]
CASES = [
    pytest.param(function, cols, fields, id=f"{function} {cols} {' '.join(fields)}".strip())
    for function in FUNCTIONS
    for cols, fields in (BACKWARD if function.endswith("grad") else FORWARD)
]


def whole_packs(case: int) -> bool:
    return not CASES[case].values[2] and CASES[case].values[1] == 72


# each function of whole packs in every dtype, the other cases in one
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        pytest.param(dtype, case, id=f"{dtype}-{CASES[case].id}")
        for i, dtype in enumerate(DTYPES)
        for case in range(len(CASES))
        if whole_packs(case) or (i + case) % len(DTYPES) == 0
    ],
)
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in GPU])
def test_special_rows_on_the_cpu(host: Arch, schedule: str, dtype: str, case: int) -> None:
    function, cols, fields = CASES[case].values
    check("host", schedule, host, function, cols, dtype, **fields)


# each function of whole packs by every second schedule, the other cases by every third; each case in one dtype, each
# function in all of them
@pytest.mark.parametrize(
    ("schedule", "case"),
    [
        pytest.param(schedule, case, id=f"{schedule}-{CASES[case].id}")
        for i, schedule in enumerate(GPU)
        for case in range(len(CASES))
        if (i + case) % (2 if whole_packs(case) else 3) == 0
    ],
)
def test_special_rows_in_generated_cuda(emulation: None, sm_90a: Arch, schedule: str, case: int) -> None:
    function, cols, fields = CASES[case].values
    check("emulated", schedule, sm_90a, function, cols, DTYPES[case % len(DTYPES)], **fields)


@pytest.mark.parametrize(
    ("schedule", "config"),
    [
        ("warp", dict(rows_per_group=2, in_flight=2, numerators=True, streaming="both")),
        ("block_registers", dict(rows_per_block=2, in_flight=2, numerators=True, streaming="stores")),
        ("block_streaming", dict(threads=256, unroll=2)),
        ("tiles", dict(threads=8, groups=16, rows_per_group=2, kept="numerators", streaming="both")),
        ("parts", dict(threads=64, packs=1)),
        ("frames", dict(threads=8, groups=8, kept="numerators", rows_per_group=2, online=False)),
        ("frames", dict(threads=64, groups=1, online=True)),
        ("cluster", dict(cluster=4, threads=64, kept="numerators", grid=8, direct=False)),
        ("cluster", dict(cluster=4, threads=64, kept="packed", online=True, grid=0, direct=True)),
    ],
)
def test_special_rows_with_other_configs(emulation: None, sm_90a: Arch, schedule: str, config: dict[str, Any]) -> None:
    check("emulated", schedule, sm_90a, "softmax", 300, "bfloat16", config)


# each schedule with each function, and each of these with each dtype
@pytest.mark.parametrize(
    ("schedule", "function", "dtype"),
    [(s, f, DTYPES[(i + j) % len(DTYPES)]) for i, s in enumerate(AMD) for j, f in enumerate(FUNCTIONS)],
)
def test_special_rows_on_amd(emulation: None, schedule: str, function: str, dtype: str) -> None:
    check("emulated", schedule, parse_arch("gfx90a"), function, 72, dtype)


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("-0x1.fffffep+127f", "-1e30f", {"equal, largest negative", "-inf but the largest negative"}),
        ("exp2f(", "fmaxf(1.0f, ", {"NaN middle", "all NaN", "+inf first", "both infinities", "ordinary"}),
        ("0x1p+0f", "0.9f", {"equal", "ordinary", "-inf but the first", "largest beside ordinary"}),
    ],
)
def test_the_special_rows_show_faults(emulation: None, sm_90a: Arch, old: str, new: str, shown: set[str]) -> None:
    """A maximum that starts too high, a function in the place of exp that loses NaN, a result that is scaled."""
    names, arrays = special.arrays("softmax", 72, "float32")
    problem = SoftmaxProblem(len(names), 72, dtype="float32")
    built = build(problem, sm_90a, "warp", device_code=False)
    source = str(built.sources["cu"])
    assert old in source
    _, run = next(emulated_runs(built, source.replace(old, new)))
    assert shown <= wrong_rows(problem, arrays, names, run([*arrays, *poisoned(problem)])).keys()


# rows of a warp, of a block and of a cluster with each function
@pytest.mark.parametrize("function", ["softmax", "softmax_grad", "log_softmax_grad"])
@pytest.mark.parametrize("cols", [100, 2048, 32768])
def test_bfloat16_moves_in_128_bits_and_does_not_spill(
    cuda_compiler: None, sm_90a: Arch, cols: int, function: str
) -> None:
    built = build(problem_of("softmax", rows=64, cols=cols, dtype="bfloat16", function=function), sm_90a)
    (kernel,) = built.resources
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, built.config
    found = summary(material(built))
    if found.counted_in == "SASS" and cols % 8 == 0:
        # a kernel that keeps rows in shared memory has them copied there
        loads = {"global load 128-bit", "cp.async"} & found.counts.keys()
        assert loads and "global load" not in found.counts, found.counts
        assert found.counts["global store 128-bit"] and "global store" not in found.counts, found.counts


@pytest.mark.parametrize("arch", CUDA_ARCHES, ids=str)
@pytest.mark.parametrize("schedule", [name for name in GPU if name in AMD])
def test_bfloat16_is_refused_where_there_is_none(arch: Arch, schedule: str) -> None:
    problem = problem_of("softmax", rows=4, cols=64, dtype="bfloat16")
    if "bf16" in arch.features:
        assert legal(SCHEDULES[schedule], problem, arch)
    else:
        with pytest.raises(ConfigError, match=f"dtype=bfloat16 needs sm_80 or newer, not {arch}"):
            build(problem, arch, schedule)


@pytest.mark.parametrize(
    ("arch", "schedule"),
    [(arch, name) for i, arch in enumerate(ROCM_ARCHES) for j, name in enumerate(AMD) if (i + j) % 2 == 0],
    ids=str,
)
def test_bfloat16_on_amd(amd_linker: None, arch: Arch, schedule: str) -> None:
    built = build(problem_of("softmax", rows=64, cols=1000, dtype="bfloat16"), arch, schedule)
    assert not any(kernel.spill_stores or kernel.stack for kernel in amdgcn_resources(built.sources["s"], arch))
    assert re.search(r"global_load_(dwordx4|b128)", str(built.sources["s"]))
    assert re.search(r"global_store_(dwordx4|b128)", str(built.sources["s"]))


@pytest.mark.parametrize("schedule", GPU)
def test_the_largest_element_is_compared_with_itself(cuda_compiler: None, sm_90a: Arch, schedule: str) -> None:
    """Where scale * x - peak is fused, exp(scale * x - round(scale * x)) overflows for large x; only the machine code
    shows it, since the emulator fuses nothing."""
    if cuda.find_tool("nvdisasm") is None:
        pytest.skip("no SASS disassembler; pip install nvidia-cuda-nvdisasm")
    built = build(problem_of("softmax", rows=4, cols=1024, scale=0.3, dtype="float32"), sm_90a, schedule)
    code = cuda.disassemble(bytes(built.sources["cubin"]))  # type: ignore[arg-type]
    assert re.search(r"FMUL[^;]*0\.3000", code) and not re.search(r"FFMA[^;]*0\.3000", code)


def test_long_bfloat16_rows_on_the_cpu(host: Arch) -> None:
    assert_correct(problem_of("softmax", rows=3, cols=100001, dtype="bfloat16"), host, "cpu")
