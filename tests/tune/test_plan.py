from __future__ import annotations

import os
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
        (ONE.replace('["llvm"]', '["llvm", "llvm"]'), "targets = ['llvm', 'llvm'] has one twice"),
        ("minutes = inf\n" + ONE, "minutes = inf is not a number over 0"),
        ("minutes = nan\n" + ONE, "minutes = nan is not a number over 0"),
        ("minutes = 1e308\n" + ONE, "minutes = 1e+308 must be at most 1000000"),
        (ONE + "priority = nan", "priority = nan is not a number"),
        (ONE + "trials = 999999999999999999", "trials = 999999999999999999 must be at most 1000000000"),
        (ONE + "trials = 99999999999999999999", "not TOML: a whole number has more than 64 bits"),
        (ONE + "set = { n = 0x" + 5000 * "f" + " }", "not TOML: a whole number has more than 64 bits"),
        (ONE + "seed = " + 5000 * "9", "is not TOML"),
        (ONE + "seed = 2026-11-22", "seed = datetime.date(2026, 11, 22) is not a whole number"),
        (ONE + "set = { n = 2026-11-22 }", "problem n=datetime.date(2026, 11, 22) is not a whole number"),
        (ONE + "set = { n = { n = 1 } }", "problem n={'n': 1} is not a whole number"),
        (ONE + 'space = "a\\u0000b"\nsearch = "auto"', "space = 'a\\x00b' is not a text"),
        ("a = " + 5000 * "[" + 5000 * "]", "is not TOML"),
        ("a" + 5000 * ".a" + " = 1", "is not TOML"),
        (2**20 * "#" + "\n" + ONE, "longer than 1048576 bytes"),
        (200 * '[[work]]\nproblem = "*"\ntargets = ["llvm"]\n', "entries; cut it into plans of at most 10000"),
        ("[defaults]\nexport = 'a\u0085b'\n" + ONE, "is not a text"),
        (ONE + 'name = "../../x"', "name = '../../x' is not a name of letters"),
        (ONE + 'name = "/a/x"', "name = '/a/x' is not a name"),
        (ONE + 'name = "a/b"', "name = 'a/b' is not a name"),
        (ONE + 'name = ".."', "name = '..' is not a name"),
        (ONE + 'name = ""', "name = '' is not a name"),
        (ONE + 'name = "a\\u0000b"', "is not a name"),
        (ONE + f'name = "{300 * "n"}"', "... is not a name of letters, digits, _ . + and -, of at most 150 bytes"),
        (ONE + f'name = "{100 * "é"}"', "is not a name"),
        ('[[work]]\nproblem = "k100-*"\nname = "x"\ntargets = ["llvm"]', "name is for one problem, and 'k100-*' fits"),
        (ONE + 'name = "x"\n' + ONE + 'name = "X"', "work 2: name = 'X' is that of"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_mistakes(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_plan(plan_file(tmp_path, text))
    assert says in str(caught.value) and "plan.toml" in str(caught.value)


def test_entries_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    """A name that was given is kept, or both are named; others get a number."""
    named = ONE + 'name = "tutorial-2"\n'
    plan = read_plan(plan_file(tmp_path, ONE + ONE.replace("llvm", "sm_80") + ONE + named + ONE))
    assert [entry.name for entry in plan.entries] == ["tutorial", "tutorial", "tutorial-3", "tutorial-2", "tutorial-4"]
    twice = plan_file(tmp_path, ONE + named + named.replace("llvm", "sm_80") + named)
    with pytest.raises(UsageError, match="work 4: name = 'tutorial-2' is that of .*work 2, too; give it another"):
        read_plan(twice)


def test_a_plan_that_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / (300 * "n"), tmp_path / "a\0b"):
        with pytest.raises(UsageError, match="plan"):
            read_plan(place)


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
