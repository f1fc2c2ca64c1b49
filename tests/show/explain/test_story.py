"""Stories: every schedule has one, it is true step by step, and it ends in the program that a build makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm.s_tir import Schedule

from schedules.build.builder import build
from schedules.core.arch import Arch
from schedules.core.errors import ConfigError, ToolchainError, UnknownNameError
from schedules.core.registry import operator
from schedules.lowering.annotations import PREFIX
from schedules.lowering.pipeline import is_tirx
from schedules.operators import auto
from schedules.operators.auto import AutoConfig
from schedules.operators.conv2d_hwcn.tutorial import TutorialConfig
from schedules.show.explain import Step, Story, story
from schedules.show.explain.calls import calls
from schedules.show.explain.story import DEFINITION, LOWERING, PROGRAM, SCHEDULE
from schedules.show.explain.written import parts
from schedules.steps.story import PART, listening, next_step
from tests.conftest import problem_of
from tests.show.explain.problems import SCHEDULES, small_problem

TUTORIAL: dict[str, Any] = dict(n=16, h=4, w=4, ci=16, co=64, kh=3, kw=3, pad=1)


@pytest.mark.parametrize(("name", "schedule"), SCHEDULES)
def test_every_schedule_tells_its_story(name: str, schedule: str) -> None:
    spec = operator(name).schedule(schedule)
    problem, arch = small_problem(name, spec)
    try:
        told = story(problem, arch, schedule)
    except ToolchainError as error:
        pytest.skip(str(error))
    made = spec.apply(problem, told.config, arch)
    _assert_sensible(told, made)
    assert tvm_ffi.structural_equal(told.scheduled, made)
    if is_tirx(made):
        assert [step.phase for step in told.steps].count(PROGRAM) >= 4
        return
    assert [step.phase for step in told.steps].count(SCHEDULE) >= 2
    # the graph that a schedule names is the one that it schedules
    assert spec.graph is not None
    named = spec.definition(operator(name), problem, told.config, arch)
    assert named.script() == told.steps[0].program["main"].script()
    with listening() as heard:
        spec.apply(problem, told.config, arch)
    # what the trace makes of the definition: no primitive comes before the first step
    first = heard[0]
    _, replayed = calls(first.program, first.schedule)
    assert tvm_ffi.structural_equal(replayed["main"].body, first.schedule.mod["main"].body)
    assert {each.schedule for each in heard} == {first.schedule}


def _assert_sensible(told: Story, made: tvm.IRModule) -> None:
    steps = told.steps
    assert [step.number for step in steps] == list(range(len(steps)))
    assert [step.phase for step in steps] == sorted(
        (step.phase for step in steps), key=[DEFINITION, SCHEDULE, PROGRAM, LOWERING].index
    )
    assert steps[0].phase == DEFINITION and steps[-1].phase == LOWERING
    for before, step in zip(steps, steps[1:], strict=False):
        assert len(step.title.split()) >= 4 and not step.title.endswith(".")
        assert step.script != before.script
        assert step.before == ("" if step.phase == PROGRAM and before.phase == DEFINITION else before.script)
        assert step.changes and all(change.endswith(".") for change in step.changes)
        assert PART not in step.script
        # every step does something, but for what is said of the function at the end
        assert step.primitives or step.phase == PROGRAM or "attributes" in step.title
    titles = [step.title for step in steps if step.phase in (SCHEDULE, PROGRAM)]
    assert len(set(titles)) == len(titles)
    kernel = {"cuda": "__global__", "amdgcn": "amdhsa_kernel", "llvm": "define"}[told.source_kind]
    assert kernel in told.source


@pytest.fixture(scope="module")
def tutorial() -> Story:
    from schedules.core.arch import parse_arch

    problem = problem_of("conv2d_hwcn", **TUTORIAL)
    return story(problem, parse_arch("cuda:sm_90a"), "tutorial", TutorialConfig())


def test_the_story_is_that_of_the_build(tutorial: Story) -> None:
    built = build(tutorial.problem, tutorial.arch, "tutorial", tutorial.config, device_code=False)
    assert tutorial.steps[-1].script == built.lowered
    assert tutorial.source == built.sources["cu"]
    assert tvm_ffi.structural_equal(tutorial.scheduled, built.scheduled)


def test_scripts_are_programs(tutorial: Story) -> None:
    """What is shown of the schedule parses to the program after that step."""
    for step in tutorial.steps:
        if step.phase in (DEFINITION, SCHEDULE):
            assert tvm_ffi.structural_equal(tvm.script.from_source(step.script), step.program), step.title


def test_diffs_lead_from_one_program_to_the_next(tutorial: Story) -> None:
    for step in tutorial.steps[1:]:
        diff = step.diff(context=len(step.before) + len(step.script))
        assert [line[1:] for line in diff[1:] if line[:1] != "-"] == step.script.splitlines()
        assert [line[1:] for line in diff[1:] if line[:1] != "+"] == step.before.splitlines()
    assert len(tutorial.steps[1].diff(context=0)) < len(tutorial.steps[1].diff())


def test_a_tutorial_of_the_primitives(tutorial: Story) -> None:
    """What cache_read, vthread, vectorize and compute_at do is said where they are called."""
    by_call: dict[str, Step] = {}  # the first step with such a call
    for step in tutorial.steps:
        for call in step.primitives:
            by_call.setdefault(call.partition("(")[0].rpartition(" = ")[2], step)

    def says(call: str, *words: str) -> bool:
        return any(all(word in change for word in words) for change in by_call[call].changes)

    assert says("cache_read", "New buffer", "filter_shared", "shared memory")
    assert says("cache_read", "conv", "moves from global memory to registers")
    assert says("split", "Bound", "f_1 (2)", "to vthread.y") and says("split", "to blockIdx.z")
    assert says("split", "Loops around conv", "rc_0, ry, rx, rc_1, f_3, b_3")
    assert says("compute_at", "filter_shared", "inside the loop rx")
    assert says("vectorize", "Vectorised", "(4)")
    assert "f_0, f_1, f_2, f_3 = split(f, factors=[None, 2, 8, 4])" in by_call["split"].primitives
    (vthreads,) = (step for step in tutorial.steps if "s_tir.InjectVirtualThread" in step.primitives)
    assert any("conv_local" in change and "256 bytes instead of" in change for change in vthreads.changes)
    (barriers,) = (step for step in tutorial.steps if "s_tir.ThreadSync" in step.primitives)
    assert any("tvm_storage_sync (2)" in change for change in barriers.changes)


def test_steps_follow_the_config(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", **TUTORIAL)
    scalar = story(problem, sm_90a, "tutorial", TutorialConfig(vector=1))
    assert not any("Vectorised" in change for step in scalar.steps for change in step.changes)
    with pytest.raises(ConfigError, match="vector=3"):
        story(problem, sm_90a, "tutorial", {"vector": 3})
    with pytest.raises(UnknownNameError, match="tutorail"):
        story(problem, sm_90a, "tutorail")
    config = replace(scalar.config, vector=4)  # type: ignore[type-var]
    assert story(problem, sm_90a, "tutorial", config).config == config


def test_a_searched_trace_has_a_story(host: Arch) -> None:
    problem = problem_of("softmax", rows=4, cols=8)
    sch = Schedule(auto.program(problem))
    next_step(sch, "nobody listens")
    row, _ = sch.get_loops("out")
    sch.parallel(row)
    told = story(problem, host, "auto", AutoConfig.of("llvm", sch))
    (step,) = (step for step in told.steps if step.phase == SCHEDULE)
    assert step.primitives == ("parallel(i)",) and any("Parallel: i (4)" in change for change in step.changes)
    assert tvm_ffi.structural_equal(told.scheduled, sch.mod)
    assert story(problem, host, "auto", told.config).steps[1].title == step.title  # replayed once, told again


def test_parts_hold_where_they_are_marked() -> None:
    """A part ends with its sequence of statements; one inside another gives way to it again."""
    from tvm.script import tirx as T

    from schedules.steps.story import inside_part, part

    def body(out: Any) -> None:
        part("first")
        T.buffer_store(out, 1, [0])
        with T.If(out[0] > 0), T.Then():
            part("second")
            T.buffer_store(out, 2, [0])
        T.buffer_store(out, 3, [0])
        with inside_part("third"):
            T.buffer_store(out, 4, [0])
        T.buffer_store(out, 5, [0])

    def program() -> tvm.IRModule:
        @T.prim_func
        def main(handle: T.handle) -> None:
            out = T.match_buffer(handle, (1,), "int32")
            body(out)

        return tvm.IRModule({"main": main})

    plain = program()
    with listening():
        marked = program()
    assert PREFIX not in plain.script() and PREFIX in marked.script()
    grown = parts(marked)
    stored = {
        title: [int(line[-1]) for line in mod.script().splitlines() if " = " in line and line[-1].isdigit()]
        for title, mod in grown
    }
    assert stored == {"first": [1, 3, 5], "second": [1, 2, 3, 5], "third": [1, 2, 3, 4, 5]}
    assert tvm_ffi.structural_equal(grown[-1][1], plain)
    assert tvm_ffi.structural_equal(parts(plain)[-1][1], plain)
