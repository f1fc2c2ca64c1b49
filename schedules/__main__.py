"""``python -m schedules``: the command line."""

from __future__ import annotations

import sys

from schedules.cli import main

sys.exit(main())
