"""Whole networks with our kernels in them, beside PyTorch eager and torch.compile, in turn in one run.

    python -m benchmarks.compare_networks                          # on the GPU if there is one, else on the CPU
    python -m benchmarks.compare_networks resnet50 --batches 1 32  # some
    python -m benchmarks.compare_networks --mode max-autotune-no-cudagraphs     # of torch.compile, and of our rest
    python -m benchmarks.compare_networks --device cpu --beside 1  # while so many other processes are always busy

Random weights, batch norm that has seen data, inference.  On a GPU float16, all from CUDA graphs with a flushed L2;
images, eager and torch.compile channels-last, with cuDNN's benchmark on.  On a CPU float32, in the format that the
model has: calls one after the other, ahead of other work where the system allows that and no company is asked for.
Ours is `schedules.torch.optimize`, with inductor for what is left and, as `ours_eager`, without; `int8` is
`schedules.torch.quantize` by ranges of the same inputs.  `first_s` is the time of the first call, kernels and
compilation included: of the first peer that builds kernels also their time, if no cache has them.  Every result is
compared with eager's first; `errors` are relative to its norm.  A result is written after every network, with its date,
to ``<logs>/<device>/compare_networks.json``; it takes the place of the same network's with the same batch, mode, peers
and company, if that is of the same versions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import schedules.torch as kernels
from benchmarks.peers.kept import keep_costs
from benchmarks.peers.networks import KIND, read_networks
from schedules.build.builder import compiler_of
from schedules.build.present import cpu_name
from schedules.cli.script import run_script
from schedules.core.device import slug
from schedules.core.errors import UnknownNameError, UsageError
from schedules.measure.journal import DEFAULT_FOLDER
from schedules.measure.neighbours import ahead_of_others
from schedules.measure.records import environment, now
from schedules.torch.kernels import arch_of

ROUNDS = 15
FLUSH = 2**28  # bytes written between two runs
TOLERANCE = {"float16": 2e-2, "float32": 1e-5, "int8": 0.2}  # of a network's output, to its norm

Call = Callable[[], Any]


def torchvision(name: str) -> Callable[[int], tuple[Any, Any]]:
    def make(n: int) -> tuple[Any, Any]:
        from torchvision import models

        return getattr(models, name)(), torch.randn(n, 3, 224, 224)

    return make


def vit_tiny(n: int) -> tuple[Any, Any]:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(224, 16, 12, 3, 192, 768)
    torch.nn.init.normal_(model.heads.head.weight)  # zeros before training: all errors would be lost in it
    return model, torch.randn(n, 3, 224, 224)


def convnext_atto(n: int) -> tuple[Any, Any]:
    from timm import create_model

    return create_model("convnext_atto"), torch.randn(n, 3, 224, 224)


def sd_unet(n: int) -> tuple[Any, Any]:
    """Of Stable Diffusion 1.5."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    return model, (torch.randn(n, 4, 64, 64), torch.tensor(500), torch.randn(n, 77, 768))


def sd_decoder(n: int) -> tuple[Any, Any]:
    """That of its VAE, to 512 x 512 pixels."""
    from diffusers import AutoencoderKL

    channels = (128, 256, 512, 512)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    model = AutoencoderKL(block_out_channels=channels, layers_per_block=2, **blocks)
    return torch.nn.Sequential(model.post_quant_conv, model.decoder), torch.randn(n, 4, 64, 64)


def gpt2(n: int) -> tuple[Any, Any]:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(use_cache=False)), torch.arange(n * 64).view(n, 64)


# with the batches that are compared on a GPU and on a CPU
NETWORKS: dict[str, tuple[Callable[[int], tuple[Any, Any]], tuple[int, ...], tuple[int, ...]]] = {
    "resnet50": (torchvision("resnet50"), (1, 32, 128), (1, 16)),
    "mobilenet_v2": (torchvision("mobilenet_v2"), (32,), ()),
    "mobilenet_v3_large": (torchvision("mobilenet_v3_large"), (), (1,)),
    "convnext_atto": (convnext_atto, (), (1,)),
    "vit_tiny": (vit_tiny, (), (1,)),
    "gpt2": (gpt2, (), (1,)),
    "sd_unet": (sd_unet, (1,), ()),
    "sd_decoder": (sd_decoder, (1,), ()),
}


def network(name: str, n: int, device: torch.device) -> tuple[Any, tuple[Any, ...]]:
    """A model in evaluation, and its inputs; the same each time."""
    torch.manual_seed(0)
    with device:
        model, inputs = NETWORKS[name][0](n)
    for norm in model.eval().modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 2)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    if device.type == "cuda":
        model = model.half()
        inputs = tuple(x.half() if x.is_floating_point() else x for x in inputs)
    return model, inputs


def output(result: Any) -> torch.Tensor:
    """The first tensor of what a model returns."""
    leaves = torch.utils._pytree.tree_leaves(list(result.values()) if hasattr(result, "keys") else result)
    return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def captured(function: Call) -> Call:
    """The replay of `function` in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()

    def call() -> Any:
        graph.replay()
        return kept

    return call


def timed(candidates: dict[str, Call], device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds of each candidate, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    trash = torch.empty(FLUSH, dtype=torch.int8, device=device) if device.type == "cuda" else None
    for _ in range(ROUNDS):
        for name, call in candidates.items():
            if trash is None:
                start = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - start) * 1e6)
                continue
            trash.zero_()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            call()
            events[1].record()
            torch.cuda.synchronize()
            times[name].append(events[0].elapsed_time(events[1]) * 1e3)
    found = {}
    for name, us in times.items():
        p10, median, p90 = np.percentile(us[2:], (10, 50, 90))
        found[name] = {"median_us": round(median, 1), "p10_us": round(p10, 1), "p90_us": round(p90, 1)}
    return found


def compared(
    name: str, n: int, device: torch.device, mode: str, peers: Sequence[str], beside: int = 0
) -> dict[str, Any]:
    """One network by all `peers`, timed `beside` so many busy processes.

    Raises UsageError if one computes something else.
    """
    model, inputs = network(name, n, device)
    on_gpu = device.type == "cuda"
    options = torch._inductor.list_mode_options(mode) if on_gpu and mode != "default" else {}
    ours = {"rest": "inductor", "options": options} if on_gpu else {}
    given = model
    if on_gpu:  # eager's and torch.compile's faster format
        given = network(name, n, device)[0].to(memory_format=torch.channels_last)
        inputs = tuple(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs)
    makers: dict[str, Callable[[], Any]] = {
        "eager": lambda: given,
        "compile": lambda: torch.compile(given, mode=mode),
        "ours": lambda: kernels.optimize(model, inputs, **ours),
    }
    makers["int8"] = lambda: kernels.quantize(model, [inputs], **ours)
    if on_gpu:  # elsewhere the rest is eager's by default
        makers["ours_eager"] = lambda: kernels.optimize(model, inputs, rest="eager")
    candidates: dict[str, Call] = {}
    first: dict[str, float] = {}
    errors: dict[str, float] = {}
    served: dict[str, Any] = {}
    wanted = output(given(*inputs)).float()
    for peer in peers:
        if peer not in makers:
            continue
        start = time.perf_counter()
        made = makers[peer]()
        call = partial(made, *inputs)
        error = ((output(call()).float() - wanted).norm() / wanted.norm()).item()
        first[peer] = round(time.perf_counter() - start, 2)
        if not error <= TOLERANCE["int8" if peer == "int8" else "float16" if on_gpu else "float32"]:
            raise UsageError(f"{name} n={n}: {peer} differs from eager by {error:.1e} of its norm; nothing is timed")
        errors[peer] = float(f"{error:.1e}")
        candidates[peer] = captured(call) if on_gpu else call
        if peer in ("ours", "int8") and (failed := [note for note in made.report.notes if " failed, " in note]):
            raise UsageError(f"{name} n={n}: {peer} is not what is asked for: {failed[0]}")
        if peer == "ours":
            report = made.report
            served = {"layers": len(report.rows), "replaced": len(report.replaced), "notes": report.notes}
    company = {"beside": beside} if beside else {}
    with busy(beside), contextlib.nullcontext() if on_gpu or beside else ahead_of_others():
        times = timed(candidates, device)
    return {"network": name, "n": n, "mode": mode, **company, "first_s": first, "errors": errors, **served, **times}


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many other processes that never wait."""
    with contextlib.ExitStack() as stack:
        for _ in range(processes):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What no two rows of a file share."""
    return row["network"], row["n"], row["mode"], row.get("beside", 0), *sorted(row["first_s"])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NAME", help=f"of {', '.join(NETWORKS)} (default: all)")
    parser.add_argument("--batches", nargs="+", type=int, metavar="N", help="default: those of the network")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--mode", default="default", help="of torch.compile (default: default)")
    parser.add_argument(
        "--peers", nargs="+", default=["eager", "compile", "ours", "ours_eager"], metavar="NAME", help="also int8"
    )
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="busy processes while calls are timed")
    parser.add_argument("--logs", type=Path, default=DEFAULT_FOLDER, help="the folder of tuning logs")
    args = parser.parse_args(words)
    for name in args.networks:
        if name not in NETWORKS:
            raise UnknownNameError("network", name, NETWORKS)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA GPU here; take --device cpu")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
    torch.backends.cudnn.benchmark = True
    arch = arch_of(device)
    here = torch.cuda.get_device_name(device) if arch.is_gpu else cpu_name()
    versions = {**environment(arch, compiler_of(arch)), "torch": str(torch.__version__)}
    file = args.logs / slug(str(here)) / f"{KIND}.json"
    old = read_networks(file) if file.exists() else {}
    found: list[dict[str, Any]] = old["networks"] if old.get("versions") == versions else []
    for name in args.networks or NETWORKS:
        for n in args.batches or NETWORKS[name][1 if arch.is_gpu else 2]:
            torch._dynamo.reset()
            try:
                with torch.no_grad():
                    row = compared(name, n, device, args.mode, args.peers, args.beside)
            except ImportError as error:
                print(f"{name}: left out, {error}", flush=True)
                continue
            row["date"] = now()[:10]
            print(json.dumps(row), flush=True)
            found = [*(other for other in found if identity(other) != identity(row)), row]
            keep_costs(args.logs, KIND, here, versions, {"networks": found})
    if file.exists():
        print(file)
    return 0


if __name__ == "__main__":
    run_script(main)
