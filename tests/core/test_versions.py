"""What tells one state of the code from another."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedules.core.versions import sources


def test_an_edit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "edited_package"
    (package / "room").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "edited_module.py").write_text("x = 1")

    def told(name: str) -> str:
        sources.cache_clear()
        return sources(name)

    seen = [told("edited_package")]
    for name, content in (("room/a.py", "1"), ("room/a.py", "2"), ("b.py", "2"), ("data.npz", "3")):
        (package / name).write_text(content)
        seen.append(told("edited_package"))
    assert len(set(seen)) == 5
    (package / "notes.txt").write_text("no code")
    assert told("edited_package") == seen[-1]
    (package / "b.py").rename(package / "c.py")
    assert told("edited_package") not in seen
    before = told("edited_module")
    (tmp_path / "edited_module.py").write_text("x = 2")
    assert told("edited_module") != before
