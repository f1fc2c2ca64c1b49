"""Trials that are built here and measured elsewhere: which, and what becomes of a kernel that ends its process."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from schedules.core.arch import parse_arch
from schedules.core.registry import operator
from schedules.predict.rank import TILE, ranked
from scripts import carry_trials
from scripts.collect_trials import names
from tests.conftest import problem_of

ARCH = parse_arch("cuda:sm_90a")
LAYER = dict(n=8, h=28, w=28, ci=128, co=128, kh=3, kw=3, pad=1, dtype="float16")


def test_likely_are_the_predicted_that_differ_in_their_tiles() -> None:
    problem = problem_of("conv2d_nhwc", **LAYER)
    best = [(each.schedule, each.config) for each in ranked(problem, ARCH)]
    found = carry_trials.likely(problem, ARCH, 4, ())
    tiles = {(name, *(getattr(config, field, None) for field in TILE)) for name, config in found}
    assert found[0] == best[0] and len(tiles) == len(found) == 4
    others = carry_trials.likely(problem, ARCH, 4, set(found))
    assert len(others) == 4 and not {*others} & {*found}
    of_one = carry_trials.likely(problem, ARCH, 2, (), ["wgmma"])
    assert [name for name, _ in of_one].count("wgmma") >= 2 and of_one[:2] == found[:2]


def test_problems_come_once_and_mostly_bare() -> None:
    asked = Namespace(problems=None, shapes=None, seed=3, sorts="few,flat,other", operators="conv2d_nhwc,conv2d_hwcn")
    found = [problem for _, problem in islice(carry_trials.wanted(asked), 60)]
    assert len({*found}) == 60
    assert {type(problem) for problem in found} == {operator(f"conv2d_{name}").problem for name in ("nhwc", "hwcn")}
    bare = [problem for problem in found if not problem.epilogue.terms]
    assert 30 < len(bare) < 60


def test_what_is_built_is_in_the_index(cuda_compiler: None, tmp_path: Path) -> None:
    problem = problem_of("conv2d_nhwc", **LAYER)
    asked = Namespace(folder=tmp_path, target=str(ARCH), schedules="", count=1, drawn=0)
    line = carry_trials.built(asked, 7, "a net", problem, ())
    words, again = carry_trials.parsed(line, names())
    assert again == problem and words["set"] == "a net"
    ((schedule, values, file, workspaces),) = words["t"]
    best = ranked(problem, ARCH)[0]
    assert (schedule, values, workspaces) == (best.schedule, list(best.config.to_json(True).values()), [])
    assert (tmp_path / file).stat().st_size > 1000
    assert carry_trials.parsed(line, {**names(), f"conv2d_nhwc.{schedule}": ["block_m"]})[0]["t"] == []


def test_configs_at_random_are_of_the_schedules_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        carry_trials, "build_at", lambda library, problem, name, config, arch: asked.append((name, config))
    )
    words = Namespace(folder=Path(), target=str(ARCH), schedules="mma_windows", count=1, drawn=9)
    problem = problem_of("conv2d_nhwc", n=8, h=64, w=64, ci=3, co=32, kh=3, kw=3, stride=2, dtype="float16")
    carry_trials.built(words, 0, "a net", problem, ())
    assert len({(name, str(config)) for name, config in asked}) == len(asked) >= 9
    assert [name for name, _ in asked].count("mma_windows") >= 8


class Measurer:
    """Says in turn what each list of `told` says; at the end of a list it has died."""

    def __init__(self, *told: list[tuple[Any, ...]]) -> None:
        self.told, self.asked, self.restarts, self.heard = iter(told), [], 0, 0.0  # type: ignore[var-annotated]
        self.pipe = self

    def send(self, what: Any, job: Any) -> None:
        self.asked.append([Path(library).name for library, _ in what[2]])
        self.lines: Iterator[tuple[Any, ...]] = iter(next(self.told))

    def poll(self, seconds: float) -> bool:
        return True

    def recv(self) -> tuple[Any, ...]:
        for line in self.lines:
            return line
        raise EOFError

    def restart(self) -> None:
        self.restarts += 1


BUILT = [["a", [1], "a.so", []], ["b", [2], "b.so", []], ["c", [3], "c.so", []]]


def test_a_kernel_that_ends_its_process_costs_no_other() -> None:
    started = [(0, index, None, None, "start") for index in (0, 1)]
    timed = [(0, None, None, None, "start"), (0, 0, 5.004, 4.9, ""), (0, None, 7.001, None, "end")]
    again = [(-1, None, "a device", "2.11", ""), *started, (0, 1, None, None, "wrong by 3"), *timed]
    child = Measurer(started, again)
    found = carry_trials.trials_of(child, 0, None, Path(), BUILT)  # type: ignore[arg-type]
    assert found == ([["a", [1], 5.0, 4.9]], [["b", [2], "crashed"], ["c", [3], "wrong by 3"]], 7.0)
    assert child.asked == [["a.so", "b.so", "c.so"], ["a.so", "c.so"]] and child.restarts == 1


def test_an_end_while_all_are_timed_is_nobodys_fault() -> None:
    child = Measurer([(0, 0, None, None, "start"), (0, None, None, None, "start"), (0, 0, 5.0, 4.9, "")])
    assert carry_trials.trials_of(child, 0, None, Path(), BUILT[:1]) == ([], [], None)  # type: ignore[arg-type]
    assert child.restarts == 1


@pytest.mark.parametrize("seconds", [1e9, 0])
def test_a_whole_build(
    cuda_compiler: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
) -> None:
    problems = tmp_path / "problems"
    problems.write_text(f"net conv2d_nhwc {problem_of('conv2d_nhwc', **LAYER)}\n")
    folder = tmp_path / "built"
    words = ["build", str(folder), "--problems", str(problems), "--count", "1", "--builders", "1"]
    monkeypatch.setattr("sys.argv", ["carry_trials", *words, "--seconds", str(seconds)])
    assert carry_trials.main() == 0
    lines = [json.loads(line) for line in (folder / carry_trials.INDEX).read_text().splitlines()]
    assert len(lines) == (1 if seconds else 0)
    assert all((folder / trial[2]).exists() for line in lines for trial in line["t"])
    with pytest.raises(SystemExit):  # what it has would be overwritten
        carry_trials.main()
    assert "has kernels already; name a new folder" in capsys.readouterr().err
