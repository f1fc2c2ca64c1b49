"""Lines of pixels in shared memory: copies are whole, apart, and enough."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedules.core.errors import ProblemError
from schedules.hopper.lines import VECTOR, Lines
from tests.conftest import problem_of


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 5), h=st.integers(1, 12), w=st.integers(1, 20), kh=st.integers(1, 3), kw=st.integers(1, 5),
    stride=st.integers(1, 3), pad=st.integers(0, 2), rows=st.sampled_from([64, 128, 192]),
)  # fmt: skip
def test_a_tile_lies_in_what_is_copied(
    n: int, h: int, w: int, kh: int, kw: int, stride: int, pad: int, rows: int
) -> None:  # fmt: skip
    """Wherever it begins, and whatever the row of the kernel and the channel."""
    try:
        p = problem_of("conv2d_nchw", n=n, h=h, w=w, ci=16, co=8, kh=kh, kw=kw, stride=stride, pad=pad)
    except ProblemError:
        assume(False)
    lines = Lines("data", p, rows, 16)  # type: ignore[arg-type]
    assert lines.length * lines.lines == p.pixels  # type: ignore[attr-defined]
    assert (lines.pitch - h * w) % VECTOR == 0 and lines.pitch >= lines.units * VECTOR
    for begin, channel in ((begin, channel) for begin in range(VECTOR) for channel in range(2)):
        shift = channel * lines.pitch % VECTOR
        for position in range(0, min(p.pixels, 5 * rows), rows):  # type: ignore[attr-defined]
            line_0, first = divmod(position, lines.length)
            before = first * lines.step // VECTOR * VECTOR
            owners: dict[int, set[int]] = {}
            for row in range(rows):
                line, pixel = divmod(position + row, lines.length)
                for moved in (0, lines.reach):
                    slot = (line - line_0) * lines.apart + pixel * lines.step - before + begin + moved
                    unit = (slot + shift) // VECTOR
                    assert slot >= 0 and unit < lines.units
                    owners.setdefault(unit, set()).add(line - line_0)
                    # the line that the producer takes the copy for
                    assert (before + unit * VECTOR) // lines.apart == line - line_0
            assert all(len(of) == 1 for of in owners.values())


def test_channels_of_a_warp_are_in_different_banks() -> None:
    for size in (7, 13, 14, 17, 28, 35):
        lines = Lines("data", problem_of("conv2d_nchw", n=32, h=1, w=size * size, ci=64, co=8, kh=1, kw=1), 128, 64)  # type: ignore[arg-type]
        banks = {i * lines.pitch % 32 // 4 for i in range(4)}
        assert len(banks) == 4 and lines.pitch < 128 + 128
