from __future__ import annotations

import pytest

from schedules.core.arch import ARCHES, Arch, VectorUnit, occupancy, parse_arch, vector_unit
from schedules.core.errors import UnknownNameError


def test_every_target_of_the_plan_is_there() -> None:
    assert set(ARCHES) == {
        "llvm",
        *(f"cuda:{name}" for name in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")),
        *(f"rocm:{name}" for name in ("gfx90a", "gfx942", "gfx1100")),
    }


@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_targets_name_their_arch(arch: Arch) -> None:
    target = arch.target()
    assert target.kind.name == arch.kind
    if arch.is_gpu:
        assert arch.name in str(target)
        assert arch.shared_block <= arch.shared_sm
        assert arch.max_threads <= arch.threads_sm


def test_short_names_parse() -> None:
    assert parse_arch("sm_80") is ARCHES["cuda:sm_80"]
    assert parse_arch("gfx942") is ARCHES["rocm:gfx942"]
    assert parse_arch("llvm:x86-64-v3").target().attrs["mcpu"] == "x86-64-v3"


@pytest.mark.parametrize(
    ("text", "near"), [("cuda:sm_90", "cuda:sm_90a"), ("rocm:gfx941", "rocm:gfx942"), ("llvm:haswel", "haswell")]
)
def test_unknown_target_names_the_nearest(text: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=near):
        parse_arch(text)


def test_compute_capability() -> None:
    assert parse_arch("sm_90a").compute_capability == "9.0"
    assert parse_arch("sm_75").compute_capability == "7.5"


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "expected"),
    # by NVIDIA's occupancy calculator for compute capability 9.0
    [
        (64, 101, 4096, (9, "registers")),
        (1024, 32, 0, (2, "threads")),
        (128, 32, 100 * 1024, (2, "shared memory")),
        (32, 16, 0, (32, "blocks")),
    ],
)
def test_occupancy(threads: int, registers: int, shared: int, expected: tuple[int, str]) -> None:
    assert occupancy(parse_arch("sm_90a"), threads, registers, shared) == expected


@pytest.mark.parametrize(
    ("target", "lanes", "registers"),
    [("llvm:x86-64-v4", 16, 32), ("llvm:x86-64-v3", 8, 16), ("llvm:x86-64", 4, 16), ("llvm:znver4", 16, 32)],
)
def test_vector_units(target: str, lanes: int, registers: int) -> None:
    assert vector_unit(parse_arch(target)) == VectorUnit(lanes, registers)
