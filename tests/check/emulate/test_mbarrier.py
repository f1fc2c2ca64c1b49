"""mbarriers alone, and as what clusters synchronise with."""

from __future__ import annotations

import numpy as np
import pytest

from schedules.check.emulate import EmulationMode, Emulator
from schedules.core.errors import EmulationError
from tests.check.emulate.hopper import MODES, run

# Warp 0 hands 6 values to warp 1 through two slots.
HANDOVER = """
extern "C" __global__ void k(const int* in, int* out) {
  __shared__ alignas(8) uint64_t full[2], empty[2];
  __shared__ int slot[2][32];
  int t = threadIdx.x, lane = t % 32;
  if (t == 0) for (int i = 0; i < 2; ++i) { bar_init(&full[i], 32); bar_init(&empty[i], 32); }
  __syncthreads();
  for (int i = 0; i < 6; ++i) {
    int s = i % 2, parity = i / 2 % 2;
    if (t < 32) {
      wait(&empty[s], parity ^ 1);
      slot[s][lane] = in[i * 32 + lane];
      arrive(&full[s]);
    } else {
      wait(&full[s], parity);
      out[i * 32 + lane] = slot[s][31 - lane];
      arrive(&empty[s]);
    }
  }
}
"""
DATA = np.arange(6 * 32, dtype="int32").reshape(6, 32)


def handover(emulator: Emulator, source: str, mode: EmulationMode) -> bool:
    (result,) = run(emulator, source, [DATA, np.zeros_like(DATA)], mode=mode, threads=64)
    return bool((result == DATA[:, ::-1]).all())


@pytest.mark.parametrize("mode", MODES)
def test_handover_through_two_slots(mode: EmulationMode, emulator: Emulator) -> None:
    assert handover(emulator, HANDOVER, mode)


@pytest.mark.parametrize(
    "old, new",
    [
        ("wait(&full[s], parity);", ""),
        ("wait(&empty[s], parity ^ 1);", ""),
        ("wait(&full[s], parity);", "wait(&full[s], parity ^ 1);"),
        ("wait(&empty[s], parity ^ 1);", "wait(&empty[s], parity);"),
        ("int s = i % 2, parity = i / 2 % 2", "int s = 0, parity = i / 2 % 2"),
        ("bar_init(&full[i], 32)", "bar_init(&full[i], 33)"),
        ("arrive(&empty[s]);", ""),
    ],
)
def test_every_wrong_handover_is_seen(old: str, new: str, emulator: Emulator) -> None:
    assert HANDOVER.count(old) == 1
    seen = []
    for mode in MODES:
        try:
            seen.append(not handover(emulator, HANDOVER.replace(old, new), mode))
        except EmulationError:
            seen.append(True)
    assert any(seen)


def test_a_deadlock_names_the_barrier_and_what_it_lacks(emulator: Emulator) -> None:
    missing = (
        "deadlock: mbarrier.try_wait never ends: phase 0 of the mbarrier at .* lacks 32 of 32 arrivals and 0 bytes"
    )
    with pytest.raises(
        EmulationError, match=rf"^{missing}; thread \(32,0,0\) waits at line \d+ \(kernel line"
    ) as caught:
        handover(emulator, HANDOVER.replace("bar_init(&full[i], 32)", "bar_init(&full[i], 33)"), MODES[0])
    assert "\n" not in str(caught.value)


def test_states_and_polling(emulator: Emulator) -> None:
    source = """extern "C" __global__ void k(int* out) {
      __shared__ alignas(8) uint64_t bar; int t = threadIdx.x;
      if (t == 0) bar_init(&bar, 64);
      __syncthreads();
      uint64_t state; unsigned done = 0, rounds = 0;
      asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 1;" : "=l"(state) : "r"(smem(&bar)));
      while (!done) {
        asm volatile("{ .reg .pred p; mbarrier.test_wait.shared.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
          : "=r"(done) : "r"(smem(&bar)), "l"(state));
        ++rounds;
      }
      out[t] = rounds;
    }"""
    (rounds,) = run(emulator, source, [np.zeros(64, "int32")], [0], threads=64)
    assert (rounds >= 1).all() and (rounds > 1).any()
    with pytest.raises(EmulationError, match="deadlock: a thread polls an mbarrier that never changes"):
        run(emulator, source.replace("(&bar, 64)", "(&bar, 65)"), [np.zeros(64, "int32")], [0], threads=64)


@pytest.mark.parametrize(
    "body, message",
    [
        ("arrive(&bar);", "mbarrier.arrive: there is no initialised mbarrier"),
        ("bar_init(&bar, 0);", "mbarrier.init with a count of 0"),
        ("bar_init(&bar, 1); bar_init(&bar, 1);", "where a valid mbarrier is"),
        ("bar_init(&bar, 1); bar = 0; arrive(&bar);", "was overwritten"),
        ("bar_init(&bar, 1); wait(&bar, 2);", "a phase parity of 2"),
        ("bar_init(&bar, 1); expect(&bar, 1 << 20);", "expect_tx of 1048576 bytes"),
        ("bar_init((uint64_t*)((char*)&bar + 4), 1);", "mbarrier.init: .* (not aligned to|outside)"),
        ("bar_init(&bar, 1); expect(&bar, 16); wait(&bar, 0);", "lacks 0 of 1 arrivals and 16 bytes"),
        ("bar_init(&bar, 1); expect(&bar, 16); arrive(&bar);", "more arrivals than the 1 of a phase"),
        ("bar_init(&bar, 1); arrive_in(&bar, 1);", "mapa to block 1 of a cluster of 1"),
    ],
)
def test_misuse(body: str, message: str, emulator: Emulator) -> None:
    source = f"""extern "C" __global__ void k(int* out) {{ __shared__ alignas(8) uint64_t bar; {body} }}"""
    with pytest.raises(EmulationError, match=message):
        run(emulator, source, [np.zeros(1, "int32")], [0], threads=1)


# The producer's data come by cp.async: the barrier, not the thread, waits for them.
COPIES = HANDOVER.replace(
    "slot[s][lane] = in[i * 32 + lane];",
    """
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(smem(&slot[s][lane])), "l"(in + i * 32 + lane));
""",
).replace(
    "arrive(&full[s]);",
    """
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(smem(&full[s])) : "memory");""",
)


@pytest.mark.parametrize("mode", MODES)
def test_copies_that_arrive(mode: EmulationMode, emulator: Emulator) -> None:
    assert handover(emulator, COPIES, mode)
    # Without .noinc the phase ends one arrival later for each, and the initial count never comes.
    with pytest.raises(EmulationError, match="deadlock"):
        handover(emulator, COPIES.replace(".noinc", ""), mode)


def test_a_plain_arrival_does_not_wait_for_copies(emulator: Emulator) -> None:
    assert not handover(emulator, COPIES.replace("cp.async.mbarrier.arrive.noinc", "mbarrier.arrive").replace(
        "b64 [%0];", "b64 _, [%0];"), MODES[0])  # fmt: skip


# ---- Clusters ----

EXCHANGE = """
extern "C" __global__ void k(const int* in, int* out) {
  __shared__ alignas(8) uint64_t bar; __shared__ int box[32];
  int t = threadIdx.x; unsigned rank = cluster_rank(), next = (rank + 1) % 4, to;
  if (t == 0) bar_init(&bar, 32);
  fence_init();
  cluster_sync(); /* the barriers are there */
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(smem(box + t)), "r"(next));
  asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(to), "r"(in[blockIdx.x * 32 + t]) : "memory");
  arrive_in(&bar, next);
  wait(&bar, 0);
  out[blockIdx.x * 32 + t] = box[31 - t];
  cluster_sync(); /* none exits while others write to it */
}
"""


@pytest.mark.parametrize("mode", MODES)
def test_blocks_of_a_cluster_exchange_data(mode: EmulationMode, emulator: Emulator) -> None:
    data = np.arange(8 * 32, dtype="int32").reshape(2, 4, 32)
    arguments = [data, np.zeros_like(data)]
    (result,) = run(emulator, EXCHANGE, arguments, mode=mode, threads=32, blocks=8, cluster=4)
    assert (result == np.roll(data, 1, axis=1)[:, :, ::-1]).all()


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("cluster_sync(); /* the barriers", "/* the barriers", "may not have begun"),
        ("wait(&bar, 0);\n", "", None),
        ("cluster_sync(); /* none", "/* none", "has exited"),
        ("cluster_sync(); /* none", 'if (rank) asm("barrier.cluster.wait;"); /* none', "wait without an arrive"),
        ("cluster_sync(); /* none", "if (rank) cluster_sync(); else wait(&bar, 1); /* none", "deadlock"),
    ],
)
def test_wrong_exchanges_are_seen(old: str, new: str, message: str | None, emulator: Emulator) -> None:
    data = np.arange(8 * 32, dtype="int32").reshape(2, 4, 32)
    source, seen = EXCHANGE.replace(old, new), []
    assert source != EXCHANGE
    if message == "has exited":  # the wait keeps every block alive until its neighbour has written
        source = source.replace("wait(&bar, 0);", "")
    for mode in MODES:
        try:
            arguments = [data, np.zeros_like(data)]
            (result,) = run(emulator, source, arguments, mode=mode, threads=32, blocks=8, cluster=4)
            seen.append(not (result == np.roll(data, 1, axis=1)[:, :, ::-1]).all())
        except EmulationError as error:
            seen.append(message is not None and message in str(error))
    assert any(seen)


def test_threads_that_exit_are_not_waited_for(emulator: Emulator) -> None:
    source = """extern "C" __global__ void k(volatile int* out) {
      if (threadIdx.x == 0 && cluster_rank()) {
        for (int i = 0; i < 5; ++i) __nanosleep(100);
        out[0] = 5;
      }
      asm volatile("barrier.cluster.arrive.release;");
      if (threadIdx.x == 32) return; /* counted, as it has arrived, but not twice */
      asm volatile("barrier.cluster.wait.acquire;");
      out[1 + blockIdx.x * 64 + threadIdx.x] = out[0];
    }"""
    for mode in MODES:
        (result,) = run(emulator, source, [np.zeros(129, "int32")], [0], threads=64, blocks=2, cluster=2, mode=mode)
        assert (result == 5).sum() == 1 + 2 * 63


def test_a_cluster_barrier_that_not_all_reach(emulator: Emulator) -> None:
    source = """extern "C" __global__ void k(int* out) {
      __shared__ alignas(8) uint64_t bar;
      if (threadIdx.x == 0) bar_init(&bar, 1);
      __syncthreads();
      if (cluster_rank()) wait(&bar, 0);
      cluster_sync();
    }"""
    with pytest.raises(
        EmulationError, match="barrier.cluster.wait never ends: 64 threads of the cluster have not arrived"
    ):
        run(emulator, source, [np.zeros(1, "int32")], [0], threads=64, blocks=2, cluster=2)


def test_registers_of_clusters(emulator: Emulator) -> None:
    names = ["%cluster_ctarank", "%cluster_nctarank", "%cluster_ctaid.x", "%cluster_nctaid.x", "%clusterid.x",
             "%nclusterid.x"]  # fmt: skip
    reads = "".join(
        f'asm volatile("mov.u32 %0, %{name};" : "=r"(out[blockIdx.x * 6 + {i}]) :);' for i, name in enumerate(names)
    )
    source = f'extern "C" __global__ void k(unsigned* out) {{ {reads} }}'
    (result,) = run(emulator, source, [np.zeros((6, 6), "uint32")], [0], threads=1, blocks=6, cluster=2)
    assert (result == [[i % 2, 2, i % 2, 2, i // 2, 3] for i in range(6)]).all()


def test_clusters_that_do_not_divide_the_grid(emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match="a grid of 3 x 1 x 1 blocks is not made of clusters of 2 x 1 x 1"):
        run(emulator, EXCHANGE, [DATA, DATA], threads=32, blocks=3, cluster=2)


@pytest.mark.parametrize("mode", MODES)
def test_one_lane_is_elected(mode: EmulationMode, emulator: Emulator) -> None:
    source = """extern "C" __global__ void k(int* out) {
      unsigned one = 0;
      asm volatile("{\\n.reg .pred %%px;\\n elect.sync _|%%px, %1;\\n@%%px mov.s32 %0, 1;\\n}\\n"
        : "+r"(one) : "r"(0xFFFFFFFF));
      out[threadIdx.x] = one;
    }"""
    (result,) = run(emulator, source, [np.zeros(96, "int32")], [0], threads=96, mode=mode)
    assert (result.reshape(3, 32).sum(1) == 1).all()


@pytest.mark.parametrize(
    "increase, message", [(232, None), (240, "deadlock: setmaxnreg.inc"), (236, "of 236 registers")]
)
def test_registers_that_warps_give_and_take(increase: int, message: str | None, emulator: Emulator) -> None:
    source = f"""extern "C" __global__ void k(int* out) {{
      if (threadIdx.x < 256) asm volatile("setmaxnreg.inc.sync.aligned.u32 {increase};");
      else asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      out[threadIdx.x] = 1;
    }}"""
    arguments = [np.zeros(384, "int32")]
    if message is None:
        assert run(emulator, source, arguments, [0], threads=384)[0].all()
        return
    with pytest.raises(EmulationError, match=message):
        run(emulator, source, arguments, [0], threads=384)
