"""What tests of the operators for PyTorch share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was built on this machine before serves no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDULES_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield
