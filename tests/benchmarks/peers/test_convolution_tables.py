from __future__ import annotations

from typing import Any

from benchmarks.peers.comparison import Times
from benchmarks.peers.convolution_case import case_result
from benchmarks.peers.tables import tables
from tests.conftest import problem_of

FIELDS: dict[str, Any] = dict(n=2, h=32, w=32, co=640, kh=3, kw=3, pad=1)


def case(ours: float | None, peers: dict[str, float | None], operator: str = "conv2d_nhwc", **fields: Any) -> Any:
    problem = problem_of(operator, **{**FIELDS, "ci": 64, **fields})

    def told(us: float | None, **about: Any) -> tuple[Times | None, dict[str, Any]]:
        return (Times(us, us, us, 9), about) if us else (None, {**about, "failed": "why"})

    found = {"ours": told(ours, schedule="mma"), **{name: told(us, counts=True) for name, us in peers.items()}}
    made = case_result(problem, found, fields.get("launch", "stream"))
    return {**made, "date": "2026-11-21T10:00:00+00:00"}


def results(*cases: Any, **head: Any) -> dict[str, Any]:
    about = {"kind": "convolution", "device": "NVIDIA H200", "versions": {"torch": "2.11", "cudnn": "9"}}
    return {**about, **head, "cases": list(cases)}


def test_a_table_for_each_operator_and_dtype() -> None:
    half = {"cudnn nhwc fp16": 8.0, "cudnn nchw fp16": 20.0}
    found = results(
        case(10.0, half, dtype="float16"),
        case(8.0, {**half, "cudnn nchw fp16": None}, dtype="float16", ci=32, stride=2),
        case(4.0, {"cudnn nhwc int8 algo 0": 2.0}, "conv2d_nchw32"),
        ceilings={"float16": {"tflops": 686.0}, "int8": {"failed": "why"}},
    )
    assert tables(found) == "\n".join(
        [
            "`conv2d_nchw32`, int8",
            "",
            "| layer | us | TOP/s | of the peak | cudnn nhwc int8 algo 0 us | of the best peer | schedule |",
            "|---|---|---|---|---|---|---|",
            "| 2x32x32 64->640 3x3 | 4.0 | 377 | 19.1% | 2.0 | 0.50 | mma |",
            "",
            "Geometric mean of the ratios: 0.50 (1 layers)",
            "",
            "`conv2d_nhwc`, float16",
            "",
            "| layer | us | TFLOP/s | of the matmul | of the peak | cudnn nhwc fp16 us | cudnn nchw fp16 us "
            "| of the best peer | schedule |",
            "|---|---|---|---|---|---|---|---|---|",
            "| 2x32x32 64->640 3x3 | 10.0 | 151 | 22.0% | 15.3% | 8.0 | 20.0 | 0.80 | mma |",
            "| 2x32x32 32->640 3x3 stride 2 | 8.0 | 23.6 | 3.4% | 2.4% | 8.0 | failed | 1.00 | mma |",
            "",
            "Geometric mean of the ratios: 0.89 (2 layers)",
            "",
            "NVIDIA H200, 2026-11-21; torch 2.11, cudnn 9",
        ]
    )


def test_what_failed_or_has_no_ceiling_stands_empty() -> None:
    found = results(case(None, {"a": 8.0}), case(4.0, {"a": 8.0}, ci=32), case(4.0, {}, ci=16), device="Some GPU")
    text = tables(found)
    assert "of the" not in text.replace("of the best peer", "").replace("of the ratios", "")
    assert "| 2x32x32 64->640 3x3 | failed |  | 8.0 |  | mma |" in text
    assert "| 2x32x32 16->640 3x3 | 4.0 | 94.4 |  |  | mma |" in text
    assert "Geometric mean of the ratios: 2.00 (1 of 3 layers)" in text
    assert "mean" not in tables(results(case(None, {"a": 8.0})))


def test_graphs_stand_apart() -> None:
    one = case(4.0, {"a": 8.0})
    text = tables(results(one, {**one, "launch": "graph"}))
    assert "`conv2d_nhwc`, float32\n" in text and "`conv2d_nhwc`, float32, launched from CUDA graphs\n" in text


def test_another_arithmetic_has_a_table_of_its_own() -> None:
    peers = {"cudnn nhwc fp32": 20.0, "cudnn nhwc tf32": 8.0}
    usual = case(10.0, peers, "conv2d_hwcn", ci=32)
    found = tables(results(usual, {**case(6.0, peers, "conv2d_hwcn"), "arithmetic": "tf32"}))
    first, second = (found.index(f"`conv2d_hwcn`, float32{name}\n") for name in ("", " in tf32"))
    # 1.51e9 operations in 6 us, of the datasheet's 494 T and not float32's 67
    assert first < second and "| 2x32x32 64->640 3x3 | 6.0 | 252 | 50.9% |" in found[second:]
