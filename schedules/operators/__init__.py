"""The operators, a folder each: problem, definition, reference, and a file for each schedule.  `auto` serves all."""
