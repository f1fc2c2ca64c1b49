"""What is shipped: bundles, which are folders of one kernel, and libraries of many."""
