from __future__ import annotations

from typing import Any

from benchmarks.peers.overhead import KIND, overhead_table


def kept(device: str, *calls: tuple[str, str, float, float | None]) -> dict[str, Any]:
    def words(us: float) -> dict[str, float]:
        return {"median_us": us, "p10_us": us, "p90_us": us}

    found = [
        {"operator": operator, "mode": mode, "ours": words(ours)} | ({"torch": words(theirs)} if theirs else {})
        for operator, mode, ours, theirs in calls
    ]
    return {"kind": KIND, "device": device, "date": "2026-11-20T01:02:03", "versions": {"torch": "2"}, "calls": found}


def test_a_row_for_each_mode_and_two_columns_for_each_device() -> None:
    cpu = kept("A CPU", ("softmax", "eager", 12.34, 4.0), ("softmax", "kernel", 9.0, None))
    gpu = kept("A GPU", ("conv", "graph", 3.0, 2.0), ("softmax", "kernel", 5.0, None))
    assert overhead_table([cpu, gpu]).splitlines() == [
        "| us of a call |  | A CPU: ours | A CPU: PyTorch | A GPU: ours | A GPU: PyTorch |",
        "|---|---|---|---|---|---|",
        "| softmax | kernel alone | 9.0 |  | 5.0 |  |",
        "| softmax | eager | 12.3 | 4.0 |  |  |",
        "| conv | in a CUDA graph |  |  | 3.0 | 2.0 |",
        "",
        "A CPU, 2026-11-20; torch 2",
        "",
        "A GPU, 2026-11-20; torch 2",
    ]
