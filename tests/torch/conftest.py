"""What tests of the operators for PyTorch share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was built on this machine before serves no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDULES_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture(scope="module", autouse=True)
def own_choices() -> Iterator[None]:
    """No file's tests are served by what another's needed: by a kernel for any width, after many widths."""
    yield
    if kernels := sys.modules.get("schedules.torch.kernels"):
        kernels._kernels.clear()
        kernels._alone.clear()
        kernels.use_bundles()


@pytest.fixture(scope="module", autouse=True)
def no_benchmark_mode() -> Iterator[None]:
    """No kernels are timed on a device that is not there: a program whose tests this process ran before may have left
    the mode on."""
    torch = sys.modules.get("torch")
    with pytest.MonkeyPatch.context() as patch:
        if torch:
            patch.setattr(torch.backends.cudnn, "benchmark", False)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_inductor() -> Iterator[None]:
    """What Inductor leaves undone for the few C++ kernels of these tests: to compile its headers beforehand, to compile
    a program that tells whether vectors of this CPU can be used, to start processes that compile."""
    if "torch" not in sys.modules:
        yield
        return
    from torch._inductor import config

    with config.patch({"cpp_cache_precompile_headers": False, "cpp.simdlen": 1, "compile_threads": 1}):
        yield


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is captured before or after, and random numbers begin anew."""
    import torch

    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
