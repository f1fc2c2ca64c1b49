from __future__ import annotations

from pathlib import Path

import pytest

from schedules.core.arch import Arch
from schedules.core.errors import UsageError
from schedules.core.presets import presets
from schedules.tune.plan import read_plan
from schedules.tune.tuner import Limits
from tests.command import Run, one_line
from tests.tune.plans import TWO, plan_file


def test_entries_in_the_order_of_their_priority(tmp_path: Path, host: Arch) -> None:
    plan = read_plan(plan_file(tmp_path, TWO))
    assert [entry.name for entry in plan.entries] == ["small-conv", "softmax-rows64-cols64"]
    first, second = plan.entries
    assert first.limits == Limits(trials=5) and second.limits == Limits(trials=4)
    assert first.targets == (host,) and first.problem.to_json()["kh"] == 3
    assert plan.out == Path("out/plan") and plan.minutes is None


def test_all_fields(tmp_path: Path) -> None:
    text = """
    minutes = 12.5
    [defaults]
    export = "somewhere"
    seed = 3
    [[work]]
    problem = "tutorial"
    targets = ["sm_80", "cuda:sm_90a"]
    minutes = 3
    patience = 7
    search = "random"
    schedules = ["simt"]
    export = false
    [[work]]
    problem = "oneflow-10*"
    targets = ["cuda:sm_90a"]
    search = "auto"
    space = "cuda"
    """
    plan = read_plan(plan_file(tmp_path, text))
    first, *others = plan.entries
    assert plan.minutes == 12.5 and plan.out == Path("somewhere")
    assert [str(arch) for arch in first.targets] == ["cuda:sm_80", "cuda:sm_90a"]
    assert (first.limits, first.search, first.schedules) == (Limits(None, 3, 7), "random", ("simt",))
    assert not first.export and first.seed == 3
    assert [entry.name for entry in others] == ["oneflow-100", "oneflow-1000", "oneflow-1024"]
    assert others[0].space == "cuda" and others[0].limits == Limits()  # the plan's minutes are its limit
    work = first.work(first.targets[1], until=5.0)
    assert work.limits == Limits(None, 3, 7, 5.0) and work.arch is first.targets[1]


ONE = '[[work]]\nproblem = "tutorial"\ntargets = ["llvm"]\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no [[work]]"),
        ("minutes = ", "is not TOML"),
        ("minutes = -1\n" + ONE, "plan.toml: minutes = -1 is not a number over 0"),
        ("minuts = 1\n" + ONE, "plan.toml: unknown field 'minuts'; did you mean 'minutes'?"),
        ("work = 1", "work = 1 is not a list of tables"),
        ("[defaults]\ntrails = 1\n" + ONE, "defaults: unknown field 'trails'; did you mean 'trials'?"),
        ("[defaults]\nexport = true\n" + ONE, "defaults: export = True is not a text"),
        (ONE + "trials = 2.5", "work 1 (tutorial): trials = 2.5 is not a whole number over 0"),
        (ONE + "patience = true", "work 1 (tutorial): patience = True is not a whole number"),
        (ONE + "seed = -1", "seed = -1 is not a whole number that is not negative"),
        (ONE + 'export = "x"', "export = 'x' is not true or false"),
        (ONE + "priority = 'high'", "priority = 'high' is not a number"),
        (ONE + 'search = "lucky"', "search = 'lucky' is not one of template, random, auto"),
        (ONE + 'space = "cuda"', 'space is for search = "auto"'),
        (ONE + 'schedules = ["smit"]', "schedules: unknown schedule of conv2d_hwcn 'smit'; did you mean 'simt'?"),
        (ONE + 'schedules = ["simt"]', "schedules: schedule simt runs on cuda, not on llvm"),
        (ONE + "set = { m = 1 }", "work 1 (tutorial): problem: unknown problem field 'm'"),
        (ONE + "set = { n = 0 }", "problem: n=0 must be at least 1"),
        ("[[work]]\ntrials = 1", "work 1: problem is missing"),
        (
            '[[work]]\nproblem = "tutorail"',
            "work 1 (tutorail): problem: unknown operator or preset 'tutorail'; did you",
        ),
        ('[[work]]\nproblem = "zzz*"', "work 1: problem = 'zzz*' fits no preset"),
        ('[[work]]\nproblem = "tutorial"', "work 1 (tutorial): targets is missing"),
        (ONE.replace("llvm", "lvm"), "targets: unknown target 'lvm'; did you mean 'llvm'?"),
        (ONE + ONE.replace("llvm", "lvm"), "work 2 (tutorial): targets: unknown target"),
        (ONE.replace('["llvm"]', '"llvm"'), "targets = 'llvm' is not a list of texts"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_plan(plan_file(tmp_path, text))
    assert says in str(caught.value) and "plan.toml" in str(caught.value)


def test_a_plan_that_is_not_there(run: Run, tmp_path: Path) -> None:
    assert "cannot read the plan" in one_line(run("tune", "--plan", tmp_path / "no.toml"))
    file = plan_file(tmp_path, ONE)
    assert "--trials is for a single search" in one_line(run("tune", "--plan", file, "--trials", "3"))
    assert "tutorial is for a single search" in one_line(run("tune", "tutorial", "--plan", file))


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_the_examples(name: str) -> None:
    plan = read_plan(Path(__file__).parents[2] / "scripts" / "plans" / f"{name}.toml")
    assert plan.minutes and len({entry.name for entry in plan.entries}) == len(plan.entries)
    if name == "h200":  # every preset for a GPU, each once, beside searches of one schedule
        planned = [entry.name.removesuffix("-n256") for entry in plan.entries if not entry.schedules]
        assert sorted(planned) == sorted(set(presets()) - {"cpu-conv"})


# ---- running one
