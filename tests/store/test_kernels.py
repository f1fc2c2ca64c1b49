"""Kernels that were chosen and built before serve the processes that come after."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedules.build.toolchain import cuda
from schedules.core import text
from schedules.core.arch import Arch, parse_arch
from schedules.core.device import find_device
from schedules.core.errors import ToolchainError, UsageError
from schedules.core.files import write_whole
from schedules.core.parallel import processes
from schedules.core.registry import operator as operator_named
from schedules.core.versions import sources, versions
from schedules.measure.journal import append
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.predict.rank import ranked, varied
from schedules.store import kernels as module
from schedules.store.disk import Disk
from schedules.store.kernels import (
    build_all,
    build_contenders,
    chosen_for,
    contenders,
    is_kept,
    keep_winner,
    kernel_of,
    look_around,
    missing,
    ready_to_build,
    winner,
)
from tests.bundle.package import fake
from tests.conftest import problem_of
from tests.fake import record_of

SOFTMAX = SoftmaxProblem(3, 41, dtype="float32")


@pytest.fixture
def here(tmp_path: Path) -> Disk:
    text.warn_once.cache_clear()
    return Disk(tmp_path / "kernels")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is built, and of problems that are chosen for."""
    done: list[str] = []
    build, choose = module._built, module.choose
    monkeypatch.setattr(module, "_built", lambda *given: done.append("build") or build(*given))
    monkeypatch.setattr(module, "choose", lambda *given, **named: done.append("choose") or choose(*given, **named))
    return done


def made(problem: Any, arch: Arch, disk: Disk) -> module.Kernel:
    return kernel_of(chosen_for(problem, arch, None, disk), disk)


def is_right(kernel: module.Kernel, rows: int = 3) -> bool:
    x = np.random.default_rng(0).standard_normal((rows, 41), np.float32)
    y = np.full_like(x, np.nan)
    kernel.function(x, y)
    wanted = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    return bool(np.allclose(y, wanted, rtol=1e-5, atol=1e-7))


def test_what_was_built_is_loaded(here: Disk, host: Arch, builds: list[str]) -> None:
    first = made(SOFTMAX, host, here)
    assert builds == ["choose", "build"] and is_kept(SOFTMAX, host, None, here)
    second = made(SOFTMAX, host, here)
    assert builds == ["choose", "build"] and second.arguments == first.arguments and not second.workspaces
    assert is_right(first) and is_right(second)
    other = replace(SOFTMAX, rows=5)
    assert not is_kept(other, host, None, here)
    assert is_right(made(other, host, here), rows=5)
    assert builds == ["choose", "build", "choose"]  # the same kernel, for other rows
    abouts = [entry.about for entry in here.entries() if "operator" in entry.about]
    assert [(about["operator"], about["arch"], about["problem"]) for about in abouts] == [
        ("softmax", "llvm", str(SOFTMAX))
    ]


class Held:
    """What a caller has in its frame: a tensor, a node of a gradient."""


def kept_of_a_caller(problem: Any, arch: Arch, disk: Disk) -> Held | None:
    """What is left of that by a first call, until Python looks for garbage."""

    def caller() -> weakref.ref[Held]:
        held = Held()
        made(problem, arch, disk)
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        return caller()()
    finally:
        gc.enable()


def test_a_build_keeps_nothing_of_its_caller(here: Disk, host: Arch) -> None:
    """Or its memory would stay taken, and the capture of a CUDA graph fail for a gradient that is over."""
    assert kept_of_a_caller(SOFTMAX, host, here) is None


@pytest.mark.parametrize("operator", ["conv2d_nhwc", "conv2d_nchw"])
def test_nor_does_that_of_a_program(
    operator: str, here: Disk, cuda_compiler: None, sm_90a: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = operator_named(operator).problem(n=8, h=14, w=14, ci=64, co=64, kh=3, kw=3, dtype="float16")
    with fake.driving("cuda", tmp_path, monkeypatch):
        assert kept_of_a_caller(problem, sm_90a, here) is None


def test_what_is_missing_of_many(here: Disk, host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals are looked at once for all; what all names depend on may have been looked up by then."""
    other, looked = replace(SOFTMAX, cols=40), []
    journals = module.journals_of
    made(SOFTMAX, host, here)
    monkeypatch.setattr(module, "journals_of", lambda name: looked.append(name) or journals(name))
    assert missing({SOFTMAX: False, other: False}, host, None, here) == {other: False} and looked == ["softmax"]
    for cached in (versions, sources):
        cached.cache_clear()
    look_around()
    monkeypatch.setattr("pathlib.Path.read_bytes", None)
    assert is_kept(SOFTMAX, host, None, here) and not missing({}, host, None, here)


def test_kernels_of_one_shape_are_kept_by_it(here: Disk, host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = chosen_for(SOFTMAX, host, None, here)
    fixed = replace(chosen, fixed_shape=True)
    assert chosen.key == replace(chosen, problem=replace(SOFTMAX, rows=5)).key
    assert fixed.key != replace(fixed, problem=replace(SOFTMAX, rows=5)).key


def other_version(patch: pytest.MonkeyPatch, name: str) -> None:
    told = module.versions()
    patch.setattr(module, "versions", lambda: {**told, name: "0.0"})


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Any], Any]] = {
    "problem": lambda patch, chosen: replace(chosen, problem=replace(SOFTMAX, cols=42)),
    "schedule": lambda patch, chosen: replace(chosen, schedule="other"),
    "config": lambda patch, chosen: replace(chosen, config={**chosen.config, "vector": 1}),
    "arch": lambda patch, chosen: replace(chosen, arch=parse_arch("cuda:sm_80")),
    "device": lambda patch, chosen: replace(chosen, arch=replace(chosen.arch, device=find_device("NVIDIA H200"))),
    "features": lambda patch, chosen: replace(chosen, arch=replace(chosen.arch, features=frozenset({"plain"}))),
    "cpu": lambda patch, chosen: patch.setattr(module, "cpu_name", lambda: "another"),
    "flags": lambda patch, chosen: patch.setattr(module, "cpu_features", lambda: frozenset({"avx1024"})),
    "cache": lambda patch, chosen: patch.setattr(module, "last_level_cache", lambda: 7),
    "second cache": lambda patch, chosen: patch.setattr(module, "second_level_cache", lambda: 7),
    "package": lambda patch, chosen: other_version(patch, "te-schedules"),
    "tvm": lambda patch, chosen: other_version(patch, "apache-tvm"),
    "tvm_ffi": lambda patch, chosen: other_version(patch, "apache-tvm-ffi"),
    "sources": lambda patch, chosen: patch.setattr(module, "sources", lambda name: "edited"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_keys_change_with_all_that_a_kernel_depends_on(
    here: Disk, host: Arch, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = chosen_for(SOFTMAX, host, None, here)
    assert replace(chosen).key == chosen.key
    assert (CHANGES[name](monkeypatch, chosen) or replace(chosen)).key != chosen.key


def test_keys_for_gpus_change_with_the_compiler(sm_90a: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    before = module.facts(SOFTMAX, sm_90a)
    monkeypatch.setattr(module, "cpu_name", lambda: "another")
    assert module.facts(SOFTMAX, sm_90a) == before
    monkeypatch.setattr(cuda, "version_of", lambda name: "99")
    monkeypatch.setattr(cuda, "compiler_installed", cuda.compiler_installed.__wrapped__)  # as another process finds it
    assert module.facts(SOFTMAX, sm_90a) != before


def test_choices_change_with_the_journals_and_the_device(
    here: Disk, host: Arch, tmp_path: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHEDULES_LOGS", str(tmp_path))
    default = chosen_for(SOFTMAX, host, None, here)
    append(tmp_path, record_of(SOFTMAX, 3.0, {"vector": 4}))
    best = chosen_for(SOFTMAX, host, None, here)
    assert "default config" in default.why and "best record: 3.00 us" in best.why and best.config["vector"] == 4
    assert chosen_for(SOFTMAX, host, None, here) == best and builds == ["choose"] * 2
    chosen_for(SOFTMAX, host, "another", here)
    assert builds == ["choose"] * 3


def test_what_is_not_used_of_journals_is_told_by_each_process(
    here: Disk, host: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append(tmp_path, record_of(SOFTMAX, 3.0))
    with next(tmp_path.glob("*/softmax.jsonl")).open("a") as file:
        file.write("torn\n")
    monkeypatch.setenv("SCHEDULES_LOGS", str(tmp_path))
    for _ in range(2):
        chosen_for(SOFTMAX, host, None, here)
        text.warn_once.cache_clear()  # as another process
    assert caplog.text.count("1 line is not used") == 2


def test_a_damaged_kernel_is_built_again(
    here: Disk, host: Arch, builds: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    made(SOFTMAX, host, here)
    (library,) = here.folder.glob("*.so")
    write_whole(library, library.read_bytes()[:-100])
    assert is_right(made(SOFTMAX, host, here)) and builds == ["choose", "build", "build"]
    here.add(library.name, {"arguments": [], "workspaces": []}, b"no library")
    chosen = chosen_for(SOFTMAX, host, None, here)
    other = Disk(here.folder.rename(here.folder.with_name("elsewhere")))  # a name that no library was loaded by
    assert is_right(kernel_of(chosen, other)) and builds == ["choose", "build", "build", "build"]
    assert "cut off or was altered" in caplog.text and "it does not load" in caplog.text


def test_without_a_linker_kernels_are_built_and_not_kept(
    here: Disk, host: Arch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object) -> None:
        raise ToolchainError("no linker found")

    monkeypatch.setattr(module, "write_library", missing)
    assert is_right(made(SOFTMAX, host, here)) and not list(here.folder.glob("*.so"))
    assert "no linker found" in caplog.text


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
def test_kernels_of_gpus_get_their_workspaces(
    here: Disk, cuda_compiler: None, sm_90a: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same text as for a launch without them; neither NVRTC nor TVM is asked for one that is there."""
    with fake.driving("cuda", tmp_path, monkeypatch):
        chosen = chosen_for(SoftmaxProblem(4, 2**21), sm_90a, None, here)
        first = kernel_of(chosen, here)
        monkeypatch.setattr(module, "load_library", None)
        second = module._loaded(f"{chosen.key}.so", chosen, here)
        assert second is not None and second.workspaces == first.workspaces
        assert [space.name for space in second.workspaces] == ["partials"]


LATER = """
import sys
import numpy as np
from pathlib import Path
from schedules.bundle.bundle import Bundle
from schedules.core.arch import parse_arch
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.store.disk import Disk
from schedules.store.kernels import chosen_for, kernel_of
disk = Disk(Path(sys.argv[1]))
kernel = kernel_of(chosen_for(SoftmaxProblem(3, 41, dtype="float32"), parse_arch("llvm"), None, disk), disk)
bundle = Bundle.open(sys.argv[2]).load()
x = np.random.default_rng(0).standard_normal((3, 41)).astype("float32")
for function in (kernel.function, bundle.function):
    y = np.zeros_like(x)
    function(x, y)
    assert np.allclose(y, np.exp(x) / np.exp(x).sum(1, keepdims=True), rtol=1e-5)
print(*sorted({"tvm", "xgboost", "rich"} & set(sys.modules)))  # tvm_ffi imports PyTorch where it is
import tvm, schedules
schedules.load("softmax", dict(rows=3, cols=5, dtype="float32"))(x[:, :5].copy(), y[:, :5].copy())
"""


def test_a_second_process_needs_no_compiler(here: Disk, host: Arch, tmp_path: Path) -> None:
    """Neither for what is kept nor for bundles; it can be asked to build all the same."""
    from schedules.build.builder import build
    from schedules.bundle.bundle import write_bundle

    made(SOFTMAX, host, here)
    write_bundle(build(SOFTMAX, host), tmp_path / "bundle")
    command = [sys.executable, "-c", LATER, str(here.folder), str(tmp_path / "bundle")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def made_by_a_worker(folder: Path) -> tuple[bool, bool]:
    """Whether it has built, and whether it has PyTorch."""
    built: list[bool] = []
    build = module._built
    module._built = lambda *given: built.append(True) or build(*given)
    disk = Disk(folder)
    kernel_of(chosen_for(SOFTMAX, parse_arch("llvm"), None, disk), disk)
    return bool(built), "torch" in sys.modules


def test_of_two_that_need_the_same_one_builds_it(here: Disk) -> None:
    with processes(2, main=False) as pool:
        tasks = [pool.schedule(made_by_a_worker, (here.folder,)) for _ in range(2)]
        found = [task.result() for task in tasks]
    assert sorted(found) == [(False, False), (True, False)]
    assert len(list(here.folder.glob("*.so"))) == 1


def test_workers_leave_what_is_to_be_said_to_who_asked(here: Disk, host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "warn_once", said.append)
    asked = SOFTMAX, host, "a device that nobody measured", here
    module._make(*asked, False)
    assert not said
    chosen_for(*asked)
    assert said == ["no records of a device that nobody measured; `schedules tune` measures some"]


class Nobodys(SoftmaxProblem):
    """Of no operator."""


def test_all_at_once(here: Disk, host: Arch, builds: list[str]) -> None:
    """What cannot be built costs no other."""
    problems = [replace(SOFTMAX, cols=cols) for cols in (41, 43)]
    done: list[None] = []
    failed = build_all(dict.fromkeys([*problems, Nobodys(2, 3)], False), host, None, here, lambda: done.append(None))
    assert {type(problem): type(error) for problem, error in failed.items()} == {Nobodys: UsageError}
    assert len(done) == 3
    assert all(is_kept(problem, host, None, here) for problem in problems)
    for problem in problems:
        made(problem, host, here)
    assert not builds


@pytest.mark.parametrize("lives", [True, False])
def test_what_is_ready_is_copied(here: Disk, host: Arch, monkeypatch: pytest.MonkeyPatch, lives: bool) -> None:
    """If it has ended, processes start from nothing."""
    with ready_to_build(host):
        (ready,) = module._ready_ahead
        monkeypatch.setattr(module, "origin", None)  # there is to be no other
        if not lives:
            os.kill(ready.pid, signal.SIGKILL)
        assert build_all({SOFTMAX: False}, host, None, here) == {}
        assert is_kept(SOFTMAX, host, None, here) and ready.alive == lives and not module._ready_ahead
    assert not ready.alive


CONVOLUTION = dict(n=8, h=28, w=28, ci=128, co=128, kh=3, kw=3, pad=1, dtype="float16")


def test_contenders_are_the_next_of_the_ranking(here: Disk, sm_90a: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen, and others that differ; of what a record or a caller names it alone."""
    monkeypatch.setenv("SCHEDULES_LOGS", str(here.folder / "none"))
    problem: Any = problem_of("conv2d_nhwc", **CONVOLUTION)
    chosen = chosen_for(problem, sm_90a, None, here)
    found = contenders(chosen, 4)
    assert chosen.source == "default" and found[0] is chosen and len({each.key for each in found}) == len(found) == 4
    best = [(each.schedule, each.config.to_json()) for each in varied(ranked(problem, sm_90a))]
    assert [(each.schedule, each.config) for each in found] == best[:4]
    assert all("predicted" in each.why and each.problem == problem for each in found)
    assert contenders(replace(chosen, source="record"), 4) == [replace(chosen, source="record")]
    assert contenders(chosen, 1) == [chosen]


def test_the_winner_of_a_contest_is_kept(here: Disk, sm_90a: Arch) -> None:
    problem: Any = problem_of("conv2d_nhwc", **CONVOLUTION)
    _, second = contenders(chosen_for(problem, sm_90a, "NVIDIA H200", here), 2)
    assert winner(problem, sm_90a, "NVIDIA H200", here) is None
    kept = keep_winner(second, "it won", problem, "NVIDIA H200", here)
    assert kept == replace(second, why="it won") == winner(problem, sm_90a, "NVIDIA H200", here)
    assert winner(problem, sm_90a, "NVIDIA H100 80GB HBM3", here) is None
    assert chosen_for(problem, sm_90a, "NVIDIA H200", here).key != second.key


def test_contenders_are_built_once(here: Disk, host: Arch) -> None:
    """By all cores; an error is that of its own."""
    chosen = chosen_for(SOFTMAX, host, None, here)
    wrong = replace(chosen, config={**chosen.config, "nothing": 1})
    done: list[None] = []
    failed = build_contenders([chosen, wrong], None, here, lambda: done.append(None))
    assert list(failed) == [wrong.key] and "nothing" in str(failed[wrong.key]) and len(done) == 2
    assert is_right(kernel_of(chosen, here))
    assert build_contenders([chosen], None, here, lambda: done.append(None)) == {} and len(done) == 3
