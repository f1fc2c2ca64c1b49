from __future__ import annotations

import pytest

from benchmarks.operator_tables import TE, TIRX, details, language, matrix, options
from schedules.core.errors import UnknownNameError
from schedules.core.registry import operators


def cells(markdown: str) -> list[dict[str, str]]:
    """The rows of a table below its headers, by header."""
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines())
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_every_schedule_stands_under_its_targets_and_language() -> None:
    rows = {row["operator"].strip("`"): row for row in cells(matrix())}
    headings = {"cuda": "CUDA", "rocm": "ROCm", "llvm": "CPU"}
    for op in operators():
        named = {heading: [name.strip("` *") for name in cell.split(",")] for heading, cell in rows[op.name].items()}
        for spec in op.schedules:
            places = {heading for heading, names in named.items() if spec.name in names}
            assert places == {f"{headings[kind]}, {language(spec)}" for kind in spec.kinds}, spec.name
    assert "`mma_split` *" in rows["conv2d_hwcn"]["CUDA, TE"]


def test_hopper_programs_are_tirx_and_the_rest_is_te() -> None:
    found = {(op.name, spec.name): language(spec) for op in operators() for spec in op.schedules}
    assert {found["softmax", name] for name in ("tiles", "frames", "parts", "cluster")} == {TIRX}
    assert {found["conv2d_nchw", "tma_wgmma"], found["conv2d_hwcn", "tf32"]} == {TIRX}
    assert {found["conv2d_nhwc", "wgmma"], found["softmax", "cpu"], found["conv2d_hwcn", "tutorial"]} == {TE}


def test_details_are_of_one_operator() -> None:
    rows = {row["schedule"]: row for row in cells(details("conv2d_hwcn"))}
    assert rows["`tf32` *"]["language"] == TIRX and rows["`tutorial`"]["targets"] == "CUDA, ROCm"
    assert all(row["how"] for row in rows.values())
    with pytest.raises(UnknownNameError):
        details("conv2d_hwc")


def test_options_are_the_fields_with_a_default() -> None:
    rows = {row["field"].strip("`"): row for row in cells(options("conv2d_nchw32"))}
    assert "co" not in rows and rows["stride"]["default"] == "1" and rows["pad"]["default"] == "0"
    assert (rows["bias"]["default"], rows["out_dtype"]["default"]) == ("false", "int8")
    assert rows["out_dtype"]["values"] == "int8, int32, float16, float32" and rows["n_from"]["values"] == ""
    with pytest.raises(UnknownNameError):
        options("softmux")
