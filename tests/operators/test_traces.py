"""Which traces reach TVM: those of our searches, and none that was made by hand to run code."""

from __future__ import annotations

import base64
import copy
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.operators import auto
from schedules.operators.auto import AutoConfig
from schedules.operators.traces import MOST_BYTES, MOST_STEPS, Steps, pack
from tests.conftest import problem_of

# drawn for a convolution of int8: index maps, pipelines, matrix instructions
TENSORCORE = Steps.unpack(Path(__file__).with_name("tensorcore_trace.txt").read_text().strip()).to_json()
CONV = dict(n=8, h=6, w=5, ci=16, co=24, kh=3, kw=3, pad=1)
BLOCK = ["GetSBlock", [], ["conv", "main"], ["b0"]]
LOOPS = ["GetLoops", ["b0"], [], ["l1", "l2"]]


def refused(steps: Any) -> str:
    """The one line that says why."""
    with pytest.raises(ConfigError, match="^trace is not one of a search") as caught:
        Steps(*steps)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300
    return str(caught.value)


def annotated(key: str, value: Any, on: str = "l1") -> list[Any]:
    return [[BLOCK, LOOPS, ["Annotate", [on, value], [key], []]], []]


def changed(steps: Any, at: tuple[Any, ...], value: Any) -> Any:
    steps = copy.deepcopy(steps)
    inner = steps
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return steps


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in `value`."""
    for key, item in enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ():
        yield (*at, key)
        yield from places(item, (*at, key))


@pytest.mark.parametrize("space", ["llvm", "cuda", "rocm"])
def test_what_a_search_makes_is_replayed(space: str) -> None:
    """Of the spaces whose rules take long, other tests replay traces."""
    pytest.importorskip("xgboost")
    from schedules.tune.auto import AutoSearch

    problem = problem_of("softmax", rows=33, cols=100)
    arch = parse_arch({"cuda": "sm_80", "rocm": "gfx942"}.get(space, space))
    for candidate in AutoSearch(problem, arch, 2, space).ask(2):
        assert isinstance(candidate.config, AutoConfig)
        assert candidate.config.check(problem, arch) is None


@pytest.mark.parametrize("key", ["pragma_import_llvm", "pragma_import_c", "pragma_unroll", "pragma_", "", "x"])
@pytest.mark.parametrize("value", ['"; ModuleID = a"', 1, "l1"])
def test_an_annotation_that_is_not_listed_never_reaches_tvm(
    key: str, value: Any, host: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvm.s_tir.schedule import Trace

    monkeypatch.setattr(Trace, "apply_json_to_schedule", lambda *_: pytest.fail("TVM was given the trace"))
    steps = annotated(key, value)
    assert "step 2" in refused(steps)
    problem = problem_of("conv2d_hwcn", **CONV)
    for described in (False, True):
        with pytest.raises(ConfigError, match="trace is not one of a search"):
            auto._replayed(problem, AutoConfig("llvm", pack(steps)), described)


@pytest.mark.parametrize(
    ("key", "value", "on"),
    [
        ("meta_schedule.parallel", '"; ModuleID = a"', "b0"),
        ("meta_schedule.parallel", 1, "l1"),  # of a block
        ("meta_schedule.parallel", 1 << 40, "b0"),
        ("meta_schedule.parallel", -1, "b0"),
        ("meta_schedule.parallel", True, "b0"),
        ("meta_schedule.parallel", 2.0, "b0"),
        ("meta_schedule.tiling_structure", '"SSRSRSX"', "b0"),
        ("meta_schedule.tiling_structure", '"S" "S"', "b0"),
        ("meta_schedule.tiling_structure", '"S\n"', "b0"),
        ("meta_schedule.auto_tensorize", '"my_intrinsic"', "b0"),
        ("meta_schedule.auto_tensorize", '"wmma_sync;x"', "b0"),
        ("meta_schedule.unroll_explicit", "v9", "b0"),
        ("pragma_unroll_explicit", 2, "l1"),
        ("pragma_auto_unroll_max_step", 1 << 20, "l1"),
        ("software_pipeline_stage", [0, "l1"], "l1"),
        ("software_pipeline_stage", [0] * 100, "l1"),
        ("software_pipeline_stage", {"a": 1}, "l1"),
        ("warp_execution", '{"root_index": 0, "nodes": [], "metadata": {}}', "b0"),
    ],
)
def test_a_value_that_the_annotation_does_not_take_is_refused(key: str, value: Any, on: str) -> None:
    refused(annotated(key, value, on))


@pytest.mark.parametrize(
    "steps",
    [
        ["words", []],
        [None, {}],
        [[1, 2], []],
        [[["GetSBlock"]], []],
        [[["Vanish", [], [], []]], []],
        [[["UnsafeSetDType", ["b0"], [0, "float32"], []]], []],
        [[[["GetSBlock"], [], ["conv", "main"], ["b0"]]], []],
        [[LOOPS], []],  # b0 was not made
        [[BLOCK, ["GetLoops", ["b0"], [], ["v1"]]], []],
        [[BLOCK, ["GetLoops", ["b0"], [], ["l1; x"]]], []],
        [[BLOCK, LOOPS, ["Bind", ["l1"], ["threadIdx.w"], []]], []],
        [[BLOCK, ["SetScope", ["b0"], [0, "texture"], []]], []],
        [[["GetSBlock", [], ["conv", "other"], ["b0"]]], []],
        [[["GetSBlock", [], ["x" * 1000, "main"], ["b0"]]], []],
        [[["EnterPostproc", [], [], []]] * 2, []],
        [[BLOCK] * (MOST_STEPS + 1), []],
        [[BLOCK], [[0, 1]]],
        [[["SampleCategorical", [], [[1, 2], [0.5, 0.5]], ["v0"]]], []],
        [[["SampleCategorical", [], [[1, 2], [0.5, 0.5]], ["v0"]]], [[0, 2]]],
        [[["SampleCategorical", [], [[1, 2], [0.5, 0.5]], ["v0"]]], [[0, [0]]]],
        [[["SampleCategorical", [], [[1, 2], [0.5, 0.5]], ["v0"]]], [[0, 0], [0, 1]]],
        [[BLOCK, LOOPS, ["SamplePerfectTile", ["l1"], [2, 64], ["v3", "v4"]]], [[2, [0, 4]]]],
        [[BLOCK, LOOPS, ["SamplePerfectTile", ["l1"], [2, 64], ["v3", "v4"]]], [[2, [4]]]],
        [[BLOCK, LOOPS, ["SamplePerfectTile", ["l1"], [2, 64], ["v3", "v4"]]], [[True, [2, 2]]]],
        [[BLOCK, LOOPS, ["SamplePerfectTile", ["l1"], [2, 64], ["v3", "v4"]]], [[2, [2, 1 << 60]]]],
    ],
)
def test_what_no_search_makes_is_refused(steps: Any) -> None:
    refused(steps)


@pytest.mark.parametrize("value", [None, "import llvm", '"import_llvm"', "", "\0", 1 << 70, -5.5, {}, [[]]])
def test_no_part_of_a_trace_can_be_anything(value: Any) -> None:
    """Every part of one instruction of each kind replaced by what fits nowhere."""
    seen = set[str]()
    for number, step in enumerate(TENSORCORE[0]):
        if step[0] not in seen:
            for at in places(step):
                other = changed(step, at, value)
                if other != step:
                    refused([[*TENSORCORE[0][:number], other], []])
        seen.add(step[0])
    assert len(seen) > 20


def index_map() -> tuple[Any, tuple[Any, ...], Any]:
    """The steps up to one that has an index map, its place there, and the map."""
    for number, step in enumerate(TENSORCORE[0]):
        if step[0] == "TransformLayout":
            return TENSORCORE[0][: number + 1], (number, 1, 1), json.loads(step[1][1])
    raise AssertionError


@pytest.mark.parametrize("value", [None, "runtime.Module", 1 << 70, -1, 2.5, {}, [], [0, "a"], {"type": "None"}])
def test_an_index_map_names_nothing_else_that_tvm_knows(value: Any) -> None:
    prefix, at, graph = index_map()
    for place in places({name: graph[name] for name in ("nodes", "root_index")}):
        other = changed(graph, place, value)
        if json.dumps(other) != json.dumps(graph) and place[0] != "metadata":
            refused([changed(prefix, at, json.dumps(other)), []])


def test_an_index_map_has_an_end() -> None:
    prefix, at, graph = index_map()
    term = next(number for number, node in enumerate(graph["nodes"]) if node["type"] == "ir.Var")
    circle = changed(graph, ("nodes", term + 1), graph["nodes"][-1])
    refused([changed(prefix, at, json.dumps(circle)), []])
    doubled = copy.deepcopy(graph)
    for _ in range(20):  # a sum of a million terms in twenty nodes
        doubled["nodes"].append({"type": "prim.Add", "data": {"span": 0, "ty": 1, "a": term, "b": term}})
        term = len(doubled["nodes"]) - 1
    assert "without end" in refused([changed(prefix, at, json.dumps(doubled)), []])


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b"[[], [" + b" " * MOST_BYTES + b"]]", b"\xff", b"NaN", b"", b"{}", b"[[], [], []]"]
)
def test_a_text_that_is_none_or_too_much(text: bytes) -> None:
    with pytest.raises(ConfigError, match="damaged"):
        Steps.unpack(base64.b64encode(zlib.compress(text)).decode())


def test_steps_of_a_kind_are_left_out_with_the_places_of_decisions() -> None:
    steps = Steps(*TENSORCORE)
    less = steps.without("Tensorize")
    assert len(less.instructions) < len(steps.instructions)
    assert [decision for _, decision in less.decisions] == [decision for _, decision in steps.decisions]
    for at, _ in less.decisions:
        assert less.instructions[at][0].startswith("Sample")
