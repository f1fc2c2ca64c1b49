"""What a script does around its main function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from schedules.cli import INTERRUPTED
from schedules.core.errors import SchedulesError


def run_script(main: Callable[[], int], stopped: str = "stopped") -> NoReturn:
    """Exit with what `main` returns; a SchedulesError, or Ctrl-C, as one line on standard error.

    The exit code is then the error's, or 130; `stopped` is what Ctrl-C is answered with: what is kept, how to go on.
    """
    try:
        sys.exit(main())
    except SchedulesError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        sys.exit(INTERRUPTED)
