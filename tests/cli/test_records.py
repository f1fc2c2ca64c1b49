"""The commands that read journals: status, best, top, diff, export, replay, resume."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedules.build.present import cpu_name
from schedules.bundle.bundle import Bundle
from schedules.cli.searching import config_text
from schedules.core.errors import BuildError, BundleError
from schedules.core.presets import preset, short
from schedules.measure.journal import Journal, append, journals
from schedules.measure.records import Record, Search
from schedules.measure.timer import Measurement
from tests.command import Run, one_line
from tests.conftest import problem_of
from tests.fake import record_of

SMALL = dict(n=32, h=6, w=6, ci=8, co=32, kh=3, kw=3, pad=1)
WORDS = ["conv2d_hwcn", *(f"{name}={value}" for name, value in SMALL.items())]
CONV = problem_of("conv2d_hwcn", **SMALL)
SOFTMAX = problem_of("softmax", rows=64, cols=64)
SEARCH = Search("template", 1, 0, trials=40)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Journals of two problems: the default and two better ones of a convolution, a failure, one of a softmax."""
    folder = tmp_path / "logs"
    for record in (
        record_of(CONV, 40.0, search=SEARCH),
        record_of(CONV, 20.0, {"chunk": 2}, search=SEARCH, more={"registers": 8}),
        record_of(CONV, None, {"vector": 4}, search=SEARCH),
        record_of(CONV, 25.0, {"chunk": 1, "block_rows": 2}, search=SEARCH),
        record_of(SOFTMAX, 5.0, stage="bench", more={"peers": {"torch": 10.0}}),
    ):
        append(folder, record)
    return folder


def test_status(run: Run, logs: Path) -> None:
    result = run("status", "--logs", logs)
    header, conv, softmax = result.out.splitlines()
    assert result.code == 0 and "default us" in header
    for text in ("conv2d_hwcn", "n=32 h=6", "llvm", "1 compile", "40.00", "20.00", "2.00", "2026-11-20 20:00"):
        assert text in conv
    assert "softmax" in softmax and "5.00" in softmax
    found = run("status", *WORDS, "--logs", logs, "--json").json
    assert len(found) == 1 and found[0]["outcomes"] == {"correct": 3, "compile": 1} and found[0]["speedup"] == 2.0
    assert found[0]["searches"][0]["done"] == 4 and not found[0]["searches"][0]["ended"]
    assert not found[0]["running"]
    assert short("conv2d_hwcn", CONV) == "n=32 h=6 w=6 ci=8 co=32 kh=3 kw=3 pad=1"
    assert short("softmax", preset("oneflow-32").problem()) == "oneflow-32"
    with Journal(next(journals(logs))):
        assert "running" in run("status", "--logs", logs).out
    assert [row["operator"] for row in run("status", "softmax", "--logs", logs, "--json").json] == ["softmax"]
    assert "nothing was measured yet of oneflow-32" in run("status", "oneflow-32", "--logs", logs).out


def test_records_of_other_versions_are_apart(run: Run, logs: Path) -> None:
    old = record_of(SOFTMAX, 1.0, versions={"apache-tvm": "0.20"}, date="2024-01-01T00:00:00+00:00")
    append(logs, old)
    (found,) = run("status", "softmax", "--logs", logs, "--json").json
    assert (found["best_us"], found["older"]) == (5.0, 1)
    assert [row["median_us"] for row in run("top", "softmax", "--logs", logs, "--json").json] == [5.0]


@pytest.mark.parametrize("command", ["show", "verify", "bench", "explain", "inspect", "build"])
def test_config_best_is_what_build_takes(run: Run, logs: Path, command: str) -> None:
    """For every command that takes a problem; without it, all but build leave the records aside."""
    more = ["--seconds", "0.01"] if command == "bench" else ["--view", "scheduled"] if command == "inspect" else []
    best = run(command, *WORDS, *more, "--config", "best", "--logs", logs, "--json").json
    plain = run(command, *WORDS, *more, *(["--default"] if command == "build" else []), "--json").json
    if command == "inspect":
        assert best["views"]["scheduled"] != plain["views"]["scheduled"]
    else:
        assert best["config"]["chunk"] == 2 != plain["config"]["chunk"]
    if command != "show":
        assert "best record: 20.00 us on" in run(command, *WORDS, *more, "--config", "best", "--logs", logs).out


def test_config_best_without_records_is_the_default(run: Run, tmp_path: Path) -> None:
    result = run("explain", *WORDS, "--config", "best", "--logs", tmp_path)
    assert result.code == 0 and "default config" in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "best,chunk=2"], "--config best is a whole config; give no fields beside it"),
        (["--config", "best", "--config", "chunk=2"], "--config best is a whole config"),
        (["--logs", "."], "give --config best with them"),
        (["--device", "NVIDIA H200", "--config", "chunk=2"], "give --config best with them"),
        (["--config", "best", "--logs", "nowhere"], "--logs nowhere is not a folder"),
    ],
)
def test_config_best_and_mistakes(run: Run, words: list[str], message: str) -> None:
    assert message in one_line(run("verify", *WORDS, *words))


def test_best(run: Run, logs: Path) -> None:
    result = run("best", *WORDS, "--logs", logs)
    assert result.code == 0 and "best record: 20.00 us on" in result.out and "20 us" not in result.err
    found = run("best", *WORDS, "--logs", logs, "--json").json
    assert found["source"] == "record" and found["config"]["chunk"] == 2
    command = found["command"].split()
    assert command[:2] == ["schedules", "build"]
    built = run(*command[1:], "--json").json  # the command builds just that
    assert built["config"] == found["config"] and built["problem"] == found["problem"]
    assert run("best", "softmax", "rows=4", "cols=4", "--logs", logs, "--json").json["source"] == "default"
    assert config_text(record_of(CONV).config).startswith("vector=")


def test_top(run: Run, logs: Path) -> None:
    result = run("top", "conv2d_hwcn", "--logs", logs)
    header, first, second, third = result.out.splitlines()
    assert "rank" in header and "#1" in first and "20.00" in first and "2.00" in first and ".jsonl:2" in first
    assert "25.00" in second and ".jsonl:4" in second and "1.00" in third
    (only,) = run("top", *WORDS, "-n", "1", "--logs", logs, "--json").json
    assert only["rank"] == 1 and only["speedup"] == 2.0 and only["median_us"] == 20.0
    assert "name an operator" in one_line(run("top", "--logs", logs))
    assert "no records of tutorial here" in one_line(run("top", "tutorial", "--logs", logs))
    assert "--count 0 must be" in one_line(run("top", "conv2d_hwcn", "-n", "0", "--logs", logs))


def test_which_records_are_meant(run: Run, logs: Path, tmp_path: Path) -> None:
    append(logs, record_of(problem_of("conv2d_hwcn", **{**SMALL, "n": 64}), 1.0))
    assert "both fit; give more fields" in one_line(run("top", "conv2d_hwcn", "--logs", logs))
    assert run("top", "conv2d_hwcn", "n=64", "--logs", logs, "--json").json[0]["median_us"] == 1.0
    append(logs, record_of(SOFTMAX, 1.0, target="llvm:haswell"))
    assert "choose with --target" in one_line(run("top", "softmax", "--logs", logs))
    append(logs, record_of(SOFTMAX, 2.0, device="Other CPU"))
    assert [row["median_us"] for row in run("top", "softmax", "--target", "llvm", "--logs", logs, "--json").json] == [5]
    other = run("top", "softmax", "--device", "other-cpu", "--logs", logs, "--json").json
    assert [row["median_us"] for row in other] == [2.0]
    assert "is not a folder" in one_line(run("top", "softmax", "--logs", tmp_path / "none"))
    assert "is not a file" in one_line(run("top", "softmax", "--journal", tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    assert "there are no journals in" in one_line(run("status", "--logs", tmp_path / "empty"))


def test_diff(run: Run, logs: Path) -> None:
    result = run("diff", *WORDS, "#1", "default", "--logs", logs)
    assert result.code == 0, result.err
    assert "#1 takes 0.500 times as long as default" in result.out
    assert "+++ default/lowered" in result.out and "@@" in result.out
    file = next(journals(logs))
    found = run("diff", f"{file}:2", f"{file}:4", "--json").json
    assert found["different"]["chunk"] == [2, 1] and found["different"]["registers"] == [8, None]
    assert (found["a"]["us"], found["b"]["us"]) == (20.0, 25.0) and found["diff"].startswith("--- ")
    by_words = run("diff", *WORDS, "cpu:chunk=1", "2", "--logs", logs).out
    assert "the same schedule and config" in by_words and "no difference in the text lowered" in by_words


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["1"], "name two records"),
        ([*WORDS, "1", "9"], "there is no #9; 3 configs were correct"),
        ([*WORDS, "1", "cpu:chunk=7"], "no correct record of cpu has chunk=7"),
        ([*WORDS, "1", "gpu:chunk=7"], "unknown schedule among the records 'gpu'"),
        ([*WORDS, "1", "nothing.jsonl:3"], "nothing.jsonl is not a file"),
        ([*WORDS, "1", "2", "--view", "sas"], "unknown view 'sas'; did you mean 'sass'?"),
        ([*WORDS, "1", "2", "--view", "cuda"], "a kernel for llvm has no cuda"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_of_diff(run: Run, logs: Path, words: list[str], says: str) -> None:
    assert says in one_line(run("diff", *words, "--logs", logs))


def reading(out: Path, logs: Path) -> list[list[str | Path]]:
    """Every command that reads journals, of the convolution in `logs`."""
    return [
        ["status", "--logs", logs],
        ["best", *WORDS, "--logs", logs],
        ["build", *WORDS, "--logs", logs],
        ["top", *WORDS, "--logs", logs],
        ["diff", *WORDS, "1", "2", "--logs", logs],
        ["export", *WORDS, "--out", out / "bundle", "--logs", logs],
        ["export", "--all", "--out", out / "all", "--logs", logs],
        ["replay", *WORDS, "--logs", logs],
        ["resume", "--list", "--log", logs],
        ["report", *WORDS, "--out", out / "report", "--logs", logs],
    ]


def test_bad_records_cost_themselves(run: Run, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is served by every command, and one line names the first of what is not used."""
    measurement, exported = Measurement(20.0, 19.0, 21.0, 9, cpu_name()), list[float]()
    monkeypatch.setattr("schedules.measure.timer.measure", lambda *_, **__: measurement)
    monkeypatch.setattr("schedules.cli.diff._text", lambda *_: "")
    monkeypatch.setattr(
        "schedules.bundle.export.export_record", lambda record, *_: exported.append(record.us) or tmp_path
    )
    file = next(journals(logs))
    good = file.read_text().splitlines()
    words = json.loads(good[1])
    hostile = [
        {**words, "target": "cuda:sm_100"},
        {**words, "median_us": 0},
        {**words, "median_us": -5.0, "p10_us": -6.0},
        {**words, "median_us": "fast"},
        {**words, "config": [1]},
        {**words, "versions": {"apache-tvm": 3}},
        {**words, "search": "template"},
        {**words, "elapsed": "long"},
        {**words, "reason": {"a": 1}},
        {**words, "device": "\x1b[31mred", "problem": {**words["problem"], "n": 16}},
    ]
    illegal = {**words, "median_us": 1.0, "p10_us": 0.5, "config": {**words["config"], "vector": 0}}
    lines = [*good, *map(json.dumps, hostile), "[" * 100_000, good[1], json.dumps(illegal), good[0][:50]]
    file.write_text("\n".join(lines))
    os.mkfifo(file.parent / "other.jsonl")
    for command in reading(tmp_path, logs):
        result = run(*command)
        assert result.code == 0, (command, result.err)
        first, *more = result.err.splitlines()
        # nine records, the brackets, the copy, the torn line; the illegal config where one is chosen; the pipe unless
        # only the operator's journal is read
        unused = {"best": 13, "build": 13, "report": 14}.get(command[0], 13)
        named = f"note: of the journals {unused} lines are not used: {file} line 5: "
        assert first.startswith(named) and first.endswith(f"and {unused - 3} more"), (command, first)
        assert all("illegal config: vector=0" in line for line in more)
        assert "\x1b" not in result.out + result.err
    assert run("best", *WORDS, "--logs", logs, "--json").json["record"]["median_us"] == 20.0
    rows = run("status", "--logs", logs, "--json").json
    assert [row["trials"] for row in rows if row["problem"] == words["problem"]] == [5]
    assert r"\x1b[31mred" in run("status", "--logs", logs).out
    assert exported == [20.0, 20.0, 5.0]


def test_an_export_that_fails_costs_that_one(
    run: Run, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedules.bundle import export

    real = export.export_record

    def failing(record: Record, *arguments: Any) -> Path:
        if record.operator == "conv2d_hwcn":
            raise BuildError("no luck")
        return real(record, *arguments)

    monkeypatch.setattr(export, "export_record", failing)
    result = run("export", "--all", "--out", tmp_path / "all", "--logs", logs)
    (line,) = result.err.splitlines()
    assert result.code == 1 and line.startswith("note: not exported: conv2d_hwcn n=32 h=6") and "no luck" in line
    assert "softmax" in result.out and len(list((tmp_path / "all").rglob("kernel.json"))) == 1


def test_a_pipe_in_place_of_a_journal(run: Run, tmp_path: Path) -> None:
    (tmp_path / "some-cpu").mkdir()
    os.mkfifo(tmp_path / "some-cpu" / "conv2d_hwcn.jsonl")
    for command in (["status"], ["best", *WORDS]):
        assert "is not a regular file" in one_line(run(*command, "--logs", tmp_path), 1)


def test_how_to_go_on_with_what_was_resumed(run: Run, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem, the journal, and the limits and workers that were given."""
    from schedules.cli import resume

    asked: list[list[str]] = []
    monkeypatch.setattr(resume, "search", lambda work, options, args, again: asked.append(again) or 0)
    assert run("resume", "--trials", "50", "--builders", "1", "--log", logs).code == 0
    (words,) = asked
    file = next(journals(logs))
    assert words[:2] == ["resume", "conv2d_hwcn"]
    assert words[-6:] == ["--journal", str(file), "--trials", "50", "--builders", "1"]
    again = run(*words[:-6], "--list", "--log", logs)
    assert again.code == 0 and str(file) in again.out


def test_a_line_without_a_record(run: Run, logs: Path) -> None:
    file = next(journals(logs))
    assert "has no record in line 99" in one_line(run("diff", f"{file}:1", f"{file}:99"))
    assert "never measured to be correct" in one_line(run("replay", f"{file}:3"))


def test_export(run: Run, logs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("export", *WORDS, "--out", out, "--logs", logs).code == 0
    bundle = Bundle.open(out)
    assert bundle.manifest["config"]["chunk"] == 2 and bundle.manifest["measured"]["median_us"] == 20.0
    assert run("export", *WORDS, "--out", out, "--logs", logs).code == 0  # it is there already
    assert "holds a bundle" in one_line(run("export", *WORDS, "--record", "2", "--out", out, "--logs", logs))
    assert run("export", *WORDS, "--record", "2", "--out", out, "--force", "--logs", logs).code == 0
    assert Bundle.open(out).manifest["config"]["chunk"] == 1
    assert "give --out DIR" in one_line(run("export", *WORDS, "--logs", logs))
    found = run("export", "--all", "--out", tmp_path / "all", "--logs", logs, "--json").json
    assert sorted(each["record"]["operator"] for each in found) == ["conv2d_hwcn", "softmax"]
    assert all(Bundle.open(each["bundle"]) for each in found)


def test_export_signs(run: Run, logs: Path, tmp_path: Path) -> None:
    """What it writes, and what is there already."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    key, out = Ed25519PrivateKey.generate(), tmp_path / "out"
    (tmp_path / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    signed = ("--sign", tmp_path / "key.pem", "--logs", logs)
    assert run("export", *WORDS, "--out", out, "--logs", logs).code == 0
    with pytest.raises(BundleError, match="is not signed"):
        Bundle.open(out, key.public_key())
    assert run("export", *WORDS, "--out", out, *signed).code == 0
    Bundle.open(out, key.public_key())


def test_replay(run: Run, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"median_us": 20.1}

    def measure(*_: object, **__: object) -> Measurement:
        us = times["median_us"]
        return Measurement(us, 0.95 * us, 1.05 * us, 9, cpu_name())

    monkeypatch.setattr("schedules.measure.timer.measure", measure)
    words = ["replay", *WORDS, "--logs", logs]
    result = run(*words)
    assert result.code == 0 and "within the noise" in result.out and "not recorded then" in result.out
    times["median_us"] = 30.0
    slower = run(*words, "--json")
    assert slower.code == 1 and slower.json["verdict"] == "slower" and not slower.json["still_true"]
    times["median_us"] = 10.0
    assert run(*words, "--json").json["verdict"] == "faster"
    other = record_of(CONV, 1.0, device="Other CPU")
    file = append(logs, other)
    assert "the record is of Other CPU" in one_line(run("replay", f"{file}:1"))


def test_a_record_that_is_no_longer_true(run: Run, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from schedules.check import verify

    real = verify.verify_function

    def wrong(*arguments: object, **options: object) -> object:
        return [replace(check, passed=False, error=7.0, detail="off by 3") for check in real(*arguments, **options)]  # type: ignore[arg-type]

    monkeypatch.setattr(verify, "verify_function", wrong)
    monkeypatch.setattr("schedules.measure.timer.measure", lambda *_, **__: pytest.fail("it was measured"))
    result = run("replay", *WORDS, "--logs", logs)
    assert result.code == 1 and "WRONG: off by 3" in result.out


def test_resume_lists_the_searches_of_this_machine(run: Run, logs: Path) -> None:
    append(logs, record_of(SOFTMAX, 1.0, device="Other CPU", search=SEARCH))
    (found,) = run("resume", "--list", "--log", logs, "--json").json
    assert (found["operator"], found["trials"], found["of"], found["ended"]) == ("conv2d_hwcn", 4, 40, False)
    assert "no search of softmax on a device of this machine" in one_line(run("resume", "softmax", "--log", logs))
    final = replace(record_of(CONV, 20.0, {"chunk": 2}, search=SEARCH), stage="final", more={"trials": 4})
    append(logs, final)
    assert run("resume", "--list", "--log", logs, "--json").json[0]["ended"]
    assert "finished: template search of conv2d_hwcn" in run("resume", "--log", logs).out
    assert run("resume", "--log", logs, "--json").json == {"finished": True, "trials": 4}
