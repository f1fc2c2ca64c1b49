from __future__ import annotations

from typing import Any

from benchmarks.peers.softmax_tables import goals
from benchmarks.peers.tables import tables


def case(rows: int, cols: int, function: str, ours: float | None, fused: bool = False, **peers: float | None) -> Any:
    def words(rate: float | None) -> dict[str, Any]:
        return {"gbytes_per_s": rate, "us": 1.0} if rate is not None else {"failed": "why"}

    problem = dict(rows=rows, cols=cols, function=function, dtype="float16", scale=1.0, mask="none", keep=1.0)
    problem |= dict(scale=0.125, keep=0.9) if fused else {}
    mine = {**words(ours), "schedule": "warp", **({"of_copy": ours / 4000} if ours is not None else {})}
    return {
        "operator": "softmax",
        "problem": problem,
        "launch": "stream",
        "bytes": 4 * rows * cols,
        "copy_bytes": 4 * rows * cols,
        "date": "2026-11-21T10:00:00+00:00",
        "ours": mine,
        "copies": {"torch": words(4000.0)},
        "peers": {name.replace("_", "."): words(rate) for name, rate in peers.items()},
    }


def results(*found: Any) -> dict[str, Any]:
    return {"kind": "softmax", "device": "Some GPU", "versions": {"torch": "2.11", "cudnn": "9"}, "cases": list(found)}


def test_shares_by_width_and_function_and_rates_by_peer() -> None:
    text = tables(
        results(
            case(49152, 1024, "softmax", 3900.0, torch=2000.0, torch_compile=3800.0),
            case(49152, 32, "softmax", 2000.0, torch=1000.0, torch_compile=None),
            case(49152, 32, "softmax_grad", 4200.0, torch=2100.0),
        )
    )
    assert text == "\n".join(
        [
            "float16, 49152 rows: our rate as a share of that of a device copy",
            "",
            "| cols | softmax | softmax_grad |",
            "|---|---|---|",
            "| 32 | 50.0% | 105.0% |",
            "| 1024 | 97.5% |  |",
            "",
            "float16, 49152 rows: `softmax`, GB/s",
            "",
            "| cols | copy | ours | torch | torch.compile | of the best peer | schedule |",
            "|---|---|---|---|---|---|---|",
            "| 32 | 4000 | 2000 | 1000 |  | 2.00 | warp |",
            "| 1024 | 4000 | 3900 | 2000 | 3800 | 1.03 | warp |",
            "",
            "float16, 49152 rows: `softmax_grad`, GB/s",
            "",
            "| cols | copy | ours | torch | of the best peer | schedule |",
            "|---|---|---|---|---|---|",
            "| 32 | 4000 | 4200 | 2100 | 2.00 | warp |",
            "",
            "Some GPU, 2026-11-21; torch 2.11, cudnn 9",
        ]
    )


def test_few_rows_and_what_is_fused_stand_apart() -> None:
    text = tables(
        results(
            case(49152, 32, "softmax", 2000.0),
            case(49152, 64, "softmax", 2000.0),
            case(8, 65536, "softmax", 100.0),
            case(1, 65536, "softmax", None, torch=50.0),
            case(49152, 32, "softmax", 3000.0, fused=True),
        )
    )
    few = text[text.index("float16, few rows: our rate") :]
    assert "| 1 x 65536 |  |\n| 8 x 65536 | 2.5% |" in few
    assert "| 1 x 65536 | 4000 |  | 50 |  | warp |" in few
    assert "float16, 49152 rows, scale, mask and dropout fused: `softmax`, GB/s" in text
    assert text.count("| cols |") == 4


def test_cases_launched_from_graphs_stand_apart_and_last() -> None:
    """Whatever was compared first: README has the first table."""
    one = case(49152, 32, "softmax", 2000.0, torch=1000.0)
    wide = {**one, "problem": {**one["problem"], "dtype": "float32"}}
    text = tables(results({**one, "launch": "graph"}, wide, one))
    titles = [line for line in text.splitlines() if line.endswith(": our rate as a share of that of a device copy")]
    assert [title.split(":")[0] for title in titles] == [
        "float16, 49152 rows",
        "float32, 49152 rows",
        "float16, 49152 rows, launched from CUDA graphs",
    ]


def test_goals_are_met_by_share_or_by_time() -> None:
    def timed(rows: int, cols: int, us: float | None, copy: float) -> Any:
        made = case(rows, cols, "softmax", None if us is None else 1.0)
        made["ours"] |= {} if us is None else {"us": us}
        return {**made, "copies": {"torch": {"us": copy}}}

    few = [
        timed(1, 65536, 6.1, 5.5),
        timed(1, 65536, 6.2, 5.5),
        timed(8, 2**20, 15.2, 14.0),
        timed(8, 2**20, 15.3, 14.0),
    ]
    text = goals([results(*few, timed(49152, 100, 10.0, 9.7)), results(timed(49152, 100, None, 9.7))])
    lines = text.splitlines()[2:]
    assert lines[0].startswith("| at most 32 rows | float16 | 92% or 0.6 us more | 2 of 4 | ")
    assert lines[0].endswith(" | 88.7% (1 x 65536) | 1.30 us |")
    assert lines[1] == (
        "| up to 512 columns, 32768 rows or more | float16 | 97% | 1 of 1, 1 not timed | 97.0% |"
        " 97.0% (49152 x 100) | 0.30 us |"
    )
