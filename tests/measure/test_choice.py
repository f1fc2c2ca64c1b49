from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from schedules.core.arch import Arch
from schedules.core.errors import ConfigError, UnknownNameError
from schedules.core.problem import Problem
from schedules.core.registry import operator
from schedules.measure import choice as module
from schedules.measure.choice import Choice, best_of, choose, default_choice, distance, log_folders
from schedules.measure.journal import append, told
from schedules.measure.loading import warned
from schedules.measure.lookup import located, summaries
from schedules.measure.records import Record
from tests.command import Run
from tests.conftest import problem_of
from tests.fake import record_of

SMALL = dict(n=32, h=6, w=6, ci=8, co=32, kh=3, kw=3, pad=1)
WORDS = ["conv2d_hwcn", *(f"{name}={value}" for name, value in SMALL.items())]
PROBLEM = problem_of("conv2d_hwcn", **SMALL)
SLOW, FAST = {"chunk": 1}, {"chunk": 16}


def chosen(folder: Path, host: Arch, problem=PROBLEM, **options):  # type: ignore[no-untyped-def]
    return choose(problem, host, folders=[folder], **options)


def test_the_best_correct_record(host: Arch, tmp_path: Path) -> None:
    for record in (
        record_of(PROBLEM, 12.0, SLOW),
        record_of(PROBLEM, 10.0, FAST),
        record_of(PROBLEM, 1.0, {"vector": 4}, outcome="correctness"),
        record_of(PROBLEM, None, {"vector": 4}),
    ):
        append(tmp_path, record)
    found = chosen(tmp_path, host)
    assert found.source == "record" and found.config == record_of(PROBLEM, 10.0, FAST).config
    assert str(found).startswith("best record: 10.00 us on ") and "2026-11-20" in str(found)


def test_a_config_has_its_latest_time_and_the_last_winner_is_kept() -> None:
    lucky, again = record_of(PROBLEM, 5.0, SLOW), record_of(PROBLEM, 11.0, SLOW)
    other = record_of(PROBLEM, 10.0, FAST)
    assert best_of([lucky, other, again]) is other
    won = replace(again, stage="final", more={"winner": True})
    assert best_of([lucky, other, won]) is won  # the finals saw both, and what one trial saw is luck
    later = replace(other, date="2026-11-21T01:00:00+00:00")
    assert best_of([won, later]) is later
    assert best_of([]) is None and best_of([record_of(PROBLEM, None)]) is None
    # the clock was set back between the trials and the finals, in which another was faster but not for sure
    early = [replace(record, date="2026-11-22T00:00:00+00:00") for record in (lucky, other)]
    assert best_of([*early, won]) is won
    assert best_of([*early, won, replace(other, stage="final", date="2026-11-23T00:00:00+00:00")]) is won


def test_an_illegal_best_is_passed_over(host: Arch, tmp_path: Path) -> None:
    """As every reader has it: the next legal one is used, and the line is named."""
    legal, slower = record_of(PROBLEM, 10.0, FAST), record_of(PROBLEM, 12.0, SLOW)
    illegal = replace(legal, config=replace(legal.config, vector=0), median_us=1.0, p10_us=1.0)  # type: ignore[call-arg]
    won = replace(illegal, median_us=2.0, stage="final", more={"winner": True})
    for record in (illegal, legal, slower, won):
        file = append(tmp_path, record)
    found = chosen(tmp_path, host)
    assert found.record == legal and str(found).startswith("best record: 10.00 us")
    (line,) = found.unused
    assert str(line).startswith(f"{file} line 4: illegal config: vector=0")
    assert best_of([illegal, legal, slower, won]) is legal and best_of([illegal, won]) is None
    (summary,) = summaries(located([file]))
    assert summary.best == legal and summary.refused == (line,)
    (tmp_path / "other").mkdir()
    (alone,) = summaries(located([append(tmp_path / "other", illegal)]))
    assert alone.best == illegal and len(alone.refused) == 1


def test_lines_that_are_not_used_are_handed_on(host: Arch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = append(tmp_path, record_of(PROBLEM, 10.0, FAST))
    with open(file, "a") as opened:
        opened.write('{"torn')
    found = chosen(tmp_path, host)
    assert found.source == "record" and [str(line) for line in found.unused] == [f"{file} line 2: cut off in writing"]
    for _ in range(2):
        warned(found)
    assert [each.message for each in caplog.records] == [told(found.unused)]


def test_the_nearest_problem_that_is_legal(host: Arch, tmp_path: Path) -> None:
    near, far, other = (
        problem_of("conv2d_hwcn", **{**SMALL, **change}) for change in ({"n": 64}, {"n": 1024}, {"stride": 2, "h": 12})
    )
    assert distance(PROBLEM, near) == 1.0 and distance(PROBLEM, far) == 5.0 and distance(PROBLEM, other) == float("inf")
    append(tmp_path, record_of(far, 1.0, {"vector": 4}))
    append(tmp_path, record_of(other, 1.0, {"vector": 4}))
    assert chosen(tmp_path, host).source == "default"
    append(tmp_path, record_of(near, 10.0, FAST))
    found = chosen(tmp_path, host)
    assert found.source == "nearest" and found.record and found.record.problem == near
    assert found.config == record_of(near, 10.0, FAST).config
    assert "nearest problem, n=64" in str(found)


def test_a_record_of_the_same_convolution_with_another_epilogue(host: Arch, tmp_path: Path) -> None:
    """It comes before any neighbour, whatever schedule it is of; the fewer fields differ, the better."""
    plain, fused = PROBLEM, replace(PROBLEM, bias=True, residual=True)  # type: ignore[call-arg]
    biased = replace(PROBLEM, bias=True)  # type: ignore[call-arg]
    append(tmp_path, record_of(replace(PROBLEM, n=33), 8.0, FAST))  # type: ignore[call-arg]
    append(tmp_path, record_of(plain, 12.0, SLOW))
    found = chosen(tmp_path, host, fused)
    assert found.source == "nearest" and found.record and found.record.problem == plain
    assert found.config == record_of(plain, 12.0, SLOW).config and "another epilogue" in str(found)
    append(tmp_path, record_of(biased, 11.0, FAST))
    again = chosen(tmp_path, host, fused).record
    assert again and again.problem == biased


def test_an_illegal_config_of_a_neighbour_is_passed_over(
    host: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, further = (problem_of("conv2d_hwcn", **{**SMALL, "n": n}) for n in (40, 64))
    illegal = record_of(near, 1.0, FAST)
    append(tmp_path, illegal)
    append(tmp_path, record_of(further, 1.0, SLOW))
    monkeypatch.setattr(type(illegal.config), "check", lambda self, *_: "no" if self == illegal.config else None)
    found = chosen(tmp_path, host)
    assert found.record and found.record.problem == further


def test_a_neighbour_too_far_or_with_another_schedule_is_passed_over(sm_90a: Arch, tmp_path: Path) -> None:
    def softmax(rows: int, cols: int) -> Problem:
        return problem_of("softmax", rows=rows, cols=cols)

    def found(problem: Problem) -> Choice:
        return choose(problem, sm_90a, folders=[tmp_path], device="NVIDIA H200")

    made = dict(target="cuda:sm_90a", schedule="frames", device="NVIDIA H200")
    config = operator("softmax").schedule("frames").default(softmax(49152, 64), sm_90a).to_json()
    record = record_of(softmax(49152, 64), 10.0, config, **made)  # type: ignore[arg-type]
    append(tmp_path, record)
    near, other, far = softmax(49152, 32), softmax(49152, 77), softmax(49152, 512)
    assert found(near).source == "nearest" and found(near).config == record.config
    assert default_choice(other, sm_90a).schedule == "tiles" and found(other).source == "default"
    assert found(far).source == "default"
    assert choose(other, sm_90a, "frames", folders=[tmp_path], device="NVIDIA H200").source == "nearest"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device": "Other CPU"}, "records of Other CPU exist, none of"),
        ({"versions": {"apache-tvm": "0.20", "compiler": "llvm 15"}}, "records of 0.20 with llvm 15 are not used"),
    ],
)
def test_records_that_do_not_hold_here(host: Arch, tmp_path: Path, change: dict[str, object], says: str) -> None:
    append(tmp_path, replace(record_of(PROBLEM, 1.0, FAST), **change))  # type: ignore[arg-type]
    found = chosen(tmp_path, host)
    assert found.source == "default" and says in found.passed_over
    assert found.config == default_choice(PROBLEM, host).config


def test_another_device_by_name(host: Arch, tmp_path: Path) -> None:
    append(tmp_path, record_of(PROBLEM, 1.0, FAST, device="Other CPU"))
    assert chosen(tmp_path, host, device="other-cpu").source == "record"


def test_a_record_serves_the_range_around_it(host: Arch, tmp_path: Path) -> None:
    fixed = problem_of("conv2d_nhwc", n=8, h=6, w=6, ci=16, co=32, kh=1, kw=1)
    append(tmp_path, record_of(fixed, 3.0, {"block_x": 3}))
    ranged = problem_of("conv2d_nhwc", **{**fixed.to_json(), "n_from": 5})
    found = chosen(tmp_path, host, ranged)
    assert found.problem == ranged and found.source == "nearest" and "3.00 us" in str(found)
    assert found.config == chosen(tmp_path, host, fixed).config != default_choice(ranged, host).config


def test_a_range_has_a_schedule_that_takes_it(sm_90a: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = dict(h=8, w=8, ci=16, co=16, kh=3, kw=3, pad=1, stride=2, dtype="float16")
    problem = problem_of("conv2d_nchw", n=3, **fields)
    ranged = problem_of("conv2d_nchw", n=4, n_from=3, **fields)
    monkeypatch.setenv("SCHEDULES_LOGS", str(tmp_path))
    for schedule, kept in (("tma_wgmma_turned", problem), ("mma", ranged)):
        named = default_choice(ranged.representative(), sm_90a, schedule)
        monkeypatch.setattr(module, "default_choice", lambda asked, *_, named=named: replace(named, problem=asked))
        assert module.choose_widened(problem, sm_90a).problem == kept
    monkeypatch.undo()
    monkeypatch.setenv("SCHEDULES_LOGS", str(tmp_path))
    turned = default_choice(ranged.representative(), sm_90a, "tma_wgmma_turned")
    other = module._for_range(ranged, turned, sm_90a, None)
    assert other.schedule != "tma_wgmma_turned" and other.problem == ranged
    with pytest.raises(ConfigError, match="built for one shape"):
        choose(ranged, sm_90a, "tma_wgmma_turned")


def test_one_schedule_only(host: Arch, tmp_path: Path) -> None:
    append(tmp_path, record_of(PROBLEM, 1.0, FAST, schedule="cpu"))
    assert chosen(tmp_path, host, schedule="cpu").source == "record"
    with pytest.raises(UnknownNameError):
        chosen(tmp_path, host, schedule="gpu")


def test_where_journals_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDULES_LOGS", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert log_folders() == [tmp_path / "a", tmp_path / "b"]
    monkeypatch.delenv("SCHEDULES_LOGS")
    monkeypatch.chdir(tmp_path)
    (beside,) = log_folders()
    assert beside == Path(module.__file__).parents[2] / "tuning_logs" and beside.is_absolute()
    (tmp_path / "tuning_logs").mkdir()
    assert log_folders() == [Path("tuning_logs"), beside]


def test_a_device_without_records_says_so_once(
    run: Run, host: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "device_name", lambda _: "A new CPU")
    says = "no records of A new CPU; `schedules tune` measures some"
    other = problem_of("softmax", rows=4, cols=8)
    with caplog.at_level(logging.WARNING, "schedules"):
        for problem in (PROBLEM, other, PROBLEM):
            assert str(warned(chosen(tmp_path, host, problem))) == "default config"
    assert [each.message for each in caplog.records] == [says]
    assert f"default config ({says})" in run("best", *WORDS, "--logs", tmp_path).out
    append(tmp_path, record_of(PROBLEM, 1.0, FAST, device="A new CPU"))
    assert chosen(tmp_path, host).passed_over == chosen(tmp_path, host, other).passed_over == ""


# ---- schedules build


def built(run: Run, *words: str | Path) -> dict[str, object]:
    result = run("build", *WORDS, *words, "--json")
    assert result.code == 0, result.err
    found: dict[str, object] = result.json
    return found


def test_build_takes_the_best_and_says_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record: Record = record_of(PROBLEM, 10.0, FAST)
    append(tmp_path, record)
    assert built(run)["source"] == "default"
    found = built(run, "--logs", tmp_path)
    assert found["source"] == "record" and found["config"] == record.config.to_json()
    assert Record.from_json(found["record"]) == record  # type: ignore[arg-type]
    assert built(run, "--logs", tmp_path, "--default")["source"] == "default"
    given = built(run, "--logs", tmp_path, "--config", "chunk=1")
    assert given["source"] == "given" and given["config"]["chunk"] == 1 and given["record"] is None  # type: ignore[index]
    monkeypatch.setenv("SCHEDULES_LOGS", str(tmp_path))
    text = run("build", *WORDS).out
    assert "best record: 10.00 us on " in text and "chunk=16" in text


def test_build_with_a_neighbours_config(run: Run, tmp_path: Path) -> None:
    near = problem_of("conv2d_hwcn", **{**SMALL, "n": 64})
    append(tmp_path, record_of(near, 10.0, FAST))
    assert built(run, "--logs", tmp_path)["source"] == "nearest"
    assert built(run, "--logs", tmp_path, "--device", "nothing")["source"] == "default"
