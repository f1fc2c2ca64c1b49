from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from schedules.core import cpu
from schedules.core.cpu import KIB, MOST_CACHE, SECOND, beyond_caches, last_level_cache, second_level_cache


@pytest.fixture(autouse=True)
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A system that tells nothing yet."""
    monkeypatch.setattr(cpu, "CACHES", tmp_path)
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    for function in (last_level_cache, second_level_cache):
        function.cache_clear()
    yield tmp_path
    for function in (last_level_cache, second_level_cache):
        function.cache_clear()


def caches(folder: Path, *told: tuple[str, str]) -> None:
    for number, (level, size) in enumerate(told):
        index = folder / f"index{number}"
        index.mkdir()
        (index / "level").write_text(level + "\n")
        (index / "size").write_text(size + "\n")


def test_caches_are_those_that_the_system_tells(system: Path) -> None:
    caches(system, ("1", "48K"), ("1", "64K"), ("2", "2M"), ("3", "32768K"))
    assert second_level_cache() == 2 * KIB**2 and last_level_cache() == 32 * KIB**2
    assert beyond_caches(25 * KIB**2) and not beyond_caches(23 * KIB**2) and beyond_caches(9 * KIB**2, 1 / 4)


def test_a_system_may_tell_nothing(system: Path) -> None:
    assert second_level_cache() == SECOND and last_level_cache() == MOST_CACHE
    assert cpu.cpu_model() is None and cpu.cpu_features() is None


def test_a_cache_that_is_told_by_half_is_left_out(system: Path) -> None:
    caches(system, ("1", "32K"), ("2", "what"), ("three", "8M"))
    (system / "index0" / "level").unlink()
    assert second_level_cache() == SECOND and last_level_cache() == MOST_CACHE


def test_the_largest_caches_are_alike(system: Path) -> None:
    caches(system, ("2", "1024K"), ("3", "491520K"))
    assert last_level_cache() == MOST_CACHE and second_level_cache() == KIB**2


def test_the_first_processor_is_told_of(system: Path) -> None:
    first = "processor\t: 0\nmodel name\t: A: 7\nflags\t\t: fpu avx2 amx_tile\n"
    (system / "cpuinfo").write_text(first + "\nprocessor\t: 1\nmodel name\t: B\nflags\t\t: fpu\n")
    assert cpu.cpu_features() == {"fpu", "avx2", "amx_tile"} and cpu.cpu_model() == "A: 7"
