"""The command line, as ``schedules`` and as ``python -m schedules``: signals are heeded before all else is imported."""

from __future__ import annotations

from schedules.core.interrupts import heed


def main() -> None:
    """Run one command and end the process with its exit code."""
    heed()
    from schedules.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
