from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.build.inspect import summary
from schedules.check.verify import emulated_runs
from schedules.core.arch import Arch, parse_arch
from schedules.core.registry import operator
from schedules.operators.depthwise_conv2d.bands import default, space
from schedules.operators.depthwise_conv2d.bands_tile import Bands, BandsConfig
from tests.conftest import assert_correct, assert_mutants_caught, problem_of
from tests.operators.depthwise_conv2d.shapes import LAYERS, LAYOUTS, SHAPES

DTYPES = ("float16", "bfloat16")
SMALL: dict[str, Any] = dict(n=2, h=8, w=12, ci=8, kh=3, kw=5, pad="1,2")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "dtype"), [(shape, DTYPES[i % 2]) for i, shape in enumerate(SHAPES)])
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str, dtype: str, layout: str) -> None:
    problem = problem_of("depthwise_conv2d", **SHAPES[shape], dtype=dtype, layout=layout)
    assert_correct(problem, sm_90a, "bands", routes=["emulated"])


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ("nchw", dict(images=2, tile_h=7, rows=7, channels=16, warps_c=2)),  # whole planes, by vectors of elements
        ("nchw", dict(images=1, tile_h=4, rows=2, channels=8, warps_c=2, warps_m=2)),
        ("nhwc", dict(images=2, tile_h=4, rows=4, channels=16, together=8, warps_c=1)),
        ("nhwc", dict(images=1, tile_h=7, rows=1, channels=8, together=2, warps_c=2, warps_m=3)),
        ("nhwc", dict(images=4, tile_h=8, rows=4, channels=16, together=1, warps_c=8)),
    ],
    ids=str,
)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any], layout: str) -> None:
    words = dict(n=3, h=7, w=7, ci=24, kh=5, kw=5, pad=2, dtype="float16", layout=layout)
    assert_correct(problem_of("depthwise_conv2d", **words, bias=True), sm_90a, "bands", config, ["emulated"])
    strided = dict(words, h=9, w=10, kh=2, kw=3, stride="1,2", pad="0,2", dilation="2,1", residual=True)
    assert_correct(problem_of("depthwise_conv2d", **strided), sm_90a, "bands", config, ["emulated"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_build_takes_a_range_of_batches(emulation: None, sm_90a: Arch, layout: str) -> None:
    words = dict(SMALL, n=4, n_from=2, dtype="float16", layout=layout)
    config = dict(images=4, tile_h=8, rows=4, channels=8, together=1 if layout == "nchw" else 4, warps_c=2)
    assert_correct(problem_of("depthwise_conv2d", **words), sm_90a, "bands", config, ["emulated"])


@pytest.mark.parametrize(("layout", "together"), [("nchw", 1), ("nhwc", 4)])
def test_infinities_and_nans_stay_in_their_windows(emulation: None, sm_90a: Arch, layout: str, together: int) -> None:
    """Zeros of the bands meet the data of other windows, and infinity times zero is NaN."""
    problem: Any = problem_of("depthwise_conv2d", **SMALL, dtype="float16", layout=layout, bias=True)
    config = dict(images=1, tile_h=4, rows=2, channels=8, together=together, warps_c=2)
    built = build(problem, sm_90a, "bands", config, device_code=False)
    op = operator("depthwise_conv2d")
    arrays = list(op.inputs(problem, np.random.default_rng(0)))
    flat = arrays[0].reshape(-1)
    flat[[5, 300, 777, 1500]] = np.inf, np.nan, -np.inf, np.inf
    with np.errstate(all="ignore"):
        wanted = op.reference(problem, arrays)[0].values
    assert 0 < np.isnan(wanted).sum() < np.isfinite(wanted).sum() and np.isinf(wanted).any()
    output = np.zeros(wanted.shape, np.float16)
    for _, run in emulated_runs(built, str(built.sources["cu"])):
        got = np.asarray(run([*arrays, output])[0])
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=5e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_broken_kernels_are_noticed(emulation: None, sm_90a: Arch, layout: str) -> None:
    problem = problem_of("depthwise_conv2d", **SMALL, dtype="float16", layout=layout)
    config = dict(images=1, tile_h=4, rows=2, channels=8, together=1 if layout == "nchw" else 4, warps_c=2)
    built = build(problem, sm_90a, "bands", config, device_code=False)
    barrier = r"tvm_builtin_cuda_cta_sync\(\);"
    mutants = {
        "no wait for data": (r"tvm_builtin_ptx_cp_async_wait_group_async_wait_group_0\(\);", ""),
        "no barrier before results leave": (rf"(?s){barrier}(?!.*{barrier})", ""),
        "no border above": (r"\(\(0 <= y\)", "((-1 <= y)"),
    }
    assert_mutants_caught(built, mutants)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (dict(together=4), "together=4 is not 1, or with layout=nhwc"),
        (dict(channels=6), "channels=6 are no whole groups of 1 for warps_c=4"),
        (dict(tile_h=6), "tile_h=6 is not a multiple of rows=4"),
        (dict(rows=40, tile_h=40), "rows=40 and a kernel of 3x5 need about"),
        (dict(images=512), "bytes of shared memory"),
        (dict(warps_c=8, warps_m=8), "is more than 32 warps"),
        (dict(images=0), "images=0 must be at least 1"),
    ],
    ids=str,
)
def test_what_is_illegal_is_said(sm_90a: Arch, config: dict[str, Any], reason: str) -> None:
    problem: Any = problem_of("depthwise_conv2d", **SMALL, dtype="float16")
    assert BandsConfig().check(problem, sm_90a) is None
    assert reason in (BandsConfig(**config).check(problem, sm_90a) or "legal")
    assert "use schedule windows" in (BandsConfig().check(problem_of("depthwise_conv2d", **SMALL), sm_90a) or "legal")
    assert "use sm_80" in (BandsConfig().check(problem, parse_arch("cuda:sm_75")) or "legal")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_space_has_a_legal_default_for_layers(sm_90a: Arch, layout: str) -> None:
    for fields in LAYERS:
        for n in (1, 32):
            problem: Any = problem_of("depthwise_conv2d", **fields, n=n, dtype="float16", layout=layout)
            config = default(problem, sm_90a)
            assert config.check(problem, sm_90a) is None and config in list(space(problem, sm_90a))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_of_inputs_is_read_once_for_all_kernel_rows(cuda_compiler: None, sm_90a: Arch, layout: str) -> None:
    problem: Any = problem_of("depthwise_conv2d", **LAYERS[-1], n=32, dtype="float16", layout=layout)
    together = 1 if layout == "nchw" else 4
    built = build(problem, sm_90a, "bands", dict(images=1, tile_h=7, rows=7, channels=16, together=together, warps_c=4))
    kernel, geometry = summary(built), Bands(problem, built.config)  # type: ignore[arg-type]
    steps = geometry.octets // 2
    assert steps == (1 if layout == "nchw" else 2)
    assert kernel.spills == 0
    assert kernel.counts["mma"] == 7 * 7 * steps and kernel.counts["ldmatrix"] == (7 + 6) * steps
