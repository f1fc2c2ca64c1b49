"""float32 as sums of bfloat16 addends: right in every layout, as exact as it says, and unasked only if as float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.check.verify import MODES, emulated_runs, judge, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.arithmetic import BF16X3, BF16X6, FLOAT32
from schedules.core.errors import ConfigError
from schedules.core.operator import Array
from schedules.core.registry import operator
from schedules.predict.estimate import LAUNCH
from schedules.predict.rank import predicted_us, ranked
from tests.conftest import assert_mutants_caught, problem_of
from tests.hopper.works import PLAIN
from tests.hopper_kernels import assert_correct_on, assert_emulated, opcodes, to_be_waited_for

NAMES = {"bf16x3": BF16X3, "bf16x6": BF16X6}
LAYOUTS = ("conv2d_hwcn", "conv2d_nchw", "conv2d_nhwc")
WORK: dict[str, Any] = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1, dtype="float32")
SHAPES: dict[str, dict[str, Any]] = {
    "ragged, stride 2": dict(n=36, h=7, w=6, ci=13, co=44, kh=3, kw=2, pad=1, stride=2),
    "asymmetric, dilated": dict(n=4, h=9, w=6, ci=40, co=8, kh=5, kw=3, pad="2,0", stride="3,1", dilation="1,2"),
    "1x1": dict(n=8, h=3, w=5, ci=24, co=36, kh=1, kw=1),
}
SMALL: list[dict[str, Any]] = [
    PLAIN | words
    for words in [
        dict(block_m=64, block_n=32, block_k=16, consumers=1, num_stages=3, cluster_m=2, grid=2),
        dict(block_m=128, block_n=32, block_k=32, split_k=2, grid=4),
        dict(block_m=64, block_n=64, block_k=16, ping_pong=True, grid=2),
    ]
]


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize(("layout", "shape"), list(zip(LAYOUTS, SHAPES, strict=True)))
def test_default_is_correct(emulation: None, layout: str, shape: str, schedule: str) -> None:
    assert_emulated(layout, SHAPES[shape] | dict(dtype="float32"), {}, schedule)


@pytest.mark.parametrize(("layout", "words"), list(zip(LAYOUTS, SMALL, strict=True)))
def test_other_configs_are_correct(emulation: None, layout: str, words: dict[str, Any]) -> None:
    assert_emulated(layout, SHAPES["ragged, stride 2"] | dict(dtype="float32"), words, "bf16x6")


@pytest.mark.parametrize("fields", [dict(filter_layout="hwoi"), dict(pad=0, h=3, w=2)], ids=str)
def test_filters_as_they_lie(emulation: None, fields: dict[str, Any]) -> None:
    """Of NCHW: packed, and of a whole image, which is a product of (n, ci * kh * kw)."""
    problem = dict(n=5, h=5, w=4, ci=9, co=20, kh=3, kw=2, pad=1, dtype="float32") | fields
    assert_emulated("conv2d_nchw", problem, SMALL[0] | dict(cluster_m=1, grid=0), "bf16x3")


# ---- errors


def emulated(built: Built, arrays: Sequence[Array]) -> Array:
    ((_, run),) = emulated_runs(built, str(built.sources["cu"]), MODES[:1])
    return run([*arrays, *poisoned(built.problem)])[0]


def product(ci: int, n: int, co: int, schedule: str, arch: Arch) -> Built:
    """A matrix product: `n` rows of data, `co` of filters, `ci` long."""
    problem = problem_of("conv2d_nhwc", n=n, h=1, w=1, ci=ci, co=co, kh=1, kw=1, dtype="float32")
    return build(problem, arch, schedule, SMALL[0] | dict(cluster_m=1, grid=0), device_code=False)


def kinds(shape: tuple[int, int], r: np.random.Generator) -> dict[str, Array]:
    """Rows of numbers that are random, positive, of a wide range, and whose halves nearly cancel each other."""
    normal = r.standard_normal(shape, dtype="float32")
    half = normal[:, : shape[1] // 2]
    near = (half * (1 + 2.0**-14 * r.standard_normal(half.shape))).astype("float32")
    return {
        "normal": normal,
        "positive": np.abs(normal),
        "wide": normal * np.exp2(r.integers(-20, 21, shape)).astype("float32"),
        "cancelling": np.concatenate([half, -near], axis=1),
    }


@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "cancelling"])
def test_six_products_are_as_exact_as_sums_in_float32(emulation: None, sm_90a: Arch, kind: str) -> None:
    """Errors in units of the sum of the absolute products, at most those of a chain in float32; three products' are
    within what they are said to be."""
    length, r = 576, np.random.default_rng(0)
    data, weight = kinds((32, length), r)[kind], kinds((32, length), r)[kind]
    if kind == "cancelling":  # the products cancel, not the factors' signs
        weight[:, length // 2 :] = weight[:, : length // 2]
    exact = data.astype("float64") @ weight.T.astype("float64")
    magnitude = np.abs(data).astype("float64") @ np.abs(weight).T.astype("float64")
    chain = np.zeros((32, 32), "float32")
    for k in range(length):
        chain = chain + np.outer(data[:, k], weight[:, k])
    off = {"chain": chain} | {
        name: emulated(
            product(length, 32, 32, name, sm_90a), [data.reshape(32, 1, 1, length), weight.reshape(32, 1, 1, length)]
        ).reshape(32, 32)
        for name in NAMES
    }
    errors = {name: np.abs(got - exact) / magnitude for name, got in off.items()}
    assert errors["bf16x6"].max() <= errors["chain"].max() and errors["bf16x6"].mean() <= errors["chain"].mean()
    assert errors["bf16x3"].max() < BF16X3.error


def addends(x: Array, count: int) -> list[Array]:
    found, rest = [], x
    for _ in range(count):
        found.append(rest.astype(ml_dtypes.bfloat16).astype("float32"))
        rest = rest - found[-1]
    return found


def test_three_addends_are_the_number() -> None:
    x = np.random.default_rng(0).standard_normal(10000, dtype="float32") * np.float32(1e-20)
    assert (sum(each.astype("float64") for each in addends(x, 3)) == x).all()
    rest = np.abs(x - sum(each.astype("float64") for each in addends(x, 2)))
    assert 2.0**-18 < (rest / np.abs(x)).max() <= 2.0**-16


def test_one_product_of_two_addends_is_not_float32s(emulation: None, sm_90a: Arch) -> None:
    arrays = [np.random.default_rng(i).standard_normal((64, 1, 1, 1), dtype="float32") for i in range(2)]
    error = {}
    for name in NAMES:
        built = product(1, 64, 64, name, sm_90a)
        got = emulated(built, arrays)
        assert judge(built.problem, arrays, [got], arithmetic=NAMES[name]).error < 1
        error[name] = judge(built.problem, arrays, [got], arithmetic=FLOAT32).error
    assert error["bf16x6"] < 2.0**-3 and error["bf16x3"] > 4


@pytest.mark.parametrize("schedule", NAMES)
def test_special_values(emulation: None, sm_90a: Arch, schedule: str) -> None:
    """Each with each: infinities, NaN, zeros, and the largest, which would round to infinity.

    What overflows is not finite: the infinity, or NaN where products of addends overflow both ways.
    """
    largest = float(np.finfo(np.float32).max)
    values = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -2.0, 1 / 3, -1e30, 1e-30, largest, -largest, 3.395e38, 0.75]
    values += [0.5, 0.25]
    count = len(values)
    given = np.array(values, np.float32).reshape(count, 1, 1, 1)
    got = emulated(product(1, count, count, schedule, sm_90a), [given, given]).reshape(count, count)
    with np.errstate(all="ignore"):
        exact = given.reshape(-1, 1).astype("float64") * given.reshape(1, -1).astype("float64")
        wanted = exact.astype("float32")
        close = np.abs(got - exact) <= NAMES[schedule].error * np.abs(exact) + 2.0**-126
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    overflowed = np.isfinite(exact) & ~np.isfinite(wanted)
    assert np.where(np.isfinite(wanted), close, np.where(overflowed, ~np.isfinite(got), same)).all()


def test_broken_kernels_are_caught(emulation: None, sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nhwc", n=2, h=4, w=4, ci=40, co=32, kh=3, kw=1, pad=1, dtype="float32")
    words = SMALL[0] | dict(cluster_m=1, grid=0, halo=False)
    built = build(problem, sm_90a, "bf16x6", words, device_code=False)
    # units of 16 bytes from an addend of operand a, and of b, to the next
    middle = r"hopper_wgmma_m64n32_bf16\(.*\+ 128\)\)\), .* \+ 64\)\)\), 1\);"
    assert_mutants_caught(
        built,
        {
            "a stage alone": (r"(sums_ptr\[\d+\]) = \(\1 \+ (sums_of_stage.*)\);", r"\1 = \2;"),
            "a stage not anew": (r"(hopper_wgmma_m64n32_bf16\(.*), 0\);", r"\1, 1);"),
            "without middle x middle": (middle, ";"),
            "not waited for": (r"\w*wgmma_wait_group\w*_0\(\);", ";"),
        },
    )


# ---- what it is made of, and where it is used


@pytest.mark.parametrize(
    ("layout", "schedule", "words"),
    [
        ("conv2d_hwcn", "bf16x3", dict(block_m=128, block_n=160, block_k=32, num_stages=4, skip_padding=True)),
        ("conv2d_nchw", "bf16x3", dict(block_m=64, block_n=192, block_k=32, num_stages=3, consumers=1)),
        ("conv2d_nhwc", "bf16x6", dict(block_m=128, block_n=128, block_k=32, num_stages=4)),
    ],
)
def test_what_it_is_made_of(
    cuda_compiler: None, sm_90a: Arch, layout: str, schedule: str, words: dict[str, Any]
) -> None:
    built = build(problem_of(layout, **WORK), sm_90a, schedule, dict(consumers=2, cluster_m=2, grid=132) | words)
    found = opcodes(built)
    assert found["HGMMA"] == {"bf16x3": 3, "bf16x6": 6}[schedule] * words["block_k"] // 16
    assert all(kernel.spill_stores == kernel.spill_loads == kernel.stack == 0 for kernel in built.resources)
    assert len(built.resources) == 2 and "C75" not in built.log
    to_be_waited_for(built)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", NAMES)
def test_it_is_used_unasked_if_as_exact_as_float32(sm_90a: Arch, layout: str, schedule: str) -> None:
    problem, op = problem_of(layout, **WORK | dict(stride=2)), operator(layout)  # Winograd's tiles want a stride of 1
    spec = op.schedule(schedule)
    assert spec.arithmetic == NAMES[schedule]
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)
    assert spec.opt_in == (spec not in op.offered(sm_90a)) == (spec.arithmetic.error > FLOAT32.error)
    assert spec.opt_in == (schedule == "bf16x3")
    found = [each for each in ranked(problem, sm_90a) if each.schedule == schedule]
    assert bool(found) == (schedule == "bf16x6")
    for each in found:
        assert each.us == predicted_us(problem, schedule, each.config, sm_90a) > LAUNCH


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_stands_among_the_others_by_its_estimate(sm_90a: Arch, layout: str) -> None:
    """Few products of a datum are dear: it is read and written anew to be split."""
    strided = problem_of(layout, **WORK | dict(stride=2))
    assert ranked(strided, sm_90a)[0].schedule == "bf16x6"
    few = problem_of(layout, **WORK | dict(h=56, w=56, ci=64, co=16, kh=1, kw=1, pad=0))
    assert ranked(few, sm_90a)[0].schedule != "bf16x6"
    odd = problem_of(layout, **WORK | dict(n=3, co=6))
    served = operator(layout).schedule("bf16x6").serves(odd, sm_90a)
    assert served >= any(each.schedule == "bf16x6" for each in ranked(odd, sm_90a)) and served == (layout == LAYOUTS[1])


def test_what_is_refused(sm_90a: Arch) -> None:
    base = dict(block_m=128, block_n=128, block_k=32, num_stages=4, consumers=2, cluster_m=2, cluster_n=1)
    for layout, fields, words, reason in (
        ("conv2d_nhwc", {}, dict(block_n=256), "needs about 304 registers, there are 232"),
        ("conv2d_nhwc", dict(co=6), {}, "co=6 is not a multiple of 4, which TMA needs"),
        ("conv2d_hwcn", dict(n=6), {}, "n=6 is not a multiple of 4, which TMA needs"),
        ("conv2d_nchw", dict(dtype="float16"), {}, "dtype=float16 is not float32"),
        ("conv2d_hwcn", dict(dtype="bfloat16"), {}, "dtype=bfloat16 is not float32"),
        ("conv2d_nhwc", dict(n=4096, h=32, w=32), {}, "data_addends has 2\\*\\*31 elements or more"),
    ):
        with pytest.raises(ConfigError, match=reason):
            operator(layout).schedule("bf16x3").config_for(problem_of(layout, **WORK | fields), sm_90a, base | words)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        operator("conv2d_nhwc").schedule("bf16x3").config_for(problem_of("conv2d_nhwc", **WORK), parse_arch("sm_80"))


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, *SMALL], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", NAMES)
def test_on_a_device(gpu: Arch, schedule: str, layout: str, shape: str, words: dict[str, Any]) -> None:
    assert_correct_on(gpu, layout, SHAPES[shape] | dict(dtype="float32"), words, schedule)
