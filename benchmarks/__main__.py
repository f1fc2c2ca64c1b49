"""Measure on this machine what the tables of README, RESULTS and docs are made of, one comparison after the other.

    python -m benchmarks                              # all that can be measured here
    python -m benchmarks layers networks --minutes 9  # some; what is not finished by then goes on with the next call
    python -m benchmarks --list

Each is a command of its own, which keeps its results in ``tuning_logs/<device>/`` and goes on where it was; what it
prints is in OUT/<name>.log.  One that fails costs no other; the exit code is then 1.  ``python -m
benchmarks.readme_tables`` makes the tables of what was kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from schedules.build.present import local_gpu
from schedules.cli.script import run_script
from schedules.core.errors import UnknownNameError, UsageError

DTYPES = "float16 bfloat16 float32"
END = 20.0  # seconds for what was asked to stop


@dataclass(frozen=True)
class Comparison:
    """`words`: the module and its arguments; on a CPU `on_cpu`, where it can be measured there."""

    about: str
    words: str
    on_cpu: str | None = None
    gpu: bool = True


COMPARISONS: Mapping[str, Comparison] = {
    "layers": Comparison("layers of networks at their first call, beside cuDNN", "compare_layers"),
    "networks": Comparison(
        "whole networks, beside PyTorch eager and torch.compile", "compare_networks", "compare_networks --device cpu"
    ),
    "autotuned": Comparison(
        "ResNet-50, beside torch.compile that searches", "compare_networks resnet50 --mode max-autotune-no-cudagraphs"
    ),
    "int8": Comparison(
        "ResNet-50 in int8",
        "compare_networks resnet50 --peers eager ours int8",
        "compare_networks resnet50 --device cpu --peers eager ours int8",
    ),
    "searches": Comparison("what 8 trials find of layers, beside 200", "few_trials"),
    "int8-layers": Comparison(
        "ResNet-50's layers in int8, beside cuDNN and a copy",
        "compare_layers whole/resnet50-int8.json --copy --each 0.05",
    ),
    "calls": Comparison("what a call costs", "torch_overhead", "torch_overhead --device cpu"),
    "softmax": Comparison(
        "softmax of wide batches, few rows and fused",
        f"compare_softmax --sets widths odd few fused --dtype {DTYPES} --graph --default --missing",
    ),
    "losses": Comparison(
        "cross-entropy of vocabularies, loss and gradient",
        "compare_softmax --sets losses --dtype bfloat16 --graph --default --missing",
    ),
    "grids": Comparison(
        "softmax at the shapes that other libraries measure",
        f"compare_softmax --sets quack flashinfer sglang liger --dtype {DTYPES} --graph --default --missing",
    ),
    "map": Comparison(
        "softmax at every shape, beside a copy",
        "compare_softmax --sets map --functions softmax --peers --graph --default --missing",
    ),
    "convolutions": Comparison(
        "every preset of a convolution, beside cuDNN", "compare_conv * --graph --missing", "compare_cpu --missing"
    ),
    "languages": Comparison("schedules in TE beside programs in TIRx", "compare_languages --missing"),
    "choices": Comparison("what the choice of a layer costs", "choice_cost", "choice_cost", gpu=False),
    "packing": Comparison("what packing filters costs", "packing_cost", "packing_cost", gpu=False),
}


def command_of(comparison: Comparison, gpu: bool) -> list[str] | None:
    """The command that measures it here; None if this machine cannot."""
    words = comparison.words if gpu and comparison.gpu else comparison.on_cpu
    if words is None:
        return None
    module, *arguments = words.split()
    return [sys.executable, "-u", "-m", f"benchmarks.{module}", *arguments]


def run(command: Sequence[str], log: Path, seconds: float | None) -> int | None:
    """The exit code of `command`, whose words go to `log`; None if it was stopped after `seconds`."""
    with log.open("w") as words:
        process = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:  # Ctrl-C, too
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(END)
                except subprocess.TimeoutExpired:
                    process.kill()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMPARISONS)} (default: all)")
    parser.add_argument("--minutes", type=float, metavar="M", help="of all together, at most")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="the logs (default out/benchmarks)")
    parser.add_argument("--list", action="store_true", help="only say what can be measured here, and how")
    args = parser.parse_args(words)
    if unknown := [name for name in args.names if name not in COMPARISONS]:
        raise UnknownNameError("comparison", unknown[0], COMPARISONS)
    if args.minutes is not None and args.minutes <= 0:
        raise UsageError("--minutes must be over 0")
    gpu = local_gpu() is not None
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.names or COMPARISONS:
        command = command_of(COMPARISONS[name], gpu)
        if args.list or command is None:
            shown = " ".join(["python", *command[2:]]) if command else "needs a CUDA GPU"
            print(f"{name:13} {COMPARISONS[name].about}: {shown}", flush=True)
            continue
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            print(f"{name:13} not begun: {args.minutes:g} minutes are over")
            continue
        begun, log = time.monotonic(), args.out / f"{name}.log"
        code = run(command, log, left)
        last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
        how = "stopped" if code is None else "done" if code == 0 else f"failed ({code})"
        print(f"{name:13} {how} after {time.monotonic() - begun:.0f} s: {last[:160]}", flush=True)
        if code:
            failed.append(name)
    if failed:
        print(f"{', '.join(failed)} failed; see the logs in {args.out}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    run_script(main, "stopped; what was finished is kept, the same command goes on")
