"""Timing, and what was measured: timers, records, journals, the choice of a config by them."""
