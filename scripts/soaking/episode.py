"""A search or plan and what befalls its first run, drawn from a seed and a number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from scripts.soaking.faults import Strike
from scripts.soaking.scene import Scene

FAULTY = "faulty"  # the operator of tests/tune/faulty.py, whose candidates are wrong on purpose
BROKEN = {"wrong": "correctness", "refused": "compile", "crash": "compile", "segfault": "runtime", "exit": "runtime"}
PROBLEMS = {
    "conv2d_hwcn": "n=16 h=7 w=7 ci=16 co=16 kh=3 kw=3",
    "conv2d_nchw": "n=1 ci=16 h=12 w=12 co=16 kh=3 kw=3 pad=1",
    "conv2d_nchw32": "n=1 ci=32 h=8 w=8 co=32 kh=3 kw=3",
    "conv2d_nhwc": "n=2 h=8 w=8 ci=16 co=16 kh=3 kw=3",
    "depthwise_conv2d": "n=2 h=8 w=8 ci=16 kh=3 kw=3 pad=1",
    "depthwise_nchw32": "n=2 h=8 w=8 ci=40 kh=3 kw=3 pad=1",
    "pack_nchw32": "n=2 h=8 w=8 ci=40",
    "pool2d": "n=2 h=8 w=8 ci=40 kh=3 kw=3 stride=2 pad=1",
    "softmax": "rows=64 cols=100 dtype=float32",
    FAULTY: f"n=1000 faults={'+'.join(BROKEN)} good=7",
}


@dataclass
class Episode:
    """One search or plan and what befalls its first run: all drawn from the seed and the number."""

    seed: int
    number: int
    operator: str
    search: str
    trials: int
    plan: bool
    resumes: bool
    strikes: list[Strike]
    dice: Random
    codes: list[int] = field(default_factory=list)
    records: int = 0
    bundles: int = 0
    seconds: float = 0.0

    @classmethod
    def draw(cls, seed: int, number: int, faults: Sequence[str]) -> Episode:
        dice = Random(f"{seed} {number}")
        # each in its turn, so that a short soak has seen them all
        first = Random(seed).sample(list(faults), len(faults))[number % len(faults)]
        operator = Random(seed).sample(list(PROBLEMS), len(PROBLEMS))[number % len(PROBLEMS)]
        trials = dice.randint(6, 10)
        names = [first, *(dice.sample(list(faults), len(faults))[: dice.choice([0, 0, 0, 1, 1, 2])])]
        strikes = [Strike.draw(name, dice, trials) for name in dict.fromkeys(names)]
        plan = any(strike.fault.for_plan for strike in strikes) or dice.random() < 0.2
        search = "random" if operator == FAULTY else dice.choice(["template", "random", "auto"])
        return cls(seed, number, operator, search, trials, plan, not plan and dice.random() < 0.5, strikes, dice)

    def __str__(self) -> str:
        faults = "; ".join(strike.said or f"({strike.name} came too late)" for strike in self.strikes)
        what = f"{'plan' if self.plan else 'tune'} {self.operator} {self.search}"
        ends = ", ".join(map(str, self.codes))
        return f"{what}: {faults}: exit {ends}; {self.records} records, {self.bundles} bundles, {self.seconds:.0f} s"

    def searches(self) -> list[tuple[str, str, str, int]]:
        """Name, operator, kind of search and trials of each of its searches."""
        found = [("first", self.operator, self.search, self.trials)]
        other = "conv2d_nchw32" if self.operator == "softmax" else "softmax"
        return [*found, ("second", other, "random", 4)] if self.plan else found

    def words(self, scene: Scene, first: bool) -> list[str]:
        """The command."""
        common = ["--log", str(scene.logs), "--builders", "1", "--timeout", "60", "--json"]
        if self.plan:
            return ["tune", "--plan", str(scene.folder / "plan.toml"), "--out", str(scene.out), *common]
        if self.resumes and not first and scene.records():
            return ["resume", *common]
        limits = ["--search", self.search, "--trials", str(self.trials)]
        return ["tune", self.operator, *PROBLEMS[self.operator].split(), *limits, *common]


def entry(search: tuple[str, str, str, int]) -> str:
    """A search as a plan has it."""
    name, operator, kind, trials = search
    fields = [word.split("=") for word in PROBLEMS[operator].split()]
    values = ", ".join(f"{field} = {value if value.isdigit() else json.dumps(value)}" for field, value in fields)
    return (
        f'[[work]]\nname = "{name}"\nproblem = "{operator}"\nset = {{ {values} }}\ntargets = ["llvm"]\n'
        f'search = "{kind}"\ntrials = {trials}\n\n'
    )
