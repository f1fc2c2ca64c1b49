"""What tests of several folders share."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from schedules.build.builder import Built, build
from schedules.check.emulate import toolchain
from schedules.check.verify import Check, emulated_runs, emulator_available, judge, poisoned, verify
from schedules.core import child
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import EmulationError, ToolchainError
from schedules.core.frames import quicker
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator
from schedules.core.versions import version_of
from schedules.tune import finals
from tests.command import Run
from tests.forked import SUBPROCESS

os.environ["TVM_NUM_THREADS"] = "1"  # tests run in as many processes as there are cores
# for processes that start from here on, as those of xdist do: NumPy's threads, and the C library's memory by large
# pages, which TVM's many small objects gain from
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
# what one of hundreds of processes has compiled, with pytest's assertions in it, the others read
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# the suite draws the same problems each time; `scripts/sweep.py` draws others, by the thousand
# on a busy machine, however slowly
slow = [HealthCheck.too_slow]
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=slow)
settings.load_profile("suite")

gc.disable()  # until the tests are collected: nothing that is imported or collected is garbage
for _place, _name, _function in quicker():  # at all times, in whatever thread
    setattr(_place, _name, _function)

# of those whose generated code is alike one stands for all; tests/build/test_builder.py builds for the others
CUDA_ARCHES = [parse_arch(name) for name in ("sm_75", "sm_80", "sm_90a", "sm_120a")]
EMULATED_ARCHES = CUDA_ARCHES[:3]
ROCM_ARCHES = [parse_arch(name) for name in ("gfx90a", "gfx942", "gfx1100", "gfx1201")]


@pytest.fixture(scope="session", autouse=True)
def no_records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was measured on this machine chooses no test's config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDULES_LOGS", str(tmp_path_factory.mktemp("no-records")))
        yield


def stand_ins() -> set[str]:
    """What modules of the package have that a test made."""
    return {
        f"{module}.{name} is of {value.__module__}"
        for module, content in list(sys.modules.items())
        if module.partition(".")[0] == "schedules"
        for name, value in list(vars(content).items())
        if str(getattr(value, "__module__", "")).partition(".")[0] in ("tests", "conftest")
    }


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No module keeps what a test put in another's place, as one does that is first imported while it is there, by
    `from .. import`: builds of all later tests would go by it."""
    yield
    assert not stand_ins()


BY_WGMMA: list[tuple[str, Any]] = []  # kernels of this module's tests whose machine code is to be looked at


@pytest.fixture(scope="module", autouse=True)
def sums_are_waited_for() -> Iterator[None]:
    """`hopper_kernels.assert_waited_for` of the module's kernels."""
    BY_WGMMA.clear()
    yield
    if BY_WGMMA:
        from tests.hopper_kernels import assert_waited_for

        assert_waited_for(BY_WGMMA)


@pytest.fixture(scope="session", autouse=True)
def short_finals() -> Iterator[None]:
    """No test needs to tell near equals apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finals, "SECONDS", 0.5)
        yield


@pytest.fixture(scope="session", autouse=True)
def kernels_of_the_last_run() -> Iterator[None]:
    """The emulator's cache keeps what the whole suite compiles, some 100 MB: of it a run compiles only what is new."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(toolchain.MOST, toolchain._KERNEL, 10_000)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """But from a process with PyTorch, whose threads no fork has."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" not in sys.modules:
            patch.setattr(child, "subprocess", SUBPROCESS)
        yield


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """The command line."""
    return Run(capfd)


# files that take minutes: begun first, so that none is left to one of the test processes at the end
LONGEST = (
    "test_faults.py",
    "test_cluster.py",
    "test_stops.py",
    "test_tune.py",
    "test_soak.py",
    "test_tma_wgmma.py",
    "test_sweep.py",
    "test_gpu_schedules.py",
    "test_epilogue.py",
    "test_epilogues.py",
    "test_tma_wgmma_few.py",
    "test_direct.py",
    "test_values.py",
    "test_mma_split.py",
)


def pytest_runtestloop() -> None:
    """What there is by now stays: the garbage collector need not look at it, thousands of times."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def host() -> Arch:
    return parse_arch("llvm")


@pytest.fixture(scope="session")
def sm_90a() -> Arch:
    return parse_arch("cuda:sm_90a")


@pytest.fixture(scope="session")
def emulation() -> None:
    """Skips where there is no C++ compiler."""
    if not emulator_available():
        pytest.skip("no C++ compiler to build the CUDA emulator with; install g++ or clang++")


@pytest.fixture(scope="session")
def cuda_compiler() -> None:
    """Skips where there is no CUDA compiler."""
    from schedules.build.toolchain.cuda import INSTALL, compile_cuda

    try:
        compile_cuda('extern "C" __global__ void nothing() {}', "sm_80")
    except ToolchainError:
        pytest.skip(f"no CUDA compiler; {INSTALL}")


@pytest.fixture(scope="session")
def amd_linker() -> None:
    """Skips where there is no linker for AMD GPUs."""
    from schedules.build.toolchain.link import INSTALL, find_lld

    if find_lld() is None:
        pytest.skip(f"no linker for AMD GPUs; {INSTALL}")


@pytest.fixture(scope="session")
def package_tools() -> None:
    """Skips where distributions cannot be built offline."""
    found = version_of("setuptools") or "0"
    if int(found.split(".")[0]) < 77 or version_of("build") is None:
        pytest.skip("needs setuptools 77 or later, and build; pip install 'te-schedules[dev]'")


@pytest.fixture(scope="session")
def gpu() -> Arch:
    """The CUDA GPU of this machine; skips where there is none."""
    from schedules.build.present import local_gpu

    found = local_gpu()
    if found is None:
        pytest.skip("no CUDA GPU on this machine")
    return found


def problem_of(name: str, /, **fields: Any) -> Problem:
    return operator(name).problem.parse(fields)


def of_problem(name: str, fields: Mapping[str, Any]) -> Problem:
    """The problem of those of `fields` that the operator called `name` takes."""
    takes = operator(name).problem.is_given
    return problem_of(name, **{field: value for field, value in fields.items() if takes(field)})


def assert_correct(
    problem: Problem, arch: Arch, schedule: str | None = None, config: Any = None, routes: list[str] | None = None
) -> list[Check]:
    """Verify and show the first failure."""
    checks = verify(problem, arch, schedule, config, routes=routes)
    assert checks
    for check in checks:
        assert check.passed, f"{check.route} {arch} {schedule} {config} {check.problem}: {check.detail}"
    return checks


@lru_cache(maxsize=16)
def generated(problem: Problem, arch: Arch, schedule: str, config: Config) -> str:
    """CUDA C++, or LLVM's code of a CPU."""
    sources = build(problem, arch, schedule, config, device_code=False).sources
    return str(sources["cu" if arch.kind == "cuda" else "ll"])


def assert_changes_the_source(problem: Problem, arch: Arch, schedule: str, base: Any, **change: Any) -> None:
    """The same config with `change` is another program."""
    assert base.to_json() != replace(base, **change).to_json()
    assert generated(problem, arch, schedule, base) != generated(problem, arch, schedule, replace(base, **change))


def caught(built: Built, source: str, arrays: Sequence[Any]) -> bool:
    """Whether `source`, run behind the host code of `built`, is wrong in some mode of the emulator."""
    expected = built.operator.reference(built.problem, arrays)
    for _, run in emulated_runs(built, source):
        try:
            outputs = run([*arrays, *poisoned(built.problem)])
            if not judge(built.problem, arrays, outputs, expected, built.schedule.arithmetic).passed:
                return True
        except EmulationError:
            return True
    return False


def is_right(built: Built, rows: int, mode: int) -> bool:
    """Whether a softmax is, with so many rows, in one mode of the emulator, whose guard pages lie around every
    tensor."""
    problem = replace(built.problem, rows=rows)  # type: ignore[call-arg]
    arrays = list(built.operator.inputs(problem, np.random.default_rng(rows)))
    _, call = list(emulated_runs(built))[mode]
    return judge(problem, arrays, call([*arrays, *poisoned(problem)])).passed


def assert_mutants_caught(built: Built, mutants: Mapping[str, tuple[str, str]], within: str = "main_kernel(") -> None:
    """The kernel is right, and is no more once the matches of any (pattern, replacement) of `mutants` are replaced.

    Only what comes after the last `within` is changed: the kernel's body, not the functions that it calls.
    """
    source = str(built.sources["cu"])
    body = source.rindex(within) if within else 0
    arrays = list(built.operator.inputs(built.problem, np.random.default_rng(0)))
    assert not caught(built, source, arrays)
    for name, (pattern, replacement) in mutants.items():
        changed, count = re.subn(pattern, replacement, source[body:])
        assert count, name
        assert caught(built, source[:body] + changed, arrays), name
