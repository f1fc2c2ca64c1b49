from __future__ import annotations

import itertools

import numpy as np
import pytest

from schedules.check.emulate import EmulationMode, Emulator
from schedules.core.errors import EmulationError

LANES = np.arange(32)


def on_warp(emulator: Emulator, expression: str, threads: int = 32, mode: EmulationMode | None = None) -> np.ndarray:
    """The value of an expression of `lane` and `v` (= 100 + lane) in every lane."""
    source = f"""extern "C" __global__ void k(int* out) {{
      int lane = threadIdx.x; int v = 100 + lane; const unsigned all = 0xffffffffu;
      out[lane] = {expression};
    }}"""
    initial = np.full(threads, -7, "int32")
    block = (threads, 1, 1)
    return emulator.launch(source, "k", (1, 1, 1), block, [initial], [0], mode=mode or EmulationMode())[0]


def expected_source(kind: str, operand: int, width: int) -> np.ndarray:
    """The source lanes of the pseudocode of `shfl.sync` in the PTX ISA."""
    segment_mask = 32 - width
    clamp = 0 if kind == "up" else 31
    greatest = (LANES & segment_mask) | (clamp & ~segment_mask)
    least = LANES & segment_mask
    j, valid = {
        "up": (LANES - operand, LANES - operand >= greatest),
        "down": (LANES + operand, LANES + operand <= greatest),
        "xor": (LANES ^ operand, (LANES ^ operand) <= greatest),
        "idx": (least | (operand & ~segment_mask & 31), np.ones(32, bool)),
    }[kind]
    return np.where(valid, j, LANES)


@pytest.mark.parametrize("kind", ["up", "down", "xor", "idx"])
def test_shuffles_follow_the_pseudocode_of_the_ptx_isa(kind: str, emulator: Emulator) -> None:
    """All of one kind in one kernel."""
    function = {"idx": "__shfl_sync"}.get(kind, f"__shfl_{kind}_sync")
    choices = list(itertools.product([0, 1, 3, 5, 8, 16, 31], [32, 16, 8, 4, 2]))  # operand, width
    lines = [
        f"out[{32 * number} + lane] = {function}(0xffffffffu, 100 + lane, {operand}, {width});"
        for number, (operand, width) in enumerate(choices)
    ]
    source = f'extern "C" __global__ void k(int* out) {{ int lane = threadIdx.x;\n{chr(10).join(lines)} }}'
    initial = np.full(32 * len(choices), -7, "int32")
    (result,) = emulator.launch(source, "k", (1, 1, 1), (32, 1, 1), [initial], [0])
    wanted = {choice: (100 + expected_source(kind, *choice)).tolist() for choice in choices}
    assert dict(zip(choices, result.reshape(-1, 32).tolist(), strict=True)) == wanted


@pytest.mark.parametrize("order", ["forward", "reverse", "strided"])
def test_shuffle_width_defaults_to_the_warp_and_takes_every_type(order: str, emulator: Emulator) -> None:
    mode = EmulationMode(order=order)  # type: ignore[arg-type]
    assert (on_warp(emulator, "__shfl_xor_sync(all, v, 1)", mode=mode) == 100 + (LANES ^ 1)).all()
    assert (on_warp(emulator, "(int)__shfl_sync(all, v * 0.5, 3)", mode=mode) == 51).all()
    assert (on_warp(emulator, "(int)(float)__shfl_sync(all, half(lane), 5)", mode=mode) == 5).all()
    assert (on_warp(emulator, "(int)(__shfl_sync(all, (long long)v << 40, 2) >> 40)", mode=mode) == 102).all()


def test_a_lane_outside_the_mask_gives_poison(emulator: Emulator) -> None:
    result = on_warp(emulator, "lane < 16 ? __shfl_xor_sync(0xffffu, v, 16) : 0")
    assert (result[:16] == -1).all()


def test_votes_and_reductions(emulator: Emulator) -> None:
    assert (on_warp(emulator, "__ballot_sync(all, lane % 3 == 0)").view("uint32") == 0x49249249).all()
    assert (on_warp(emulator, "__any_sync(all, lane == 9) * 2 + __all_sync(all, lane < 31)") == 2).all()
    assert (on_warp(emulator, "__reduce_add_sync(all, v)") == 100 * 32 + 496).all()
    assert (on_warp(emulator, "__reduce_min_sync(all, 5 - lane)") == -26).all()
    assert (on_warp(emulator, "__reduce_max_sync(all, (unsigned)lane)") == 31).all()
    assert (on_warp(emulator, "__match_any_sync(all, lane / 16)").view("uint32")[[0, 31]] == [0xFFFF, 0xFFFF0000]).all()


def test_active_mask_of_a_branch_and_of_a_short_warp(emulator: Emulator) -> None:
    assert (on_warp(emulator, "(int)__activemask()", threads=20) == (1 << 20) - 1).all()
    branch = "([&] { int m = 0; if (lane < 8)\n m = __activemask();\n return m; })()"
    assert (on_warp(emulator, branch) == np.where(LANES < 8, 0xFF, 0)).all()


def test_lanes_that_have_exited_need_not_arrive(emulator: Emulator) -> None:
    source = """extern "C" __global__ void k(int* out) {
      if (threadIdx.x >= 16) return;
      out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (int)threadIdx.x, 1);
    }"""
    (result,) = emulator.launch(source, "k", (1, 1, 1), (32, 1, 1), [np.zeros(16, "int32")], [0])
    assert (result == (np.arange(16) ^ 1)).all()


@pytest.mark.parametrize(
    "expression, message",
    [
        ("lane < 16 ? __shfl_xor_sync(all, v, 1) : 0", ""),
        ("__shfl_xor_sync(0xffffu, v, 1)", "does not name the calling lane 16"),
        ("__shfl_sync(all, v, 0, 5)", "width 5"),
        ("lane < 16 ? __shfl_xor_sync(all, v, 1) : __shfl_down_sync(all, v, 1)", "divergent __shfl_"),
    ],
)
def test_divergence_is_an_error(expression: str, message: str, emulator: Emulator) -> None:
    source = f"""extern "C" __global__ void k(int* out) {{
      int lane = threadIdx.x; int v = lane; const unsigned all = 0xffffffffu;
      out[lane] = {expression};
      __syncthreads();
    }}"""
    with pytest.raises(EmulationError, match=message or r"divergent __shfl_xor_sync.*waits at line 4.*kernel line 3"):
        emulator.launch(source, "k", (1, 1, 1), (32, 1, 1), [np.zeros(32, "int32")], [0])


def test_a_missing_syncwarp_is_seen(emulator: Emulator) -> None:
    source = """extern "C" __global__ void k(int* out) {
      __shared__ int staged[32];
      staged[threadIdx.x] = threadIdx.x;
      __syncwarp();
      out[threadIdx.x] = staged[threadIdx.x ^ 1];
    }"""

    def run(text: str, order: str) -> np.ndarray:
        mode = EmulationMode(order=order)  # type: ignore[arg-type]
        return emulator.launch(text, "k", (1, 1, 1), (32, 1, 1), [np.zeros(32, "int32")], [0], mode=mode)[0]

    for order in ("forward", "reverse", "strided"):
        assert (run(source, order) == LANES ^ 1).all()
        assert (run(source.replace("__syncwarp();", ""), order) == -1).sum() == 16
