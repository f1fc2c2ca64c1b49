"""A kernel as a story: the program after each step on its way from the definition to the generated source."""

from schedules.show.explain.story import Step, Story, story

__all__ = ["Step", "Story", "story"]
