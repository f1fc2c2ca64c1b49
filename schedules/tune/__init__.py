"""Searching a schedule's configs for the fastest one on a device."""
