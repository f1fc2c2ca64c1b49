#!/usr/bin/env python3
"""Depthwise convolutions of networks on the GPU here: what is chosen and a few other configs of both schedules, beside
cuDNN, a copy, and an elementwise kernel of PyTorch's (``torch.neg``) that move as many bytes.

    python -m benchmarks.compare_depthwise OUT.jsonl --seconds 90 --seed 0
    python -m benchmarks.compare_depthwise OUT.jsonl --operator depthwise_nchw32

Every result is checked: against float64, and int8 to the bit.  cuDNN's is float16, channels last, where ours is int8,
which it has none of.  Calls are launched from CUDA graphs, on tensors in turn that no cache holds
together.  A line for each layer in each layout, the most telling first; another seed draws other configs.
``python -m scripts.fit_depthwise keep OUT.jsonl`` keeps what came out as trials, which the choice is fitted to.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from schedules.build.builder import build
from schedules.build.library import load_library
from schedules.build.toolchain.link import write_library
from schedules.core.arch import parse_arch
from schedules.core.errors import SchedulesError
from schedules.core.problem import Config
from schedules.core.registry import operator, operator_of
from schedules.operators.conv2d_nchw32.packing import pack_depthwise
from schedules.operators.depthwise_conv2d import estimate
from schedules.operators.depthwise_conv2d.definition import DepthwiseProblem
from schedules.operators.depthwise_nchw32.definition import DepthwiseNchw32Problem

TARGET, DEVICE = "cuda:sm_90a", "cuda"
NETWORKS = {  # channels, size, kernel, stride
    "MobileNetV2": [(144, 56, 3, 1), (96, 112, 3, 2), (384, 14, 3, 1), (960, 7, 3, 1)]
    + [(32, 112, 3, 1), (192, 28, 3, 1), (576, 14, 3, 2), (144, 56, 3, 2), (192, 28, 3, 2), (576, 14, 3, 1)],
    "EfficientNet-B0": [(240, 28, 5, 1), (672, 14, 5, 2), (1152, 7, 5, 1), (144, 56, 5, 2)],
    "ConvNeXt-T": [(96, 56, 7, 1), (384, 14, 7, 1), (768, 7, 7, 1), (192, 28, 7, 1)],
    "MobileNetV3": [(72, 28, 5, 1), (200, 14, 3, 1), (960, 7, 5, 1), (16, 112, 3, 1)],
}
BATCHES = {  # layers of a network, at most
    "depthwise_conv2d": {32: 9, 1: 4, 8: 3, 128: 1},
    "depthwise_nchw32": {32: 10, 128: 10, 1: 3},
}
HOW: dict[str, list[dict[str, Any]]] = {
    "depthwise_conv2d": [{"layout": "nhwc"}, {"layout": "nchw"}],
    "depthwise_nchw32": [{"dtype": "int8", "bias": True, "alpha": "channel", "beta": "alpha"}],
}
OTHERS = [("MobileNetV2", 144, 56, 3), ("EfficientNet-B0", 240, 28, 5), ("ConvNeXt-T", 768, 7, 7)]  # in other dtypes
NEAR = 1.6  # times the least estimate, of configs that are tried
# besides the default
TRIED = {("depthwise_conv2d", "windows"): 2, ("depthwise_conv2d", "bands"): 4, ("depthwise_nchw32", "windows"): 6}
EPSILON = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-23}
REPLAYS, MOST_SETS = 7, 48

Built = tuple[str, Config, str]  # schedule, config, library


def layers(name: str) -> Iterator[tuple[str, Any]]:
    """Networks and problems of an operator."""
    for n, most in BATCHES[name].items():
        told = [(net, *layer, "float16") for net, own in NETWORKS.items() for layer in own[:most]]
        if n == 32 and name == "depthwise_conv2d":
            told += [(*layer, 1, dtype) for dtype in ("bfloat16", "float32") for layer in OTHERS]
        for net, c, size, k, stride, dtype in told:
            fields = dict(n=n, h=size, w=size, ci=c, kh=k, kw=k, stride=stride, pad=k // 2)
            for how in HOW[name]:
                yield net, operator(name).problem.parse({"dtype": dtype, **fields, **how})


def candidates(problem: Any, seed: int) -> list[tuple[str, Config]]:
    """What is chosen, the default of the other schedule, and others: half of them that look good, half at random."""
    op, arch, rng = operator_of(problem), parse_arch(TARGET), random.Random(f"{seed} {problem}")
    first = op.choose(problem, arch)
    found: list[tuple[str, Config]] = []
    for spec in sorted(op.offered(arch), key=lambda spec: spec.name != first):
        if not spec.serves(problem, arch):
            continue
        default: Any = spec.default(problem, arch)
        told = {config: estimate(problem, config, arch) for config in spec.legal_space(problem, arch)}
        near = [config for config in sorted(told, key=told.__getitem__) if told[config] < NEAR * min(told.values())]
        tried = TRIED[op.name, spec.name]
        chosen = near[: tried // 2] + rng.sample(near, min(len(near), tried))
        if spec.name == "windows":  # the same with fewer registers
            fewer = replace(default, min_blocks=2 * default.resident(problem, arch))
            chosen.insert(0, fewer)
        found += [(spec.name, default), *((spec.name, config) for config in chosen if config != default)]
        found = [each for each in dict.fromkeys(found) if each[1].check(problem, arch) is None]
    return found


def make(problem: Any, schedule: str, config: Config, library: str) -> None:
    write_library(build(problem, parse_arch(TARGET), schedule, config).module, Path(library))


def timed(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one of `calls`, which a CUDA graph has in turn: the median of REPLAYS."""
    import torch

    from benchmarks.peers.graphs import tvm_stream

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side), tvm_stream(side.cuda_stream):
        for call in calls[:2]:
            call()
        side.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for call in calls:
                call()
    torch.cuda.synchronize()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return round(sorted(times)[REPLAYS // 2], 2)


@dataclass(frozen=True)
class Case:
    """The tensors of each of several calls of our kernel, outputs last; calls of cuDNN; how far the first output is
    from right, by what is allowed."""

    given: list[list[Any]]
    peers: list[Callable[[], Any]]
    error: Callable[[], float]


def in_floats(p: DepthwiseProblem, sets: int, rng: Any) -> Case:
    import torch
    from torch.nn.functional import conv2d

    dtype, form = getattr(torch, p.dtype), torch.channels_last if p.channels_last else torch.contiguous_format

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, device=DEVICE, dtype=dtype, generator=rng).to(memory_format=form)

    def memory(tensor: Any) -> Any:
        return tensor.permute(0, 2, 3, 1) if p.channels_last else tensor

    inputs = [drawn(p.n, p.ci, p.h, p.w) for _ in range(sets)]
    outputs = [torch.empty_like(drawn(p.n, p.ci, p.out_h, p.out_w)) for _ in range(sets)]
    weight = torch.randn((p.ci, 1, p.kh, p.kw), device=DEVICE, dtype=dtype, generator=rng) / p.kh
    how = (None, p.stride, p.pad, p.dilation, p.ci)
    wanted = conv2d(inputs[0].double(), weight.double(), *how)
    magnitude = conv2d(inputs[0].double().abs(), weight.double().abs(), *how)

    def error() -> float:
        bound = EPSILON[p.dtype] * wanted.abs() + 2**-20 * magnitude + 1e-7
        return float(((outputs[0].double() - wanted).abs() / bound).max())

    given = [[memory(x), weight.view(p.ci, p.kh, p.kw), memory(y)] for x, y in zip(inputs, outputs, strict=True)]
    return Case(given, [partial(conv2d, x, weight, *how) for x in inputs], error)


def in_bytes(p: DepthwiseNchw32Problem, sets: int, rng: Any) -> Case:
    """With a bias and a scale for each channel.  The peer's are float16."""
    import torch
    from torch.nn.functional import conv2d

    def drawn(*shape: int, most: int = 128, dtype: Any = torch.int8) -> Any:
        return torch.randint(-most, most, shape, device=DEVICE, dtype=dtype, generator=rng)

    data, filters, bias, alpha, output = p.arguments()
    weight = drawn(p.ci, p.kh, p.kw)
    packed = torch.from_numpy(pack_depthwise(weight.cpu().numpy())).to(DEVICE)
    added = drawn(*bias.shape, most=2**14, dtype=torch.int32)
    scales = torch.rand(alpha.shape, device=DEVICE, generator=rng) * 2**-7 + 2**-9
    inputs = [drawn(*data.shape) for _ in range(sets)]
    outputs = [torch.empty(output.shape, device=DEVICE, dtype=torch.int8) for _ in range(sets)]
    channels, how = bias.shape[0], (None, p.stride, p.pad, p.dilation)
    plain = inputs[0].permute(0, 1, 4, 2, 3).reshape(p.n, channels, p.h, p.w).float()
    whole = torch.zeros((channels, 1, p.kh, p.kw), device=DEVICE)
    whole[: p.ci, 0] = weight.float()
    sums = conv2d(plain, whole, *how, channels) + added.view(-1, 1, 1)  # whole numbers, exact in float32
    wanted = (sums * scales.view(-1, 1, 1)).round().clamp(-128, 127)

    def error() -> float:
        got = outputs[0].permute(0, 1, 4, 2, 3).reshape(wanted.shape)
        return 0.0 if bool((got == wanted).all()) else math.inf

    given = [[x, packed, added, scales, y] for x, y in zip(inputs, outputs, strict=True)]
    last = torch.channels_last
    images = [torch.randn((p.n, p.ci, p.h, p.w), device=DEVICE).half().to(memory_format=last) for _ in range(sets)]
    half = weight.half().unsqueeze(1)
    return Case(given, [partial(conv2d, x, half, *how, p.ci) for x in images], error)


def measure(p: Any, found: Sequence[tuple[Built, Any]]) -> dict[str, Any]:
    """The line of a problem, without its network."""
    import torch

    from benchmarks.peers.bench import view

    rng = torch.Generator(DEVICE).manual_seed(0)
    sets = max(2, min(MOST_SETS, math.ceil(2 * torch.cuda.get_device_properties(0).L2_cache_size / p.min_bytes)))
    case = (in_floats if isinstance(p, DepthwiseProblem) else in_bytes)(p, sets, rng)
    line: dict[str, Any] = {"op": operator_of(p).name, "problem": str(p), "configs": []}
    for (schedule, config, library), future in found:
        said: dict[str, Any] = {"schedule": schedule, "config": config.to_json(True)}
        line["configs"].append(said)
        try:
            future.result()
        except SchedulesError as fault:
            said["failed"] = str(fault)
            continue
        function = load_library(Path(library), parse_arch(TARGET))
        poison = case.given[0][-1]
        poison.fill_(math.nan if poison.is_floating_point() else 85)
        said["us"] = timed([partial(function, *map(view, of)) for of in case.given])
        said["error"] = round(case.error(), 2)
    line["cudnn"] = timed(case.peers)
    half = p.min_bytes // 4
    blocks = [torch.zeros(half, dtype=torch.float16, device=DEVICE) for _ in range(2 * sets)]
    pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
    line["copy"] = timed([partial(b.copy_, a) for a, b in pairs])
    line["neg"] = timed([partial(torch.neg, a, out=b) for a, b in pairs])
    return line


def told(line: dict[str, Any]) -> str:
    first = line["configs"][0]
    best = {
        name: min((c["us"] for c in line["configs"] if c["schedule"] == name and "us" in c), default=math.nan)
        for name in ("windows", "bands")
    }
    wrong = [c for c in line["configs"] if not c.get("error", math.inf) <= 1.01]
    text = f"{line['problem']}: {first['schedule']} {first.get('us')} best {best} cudnn {line['cudnn']}"
    return f"{text} copy {line['copy']} neg {line['neg']}" + (f" WRONG {wrong}" if wrong else "")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("out", type=Path)
    words.add_argument("--operator", choices=list(HOW), default="depthwise_conv2d")
    words.add_argument("--seconds", type=float, default=90)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--builders", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    asked = words.parse_args()
    end = time.monotonic() + asked.seconds
    every = list(layers(asked.operator))
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(asked.builders, mp_context=context) as pool:
        drawn = [pool.submit(candidates, problem, asked.seed) for _, problem in every]
        jobs = []
        for at, ((name, problem), future) in enumerate(zip(every, drawn, strict=True)):
            libraries = [(*each, f"{folder}/{at}-{i}.so") for i, each in enumerate(future.result())]
            jobs.append((name, problem, [(each, pool.submit(make, problem, *each)) for each in libraries]))
        import torch

        from schedules.core.versions import versions

        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = False
        said = {**versions(), "torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
        head = {"device": torch.cuda.get_device_name(), "versions": said, "date": time.strftime("%Y-%m-%d")}
        with asked.out.open("w", buffering=1) as out:
            out.write(json.dumps({**head, "target": TARGET}) + "\n")
            for name, problem, found in jobs:
                if time.monotonic() > end - 3:
                    print("out of time")
                    break
                line = {"net": name, **measure(problem, found)}
                out.write(json.dumps(line) + "\n")
                print(told(line), flush=True)
        pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    main()
