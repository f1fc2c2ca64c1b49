from __future__ import annotations

from pathlib import Path

import pytest

from schedules.core.errors import UsageError
from schedules.core.folders import inside


@pytest.mark.parametrize("name", ["a", "a b.json", "a/b", "é", "..a", "a/./b", "x" * 255])
def test_names_of_a_folder(tmp_path: Path, name: str) -> None:
    assert inside(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("link", ["file", "folder"])
def test_a_link_within_the_folder_is_one_of_its_names(tmp_path: Path, link: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / link)
    assert inside(tmp_path, "link") == tmp_path / "link"


OUTSIDE = ["", ".", "..", "/", "/etc/passwd", "../x", "a/../../x", "a/..", "//x", "out", "out/x", "loop/x/../.."]
NO_NAMES = ["a\0b", "a\nb", "\ud800", "\x1b[2J", "x" * 256, "a/" + "é" * 128, None, 3, b"a", ["a"], {}]


@pytest.mark.parametrize("name", [*OUTSIDE, *NO_NAMES], ids=lambda name: repr(name)[:20])
def test_what_leaves_the_folder_is_refused_in_one_line(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    with pytest.raises(UsageError) as caught:
        inside(folder, name)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 600
