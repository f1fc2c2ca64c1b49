"""What a script does around its main function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from schedules.core import interrupts
from schedules.core.errors import SchedulesError


def run_script(main: Callable[[], int], stopped: str = "stopped") -> NoReturn:
    """Exit with what `main` returns; a SchedulesError, or Ctrl-C, as one line on standard error.

    The exit code is then the error's, or 130; `stopped` is what Ctrl-C is answered with: what is kept, how to go on.
    """

    def guarded() -> int:
        try:
            return main()
        except SchedulesError as error:
            if not interrupts.asked():  # what fails after a signal may well fail by it
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return error.exit_code

    interrupts.run(guarded, stopped)
