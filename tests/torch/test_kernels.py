from __future__ import annotations

import contextlib
import dataclasses
import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

import schedules.torch as kernels  # noqa: E402
from schedules.build.builder import build  # noqa: E402
from schedules.bundle.bundle import write_bundle  # noqa: E402
from schedules.core.arch import Arch, parse_arch  # noqa: E402
from schedules.core.errors import ArgumentError, BuildError, BundleError, DeviceError, UsageError  # noqa: E402
from schedules.measure.journal import append  # noqa: E402
from schedules.operators.conv2d_nhwc.definition import NhwcProblem as ConvProblem  # noqa: E402
from schedules.operators.softmax import OPERATOR, cpu  # noqa: E402
from schedules.operators.softmax.definition import SoftmaxProblem  # noqa: E402
from schedules.store import kernels as store  # noqa: E402
from schedules.torch import kernels as dispatch  # noqa: E402
from tests.fake import record_of  # noqa: E402

CPU = torch.device("cpu")


def softmax_problem(rows: int, cols: int, **fields: Any) -> SoftmaxProblem:
    return SoftmaxProblem(rows, cols, dtype="float32", **fields)


@pytest.fixture(autouse=True)
def first_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have asked for."""
    monkeypatch.setattr(dispatch, "_alone", {})


@pytest.fixture
def forgetful() -> Iterator[None]:
    kernels.use_bundles()
    yield
    kernels.use_bundles()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is built in this process."""
    found: list[Any] = []
    make = store._built
    monkeypatch.setattr(store, "_built", lambda *given: found.append(given) or make(*given))
    return found


def test_one_build_serves_all_numbers_of_rows(forgetful: None, built: list[Any]) -> None:
    for rows in (1, 3, 2, 3):  # few enough for one default config
        x = torch.randn(rows, 41)
        torch.testing.assert_close(kernels.softmax(x), torch.softmax(x, -1))
    kernels.use_bundles()  # forgets which kernel serves which shape, but not the kernels
    kernels.softmax(torch.randn(4, 41))
    assert len(built) == 1
    kernels.softmax(torch.randn(3, 41), scale=0.5)
    assert len(built) == 2


def test_one_build_serves_all_short_rows_but_of_the_first_widths(forgetful: None, built: list[Any]) -> None:
    for count, cols in ((1, 5), (2, 6), (2, 5), (3, 1), (3, 77), (3, 31), (3, 1024), (4, 1025)):
        x = torch.randn(4, cols)
        torch.testing.assert_close(kernels.softmax(x, scale=0.375), torch.softmax(x * 0.375, -1))
        assert len(built) == count


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_one_build_serves_the_batches_up_to_a_power_of_two(
    forgetful: None, built: list[Any], memory_format: Any
) -> None:
    filters = torch.randn(5, 3, 3, 3).to(memory_format=memory_format)
    for count, batches in enumerate(((1,), (2,), (4, 3), (7, 5, 8, 6)), start=1):
        for n in batches:
            x = torch.randn(n, 3, 6, 7).to(memory_format=memory_format)
            torch.testing.assert_close(kernels.conv2d(x, filters), torch.conv2d(x, filters))
            assert len(built) == count


def test_a_bundle_of_a_range_serves_its_batches(forgetful: None, host: Arch, tmp_path: Path) -> None:
    problem = ConvProblem(6, 5, 5, 3, 4, 3, 3, n_from=2)
    write_bundle(build(problem, host), tmp_path / "range")
    (bundle,) = kernels.use_bundles(tmp_path)
    for n, served in ((1, False), (2, True), (5, True), (6, True), (7, False)):
        made = dispatch.kernel_for(dataclasses.replace(problem, n=n, n_from=0), CPU).made
        assert (made == f"bundle {bundle.path}") is served


def test_the_best_record_is_used(
    forgetful: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = softmax_problem(24, 43)
    append(tmp_path, record_of(problem, 3.0, {"vector": 4}))
    monkeypatch.setenv("SCHEDULES_LOGS", str(tmp_path))
    with caplog.at_level(logging.INFO, "schedules"):
        recorded, default = (dispatch.kernel_for(softmax_problem(rows, 43), CPU) for rows in (24, 4096))
    assert "vector=4" in recorded.made and "vector=4" not in default.made
    assert "best record: 3.00 us" in caplog.text and "rows=4096 cols=43" in caplog.text


def test_programs_of_one_shape_are_kept_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the auto-scheduler finds takes the rows that it was found for, and no other."""

    fixed = dataclasses.replace(OPERATOR, schedules=(dataclasses.replace(cpu.SCHEDULE, fixed_shape=True),))
    monkeypatch.setattr(store, "operator_of", lambda problem: fixed)
    first, second = (dispatch.kernel_for(softmax_problem(rows, 47), CPU) for rows in (2, 3))
    assert first is not second and first.arguments[0].shape == (2, 47)
    assert dispatch.kernel_for(softmax_problem(2, 47), CPU) is first


def test_bundles_come_first_and_the_nearest_of_them(
    forgetful: None, tmp_path: Path, host: Arch, caplog: pytest.LogCaptureFixture
) -> None:
    for rows in (4, 512):
        write_bundle(build(softmax_problem(rows, 29), host), tmp_path / f"deep/{rows}")
    write_bundle(build(softmax_problem(4, 29), parse_arch("rocm:gfx90a")), tmp_path / "amd")
    with caplog.at_level(logging.WARNING, "schedules"):
        taken = kernels.use_bundles(tmp_path)
    assert {bundle.path.name for bundle in taken} == {"4", "512"}
    assert "amd is left out: built for gfx90a" in caplog.text
    assert dispatch.kernel_for(softmax_problem(3, 29), CPU).made.endswith("deep/4")
    assert dispatch.kernel_for(softmax_problem(700, 29), CPU).made.endswith("deep/512")
    assert "bundle" not in dispatch.kernel_for(softmax_problem(3, 30), CPU).made
    x = torch.randn(9, 29)
    torch.testing.assert_close(kernels.softmax(x), torch.softmax(x, -1))
    kernels.use_bundles()
    assert "bundle" not in dispatch.kernel_for(softmax_problem(3, 29), CPU).made


def test_a_folder_without_bundles_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="holds no bundle"):
        kernels.use_bundles(tmp_path)


def test_nothing_is_built_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 51)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match="call it once before"):
        kernels.softmax(x)
    monkeypatch.undo()
    kernels.softmax(x)


def test_tensors_that_do_not_fit_are_named() -> None:
    """By the checks of the function itself; what they let through is right."""
    kernel = dispatch.kernel_for(softmax_problem(3, 51), CPU)
    x, y = torch.randn(3, 51), torch.zeros(3, 51)
    refused = [
        ((x,), "1 tensors given, 2 needed"),
        ((x, y, y), "3 tensors given"),
        ((x[:, :50].contiguous(), y), r"x has shape \(3, 50\), needed \(3, 51\)"),
        ((x[0], y), "x has shape"),
        ((x, y[:2]), r"has shape \(2, 51\), needed \(3, 51\)"),
        ((x.double(), y), "x has dtype float64"),
        ((x, y.half()), "has dtype float16"),
        ((torch.randn(51, 3).t(), y), "x is not contiguous"),
    ]
    for tensors, text in refused:
        with pytest.raises(ArgumentError, match=text):
            kernel(*tensors)
    assert not y.any()
    kernel(x, y)
    torch.testing.assert_close(y, torch.softmax(x, -1))


def test_extents_of_one_may_have_any_stride() -> None:
    for size, stride in (((1, 7), (100, 1)), ((7, 1), (1, 5)), ((1, 1), (3, 9)), ((1, 1, 7), (9, 50, 1))):
        x = torch.randn(200).as_strided(size, stride)
        torch.testing.assert_close(kernels.softmax(x), torch.softmax(x, -1))


def test_devices_without_kernels() -> None:
    with pytest.raises(DeviceError, match="no kernels for xpu:0"):
        dispatch.arch_of(torch.device("xpu:0"))
    with pytest.raises(NotImplementedError, match="schedules::softmax"):
        torch.ops.schedules.softmax(torch.randn(2, 3).to_sparse(), None, None, "softmax", 1.0, 0, False)


def test_threads_share_one_build(built: list[Any]) -> None:
    """A backward pass on a GPU runs, and builds its first kernels, in a thread of PyTorch's."""
    x = torch.randn(6, 1053)
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda _: kernels.softmax(x), range(3)))
    assert len(built) == 1
    for y in results:
        torch.testing.assert_close(y, torch.softmax(x, -1))


def test_prepared_kernels_are_not_built_again(
    built: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCHEDULES_CACHE", str(tmp_path))
    problems = [softmax_problem(3, cols) for cols in (1057, 1059, 1057)]
    kernels.prepare(problems, CPU, progress=True)
    assert "building kernels" in (bar := capfd.readouterr().err) and "2/2" in bar
    for cols in (1057, 1059):
        x = torch.randn(3, cols)
        torch.testing.assert_close(kernels.softmax(x), torch.softmax(x, -1))
    kernels.prepare(problems, CPU)
    assert not built and not capfd.readouterr().err


def test_compilers_start_while_a_first_model_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a kernel was built before, nor where bundles serve."""
    begun: list[Arch] = []
    monkeypatch.setattr(dispatch, "ready_to_build", lambda arch: contextlib.nullcontext(begun.append(arch)))
    model, x = torch.nn.Softmax(-1).eval(), torch.randn(3, 1073)
    model.register_buffer("there", torch.zeros(1))
    (tmp_path / "file").write_text("")
    for folder, starts in (("kernels", 1), ("kernels", 0), ("file", 1), ("file/under", 1)):
        monkeypatch.setenv("SCHEDULES_CACHE", str(tmp_path / folder))
        begun.clear()
        torch.testing.assert_close(kernels.optimize(model, x)(x), torch.softmax(x, -1))
        assert begun == [dispatch.arch_of(CPU)] * starts
        dispatch._kernels.clear()
    monkeypatch.setattr(dispatch, "_bundles", {0: []})
    with dispatch.likely_to_build([CPU]):
        assert len(begun) == 1


SECOND = """
import sys, torch
import schedules.torch as kernels
x, data, filter = torch.randn(5, 1071), torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
torch.testing.assert_close(kernels.softmax(x), torch.softmax(x, -1))
torch.testing.assert_close(kernels.conv2d(data, filter), torch.conv2d(data, filter), rtol=1e-4, atol=1e-4)
print([name for name in ("tvm", "rich", "xgboost") if name in sys.modules])
"""


def test_a_second_process_imports_no_compiler() -> None:
    kernels.softmax(torch.randn(5, 1071))
    kernels.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3))
    done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_folder_that_takes_no_files_costs_only_the_next_process(
    built: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SCHEDULES_CACHE", str(tmp_path / "file"))
    kernels.prepare([softmax_problem(3, cols) for cols in (1061, 1063)], CPU)
    for cols in (1061, 1063):
        x = torch.randn(3, cols)
        torch.testing.assert_close(kernels.softmax(x), torch.softmax(x, -1))
    assert not built
    kernels.softmax(torch.randn(3, 1065))
    assert len(built) == 1


def test_what_cannot_be_prepared_is_said_and_raised_by_its_call(
    built: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = store._built

    def refuse(name: str, chosen: Any, kept: Any) -> Any:
        if chosen.problem.cols == 1069:
            raise BuildError("refused")
        return make(name, chosen, kept)

    monkeypatch.setattr(store, "_built", refuse)
    monkeypatch.setattr(dispatch, "build_all", lambda *given: {})
    kernels.prepare([softmax_problem(3, cols) for cols in (1069, 1067)], CPU)
    assert "no kernel for rows=3 cols=1069" in caplog.text and "refused" in caplog.text and len(built) == 1
    with pytest.raises(BuildError, match="refused"):
        kernels.softmax(torch.randn(3, 1069))
    kernels.softmax(torch.randn(3, 1067))
    assert len(built) == 1
