"""The HTML: whole, self-contained, usable without a mouse, and safe for any text."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from schedules.core.arch import parse_arch
from schedules.show.explain import Story, story
from schedules.show.explain.html import page, story_html
from tests.conftest import problem_of

VOID = {"meta"}


class Reader(HTMLParser):
    """Tags in balance, ids, links and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.named: list[str] = []
        self.boxes: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if "href" in given else []
        self.named += [given["aria-labelledby"] or ""] if "aria-labelledby" in given else []
        if tag == "pre":
            self.boxes.append(given)
        assert "src" not in given and not any(name.startswith("on") for name in given)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def told() -> Story:
    return story(problem_of("softmax", rows=4, cols=64), parse_arch("cuda:sm_90a"), "warp")


def test_page(told: Story) -> None:
    other = replace(told, schedule=replace(told.schedule, name="other"))
    text = page("A <page> & more", [story_html(told), story_html(other)])
    read = Reader(text)
    assert text.startswith("<!doctype html>") and '<html lang="en">' in text and "width=device-width" in text
    assert not {"script", "link", "img", "iframe"} & read.tags.keys() and "http" not in text and "url(" not in text
    assert "prefers-color-scheme: dark" in text and "overflow: auto" in text
    assert len(set(read.ids)) == len(read.ids)
    assert {link.removeprefix("#") for link in read.links} <= set(read.ids) and set(read.named) <= set(read.ids)
    assert len(read.links) == 2 * (len(told.steps) + 1)
    assert all(box["tabindex"] == "0" and box["role"] == "region" and box["aria-label"] for box in read.boxes)
    assert read.tags["h1"] == 1 and read.tags["h2"] == 2 and read.tags["h3"] == 2 * (len(told.steps) + 1)
    assert "A <page> & more" in read.text


def test_fragment_holds_the_story(told: Story) -> None:
    read = Reader(story_html(told))
    for step in told.steps:
        assert f"{step.number}. {step.title}" in read.text
        assert all(change in read.text for change in step.changes)
        assert all(call in read.text for call in step.primitives)
        assert "".join(step.script.splitlines()) in read.text
    assert "".join(told.source.splitlines()) in read.text
    diffs = [line for step in told.steps if step.before for line in step.diff()]
    assert read.tags["ins"] == sum(line[0] == "+" for line in diffs) > 0
    assert read.tags["del"] == sum(line[0] == "-" for line in diffs) > 0
