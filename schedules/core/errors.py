"""The errors this package raises.

Every message is one line that names the mistake and the remedy.  ``exit_code`` is what the command line returns for it:
2 for a mistake in what was asked, 1 for work that failed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SchedulesError(Exception):
    """Base of all errors raised on purpose by this package."""

    exit_code = 1


class UsageError(SchedulesError):
    """What was asked for cannot be meant; nothing was started."""

    exit_code = 2


class UnknownNameError(UsageError):
    """An operator, schedule, target, preset or field that does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
        super().__init__(f"unknown {kind} {name!r}; {remedy}")
        self.kind, self.name, self.nearest = kind, name, near[0] if near else None


class ProblemError(UsageError):
    """A problem whose dimensions or dtype make no sense for the operator."""


class ConfigError(UsageError):
    """A config that is illegal for this problem on this arch."""


class ToolchainError(UsageError):
    """A compiler, linker or disassembler that is needed and not installed."""


class BundleError(UsageError):
    """A bundle folder that is missing, occupied, incomplete, altered or for another device."""


class ArgumentError(SchedulesError):
    """A tensor passed to a built function has the wrong shape, dtype, device or strides."""


class BuildError(SchedulesError):
    """The compiler refused a program that was expected to build."""


class EmulationError(SchedulesError):
    """Generated CUDA did something on the emulator that no GPU permits, or something the emulator does not know."""


class DeviceError(SchedulesError):
    """The device failed: an illegal access, a launch that was refused, or no memory left."""


class JournalError(SchedulesError):
    """A journal that another process holds, or that cannot be written."""


class MachineError(SchedulesError):
    """This machine, and no candidate, is at fault: no space, no memory, a stuck process, a device that is lost."""


class TuningError(SchedulesError):
    """A search that cannot go on: nothing it tries works."""


class DerivativeError(SchedulesError):
    """A derivative that no kernel computes."""
