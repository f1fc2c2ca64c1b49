"""The story of one kernel: what its schedule, or its author, and the lowering do to the program, step by step.

Titles come from the schedules themselves (`schedules.steps.story`) and from a table of the lowering's passes; what
changed is read off the programs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi

from schedules.build.builder import Built, build_scheduled
from schedules.core.arch import Arch
from schedules.core.operator import Operator, ScheduleSpec
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator_of
from schedules.lowering import pipeline
from schedules.predict.start import started
from schedules.show.explain.anatomy import anatomy, differences
from schedules.show.explain.calls import calls
from schedules.show.explain.lowering import Watcher
from schedules.show.explain.written import parts
from schedules.steps.story import Told, listening

DEFINITION, SCHEDULE, PROGRAM, LOWERING = "definition", "schedule", "program", "lowering"
_SOURCES = {"cuda": ("cu", "cuda"), "rocm": ("s", "amdgcn"), "llvm": ("ll", "llvm")}


@dataclass(frozen=True)
class Step:
    """One step: what it is for, what was done, and the program after it.

    `phase` is definition, schedule, program (a part of a program written in TIRx) or lowering.  `primitives` are the
    calls of a schedule or the names of passes; `changes` are sentences; `before` and `script` are TIR before and after.
    """

    number: int
    phase: str
    title: str
    primitives: tuple[str, ...]
    changes: tuple[str, ...]
    before: str = field(repr=False)
    script: str = field(repr=False)
    program: tvm.IRModule = field(repr=False, compare=False)

    def diff(self, context: int = 3) -> list[str]:
        """The lines of a unified diff from `before` to `script`; all of `script` if nothing was there before."""
        return _diff(self.before, self.script, context)


@dataclass(frozen=True)
class Story:
    """All steps of a kernel, and the source they end in.

    `source_kind` is cuda, amdgcn or llvm.  `scheduled` is the number of the step that ends in the scheduled program.
    """

    operator: Operator
    problem: Problem
    arch: Arch
    schedule: ScheduleSpec
    config: Config
    steps: tuple[Step, ...]
    source: str = field(repr=False)
    source_kind: str

    @property
    def title(self) -> str:
        return f"{self.operator.name} {self.problem}, {self.schedule.name} for {self.arch}"

    @property
    def scheduled(self) -> tvm.IRModule:
        """The program that is handed to the lowering: the one that `build.builder.build` makes."""
        return [step for step in self.steps if step.phase != LOWERING][-1].program


def story(
    problem: Problem, arch: Arch, schedule: str | None = None, config: Config | dict[str, Any] | None = None
) -> Story:
    """The story of `problem` on `arch` with the schedule and config that `build` takes.

    The CUDA compiler is not needed.  Raises ConfigError, UnknownNameError, ToolchainError or BuildError.
    """
    op = operator_of(problem)
    spec, config = started(problem, arch, schedule, config)
    with listening() as told:
        made = spec.apply(problem, config, arch)
    if pipeline.is_tirx(made):
        chapters = _written(tvm.IRModule({"main": spec.definition(op, problem, config, arch)}), made)
    else:
        chapters = _scheduled(told, made)
    program = chapters[-1].program
    watcher = Watcher(program)
    built = build_scheduled(op, problem, spec, config, arch, program, device_code=False, instruments=(watcher,))
    chapters += [_Chapter(LOWERING, each.title, tuple(each.passes), each.program) for each in watcher.groups]
    source, kind = _source(built)
    return Story(op, problem, arch, spec, config, tuple(_steps(chapters)), source, kind)


@dataclass(frozen=True)
class _Chapter:
    """A step before it is compared with the one before."""

    phase: str
    title: str
    primitives: tuple[str, ...]
    program: tvm.IRModule
    anew: bool = False  # there is nothing to compare it with


def _scheduled(told: list[Told], made: tvm.IRModule) -> list[_Chapter]:
    """The definition, the schedule's steps, and what was said of the function at the end."""
    first = told[0]
    texts, _ = calls(first.program, first.schedule)
    chapters = [
        _Chapter(
            DEFINITION, "What is computed: the tensor expression as loops, before any schedule", (), first.program, True
        )
    ]
    ends = [(each.program, each.instructions) for each in told[1:]]
    ends.append((first.schedule.mod, len(texts)))
    start = first.instructions
    for each, (program, end) in zip(told, ends, strict=True):
        chapters.append(_Chapter(SCHEDULE, each.title, tuple(text for text in texts[start:end] if text), program))
        start = end
    chapters.append(_Chapter(SCHEDULE, "What the build is told: attributes of the function", (), made))
    return chapters


def _written(definition: tvm.IRModule, made: tvm.IRModule) -> list[_Chapter]:
    """The definition, and the program growing part by part."""
    chapters = [_Chapter(DEFINITION, "What is computed: the tensor expression as loops", (), definition, True)]
    for number, (title, program) in enumerate(parts(made)):
        chapters.append(_Chapter(PROGRAM, title, (), program, anew=number == 0))
    return chapters


def _steps(chapters: list[_Chapter]) -> Iterator[Step]:
    """The chapters that changed the program, numbered from 0."""
    program = tvm.IRModule({})
    number, script, nothing = 0, "", anatomy(program)
    seen = nothing
    for chapter in chapters:
        if not chapter.anew and tvm_ffi.structural_equal(program, chapter.program):
            continue
        before, script = "" if chapter.anew else script, chapter.program.script()
        if script == before:
            continue
        found = anatomy(chapter.program)
        changes = differences(nothing if chapter.anew else seen, found)
        if not changes:
            changed = sum(line.startswith("+") for line in _diff(before, script, context=0))
            changes = (f"Other lines: {changed}; buffers, loops and calls stay as they are.",)
        program, seen = chapter.program, found
        yield Step(number, chapter.phase, chapter.title, chapter.primitives, changes, before, script, program)
        number += 1


def _diff(before: str, after: str, context: int) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=context)
    return list(lines)[2:]  # without the names of two files


def _source(built: Built) -> tuple[str, str]:
    ending, kind = _SOURCES[built.arch.kind]
    return str(built.sources[ending]), kind
