#!/usr/bin/env python3
"""Depthwise convolutions of networks on the GPU here: what is chosen and a few other configs of both schedules, beside
cuDNN, a copy, and an elementwise kernel of PyTorch's (``torch.neg``) that move as many bytes.

    python -m benchmarks.compare_depthwise OUT.jsonl --seconds 90 --seed 0

Every result is checked against float64.  Calls are launched from CUDA graphs, on tensors in turn that no cache holds
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from schedules.build.builder import build
from schedules.build.library import load_library
from schedules.build.toolchain.link import write_library
from schedules.core.arch import parse_arch
from schedules.core.errors import SchedulesError
from schedules.core.problem import Config
from schedules.core.registry import operator
from schedules.operators.depthwise_conv2d import estimate
from schedules.operators.depthwise_conv2d.definition import DepthwiseProblem

TARGET = "cuda:sm_90a"
NETWORKS = {  # channels, size, kernel, stride
    "MobileNetV2": [(144, 56, 3, 1), (96, 112, 3, 2), (384, 14, 3, 1), (960, 7, 3, 1)]
    + [(32, 112, 3, 1), (192, 28, 3, 1), (576, 14, 3, 2)],
    "EfficientNet-B0": [(240, 28, 5, 1), (672, 14, 5, 2), (1152, 7, 5, 1), (144, 56, 5, 2)],
    "ConvNeXt-T": [(96, 56, 7, 1), (384, 14, 7, 1), (768, 7, 7, 1), (192, 28, 7, 1)],
    "MobileNetV3": [(72, 28, 5, 1), (200, 14, 3, 1), (960, 7, 5, 1), (16, 112, 3, 1)],
}
BATCHES = {32: 9, 1: 4, 8: 3, 128: 1}  # layers of a network, at most
OTHERS = [("MobileNetV2", 144, 56, 3), ("EfficientNet-B0", 240, 28, 5), ("ConvNeXt-T", 768, 7, 7)]  # in other dtypes
NEAR = 1.6  # times the least estimate, of configs that are tried
TRIED = {"windows": 2, "bands": 4}  # besides the default
EPSILON = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-23}
REPLAYS, MOST_SETS = 7, 48

Built = tuple[str, Config, str]  # schedule, config, library


def layers() -> Iterator[tuple[str, DepthwiseProblem]]:
    """Networks and problems."""
    for n, most in BATCHES.items():
        told = [(name, *layer, "float16") for name, own in NETWORKS.items() for layer in own[:most]]
        if n == 32:
            told += [(*layer, 1, dtype) for dtype in ("bfloat16", "float32") for layer in OTHERS]
        for name, c, size, k, stride, dtype in told:
            for layout in ("nhwc", "nchw"):
                fields = dict(n=n, h=size, w=size, ci=c, kh=k, kw=k, stride=stride, pad=k // 2)
                yield name, DepthwiseProblem.parse({**fields, "dtype": dtype, "layout": layout})


def candidates(problem: DepthwiseProblem, seed: int) -> list[tuple[str, Config]]:
    """What is chosen, the default of the other schedule, and others: half of them that look good, half at random."""
    op, arch, rng = operator("depthwise_conv2d"), parse_arch(TARGET), random.Random(f"{seed} {problem}")
    first = op.choose(problem, arch)
    found: list[tuple[str, Config]] = []
    for spec in sorted(op.offered(arch), key=lambda spec: spec.name != first):
        if not spec.serves(problem, arch):
            continue
        default: Any = spec.default(problem, arch)
        told = {config: estimate(problem, config, arch) for config in spec.legal_space(problem, arch)}
        near = [config for config in sorted(told, key=told.__getitem__) if told[config] < NEAR * min(told.values())]
        chosen = near[: TRIED[spec.name] // 2] + rng.sample(near, min(len(near), TRIED[spec.name]))
        if spec.name == "windows":  # the same with fewer registers
            fewer = replace(default, min_blocks=2 * default.resident(problem, arch))
            chosen.insert(0, fewer)
        found += [(spec.name, default), *((spec.name, config) for config in chosen if config != default)]
        found = [each for each in dict.fromkeys(found) if each[1].check(problem, arch) is None]
    return found


def make(problem: DepthwiseProblem, schedule: str, config: Config, library: str) -> None:
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


def measure(p: DepthwiseProblem, found: Sequence[tuple[Built, Any]]) -> dict[str, Any]:
    """The line of a problem, without its network."""
    import torch
    from torch.nn.functional import conv2d

    from benchmarks.peers.bench import view

    device, dtype = torch.device("cuda"), getattr(torch, p.dtype)
    rng = torch.Generator(device).manual_seed(0)
    sets = max(2, min(MOST_SETS, math.ceil(2 * torch.cuda.get_device_properties(0).L2_cache_size / p.min_bytes)))
    form = torch.channels_last if p.channels_last else torch.contiguous_format

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=dtype, generator=rng).to(memory_format=form)

    def memory(tensor: Any) -> Any:
        return view(tensor.permute(0, 2, 3, 1) if p.channels_last else tensor)

    inputs = [drawn(p.n, p.ci, p.h, p.w) for _ in range(sets)]
    outputs = [torch.empty_like(drawn(p.n, p.ci, p.out_h, p.out_w)) for _ in range(sets)]
    weight = torch.randn((p.ci, 1, p.kh, p.kw), device=device, dtype=dtype, generator=rng) / p.kh
    how = (None, p.stride, p.pad, p.dilation, p.ci)
    wanted = conv2d(inputs[0].double(), weight.double(), *how)
    magnitude = conv2d(inputs[0].double().abs(), weight.double().abs(), *how)
    line: dict[str, Any] = {"problem": str(p), "configs": []}
    for (schedule, config, library), future in found:
        said: dict[str, Any] = {"schedule": schedule, "config": config.to_json(True)}
        line["configs"].append(said)
        try:
            future.result()
        except SchedulesError as fault:
            said["failed"] = str(fault)
            continue
        function = load_library(Path(library), parse_arch(TARGET))
        outputs[0].fill_(math.nan)
        given = [
            (memory(x), view(weight.view(p.ci, p.kh, p.kw)), memory(y)) for x, y in zip(inputs, outputs, strict=True)
        ]
        said["us"] = timed([partial(function, *of) for of in given])
        bound = EPSILON[p.dtype] * wanted.abs() + 2**-20 * magnitude + 1e-7
        said["error"] = round(((outputs[0].double() - wanted).abs() / bound).max().item(), 2)
    line["cudnn"] = timed([partial(conv2d, x, weight, *how) for x in inputs])
    half = p.min_bytes // 4
    blocks = [torch.zeros(half, dtype=torch.float16, device=device) for _ in range(2 * sets)]
    pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
    line["copy"] = timed([partial(b.copy_, a) for a, b in pairs])
    line["neg"] = timed([partial(torch.neg, a, out=b) for a, b in pairs])
    return line


def told(line: dict[str, Any]) -> str:
    first = line["configs"][0]
    best = {
        name: min((c["us"] for c in line["configs"] if c["schedule"] == name and "us" in c), default=math.nan)
        for name in TRIED
    }
    wrong = [c for c in line["configs"] if not c.get("error", math.inf) <= 1.01]
    text = f"{line['problem']}: {first['schedule']} {first.get('us')} best {best} cudnn {line['cudnn']}"
    return f"{text} copy {line['copy']} neg {line['neg']}" + (f" WRONG {wrong}" if wrong else "")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("out", type=Path)
    words.add_argument("--seconds", type=float, default=90)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--builders", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    asked = words.parse_args()
    end = time.monotonic() + asked.seconds
    every = list(layers())
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
