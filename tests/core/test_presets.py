"""Presets: every name is there, and is the problem it says it is."""

from __future__ import annotations

import pytest

from schedules.core.errors import ProblemError, UnknownNameError, UsageError
from schedules.core.presets import parse_presets, planned, preset, presets, resolve
from schedules.core.problem import Conv2dProblem
from schedules.core.registry import OPERATORS

WIDTHS = (32, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384, 32768)


def test_tutorial() -> None:
    op, problem = resolve("tutorial", {})
    assert op.name == "conv2d_hwcn"
    assert str(problem) == "n=256 h=14 w=14 ci=256 co=512 kh=3 kw=3 stride=1 pad=1 dilation=1 dtype=float32"
    assert problem.flops == 118_380_036_096


def test_oneflow_widths() -> None:
    for width in WIDTHS:
        assert preset(f"oneflow-{width}").fields == {"rows": 49152, "cols": width, "dtype": "float16"}
    assert len([name for name in presets() if name.startswith("oneflow-")]) == len(WIDTHS)


def test_k100_shapes() -> None:
    shapes = [tuple(preset(f"k100-{i}").fields[name] for name in ("n", "ci", "h", "w", "co")) for i in range(1, 7)]
    assert shapes == [
        (16, 128, 64, 64, 27),
        (16, 256, 32, 32, 256),
        (16, 64, 128, 128, 64),
        (2, 1920, 32, 32, 640),
        (2, 640, 64, 64, 640),
        (2, 320, 64, 64, 4),
    ]
    for i in range(1, 7):
        assert preset(f"k100-packed-{i}").fields == preset(f"k100-{i}").fields | {"filter_layout": "hwoi"}


def test_direct_article() -> None:
    op, problem = resolve("direct-article", {})
    assert op.name == "conv2d_nchw"
    assert problem.to_json()["dtype"] == "float32" and problem.flops == 2 * 6 * 763 * 507 * 6 * 36


def test_few_channels() -> None:
    found = {name: p.problem() for name, p in presets().items() if name.startswith("few-")}
    assert len(found) == 40 and len({str(p) for p in found.values()}) == 40
    for name, p in found.items():
        assert isinstance(p, Conv2dProblem) and p.dtype == "float32" and p.kh == p.kw
        assert name == f"few-{p.n}x{p.ci}x{p.h}x{p.w}-{p.co}-{p.kh}x{p.kw}" and p.pad in ((0, 0), (p.kh // 2,) * 2)
    assert {p.kh for p in found.values()} == {3, 5, 7, 9, 11}
    assert {p.pad[0] > 0 for p in found.values()} == {True, False}


def test_resnet_layers() -> None:
    layers = {name: p.fields for name, p in presets().items() if name.startswith("resnet50-")}
    assert len(layers) == 12
    for name, fields in layers.items():
        size, ci, co, kernel, *stride = name.removeprefix("resnet50-").split("-")
        assert (fields["h"], fields["ci"], fields["co"], f"{fields['kh']}x{fields['kw']}") == (
            int(size),
            int(ci),
            int(co),
            kernel,
        )
        assert fields.get("stride", 1) == int("".join(stride).removeprefix("s") or 1)
        assert fields.get("pad", 0) == fields["kh"] // 2 and fields["n"] == 16


@pytest.mark.parametrize("name", list(presets()))
def test_every_preset_is_a_legal_problem(name: str) -> None:
    chosen = preset(name)
    if chosen.available:
        assert chosen.problem().flops > 0
    else:
        # the geometry holds whatever the layout will be
        Conv2dProblem.parse({**chosen.fields, "dtype": "float32"})


def test_words_replace_fields() -> None:
    _, problem = resolve("tutorial", {"n": "8", "pad": "0"})
    assert problem.to_json()["n"] == 8 and problem.to_json()["pad"] == (0, 0)


def test_an_operator_takes_its_own_words() -> None:
    with pytest.raises(ProblemError, match="missing problem n"):
        resolve("conv2d_hwcn", {"h": "4"})


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'tutorial'"):
        resolve("tutorail", {})
    with pytest.raises(UnknownNameError, match="did you mean 'conv2d_hwcn'"):
        resolve("conv2d_hcwn", {})
    with pytest.raises(UnknownNameError, match="unknown preset"):
        preset("nothing")


def test_planned_operators_are_named() -> None:
    if not planned():
        pytest.skip("every operator with presets is in this version")
    name = planned()[0]
    with pytest.raises(UsageError, match=f"operator {name} is planned"):
        resolve(name, {})
    theirs = next(p.name for p in presets().values() if p.operator == name)
    with pytest.raises(UsageError, match=f"{theirs} is a problem of {name}, which is planned"):
        resolve(theirs, {})


@pytest.mark.parametrize("name", ["twice", next(iter(OPERATORS))])
def test_names_are_unique(name: str) -> None:
    with pytest.raises(UsageError, match="rename it"):
        parse_presets(f"[one]\n{name} = {{ n = 1 }}\n[two]\n{name} = {{ n = 2 }}\n")
