"""What is ranked is legal, the fastest first, and the same for all that the trees cannot tell apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from schedules.core.arch import parse_arch
from schedules.core.device import H100
from schedules.core.presets import resolve
from schedules.core.registry import operator_of
from schedules.hopper.config import STAGES
from schedules.measure.choice import default_choice
from schedules.predict import rank, trees
from schedules.predict.configs import FILLED, columns_of
from schedules.predict.estimate import LAUNCH, waiting
from schedules.predict.rank import TILE, UNROLLED, _sums_fit, filled, predicted_us, ranked, varied
from scripts import fit_choice

ROOT = Path(__file__).parents[2]
ARCH = parse_arch("cuda:sm_90a")
LAYER = {"n": "3", "h": "14", "w": "14", "ci": "48", "co": "37", "kh": "3", "kw": "3", "pad": "1", "dtype": "float16"}


def test_the_shipped_trees_choose_as_well_as_when_they_were_shipped() -> None:
    """Replays every fourth layer of the trials in the repository."""
    shipped = trees.load()
    assert shipped and shipped.header["held_out"]["mean"] < 1.06
    told = shipped.header["replayed"]
    layers = fit_choice.learned(fit_choice.known(ROOT / "tuning_logs/nvidia-h200")[1])
    regrets = fit_choice.replayed(shipped, layers)
    assert fit_choice.mean(regrets) < told["mean"] + 0.005 and regrets.max() < told["worst"] + 0.05


@pytest.mark.parametrize("name", ["conv2d_nhwc", "conv2d_nchw"])
def test_what_is_predicted_is_of_the_config_that_is_handed_back(name: str) -> None:
    """A stage with a halo is larger: its config has fewer stages than its tile suggests."""
    _, problem = resolve(name, {**LAYER, "h": "64", "w": "64", "ci": "128", "co": "128"})
    for each in ranked(problem, ARCH):
        assert predicted_us(problem, each.schedule, each.config, ARCH) == pytest.approx(each.us, rel=1e-6)


@pytest.mark.parametrize(
    "fields", ["h=56 w=56", "w=15", "kh=1 kw=1 pad=0", "stride=2", "h=7 w=7 kh=1 kw=1 pad=0 ci=512"]
)
def test_most_that_is_tried_is_legal(monkeypatch: pytest.MonkeyPatch, fields: str) -> None:
    """What is looked at costs a choice its time: little of it in vain."""
    words = dict(word.split("=") for word in fields.split())
    _, problem = resolve("conv2d_nchw", {**LAYER, "n": "4", "h": "28", "w": "28", "ci": "64", "co": "64", **words})
    tried: list[str | None] = []

    def noted(config: Any, *where: Any) -> Any:
        found = filled(config, *where)
        tried.append(None if found else f"{type(config).__name__}: {config.check(*where)}")
        return found

    monkeypatch.setattr(rank, "filled", noted)
    ranked.__wrapped__(problem, ARCH)
    assert rank.KEPT <= tried.count(None) > len(tried) / 2
    # sums of all taps along a row are counted
    assert not any(each and each.startswith("TmaWgmmaConfig") and "registers" in each for each in tried)


@pytest.mark.parametrize(("name", "ci"), [("conv2d_nhwc", "3"), ("conv2d_nhwc", "64"), ("conv2d_nchw", "64")])
def test_no_config_could_have_more_stages(name: str, ci: str) -> None:
    _, problem = resolve(name, {**LAYER, "h": "64", "w": "64", "ci": ci, "co": "64"})
    staged = [each.config for each in ranked(problem, ARCH) if hasattr(each.config, FILLED)]
    assert staged
    for config in staged:
        stages = getattr(config, FILLED)
        more: Any = replace(config, **{FILLED: stages + 1})
        assert stages == STAGES[-1] or more.check(problem, ARCH) is not None


@pytest.mark.parametrize("name", ["conv2d_nhwc", "conv2d_nchw", "conv2d_hwcn", "conv2d_nchw32"])
def test_the_fastest_come_first_and_all_are_legal(name: str) -> None:
    operator, problem = resolve(name, {**LAYER, "dtype": "int8" if name == "conv2d_nchw32" else "float16"})
    found = ranked(problem, ARCH)
    assert len(found) > 8 and [each.us for each in found] == sorted(each.us for each in found)
    assert len({(each.schedule, str(each.config)) for each in found}) == len(found)
    for each in found:
        assert each.config.check(problem, ARCH) is None
        assert not operator.opt_in(each.schedule) and each.limit in dict(each.parts)
    best = default_choice(problem, ARCH)
    assert (best.schedule, best.config, best.predicted) == (found[0].schedule, found[0].config, found[0])
    assert "predicted" in str(best)


@pytest.mark.parametrize(
    ("name", "layer", "schedule"),
    [
        ("conv2d_nhwc", dict(n=32, h=56, w=56, ci=256, co=256), "tma_wgmma"),
        ("conv2d_nchw", dict(n=32, h=56, w=56, ci=256, co=256), "tma_wgmma"),
        ("conv2d_nchw", dict(n=32, h=57, w=57, ci=256, co=256), "tma_wgmma_"),
        ("conv2d_hwcn", dict(n=64, h=56, w=56, ci=256, co=256), "tma_wgmma"),
        ("conv2d_nchw32", dict(n=32, h=56, w=56, ci=256, co=256, dtype="int8"), "tma_wgmma"),
        ("conv2d_nhwc", dict(n=32, h=224, w=224, ci=3, co=64), "mma_windows"),
    ],
)
def test_large_layers_take_programs_in_tirx(name: str, layer: dict[str, Any], schedule: str) -> None:
    words = {
        "kh": "3",
        "kw": "3",
        "pad": "1",
        "dtype": "float16",
        **{field: str(size) for field, size in layer.items()},
    }
    best = ranked(resolve(name, words)[1], ARCH)[0]
    assert best.schedule.startswith(schedule), (best.schedule, best.config)


@pytest.mark.parametrize("name", ["conv2d_nhwc", "conv2d_nchw"])
def test_what_is_never_legal_hides_nothing(name: str) -> None:
    """Tensor cores take no float32, and would seem many times as fast."""
    words = {**LAYER, "n": "64", "h": "28", "w": "28", "ci": "256", "co": "256", "dtype": "float32"}
    assert ranked(resolve(name, words)[1], ARCH)


@pytest.mark.parametrize("name, ci", [("conv2d_nchw", "16"), ("conv2d_nhwc", "15")])
def test_no_long_loop_of_single_loads_is_ranked(name: str, ci: str) -> None:
    """Which a compiler may leave as it is."""
    _, problem = resolve(name, {**LAYER, "ci": ci})
    found = [each for each in ranked(problem, ARCH, "mma") if each.schedule == "mma"]
    counts = [waiting(problem, operator_of(problem).schedule("mma"), columns_of([each.config]))[0] for each in found]
    assert found and 0 < max(counts) <= UNROLLED
    _, aligned = resolve(name, {**LAYER, "ci": "64", "h": "16", "w": "16", "kh": "1", "kw": "1", "pad": "0"})
    columns = columns_of([each.config for each in ranked(aligned, ARCH, "mma")])
    assert not waiting(aligned, operator_of(aligned).schedule("mma"), columns).any()


def test_what_is_loaded_in_one_step_waits_for_nothing() -> None:
    _, problem = resolve("conv2d_nchw", {**LAYER, "ci": "3"})
    spec = operator_of(problem).schedule("mma")
    words: dict[str, Any] = dict(block_m=64, block_n=128, warps_m=2, warps_n=2, stages=2, min_blocks=0)
    assert waiting(problem, spec, columns_of([spec.config(block_k=16, **words)])) == [24.0]
    assert waiting(problem, spec, columns_of([spec.config(block_k=32, **words)])) == [0.0]


def test_what_differs_in_its_tiles_is_worth_trying_first() -> None:
    _, problem = resolve("conv2d_nhwc", LAYER)
    found = ranked(problem, ARCH)
    first = varied(found)
    assert first[0] is found[0] and sorted(map(id, first)) == sorted(map(id, found))
    tiles = [(each.schedule, *(getattr(each.config, name, None) for name in TILE)) for each in first]
    count = len(set(tiles))
    assert 1 < count < len(found) and len(set(tiles[:count])) == count
    for some in (first[:count], first[count:]):
        assert [each.us for each in some] == sorted(each.us for each in some)


def test_of_one_schedule_only() -> None:
    _, problem = resolve("conv2d_nhwc", LAYER)
    found = ranked(problem, ARCH, "mma")
    assert found and {each.schedule for each in found} == {"mma"}
    told = predicted_us(problem, "mma", found[0].config, ARCH)
    assert told == pytest.approx(found[0].us)


def test_bfloat16_is_as_float16_and_another_device_has_its_own() -> None:
    _, problem = resolve("conv2d_nhwc", LAYER)
    wide = replace(problem, dtype="bfloat16")
    assert [e.config for e in ranked(wide, ARCH)] == [e.config for e in ranked(problem, ARCH)]
    assert ranked(problem, ARCH.on(H100))


def test_a_schedule_with_an_estimate_is_ranked_by_it_where_no_trees_are() -> None:
    arch = parse_arch("cuda:sm_80")
    _, problem = resolve("conv2d_nhwc", {**LAYER, "ci": "3", "h": "64", "w": "64", "kh": "7", "kw": "7"})
    spec, found = operator_of(problem).schedule("mma_windows"), ranked(problem, arch)
    assert spec.estimate and len(found) > 8 and {each.schedule for each in found} == {spec.name}
    assert [each.us for each in found] == sorted(LAUNCH + spec.estimate(problem, each.config, arch) for each in found)
    assert not ranked(problem, arch, "mma") and default_choice(problem, arch).config == found[0].config


def test_what_the_trees_have_not_seen_is_left_to_the_rule() -> None:
    _, problem = resolve("conv2d_nhwc", LAYER)
    for arch in (parse_arch("cuda:sm_80"), parse_arch("rocm:gfx942"), parse_arch("llvm")):
        assert ranked(problem, arch) == ()
        assert default_choice(problem, arch).predicted is None
    _, rows = resolve("softmax", {"rows": "8", "cols": "100", "dtype": "float16"})
    assert ranked(rows, ARCH) == ()


def test_what_trials_show_to_be_fast_is_among_the_ranked() -> None:
    """Of recorded layers: no legal config, of a schedule that needs no name, is predicted to be much faster."""
    lost, layers = [], fit_choice.learned(fit_choice.known(ROOT / "tuning_logs/nvidia-h200")[1])
    strided = [layer for layer in layers if layer.problem.stride[0] > 1 and layer.problem.n >= 32]
    for layer in strided[::3]:
        unasked = {spec.name for spec in layer.operator.offered(ARCH) if spec.name != "winograd"}  # whose errors count
        best = ranked(layer.problem, ARCH)[0].us
        for name, config, _ in layer.trials:
            us = predicted_us(layer.problem, name, config, ARCH) if name in unasked else None
            if us and best > 1.25 * us:
                lost.append((str(layer.problem), name, str(config), us, best))
    assert not lost


@pytest.mark.parametrize("pairs", (1, 3))
def test_the_choice_knows_the_registers_of_a_block(pairs: int) -> None:
    """As the check of configs has them, however many warps turn."""
    _, problem = resolve("conv2d_nchw", {**LAYER, "h": "14", "w": "14", "kh": "1", "kw": "1", "pad": "0"})
    spec = operator_of(problem).schedule("tma_wgmma_boxes")
    configs: list[Any] = [
        spec.config.parse(dict(block_m=m * consumers, block_n=n, consumers=consumers, pairs=pairs, num_stages=2))
        for m, consumers, n in product((64, 128), (1, 2), range(32, 257, 32))
    ]
    columns = columns_of(configs)
    found = _sums_fit(columns.get("block_m") * columns.get("block_n"), columns, spec, ARCH)
    reasons = [each.check_block("float16", ARCH) for each in configs]
    assert found.tolist() == ["registers" not in (reason or "") for reason in reasons] and len(set(found.tolist())) == 2
