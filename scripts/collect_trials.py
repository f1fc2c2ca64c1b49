#!/usr/bin/env python3
"""Trials of many layers, for the choice of configs to learn from: drawn, built, verified and timed on the GPUs here.

    python -m scripts.collect_trials OUT.jsonl --shapes SHAPES.json --seconds 240 --builders 30

Of each problem, some with a bias, a residual and an activation: what is predicted to be fastest, or the rule's choice,
the default of every schedule that serves it, and configs at random, mostly good ones; for one bare problem in three
cuDNN's best time of either layout too.
Each is compared with PyTorch's float32 convolution (int8: with float64, exactly) before it is timed.  Times are medians
of CUDA graphs with L2 overwritten before each replay.  Builders are processes of their own, as is what measures on each
GPU: one that dies costs a candidate.

SHAPES.json: a list of layers (set, n, ci, h, w, co, kh, kw, stride, pad, dilation, groups); others are drawn.
A line of OUT: {"op", "p" the problem, "set", "cudnn" us, "t": [[schedule, values of the config's fields, us, p10 us]],
"bad": [[schedule, values, reason]]}; its first line says device, versions and date.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import heapq
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import SchedulesError
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.core.registry import operator, operator_of
from scripts.drawn_layers import MIX, given, problems

PREDICTED = 4  # configs of the ranking, whatever it learned so far
OF = (1, 3, 6)  # draws, of which one is kept
TRIES = 60  # draws until a legal config is given up
PEERS = 3  # of as many problems, cuDNN is timed on one: its search takes longer than all else
ROUNDS = 13  # replays of each candidate
SLOW = 5.0  # times the fastest so far: such a candidate is timed three times only
LATE = 25.0  # seconds without a word after which a process is ended
DEPTHS = ("num_stages", "stages")  # the field that is mostly filled up


def rough(problem: Any, config: Any, arch: Arch) -> float:
    """A crude measure of what a config costs."""
    m, n = getattr(config, "block_m", 0), getattr(config, "block_n", 0)
    m = m or getattr(config, "tile_h", 0) * getattr(config, "tile_w", 0)
    if not m or not n:
        return 0.0
    sides = (problem.pixels, problem.co), (problem.co, problem.pixels)
    tiles = min(-(-rows // m) * -(-columns // n) for rows, columns in sides) * getattr(config, "split_k", 1)
    resident = arch.device.multiprocessors * max(1, getattr(config, "blocks_sm", 1))
    own = (m * n + 48 * (m + n)) / getattr(config, "split_k", 1) + 4000
    return -(-tiles // resident) * own


def draws(
    problem: Any,
    arch: Arch,
    count: int,
    r: random.Random,
    predicted: int,
    of: Sequence[int] = OF,
    only: Sequence[str] = (),
) -> list[tuple[str, Config]]:
    """What is ruled, the `predicted` first of the ranking, every schedule's default, and `count` in all with those at
    random: each the best that is expected `of` so many.  Of `only` these schedules, if there are any, beside what is
    ruled and the first of others in the ranking."""
    from schedules.predict.rank import ranked
    from schedules.predict.start import started

    op = operator_of(problem)
    found: dict[tuple[str, str], tuple[str, Config]] = {}

    def add(name: str, config: Config) -> None:
        found.setdefault((name, str(config)), (name, config))

    with contextlib.suppress(SchedulesError):
        spec, config = started(problem, arch)
        add(spec.name, config)
    first = ranked(problem, arch)
    if only:
        by_name = {spec.name: ranked(problem, arch, spec.name) for spec in op.offered(arch)}
        of_others = [found for name, found in by_name.items() if name not in only]
        first = tuple(heapq.merge(*of_others, key=lambda each: each.us))[:predicted]
        first += tuple(each for name in only for each in by_name.get(name, ())[: 2 * predicted])
    for each in first[: None if only else predicted]:
        add(each.schedule, each.config)
    fitting: list[tuple[ScheduleSpec, float]] = []
    for spec in op.offered(arch):
        if arch.kind in spec.kinds and spec.name in (only or [spec.name]):
            cores = not {f.name for f in dataclasses.fields(spec.config)} >= {"block_n"}
            slow = cores and problem.dtype != "float32" and problem.ci > 8
            default = spec.default(problem, arch)
            if default.check(problem, arch) is None:
                fitting.append((spec, 0.1 if slow else 0.4 if cores else 1.0))
                if not slow or r.random() < 0.1:
                    add(spec.name, default)
    spaces: dict[str, Any] = {}
    for _ in range(4 * count):
        if len(found) >= count or not fitting:
            break
        few: list[tuple[str, Config]] = []
        for spec in r.choices([spec for spec, _ in fitting], [weight for _, weight in fitting], k=r.choice(of)):
            space = spaces.setdefault(spec.name, spec.numbered_space(problem, arch))
            few += [(spec.name, config) for config in [one(space, problem, arch, r)] if config]
        if few:
            add(*min(few, key=lambda each: cost(problem, each[0], each[1], arch)))
    return list(found.values())[:count]


def cost(problem: Any, schedule: str, config: Any, arch: Arch) -> float:
    """What a config is predicted to take, or a crude measure of it, by which one of a few draws is kept."""
    from schedules.predict.rank import predicted_us

    found = predicted_us(problem, schedule, config, arch)
    return rough(problem, config, arch) if found is None else found


def one(space: Any, problem: Any, arch: Arch, r: random.Random) -> Config | None:
    """A legal config of `space` at random, mostly with all the stages that there is room for; None if there is none."""
    for _ in range(TRIES if len(space) else 0):
        config = space[r.randrange(len(space))]
        depth = next((name for name in DEPTHS if hasattr(config, name)), None)
        if depth and r.random() < 0.8:
            for stages in (8, 6, 5, 4, 3, 2):
                deeper = dataclasses.replace(config, **{depth: stages})
                if deeper.check(problem, arch) is None:
                    return deeper
        elif config.check(problem, arch) is None:
            return config
    return None


def build_at(library: Path, problem: Any, schedule: str, config: Any, arch: Arch) -> tuple[Any, ...]:
    """Build a config into `library`; shape and dtype of each workspace that its function takes last."""
    from schedules.build.builder import build_scheduled
    from schedules.build.toolchain.link import write_library
    from schedules.build.workspace import workspaces_as_arguments

    op = operator_of(problem)
    spec = op.schedule(schedule)
    scheduled, workspaces = workspaces_as_arguments(spec.apply(problem, config, arch))
    write_library(build_scheduled(op, problem, spec, config, arch, scheduled).module, library)
    return tuple((argument.shape, argument.dtype) for argument in workspaces)


def builder(pipe: Connection, target: str, folder: str, predicted: int, of: Sequence[int], only: Sequence[str]) -> None:
    """A process that draws and builds: takes (number, problem, count, seed), sends (number, schedule, config, library,
    workspaces) or a failure, and None where the problem is through."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    arch = parse_arch(target)
    while True:
        number, problem, count, seed, until = pipe.recv()
        try:
            candidates = draws(problem, arch, count, random.Random(seed), predicted, of, only)
        except Exception as error:
            pipe.send((number, "draw", None, f"{type(error).__name__}: {error}"[:200], ()))
            candidates = []
        for index, (name, config) in enumerate(candidates):
            if time.time() > until:
                break
            library = Path(folder) / f"{number}-{index}.so"
            try:
                made = build_at(library, problem, name, config, arch)
                pipe.send((number, name, config, str(library), made))
            except Exception as error:
                pipe.send((number, name, config, f"! {type(error).__name__}: {str(error)[-150:]}", ()))
        pipe.send((number, None, None, None, ()))


def measurer(pipe: Connection, gpu: str, target: str, peers: int) -> None:
    """A process with a GPU: takes (number, problem, candidates), sends (number, index, us, p10 us, reason) of each and
    (number, None, us of cuDNN, ...) last."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    from schedules.build.library import load_library

    arch = parse_arch(target)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark_limit = 0
    bench = Bench(torch, arch, load_library)
    pipe.send((-1, None, torch.cuda.get_device_name(), torch.__version__, ""))
    while True:
        number, problem, candidates = pipe.recv()
        for line in bench.run(
            problem, candidates, number % peers == 0, lambda index, n=number: pipe.send((n, index, None, None, "start"))
        ):
            pipe.send((number, *line))


class Bench:
    """Tensors of one problem on the device, the reference, and the times of what was built for it."""

    def __init__(self, torch: Any, arch: Arch, load: Any) -> None:
        self.torch, self.arch, self.load = torch, arch, load
        self.device = "cuda"
        self.trash = torch.empty(256 * 2**20, dtype=torch.int8, device=self.device)

    def laid(self, plain: Any, axes: tuple[str, ...], names: str) -> Any:
        """`plain`, whose axes are `names`, as a tensor of `axes`; channels in groups of 32 where the axes say so."""
        torch, order = self.torch, names.split()
        for index, name in enumerate(order):
            group = {"ci": ("gi", "li"), "co": ("go", "lo")}.get(name)
            if group and name not in axes:
                size = plain.shape[index]
                spare = [0, 0] * (plain.dim() - 1 - index) + [0, -size % 32]
                plain = torch.nn.functional.pad(plain, spare).unflatten(index, (-1, 32))
                order[index : index + 1] = group
        if "co" in axes and "li" in axes:  # filters of padded channels
            at = order.index("co")
            plain = torch.nn.functional.pad(plain, [0, 0] * (plain.dim() - 1 - at) + [0, -plain.shape[at] % 32])
        return plain.permute([order.index(axis) for axis in axes]).contiguous()

    def run(self, problem: Any, candidates: Any, peer: bool, starts: Any) -> Any:
        from schedules.torch.convolution import by_pytorch

        torch, p = self.torch, problem
        terms: dict[str, Any] = {}
        conv = torch.nn.functional.conv2d
        torch.backends.cudnn.benchmark = False
        torch.manual_seed(0)
        if p.dtype == "int8":
            x = torch.randint(-64, 64, (p.n, p.ci, p.h, p.w), device=self.device).to(torch.int8)
            f = torch.randint(-64, 64, (p.co, p.ci, p.kh, p.kw), device=self.device).to(torch.int8)
            wanted = conv(x.double(), f.double(), None, p.stride, p.pad, p.dilation)
            terms = {each.name: self.drawn_int8(p, each) for each in p.epilogue.operands}
            wanted = self.finished_int8(p, wanted, terms)
            peers, eps = (x.half(), f.half()), 0.0
        else:
            dtype = getattr(torch, p.dtype)
            x = torch.randn(p.n, p.ci, p.h, p.w, dtype=dtype, device=self.device)
            f = torch.randn(p.co, p.ci, p.kh, p.kw, device=self.device).mul((p.ci * p.kh * p.kw) ** -0.5).to(dtype)
            for term in p.epilogue.terms:
                shape = (p.co,) if term.axis == "channel" else (p.n, p.co, p.out_h, p.out_w)
                terms[term.name] = torch.randn(shape, device=self.device).to(getattr(torch, term.dtype))
            bias, residual = (terms[name].float() if name in terms else None for name in ("bias", "residual"))
            wanted = by_pytorch(x.float(), f.float(), bias, residual, p.stride, p.pad, p.dilation, 1, p.activation)
            peers, eps = (x, f), {"float16": 2**-9, "bfloat16": 2**-6, "float32": 1e-4}[p.dtype]
        data, filters = self.laid(x, p.data_axes, "n ci h w"), self.laid(f, p.filter_axes, "co ci kh kw")
        wanted = self.laid(wanted, p.output_axes, "n co y x")
        more = [self.laid(t, p.output_axes, "n co y x") if t.dim() == 4 else t for t in terms.values()]
        output = torch.empty(p.shapes()[2], dtype=getattr(torch, p.epilogue.out_dtype), device=self.device)
        assert data.shape == p.shapes()[0] and filters.shape == p.shapes()[1] and wanted.shape == p.shapes()[2]
        graphs = []
        for index, (library, workspaces) in enumerate(candidates):
            starts(index)
            function = self.load(Path(library), self.arch)
            own = [torch.empty(shape, dtype=getattr(torch, dtype), device=self.device) for shape, dtype in workspaces]
            output.view(torch.int8).fill_(-1)
            try:
                function(data, filters, *more, output, *own)
                torch.cuda.synchronize()
            except Exception as fault:
                yield index, None, None, f"{type(fault).__name__}: {str(fault)[:100]}"
                torch.cuda.synchronize()  # raises, and so ends this process, if the device is lost
                continue
            error = float(((output.to(wanted.dtype) - wanted).abs() / (eps * wanted.abs() + (eps or 0.5))).max())
            if not error <= 1:
                yield index, None, None, f"wrong by {error:.3g}"
                continue
            graphs.append((index, self.graph(lambda c=function, m=tuple(own): c(data, filters, *more, output, *m))))
        starts(None)
        if peer and not terms:
            last = tuple(tensor.contiguous(memory_format=torch.channels_last) for tensor in peers)
            torch.backends.cudnn.benchmark = True
            for each in (last, peers):
                graphs.append((-1, self.graph(lambda t=each: conv(*t, None, p.stride, p.pad, p.dilation))))
        found = self.times([graph for _, graph in graphs])
        for (index, _), (median, low) in zip(graphs, found, strict=True):
            if index >= 0:
                yield index, median, low, ""
        both = [median for (index, _), (median, _) in zip(graphs, found, strict=True) if index < 0]
        yield None, min(both, default=None), None, "end"

    def drawn_int8(self, p: Any, operand: Any) -> Any:
        """A bias, a residual, or a scale about its default; of channels those added to a group too, with no bias."""
        torch, device = self.torch, self.device
        if operand.axis == "element":
            return torch.randint(-64, 64, (p.n, p.co, p.out_h, p.out_w), device=device).to(torch.int8)
        size = (p.co + -p.co % 32) if operand.axis == "channel" else 1
        if operand.dtype == "int32":
            return torch.randint(-20000, 20000, (size,), device=device, dtype=torch.int32).index_fill_(
                0, torch.arange(p.co, size, device=device), 0
            )
        usual = type(p).__dataclass_fields__[operand.name].default
        return (torch.rand(size, device=device) + 0.5) * usual

    def finished_int8(self, p: Any, sums: Any, terms: Any) -> Any:
        """What becomes of exact sums, rounded where the kernels round."""
        if not terms:
            return (sums * p.alpha).round().clamp(-128, 127)
        own = {name: each[: p.co, None, None] if each.dim() == 1 else each for name, each in terms.items()}
        y = own["alpha"] * (sums + own["bias"]).float()
        if "residual" in own:
            y = (y.double() + own["gamma"].double() * own["residual"].double()).float()
        return y.clamp(0 if p.activation == "relu" else -128, 127).round().double()

    def graph(self, call: Any) -> Any:
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()
        graph.keep = call, kept
        return graph

    def times(self, graphs: Any) -> list[tuple[float, float]]:
        """(median, lowest tenth) in us of each."""
        torch = self.torch
        found: list[list[float]] = [[] for _ in graphs]
        for turn in range(ROUNDS):
            best = min((sorted(t)[len(t) // 2] for t in found if t), default=0.0)
            events = []
            for index, graph in enumerate(graphs):
                if turn > 2 and sorted(found[index])[len(found[index]) // 2] > SLOW * best:
                    continue
                self.trash.zero_()
                start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
                start.record()
                graph.replay()
                stop.record()
                events.append((index, start, stop))
            torch.cuda.synchronize()
            for index, start, stop in events:
                found[index].append(start.elapsed_time(stop) * 1e3)
            if turn == 0:  # the first brings code onto the device
                found = [[] for _ in graphs] if ROUNDS > 1 else found
        return [(sorted(t)[len(t) // 2], sorted(t)[len(t) // 10]) for t in found]


def names() -> dict[str, list[str]]:
    """The fields of each schedule's config, in the order in which lines have their values."""
    specs = {f"{op}.{spec.name}": spec for op in sorted({op for op, *_ in MIX}) for spec in operator(op).schedules}
    return {key: [f.name for f in dataclasses.fields(spec.config) if f.init] for key, spec in specs.items()}


class Child:
    """A process at the other end of a pipe, which is started again where it ends."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        self.work, self.arguments = work, arguments
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self.work, args=(theirs, *self.arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Any = None
        self.heard = time.time() + 60  # its imports take a while

    def restart(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.start()

    def send(self, what: Any, job: Any) -> None:
        self.pipe.send(what)
        self.job, self.heard = job, max(self.heard, time.time())


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("out", type=Path)
    words.add_argument("--shapes", type=Path)
    words.add_argument("--problems", type=Path, help="lines of a set, an operator and fields: these and no others")
    words.add_argument("--seconds", type=float, default=240)
    words.add_argument("--builders", type=int, default=(os.cpu_count() or 2) - 2)
    words.add_argument("--gpus", default=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    words.add_argument("--count", type=int, default=14, help="candidates of a problem")
    words.add_argument("--predicted", type=int, default=PREDICTED, help="of these, the first of the ranking")
    words.add_argument("--of", default=",".join(map(str, OF)), help="draws of which the best that is expected is kept")
    words.add_argument("--schedules", default="", help="draw configs of these alone")
    words.add_argument("--peers", type=int, default=PEERS, help="of as many problems, cuDNN is timed on one")
    words.add_argument("--sorts", default="few,flat,other", help="of layers, as few,flat+short,nchw+ragged,float32")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--target", default="cuda:sm_90a")
    asked = words.parse_args()
    end = time.time() + asked.seconds
    stop_drawing, stop_building = end - 22, end - 12
    from schedules.core.versions import versions

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        of = tuple(map(int, asked.of.split(",")))
        only = [name for name in asked.schedules.split(",") if name]
        builders = [Child(builder, asked.target, folder, asked.predicted, of, only) for _ in range(asked.builders)]
        benches = [Child(measurer, gpu, asked.target, asked.peers) for gpu in asked.gpus.split(",")]
        source, number = problems(asked.shapes, asked.seed, asked.sorts.split(",")), 0
        if asked.problems:
            source = given(asked.problems)
        held: dict[int, dict[str, Any]] = {}  # by number: what is known of a problem under way
        ready: list[int] = []
        trials = wrong = 0
        shown = time.time()
        with asked.out.open("a", buffering=1) as out:
            header = {
                "versions": versions(),
                "date": time.strftime("%Y-%m-%d"),
                "target": asked.target,
                "fields": names(),
            }

            def settle(job: dict[str, Any]) -> None:
                """Write what is known of a problem."""
                nonlocal trials, wrong
                for path, _ in job["built"]:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                done = [[*job["names"][i], us, low] for i, (us, low) in sorted(job["times"].items())]
                trials, wrong = trials + len(done), wrong + len(job["bad"])
                if done or job["bad"]:
                    p = job["problem"]
                    line = {"op": operator_of(p).name, "p": str(p), "set": job["set"], "cudnn": job["cudnn"]}
                    out.write(json.dumps({**line, "t": done, "bad": job["bad"]}, separators=(",", ":")) + "\n")

            while time.time() < end and (held or stop_drawing):
                for child in builders:
                    if child.job is None and time.time() < stop_drawing and len(ready) < 40:
                        name, problem = next(source, ("", None))
                        if problem is None:
                            stop_drawing = 0.0
                            break
                        number += 1
                        held[number] = dict(problem=problem, set=name, built=[], names=[], bad=[], times={}, cudnn=None)
                        child.send((number, problem, asked.count, f"{asked.seed} {number}", stop_building), number)
                for child in benches:
                    if child.job is None and ready and child.heard <= time.time():
                        job = held[ready[0]]
                        rest = [i for i in range(len(job["built"])) if i not in job["times"] and i not in job["skip"]]
                        child.send((ready[0], job["problem"], [job["built"][i] for i in rest]), (ready.pop(0), rest))
                pipes = {child.pipe: child for child in (*builders, *benches)}
                for pipe in wait(list(pipes), 0.2):
                    child = pipes[pipe]  # type: ignore[index]
                    try:
                        message = child.pipe.recv()
                    except (EOFError, OSError):
                        child.heard = 0.0
                        continue
                    child.heard = time.time()
                    if child in builders:
                        at, name, config, made, spaces = message
                        job = held[at]
                        if name is None:
                            child.job = None
                            job["skip"] = set()
                            (ready.append if job["built"] else lambda n: settle(held.pop(n)))(at)
                        elif config is None or made.startswith("! "):
                            job["bad"].append([name, list(config.to_json(True).values()) if config else [], made])
                        else:
                            job["names"].append([name, list(config.to_json(True).values())])
                            job["built"].append((made, spaces))
                        continue
                    at, index, us, low, text = message
                    if at == -1:
                        if "device" not in header:
                            header |= {"device": us, "torch": str(low)}
                            out.write(json.dumps(header) + "\n")
                            print(header["device"], header["versions"], flush=True)
                        continue
                    job, rest = held[at], child.job[1]
                    if text == "start":
                        job["at"] = None if index is None else rest[index]
                    elif text == "end":
                        job["cudnn"] = us and round(us, 2)
                        child.job = None
                        settle(held.pop(at))
                    elif text:
                        job["skip"].add(rest[index])
                        job["bad"].append([*job["names"][rest[index]], text])
                    else:
                        job["times"][rest[index]] = round(us, 2), round(low, 2)
                for child in (*builders, *benches):
                    if (child.job is not None and time.time() - child.heard > LATE) or not child.process.is_alive():
                        job_of, child.job = child.job, None
                        print("ended:", child.work.__name__, job_of, child.process.exitcode, flush=True)
                        if child in benches and job_of is not None and job_of[0] in held:
                            at = job_of[0]
                            job = held[at]
                            failed = job.get("at")
                            if failed is None:  # in the timing, or in cuDNN: whose fault it was is not known
                                settle(held.pop(at))
                            else:
                                job["skip"].add(failed)
                                job["bad"].append([*job["names"][failed], "crashed"])
                                ready.append(at)
                        elif child in builders and job_of in held:
                            held[job_of]["skip"] = set()
                            (ready.append if held[job_of]["built"] else held.pop)(job_of)
                        child.restart()
                if time.time() - shown > 20:
                    shown = time.time()
                    left = round(end - shown)
                    print(
                        f"{left} s left: {number} problems, {trials} trials, {wrong} bad, {len(ready)} wait", flush=True
                    )
        for child in (*builders, *benches):
            child.process.kill()
    print(f"{trials} trials of {number} problems, {wrong} wrong or not built", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
