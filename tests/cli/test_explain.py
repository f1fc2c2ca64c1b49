"""``schedules explain``."""

from __future__ import annotations

from pathlib import Path

from tests.command import Run, one_line

WORDS = ["explain", "conv2d_hwcn", "n=8", "h=5", "w=4", "ci=3", "co=6", "kh=3", "kw=3", "pad=1"]


def test_explain(run: Run, tmp_path: Path) -> None:
    result = run(*WORDS, "--json")
    assert result.code == 0, result.err
    steps, source = result.json["steps"], result.json["source"]
    assert source["kind"] == "llvm" and "define" in source["text"]
    assert [step["number"] for step in steps] == list(range(len(steps)))

    short, full = run(*WORDS), run(*WORDS, "--full")
    assert short.code == full.code == 0
    for step in steps:
        assert f"# ---- {step['number']}. {step['title']}" in short.out
        assert all(f"- {change}" in short.out for change in step["changes"])
        assert all(call in full.out for call in step["primitives"])
    assert (
        "define" in full.out.rpartition("# ---- ")[2] and "attributes #0" in full.out
    )  # the rest of LLVM's text has addresses
    assert "attributes #0" in source["text"] and "attributes #0" not in short.out
    assert "more lines; --step N or --full shows all" in short.out and "more lines" not in full.out

    alone = run(*WORDS, "--step", "2").out
    assert steps[2]["script"] in alone and steps[2]["title"] in alone and steps[1]["title"] not in alone

    file = tmp_path / "story.html"
    written = run(*WORDS, "--html", file)
    assert written.code == 0 and written.out == f"{len(steps)} steps in {file}\n"
    assert file.read_text().startswith("<!doctype html>") and steps[1]["title"] in file.read_text()


def test_mistakes(run: Run, tmp_path: Path) -> None:
    assert one_line(run(*WORDS, "--step", "99")).startswith("--step 99: the story has steps 0 to ")
    assert one_line(run(*WORDS, "--step", "-1")).startswith("--step -1: the story has steps 0 to ")
    assert "leave out --step and --json" in one_line(run(*WORDS, "--json", "--html", tmp_path / "a.html"))
    assert "cannot be written" in one_line(run(*WORDS, "--html", tmp_path / "none" / "a.html"))
    assert "unknown schedule" in one_line(run(*WORDS, "--schedule", "tutorail"))
