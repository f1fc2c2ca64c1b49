from __future__ import annotations

import importlib.util
import inspect
from types import FrameType
from typing import Any

import pytest

from schedules.core.frames import outer_frames, quick_frames


def plain() -> Any:
    """The module inspect as it came, whatever was put into the one in use."""
    spec = importlib.util.find_spec("inspect")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLAIN = plain()


def here() -> FrameType:
    frame = inspect.currentframe()
    assert frame and frame.f_back
    return frame.f_back


def fields(infos: list[inspect.FrameInfo]) -> list[tuple[object, ...]]:
    return [(info.frame, info.filename, info.lineno, info.function, info.code_context, info.index) for info in infos]


def test_the_frames_are_those_of_inspect() -> None:
    frame = here()
    ways = (PLAIN.getouterframes, outer_frames)
    (usual, quick), (_, without) = ([fields(way(frame, context)) for way in ways] for context in (1, 0))
    assert len(quick) > 10 and quick[0][3] == "test_the_frames_are_those_of_inspect"
    assert quick == usual
    assert all(entry[4:] == (None, None) for entry in without)


def test_they_are_in_place_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "getouterframes", PLAIN.getouterframes)
    with quick_frames():
        assert inspect.getouterframes is outer_frames
        with quick_frames():
            pass
        assert inspect.getouterframes is outer_frames
        assert inspect.stack()[0].function == "test_they_are_in_place_only_meanwhile"
    assert inspect.getouterframes is PLAIN.getouterframes
