from __future__ import annotations

from random import Random

from schedules.core.draws import channels, multiple_of, one_of, pair_of, up_to


def test_small_numbers_are_as_likely_as_large_ones() -> None:
    r = Random(0)
    numbers = [up_to(1000)(r) for _ in range(900)]
    assert min(numbers) == 1 and max(numbers) <= 1000 and {type(number) for number in numbers} == {int}
    for low, high in ((1, 10), (10, 100), (100, 1001)):
        assert 250 < sum(low <= number < high for number in numbers) < 350
    assert {up_to(1)(r) for _ in range(50)} == {1} and {up_to(2)(r) for _ in range(50)} == {1, 2}


def test_most_channels_are_multiples_of_a_vector() -> None:
    r = Random(0)
    counts = [channels(300)(r) for _ in range(400)]
    assert min(counts) >= 1 and 256 < max(counts) <= 300
    assert 0.7 < sum(count % 8 == 0 for count in counts) / 400 < 0.85
    assert sum(count % 64 == 0 for count in counts) > 80 and sum(count % 2 for count in counts) > 40


def test_draws_of_draws() -> None:
    r = Random(0)
    assert {pair_of(one_of(1, 2))(r) for _ in range(50)} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert {multiple_of(one_of(8), one_of(1, 3))(r) for _ in range(50)} == {8, 24}
