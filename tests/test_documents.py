"""README, its neighbours and docs/: their commands are accepted, their files and headings are there."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from schedules.cli import COMMANDS, command_parser
from schedules.cli.arguments import parse
from schedules.core.errors import SchedulesError, UnknownNameError
from schedules.core.presets import operator_named
from tests.command import Run
from tests.documents import ROOT, blocks, headings, prose

DOCUMENTS = [file for pattern in ("*.md", "docs/*.md", "examples/**/*.md") for file in sorted(ROOT.glob(pattern))]
SHELL = ("", "sh", "bash")
TEXTS = {str(file.relative_to(ROOT)): file.read_text() for file in DOCUMENTS}
LINES = {
    f"{name}: {' '.join(words)}": words
    for name, text in TEXTS.items()
    for block in blocks(text)
    if block.language in SHELL
    for words in block.commands()
}
CURRENT = [text for name, text in TEXTS.items() if name != "CHANGELOG.md"]  # the others name what was there then
SCRIPTS = sorted({found for text in CURRENT for found in re.findall(r"\bscripts/\w+\.py", text)})
BENCHMARKS = sorted({found for text in CURRENT for found in re.findall(r"python -m (benchmarks\.\w+)", text)})
EXAMPLES = ("row_sum",)  # operators that a document itself makes


def of(command: str) -> list[str]:
    return [line for line, words in LINES.items() if words[0] == command]


@pytest.mark.parametrize("line", of("schedules"))
def test_commands_are_accepted(line: str) -> None:
    command, *words = LINES[line][1:]
    args = parse(command_parser(command)[1], words)
    if name := next(iter(getattr(args, "words", [])), None):
        assert name in EXAMPLES or "/" in name or operator_named(name)


def test_there_are_commands_of_every_kind() -> None:
    assert len(of("schedules")) > 20 and len([line for line, words in LINES.items() if "scripts/" in words[0]]) > 2
    assert {LINES[line][1] for line in of("schedules")} > {"build", "verify", "tune", "bench", "explain"}


@pytest.mark.parametrize("words", [["build", "tutorial", "--taget", "llvm"], ["bench", "--seconds", "soon"]])
def test_a_command_with_a_mistake_would_be_noticed(words: list[str]) -> None:
    with pytest.raises(SchedulesError):
        parse(command_parser(words[0])[1], words[1:])
    with pytest.raises(UnknownNameError):
        operator_named("tutorail")


@pytest.mark.parametrize("name", TEXTS)
def test_commands_named_in_a_sentence_exist(name: str) -> None:
    named = set(re.findall(r"`schedules ([a-z]+)\b", prose(TEXTS[name])))
    assert named <= set(COMMANDS)


def help_of(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    try:
        with pytest.raises(SystemExit) as end:
            if script.endswith(".py"):
                runpy.run_path(str(ROOT / script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__")
    except ModuleNotFoundError as error:
        if error.name != "torch":  # which only its own tests have
            raise
        pytest.skip(f"{script} needs PyTorch")
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("script", [*SCRIPTS, *BENCHMARKS])
def test_scripts_take_the_options_that_are_shown(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = help_of(script, monkeypatch, capsys)
    assert "usage: " in said
    lines = [words for words in LINES.values() if script in words[:3]]
    options = {word for words in lines for word in words if word.startswith("--")}
    assert {option for option in options if not re.search(rf"{option}\b", said)} == set()


@pytest.mark.parametrize("target", [words[1] for words in LINES.values() if words[0] == "make"])
def test_targets_of_make_exist(target: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert target in targets or "=" in target


@pytest.mark.parametrize("name", TEXTS)
def test_python_toml_and_json_blocks_are_whole(name: str) -> None:
    from schedules.core.presets import tomllib

    for block in blocks(TEXTS[name]):
        if block.language == "python":
            compile(block.text, f"{name} {block.name}", "exec")
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language in (*SHELL, "console"), f"a language that no test reads: {block.language}"


def test_the_front_page_is_short_and_leads_to_every_document() -> None:
    front = TEXTS["README.md"]
    assert len(front.splitlines()) <= 220
    linked = set(re.findall(r"\]\(([\w/.-]+\.md)\)", front))
    assert linked >= {name for name in TEXTS if name.startswith("docs/")} | {"RESULTS.md", "CONTRIBUTING.md"}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(TEXTS[name])):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        assert not anchor or anchor in headings(file.read_text()), target


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_named_exist(name: str) -> None:
    """Paths in backticks below a folder of the repository; those of an example, and patterns, are not there."""
    made = {"out", ".venv"}  # by commands
    top = {path.name for path in ROOT.iterdir() if path.is_dir()} - made
    if name == "CHANGELOG.md":  # what was there then
        return
    for path in re.findall(r"`([\w.-]+/[\w./-]*)`", prose(TEXTS[name])):
        if path.split("/")[0] in top and not any(example in path for example in EXAMPLES):
            assert (ROOT / path).exists(), path


def test_headings_are_found() -> None:
    assert {"how-to-add-an-operator", "set-up"} <= headings(TEXTS["CONTRIBUTING.md"])
    assert headings("# A `b`, c: d-e!\n```\n# no\n```\n") == {"a-b-c-d-e"}


def told(text: str) -> list[tuple[str, list[str]]]:
    """Each command of a text's console blocks with the lines shown of what it prints."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks(text):
        for line in block.text.splitlines() if block.language == "console" else ():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line != "...":
                found[-1][1].append(line)
    return found


def like(line: str) -> str:
    """A line without its numbers, which other compilers and machines have otherwise."""
    return re.sub(r"[\d.]+", "#", " ".join(line.split()))


def missing(shown: list[str], printed: list[str]) -> list[str]:
    """The lines of `shown` that `printed` does not have, in this order, at the beginning of a line."""
    rest = iter([like(line) for line in printed])
    return [line for line in shown if not any(here.startswith(like(line)) for here in rest)]


TOURS = [name for name, text in TEXTS.items() if told(text)]


def test_tours_are_found() -> None:
    assert {"README.md", "docs/inspect.md"} <= set(TOURS) and sum(len(told(TEXTS[name])) for name in TOURS) >= 4


@pytest.mark.parametrize("name", TOURS)
def test_a_tour_prints_what_it_shows(
    name: str, cuda_compiler: None, emulation: None, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")
    for command, shown in told(TEXTS[name]):
        program, *words = shlex.split(command)
        assert program == "schedules" and shown
        ran = run(*words)
        assert ran.code == 0, ran.err
        assert not missing(shown, ran.out.splitlines()), command


def test_a_tour_that_shows_something_else_is_noticed() -> None:
    printed = ["route  seed  result", "serial  0  passed  0.144  ...", "emulated  0  passed"]
    assert not missing(["route seed", "emulated  0     passed"], printed)
    assert missing(["emulated 0 passed", "serial 0 passed"], printed) == ["serial 0 passed"]
    assert missing(["serial 0 FAILED"], printed) == ["serial 0 FAILED"]
