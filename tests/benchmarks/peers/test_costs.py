"""Files of costs: one reader and one writer for the scripts that keep them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import instruction_mix, library, overhead, packing_cost
from benchmarks.peers.costs import sources
from benchmarks.peers.kept import keep_costs
from schedules.core.errors import UsageError

READERS: dict[tuple[str, str], Callable[[Path], dict[str, Any]]] = {
    (overhead.KIND, "calls"): overhead.read_overhead,
    (packing_cost.KIND, "filters"): packing_cost.read_packing,
    (library.KIND, "kernels_ms"): library.read_library,
    (instruction_mix.KIND, "now"): instruction_mix.read_mix,
}


def test_each_row_is_one_line(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": "{\n"}, {"a": 2, "b": "x  y"}]
    file = keep_costs(tmp_path, packing_cost.KIND, "A device", {}, {"filters": rows})
    assert packing_cost.read_packing(file)["filters"] == rows
    assert '{ "a": 2, "b": "x  y" }' in file.read_text()


@pytest.mark.parametrize(("kind", "content"), READERS)
def test_what_is_kept_is_read_and_other_files_are_refused(kind: str, content: str, tmp_path: Path) -> None:
    read = READERS[kind, content]
    file = keep_costs(tmp_path, kind, "A device", {"numpy": "2"}, {content: []})
    whole = read(file)
    assert whole[content] == [] and sources([whole]) == [f"A device, {whole['date'][:10]}; numpy 2"]
    lacking = {name: value for name, value in whole.items() if name != content}
    for text in ("{", "[]", json.dumps({**whole, "kind": "softmax"}), json.dumps(lacking)):
        file.write_text(text)
        with pytest.raises(UsageError, match=rf"holds no {kind}; give a file that {kind} wrote"):
            read(file)
    file.unlink()
    with pytest.raises(UsageError, match="cannot read"):
        read(file)
