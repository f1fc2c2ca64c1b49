"""TVM's own tuner on one problem for a given time, as a peer for `schedules tune --search auto`.

python -m benchmarks.stock_metaschedule tutorial --target cuda:sm_90a --minutes 10 --fast-build

`tune_tir` runs with TVM's builder, runner, search and cost model; what is put in is the CUDA compiler, told the
target's arch.  TVM's builder starts its workers anew for each batch, and each imports every target's intrinsics, ten
seconds: --fast-build leaves that import out.  Prints a JSON line for each batch, then one for the fastest program,
verified and timed again by this project's clock, since TVM compares no candidate's numbers with anything.  Needs
xgboost, psutil and cloudpickle.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from schedules.build.builder import build
from schedules.build.present import device_name
from schedules.check.verify import verify
from schedules.cli.script import run_script
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import BuildError, ConfigError, ToolchainError, UsageError
from schedules.core.presets import resolve
from schedules.core.problem import Problem
from schedules.core.threads import THREADS, cores
from schedules.measure.timer import measure
from schedules.operators import auto
from schedules.operators.auto import AutoConfig
from schedules.tune.trace_model import require_xgboost
from schedules.tune.trace_space import RULES, search_target

FAST_BUILD = "schedules.fast_build"
ROOT = str(Path(__file__).resolve().parent.parent)
FINALISTS = 8  # the fastest records, tried until one is correct


class OutOfTimeError(Exception):
    """The time is up; raised from a callback, the only way out of `tune_tir`."""


def prepare_worker(kind: str, arch: str, root: str) -> None:
    """In a worker process: the device compiler that knows the arch, and the build without the import."""

    sys.path.insert(0, root)
    import tvm
    import tvm_ffi

    if kind == "cuda":
        import tvm.support.nvcc  # registers the callback that is replaced here

        from schedules.build.toolchain import cuda

        cuda.ensure_runtime()
        tvm_ffi.register_global_func(
            "tvm_callback_cuda_compile",
            lambda source: cuda.compile_cuda(str(source), arch).cubin,
            override=True,
        )

    def fast_build(mod: Any, target: Any, _params: Any) -> Any:
        with target:
            return tvm.driver.build(mod, target=target)

    tvm_ffi.register_global_func("schedules.fast_build", fast_build, override=True)


@derived_object
class Watch(ms.measure_callback.PyMeasureCallback):
    """Counts trials, prints the best after each batch, and ends the search when the time is up."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.start = time.monotonic()
        self.seconds = seconds
        self.trials = self.failed = 0
        self.best_us: float | None = None
        self.reasons: dict[str, int] = {}
        self.over = False

    def apply(
        self, task_scheduler: Any, task_id: int, measure_candidates: Any, builder_results: Any, runner_results: Any
    ) -> None:
        for built, ran in zip(builder_results, runner_results, strict=True):
            self.trials += 1
            reason = built.error_msg or ran.error_msg
            if reason:
                self.failed += 1
                lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
                self.reasons[lines[-1][:120]] = self.reasons.get(lines[-1][:120], 0) + 1
                continue
            times = sorted(float(second) for second in ran.run_secs)
            us = times[len(times) // 2] * 1e6
            self.best_us = us if self.best_us is None else min(us, self.best_us)
        elapsed = time.monotonic() - self.start
        emit("batch", **self.summary(elapsed))
        if elapsed >= self.seconds:
            self.over = True
            raise OutOfTimeError

    def summary(self, elapsed: float) -> dict[str, Any]:
        return {
            "seconds": round(elapsed, 2),
            "trials": self.trials,
            "failed": self.failed,
            "trials_per_s": round(self.trials / elapsed, 3),
            "best_us": self.best_us,
        }


def emit(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def tune(problem: Problem, arch: Arch, space: str, args: argparse.Namespace, folder: str) -> tuple[Any, Any]:
    """Run `tune_tir` until the time is up or the trials are used.  Returns its database and the `Watch`."""
    os.environ.setdefault(THREADS, str(cores() or os.cpu_count()))  # its runner's processes inherit the number
    initializer = functools.partial(prepare_worker, arch.kind, arch.name, ROOT)
    builder = ms.builder.LocalBuilder(
        initializer=initializer, max_workers=args.workers, f_build=FAST_BUILD if args.fast_build else None
    )
    runner = ms.runner.LocalRunner(initializer=initializer)
    database = ms.database.JSONDatabase(work_dir=folder)
    watch = Watch(args.minutes * 60)
    try:
        ms.tune_tir(
            auto.program(problem),
            search_target(arch, space),
            folder,
            args.trials,
            num_trials_per_iter=args.batch,
            builder=builder,
            runner=runner,
            database=database,
            space=RULES[space],
            seed=args.seed,
            measure_callbacks=[ms.measure_callback.AddToDatabase(), ms.measure_callback.UpdateCostModel(), watch],
        )
    except Exception:  # TVM hands the callback's own error on as another type
        if not watch.over:
            raise
    return database, watch


def finalists(problem: Problem, space: str, database: Any) -> list[AutoConfig]:
    """The configs of the fastest records."""
    mod = ms.tune_context._normalize_mod(auto.program(problem)["main"])
    workload = database.commit_workload(mod)
    found = []
    for record in database.get_top_k(workload, FINALISTS):
        sch = Schedule(auto.program(problem))
        record.trace.apply_to_schedule(sch, remove_postproc=False)
        found.append(AutoConfig.of(space, sch))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "words", nargs="+", metavar="NAME [field=value ...]", help="an operator or a preset, then fields"
    )
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--space", help="llvm, cuda or cuda-tensorcore (default: by the target)")
    parser.add_argument("--minutes", type=float, default=10.0, help="the batch that this passes in is the last")
    parser.add_argument("--trials", type=int, default=10**6)
    parser.add_argument("--batch", type=int, default=64, help="trials of a batch (default: TVM's 64)")
    parser.add_argument("--workers", type=int, help="processes that build (default: TVM's, one a core)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fast-build", action="store_true", help="spare the workers the import of intrinsics")
    args = parser.parse_args()
    name, *fields = args.words
    _, problem = resolve(name, dict(word.split("=", 1) for word in fields))
    arch = parse_arch(args.target)
    space = args.space or arch.kind
    if space not in RULES or arch.kind not in auto.SPACES[space]:
        raise UsageError(f"--space {space} is not one for {arch}; use {' or '.join(RULES)}")
    device = device_name(arch)
    if device is None:
        raise UsageError(f"no device for {arch} here to tune on")
    require_xgboost()
    missing = [name for name in ("psutil", "cloudpickle") if importlib.util.find_spec(name) is None]
    if missing:
        raise ToolchainError(f"TVM's tuner needs {' and '.join(missing)}; pip install {' '.join(missing)}")
    emit("start", problem=str(problem), target=str(arch), space=space, device=device, fast_build=args.fast_build)
    with tempfile.TemporaryDirectory() as folder:
        database, watch = tune(problem, arch, space, args, folder)
        elapsed = time.monotonic() - watch.start
        emit("tuned", **watch.summary(elapsed), reasons=watch.reasons)
        for rank, config in enumerate(finalists(problem, space, database)):
            try:
                (check,) = verify(problem, arch, "auto", config, routes=["device"])
                found = measure(build(problem, arch, "auto", config))
            except (BuildError, ConfigError) as error:
                emit("refused", rank=rank, reason=str(error))
                continue
            emit(
                "best" if check.passed else "wrong",
                rank=rank,
                error=check.error,
                median_us=found.median_us,
                p10_us=found.p10_us,
                p90_us=found.p90_us,
                tflops=problem.flops / found.median_us / 1e6,
                config=config.to_json(),
            )
            if check.passed:
                return 0
    return 1


if __name__ == "__main__":
    run_script(main)
