from __future__ import annotations

from typing import Any

from benchmarks.peers.networks import KIND, networks_table


def row(network: str, n: int, **us: float) -> dict[str, Any]:
    return {"network": network, "n": n, "mode": "default", **{k: {"median_us": v} for k, v in us.items()}}


def test_a_row_for_each_network_beside_the_fastest_of_pytorchs() -> None:
    networks = [
        row("a", 1, eager=3000.4, compile=1500.0, ours=1000.0),
        row("a", 1, eager=3000.0, ours=1000.0, int8=750.0),
        row("a", 1, eager=3000.0, ours_eager=1200.0),
    ]
    networks.append(row("b", 2, eager=90.0, ours=100.0) | {"beside": 1, "date": "2026-11-21"})
    file = {
        "kind": KIND,
        "device": "A GPU",
        "date": "2026-11-20T01:02:03",
        "versions": {"torch": "2"},
        "networks": networks,
    }
    assert networks_table([file]).splitlines()[2:] == [
        "| A GPU | `a` | 1 | default | 3,000 | 1,500 | 1,000 |  |  | 1.50 |",
        "| A GPU | `a` | 1 |  | 3,000 |  | 1,000 |  | 750 | 4.00 |",
        "| A GPU | `a` | 1 |  | 3,000 |  |  | 1,200 |  | 2.50 |",
        "| A GPU | `b`, beside 1 busy | 2 |  | 90 |  | 100 |  |  | 0.90 |",
        "",
        "A GPU, 2026-11-20 to 2026-11-21; torch 2",
    ]
