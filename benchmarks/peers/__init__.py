"""Other libraries' implementations of the same problems, to be measured in the same run.  Nothing here is a kernel."""
