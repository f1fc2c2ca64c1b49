from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import schedules
from schedules.core.errors import ArgumentError, UnknownNameError, UsageError
from schedules.measure.journal import append
from tests.conftest import problem_of
from tests.fake import record_of

FIELDS = dict(rows=16, cols=64)


def test_a_kernel_that_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "schedules"):
        softmax = schedules.load("softmax", FIELDS)
    assert "default config" in caplog.text and "softmax rows=16 cols=64" in caplog.text
    x = np.random.default_rng(0).standard_normal((16, 64)).astype("float16")
    y = np.empty_like(x)
    softmax(x, y)
    np.testing.assert_allclose(y.astype(float).sum(1), 1, atol=1e-2)
    with pytest.raises(ArgumentError):
        softmax(x)


def test_the_best_record_is_used_and_named(tmp_path: Path) -> None:
    problem = problem_of("softmax", **FIELDS)
    record = record_of(problem, 3.0)
    append(tmp_path, record)
    kernel = schedules.load("softmax", FIELDS, logs=[tmp_path])
    assert kernel.choice.source == "record" and kernel.choice.record == record
    assert "best record: 3.00 us" in str(kernel)
    assert schedules.load("softmax", problem).choice.source == "default"


def test_equal_kernels_are_built_once() -> None:
    first = schedules.load("softmax", FIELDS)
    assert schedules.load("softmax", problem_of("softmax", **FIELDS), "llvm").built is first.built
    assert schedules.load("softmax", FIELDS, config=first.built.config.to_json()).built is first.built


def test_names_and_presets() -> None:
    words = dict(n=8, h=5, w=5, ci=4, co=4)
    kernel = schedules.load("tutorial", words)
    assert kernel.built.problem == problem_of("conv2d_hwcn", **words, kh=3, kw=3, pad=1)
    assert schedules.load("conv2d_hwcn", kernel.built.problem).built is kernel.built
    with pytest.raises(UsageError, match="is a problem of conv2d_hwcn, not of softmax"):
        schedules.load("softmax", kernel.built.problem)
    with pytest.raises(UnknownNameError, match="unknown preset 'tutorail'"):
        schedules.load("conv2d_hwcn", "tutorail")
    with pytest.raises(UnknownNameError):
        schedules.load("softmx", FIELDS)
    with pytest.raises(UsageError, match="missing problem"):
        schedules.load("softmax")
    with pytest.raises(UnknownNameError, match="unknown config field"):
        schedules.load("softmax", FIELDS, config={"volume": 11})
