"""A story as HTML: one file without scripts or anything from elsewhere, for wide and narrow, light and dark screens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from schedules.show.explain.story import DEFINITION, LOWERING, PROGRAM, SCHEDULE, Step, Story

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --quiet: #55606e; --paper: #ffffff; --box: #f5f7f9; --line: #d5dbe1;
  --link: #0b57b0; --new: #dff5e3; --new-ink: #0b4a1c; --old: #fbe4e4; --old-ink: #7a1414; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe5ec; --quiet: #a3afbc; --paper: #14181d; --box: #1d232a;
  --line: #38424d; --link: #8ec1ff; --new: #143b22; --new-ink: #b9f2c8; --old: #4a1d20; --old-ink: #ffc9c9; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1rem clamp(.75rem, 3vw, 2rem) 4rem; }
h1 { font-size: clamp(1.3rem, 4vw, 1.9rem); line-height: 1.25; overflow-wrap: anywhere; }
a { color: var(--link); }
a:focus-visible, summary:focus-visible, pre:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.story h2 { font-size: 1.25rem; line-height: 1.3; overflow-wrap: anywhere; }
.story h3 { font-size: 1.08rem; line-height: 1.35; margin: 0 0 .5rem; }
.story dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .15rem 1rem; margin: 0 0 1rem; }
.story dt, .story .story-phase { color: var(--quiet); }
.story dd { margin: 0; overflow-wrap: anywhere; }
.story .story-phase { font-size: .85rem; margin: 0; }
.story nav ul { padding: 0; list-style: none; margin: .25rem 0 .75rem; }
.story nav li { padding: .15rem 0; }
.story article { border-top: 1px solid var(--line); padding: 1.25rem 0 .5rem; scroll-margin-top: .5rem; }
.story article > ul { margin: 0 0 .75rem; padding-left: 1.2rem; overflow-wrap: anywhere; }
.story summary { cursor: pointer; padding: .3rem 0; color: var(--link); }
.story pre { margin: .25rem 0 .75rem; padding: .6rem 0; max-height: 38rem; overflow: auto; border-radius: .4rem;
  border: 1px solid var(--line); background: var(--box);
  font: .82rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; tab-size: 4; }
.story pre code { display: block; width: max-content; min-width: 100%; font: inherit; }
.story pre span, .story pre ins, .story pre del { display: block; padding: 0 .75rem; text-decoration: none;
  min-height: 1.45em; }
.story pre ins { background: var(--new); color: var(--new-ink); }
.story pre del { background: var(--old); color: var(--old-ink); }
.story pre .story-place { color: var(--quiet); padding-top: .4rem; }
@media (max-width: 40rem) { .story dl { grid-template-columns: 1fr; gap: 0; } .story dd { margin-bottom: .4rem; }
  .story pre { font-size: .75rem; max-height: 75vh; } }
@media print { .story pre { max-height: none; overflow: visible; white-space: pre-wrap; } }
""".strip()
_PHASES = {DEFINITION: "Definition", SCHEDULE: "Schedule", PROGRAM: "Program", LOWERING: "Lowering"}
_SOURCES = {"cuda": "CUDA C++", "amdgcn": "AMDGCN assembly", "llvm": "LLVM IR"}


def page(title: str, fragments: Iterable[str], style: str = "") -> str:
    """A whole HTML page of `fragments` under `title`, plain text; `style` are rules of their own."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(fragments) + "\n</main>\n</body>\n</html>\n"
    )


def story_html(story: Story, brief: bool = False) -> str:
    """`story` as a ``<section>`` for `page`, or for another page with `STYLE`; two stories may stand in one.

    `brief` is for a page of many: the definition, what each step of the schedule changes, the lowering in sentences,
    the source.
    """
    anchor = "s" + hashlib.sha256(f"{story.title} {story.config}".encode()).hexdigest()[:8]
    kind = _SOURCES[story.source_kind]
    facts = {
        "operator": f"{story.operator.name}: {story.operator.summary}",
        "problem": str(story.problem),
        "schedule": f"{story.schedule.name}: {story.schedule.summary}",
        "config": str(story.config),
        "target": str(story.arch),
    }
    return "\n".join(
        [
            f'<section class="story" aria-labelledby="{anchor}">',
            f'<h2 id="{anchor}">{escape(story.operator.name)}, {escape(story.schedule.name)} for '
            f"{escape(str(story.arch))}</h2>",
            "<dl>",
            *(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()),
            "</dl>",
            *_contents(story, anchor, kind),
            *(part for step in story.steps for part in _step(step, anchor, brief)),
            f'<article id="{anchor}-source" aria-labelledby="{anchor}-source-title">',
            f'<p class="story-phase">Source</p><h3 id="{anchor}-source-title">What comes out: {kind}</h3>',
            _code(story.source.splitlines(), f"{kind} of the kernel"),
            "</article>",
            "</section>",
        ]
    )


def _contents(story: Story, anchor: str, kind: str) -> list[str]:
    lines = [f'<nav aria-label="Steps of {escape(story.title)}">']
    for phase, steps in groupby(story.steps, lambda step: step.phase):
        links = [
            f'<li><a href="#{anchor}-{step.number}">{step.number}. {escape(step.title)}</a></li>' for step in steps
        ]
        lines += [f'<p class="story-phase">{_PHASES[phase]}</p>', "<ul>", *links, "</ul>"]
    source = f'<li><a href="#{anchor}-source">What comes out: {kind}</a></li>'
    return [*lines, '<p class="story-phase">Source</p>', "<ul>", source, "</ul>", "</nav>"]


def _step(step: Step, anchor: str, brief: bool) -> list[str]:
    here = f"{anchor}-{step.number}"
    lines = [
        f'<article id="{here}" aria-labelledby="{here}-title">',
        f'<p class="story-phase">{_PHASES[step.phase]}</p>'
        f'<h3 id="{here}-title">{step.number}. {escape(step.title)}</h3>',
        "<ul>",
        *(f"<li>{escape(change)}</li>" for change in step.changes),
        "</ul>",
    ]
    if step.primitives:
        one, many = ("pass", "passes") if step.phase == LOWERING else ("call", "calls")
        count = len(step.primitives)
        listing = _code(step.primitives, f"The {many} of step {step.number}")
        lines += _details(f"{count} {one if count == 1 else many}", listing, opened=step.phase == SCHEDULE)
    if step.before and not (brief and step.phase == LOWERING):
        diff = step.diff()
        shown = _code(diff, f"What step {step.number} changes in the program", diff=True)
        lines += _details(f"What changes in the program ({_lines(len(diff))})", shown, opened=True)
    if not (brief and step.before):
        script = step.script.splitlines()
        shown = _code(script, f"The program after step {step.number}")
        lines += _details(f"The whole program ({_lines(len(script))})", shown, opened=not step.before)
    return [*lines, "</article>"]


def _lines(count: int) -> str:
    return f"{count} line" + ("s" if count != 1 else "")


def _details(summary: str, body: str, opened: bool = False) -> list[str]:
    return [f"<details{' open' if opened else ''}>", f"<summary>{escape(summary)}</summary>", body, "</details>"]


def _code(lines: Sequence[str], label: str, diff: bool = False) -> str:
    """Lines in a box that scrolls by itself, by keyboard too; signs tell a diff's lines apart, not colours alone."""
    body = "".join(map(_diff_line, lines)) if diff else "".join(f"<span>{escape(line)}</span>" for line in lines)
    return f'<pre tabindex="0" role="region" aria-label="{escape(label)}"><code>{body}</code></pre>'


def _diff_line(line: str) -> str:
    tag = {"+": "ins", "-": "del"}.get(line[:1], "span")
    if line.startswith("@@"):
        return f'<span class="story-place">{escape(line)}</span>'
    return f"<{tag}>{escape(line)}</{tag}>"
