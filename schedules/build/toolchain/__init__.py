"""Compilers and linkers: found on PATH or in Python packages, or refused with the command that installs them."""
