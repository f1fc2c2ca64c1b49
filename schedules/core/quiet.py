"""Keeping known, harmless warnings of native code off the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence

# TVM asks the live device for what a cross-build states explicitly, and says so on every build
ROCM_WARNINGS = (
    "Unable to detect ROCm version",
    "Cannot get maximum number of threads for AMD codegen",
    "Unroll hint get ignore at CodeGenLLVM backend",
)


@contextlib.contextmanager
def without_lines(known: Sequence[str]) -> Iterator[None]:
    """Pass standard error on, except lines that contain one of `known`.

    The descriptor itself is redirected, since native code does not write through Python; other threads' lines are
    delayed until the end.
    """
    if not known:
        yield
        return
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            caught.seek(0)
            for line in caught.read().decode(errors="replace").splitlines():
                if not any(words in line for words in known):
                    print(line, file=sys.stderr)
