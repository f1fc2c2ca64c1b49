"""Correctness: what was built computes what its definition says, on the device or on a CPU that stands in for it."""
