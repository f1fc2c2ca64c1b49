"""Whoever asks what a problem is built with without a record is told the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedules.build.builder import build
from schedules.check.verify import verify
from schedules.core.arch import Arch
from schedules.core.errors import ConfigError, UnknownNameError
from schedules.core.presets import resolve
from schedules.measure.choice import choose, default_choice
from schedules.predict.rank import ranked
from schedules.predict.start import started
from schedules.show.explain.story import story

LAYER = {"n": "2", "h": "9", "w": "8", "ci": "16", "co": "24", "kh": "3", "kw": "3", "pad": "1", "dtype": "float16"}
_, PROBLEM = resolve("conv2d_nhwc", LAYER)


def test_all_begin_with_what_is_predicted_to_be_fastest(sm_90a: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    best = ranked(PROBLEM, sm_90a)[0]
    wanted = best.schedule, best.config
    spec, config = started(PROBLEM, sm_90a)
    assert (spec.name, config) == wanted
    built = build(PROBLEM, sm_90a, device_code=False)
    assert (built.schedule.name, built.config) == wanted
    for chosen in (default_choice(PROBLEM, sm_90a), choose(PROBLEM, sm_90a, folders=[])):
        assert (chosen.schedule, chosen.config) == wanted
    told = story(PROBLEM, sm_90a)
    assert (told.schedule.name, told.config) == wanted
    used = []
    monkeypatch.setattr("schedules.check.verify.RUNNERS", {"emulated": lambda *words: used.append(words) or ()})
    verify(PROBLEM, sm_90a, routes=["emulated"])
    assert used[0][2:] == wanted


def test_given_fields_are_kept_and_the_rest_is_the_fastest_with_them(sm_90a: Arch) -> None:
    for given in ({"block_n": "16"}, {"block_k": "16", "num_stages": "3"}):
        spec, config = started(PROBLEM, sm_90a, "tma_wgmma", given)
        assert {name: str(vars(config)[name]) for name in given} == given
        assert spec.name == "tma_wgmma" and config.check(PROBLEM, sm_90a) is None
        best = ranked(PROBLEM, sm_90a, "tma_wgmma")[0].config
        changed = replace(best, **{name: int(value) for name, value in given.items()})
        assert changed.check(PROBLEM, sm_90a) is not None or config == changed


def test_a_config_is_taken_as_it_is_and_checked(sm_90a: Arch) -> None:
    _, config = started(PROBLEM, sm_90a, "tma_wgmma")
    assert started(PROBLEM, sm_90a, "tma_wgmma", config)[1] is config
    _, other = resolve("conv2d_nhwc", {**LAYER, "ci": "3"})
    with pytest.raises(ConfigError, match="ci=3"):
        started(other, sm_90a, "tma_wgmma", config)


def test_what_cannot_be_is_refused(sm_90a: Arch) -> None:
    with pytest.raises(ConfigError, match="block_k=48"):
        started(PROBLEM, sm_90a, "tma_wgmma", {"block_k": "48"})
    with pytest.raises(UnknownNameError, match="block_q"):
        started(PROBLEM, sm_90a, "tma_wgmma", {"block_q": "48"})
    with pytest.raises(UnknownNameError, match="tma_wgma"):
        started(PROBLEM, sm_90a, "tma_wgma")
    with pytest.raises(ConfigError, match="runs on llvm"):
        started(PROBLEM, sm_90a, "cpu")
