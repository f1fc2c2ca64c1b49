from __future__ import annotations

from typing import Any

from benchmarks.peers.instruction_mix import mix_table


def row(**used: Any) -> dict[str, Any]:
    kernel = {"preset": "a", "operator": "conv", "dtype": "float16", "registers": 40, "scratch": 0, "waves": 4}
    return {**kernel, **used}


def test_a_row_for_each_operator_with_what_changed() -> None:
    file = {
        "device": "AMD gfx942",
        "date": "2026-11-23T01",
        "versions": {"llvm": "22"},
        "before": [
            row(registers=200, scratch=8, barrier=7, products=0.2, limit="LDS", conflicts=0.3),
            row(preset="b", registers=100, barrier=5, products=0.4, limit="LDS"),
            {"preset": "c", "operator": "conv", "dtype": "float16", "refused": "why"},
        ],
        "now": [
            row(
                **{
                    "mfma": 8,
                    "global load": 3,
                    "global load 128-bit": 2,
                    "products": 0.5,
                    "limit": "matrix cores",
                    "conflicts": 0,
                }
            ),
            row(preset="d", operator="softmax", wait=2),
        ],
    }
    header, _, conv, softmax, _, source = mix_table([file]).splitlines()
    cells = dict(zip(header.split(" | "), conv.split(" | "), strict=True))
    assert cells["presets"] == "1" and cells["registers"] == "150 > 40" and cells["with scratch"] == "1 > 0"
    assert cells["barriers"] == "6 > 0" and cells["matrix"] == "0 > 8" and cells["memory"] == "0 > 5"
    assert cells["conflicts"] == "30% > 0%"
    assert cells["products"] == "30% > 50%" and conv.endswith("| LDS > matrix cores |")
    assert softmax == "| gfx942 | `softmax` | float16 | 1 | 40 | 40 | 0 | 4.0 | 0 | 0 | 0 |  | 0 | 0 | 0 | 2 |  |  |"
    assert source == "AMD gfx942, 2026-11-23; llvm 22"
