"""Our convolutions beside cuDNN's: one case run, as plain data and as a line.

A results file of kind "convolution"; see `comparison`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.peers.bench import Bench
from benchmarks.peers.comparison import STREAM, Call, Entrant, Times, compare, head_of
from benchmarks.peers.convolution import Peer, call_of, peers_of, placed
from benchmarks.peers.graphs import launching
from schedules.core.arch import Arch
from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.problem import Conv2dProblem
from schedules.core.registry import operator_of
from schedules.measure.choice import Choice
from schedules.measure.timer import Timer

KIND = "convolution"


def run_case(
    problem: Conv2dProblem,
    arch: Arch,
    choice: Choice,
    peers: Sequence[str],
    timer: Timer,
    seconds: float,
    *,
    seed: int = 0,
    launch: str = STREAM,
) -> dict[str, Any]:
    """Compare `choice` with the peers whose names fit one of the patterns `peers`; what `case_result` says.

    All are launched the same way: with `launch` = GRAPH each from a CUDA graph, which is what is verified then too.
    Raises DeviceError, ToolchainError, and what a device that is out of order makes TVM or PyTorch raise.
    """
    arithmetic = operator_of(problem).schedule(choice.schedule).arithmetic
    bench = Bench(problem, arch, seed, arithmetic=arithmetic)

    launched = launching(launch)

    def of_peer(peer: Peer) -> Callable[[], Call]:
        return lambda: launched(call_of(peer, problem, bench.tensors))

    entrants = {"ours": bench.ours(choice, launched=launched)}
    for peer in peers_of(problem, peers):
        entrants[peer.name] = Entrant(
            of_peer(peer),
            {"counts": peer.counts(arithmetic)},
            most=peer.far,
            judged=peer.same_work(problem),
            adapt=lambda outputs: [placed(problem, output) for output in outputs],
        )
    return case_result(problem, compare(entrants, timer, bench.judge, bench.poison, seconds), launch, arithmetic)


def case_result(
    problem: Conv2dProblem,
    found: Mapping[str, tuple[Times | None, dict[str, Any]]],
    launch: str = STREAM,
    arithmetic: Arithmetic = FLOAT32,
) -> dict[str, Any]:
    """One case as plain data, ours computed in `arithmetic`.  Names in `found`: "ours" and the peers'.

    `tflops` counts the textbook method's operations (int8: TOP/s), padding included.  `ratio` is the time of `best`,
    the fastest of the peers that count, as a multiple of ours: over 1 ours is faster.
    """
    told = {name: _told(times, about, problem.flops) for name, (times, about) in found.items()}
    ours = told.pop("ours")
    case = {**head_of(problem, launch, arithmetic), "flops": problem.flops, "ours": ours, "peers": told}
    counted = {name: words["us"] for name, words in told.items() if "us" in words and words.get("counts", True)}
    if counted and "us" in ours:
        best = min(counted, key=lambda name: counted[name])
        case |= {"best": best, "ratio": round(counted[best] / ours["us"], 4)}
    return case


def _told(times: Times | None, about: Mapping[str, Any], flops: int) -> dict[str, Any]:
    rate = {**times.to_json(), "tflops": round(flops / times.us / 1e6, 2)} if times else {}
    return {**about, **rate}


def layer(words: Mapping[str, Any]) -> str:
    """A problem in a few words, as 16x56x56 64->256 3x3 stride 2; what is usual is left out."""
    kernel = (words["kh"], words["kw"])
    pad, stride, dilation = (tuple(words[name]) for name in ("pad", "stride", "dilation"))
    parts = [
        "x".join(str(words[name]) for name in ("n", "h", "w")),
        f"{words['ci']}->{words['co']}",
        "x".join(map(str, kernel)),
    ]
    # the padding that keeps the size of the image is the usual one
    usual = {"pad": tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))}
    for name, value in (("stride", stride), ("pad", pad), ("dilation", dilation)):
        if value != usual.get(name, (1, 1)):
            parts += [name, str(value[0]) if len(set(value)) == 1 else ",".join(map(str, value))]
    parts += [name for name in ("bias", "residual") if words.get(name)]
    parts += [f"out {words['out_dtype']}"] if words.get("out_dtype", words["dtype"]) != words["dtype"] else []
    return " ".join([*parts, *([words["activation"]] if words.get("activation", "none") != "none" else [])])


def name_of(problem: Conv2dProblem) -> str:
    """The problem for people who read an error."""
    return f"{operator_of(problem).name} {layer(problem.to_json())} {problem.dtype}"


def line_of(case: Mapping[str, Any]) -> str:
    """A case in a line, for people who watch."""
    ours = case["ours"]
    name = f"{case['operator']:14} {layer(case['problem']):34} {case['problem']['dtype']:8}"
    if "us" in ours:
        what = f"{ours['us']:9.2f} us {ours['tflops']:7.1f} T/s  {ours['schedule']} ({ours['chosen']})"
        what += f"  {case['ratio']:.2f} of {case['best']}" if "ratio" in case else ""
    else:
        what = f"FAILED: {ours.get('failed', 'not run')}"
    others = "  ".join(
        f"{peer} {words['us']:.1f}" if "us" in words else f"{peer} - ({words.get('failed', 'not run')})"
        for peer, words in case["peers"].items()
    )
    return f"{name} {what}  {others}"
