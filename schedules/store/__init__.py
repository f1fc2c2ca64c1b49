"""What was chosen and built before, kept on this machine's disk for the processes that come after."""
