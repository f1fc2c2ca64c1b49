"""Scheduling programs as traces: TVM's design spaces, and points drawn from them and changed at random.

MetaSchedule's rules make the spaces, its postprocessors finish a point and say whether it is sound, its mutators change
one decision.  The drawing is done here: MetaSchedule draws every tile blindly, and of such points of a large
convolution on a GPU two in a hundred have a possible number of threads and fit into shared memory.  Here a trace is
judged by its decisions alone before it is applied, and by its shared tiles before it is lowered.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api as ms_ffi
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.s_tir.schedule import Trace
from tvm.s_tir.stmt import SBlock
from tvm.target import Target

from schedules.build.toolchain.cuda import require_headers
from schedules.core.arch import Arch
from schedules.core.errors import ConfigError
from schedules.core.problem import Problem
from schedules.core.quiet import ROCM_WARNINGS, without_lines
from schedules.core.registry import operator_of
from schedules.lowering import pipeline
from schedules.operators import auto

MAX_VTHREADS = 8  # what VerifyGPUCode allows
MAX_ACCUMULATORS = 256  # of a thread; beyond, they spill, and the CUDA compiler takes ten seconds over it
FRAGMENT = 8  # accumulators of a thread in a 16x16 tile of matrix instructions
# a prime factor of an extent goes to the outermost loop, the blocks of a GPU, so many times as often as to another:
# large and small tiles in turn
OUTER_WEIGHTS = {True: (2.0, 4.0), False: (1.0,)}  # by Arch.is_gpu
DRAWS = 500  # for one plausible trace
RULES = {"llvm": "llvm", "cuda": "cuda", "rocm": "cuda", "cuda-tensorcore": "cuda-tensorcore"}
COOPERATIVE = "meta_schedule.cooperative_fetch"
LEAST_THREADS = "meta_schedule.thread_extent_low_inclusive"
WARP_EXECUTION = "warp_execution"
PIPELINE = "software_pipeline_stage"
TENSORIZE = "meta_schedule.auto_tensorize"

logger = logging.getLogger(__name__)
Features = np.ndarray[Any, Any]


def search_target(arch: Arch, space: str) -> Target:
    """The target that the rules read limits from.  Their spaces without matrix instructions use static shared memory,
    which a kernel has less of."""
    if not arch.is_gpu:
        return arch.target()
    key = "arch" if arch.kind == "cuda" else "mcpu"
    with without_lines(ROCM_WARNINGS if arch.kind == "rocm" else ()):
        return Target(
            {
                "kind": arch.kind,
                key: arch.name,
                "max_threads_per_block": arch.max_threads,
                "max_shared_memory_per_block": arch.shared_block if space == "cuda-tensorcore" else arch.shared_static,
                "thread_warp_size": arch.wave,
            },
            host={"kind": "llvm"},
        )


@dataclass(frozen=True)
class _Tile:
    """A loop's extent drawn as a product: the step, its factors now, the largest innermost one."""

    step: Any
    factors: tuple[int, ...]
    innermost: int


@dataclass(frozen=True)
class _Outline:
    """What a trace draws, and how the tiles become threads."""

    trace: Trace
    tiles: tuple[_Tile, ...]
    choices: tuple[tuple[Any, tuple[float, ...]], ...]  # step, the weight of each of its values
    bound: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]  # thread axis; the (tile, factor) whose product it is
    least_threads: int = 1
    warps: bool = False  # a postprocessor binds the lanes of a warp

    @classmethod
    def of(cls, trace: Trace) -> _Outline:
        tiles: list[_Tile] = []
        choices: list[tuple[Any, tuple[float, ...]]] = []
        bound: list[tuple[str, tuple[tuple[int, int], ...]]] = []
        sources: dict[Any, tuple[tuple[int, int], ...]] = {}  # of factors and loops
        least, warps = 1, False
        for step in trace.insts:
            kind, inputs, outputs = str(step.kind.name), step.inputs, step.outputs
            if kind == "SamplePerfectTile":
                factors = tuple(int(factor) for factor in trace.decisions[step])
                sources.update((output, ((len(tiles), place),)) for place, output in enumerate(outputs))
                tiles.append(_Tile(step, factors, int(step.attrs[1])))
            elif kind == "SampleCategorical":
                choices.append((step, tuple(float(share) for share in step.attrs[1])))
            elif kind == "Split":
                parts = zip(outputs, list(inputs)[1:], strict=True)
                sources.update((loop, sources[factor]) for loop, factor in parts if factor in sources)
            elif kind == "Fuse" and all(loop in sources for loop in inputs):
                sources[outputs[0]] = tuple(source for loop in inputs for source in sources[loop])
            elif kind == "Bind" and inputs[0] in sources:
                bound.append((str(step.attrs[0]), sources[inputs[0]]))
            elif kind == "Annotate" and str(step.attrs[0]) == LEAST_THREADS:
                least = int(inputs[1])
            elif kind == "Annotate" and str(step.attrs[0]) == WARP_EXECUTION:
                warps = True
            elif kind == "EnterPostproc":
                break
        return cls(trace, tuple(tiles), tuple(choices), tuple(bound), least, warps)

    def threads(self, tiles: Sequence[Sequence[int]]) -> tuple[int, int, int]:
        """Threads and virtual threads of a block, and outputs of one of these, as far as `tiles` tell; else 1."""
        threads, vthreads, outputs = self.least_threads if not self.bound else 1, 1, 1
        for axis, sources in self.bound:
            extent = math.prod(tiles[tile][place] for tile, place in sources)
            if axis.startswith("threadIdx"):
                threads *= extent
                outputs *= math.prod(math.prod(tiles[tile][place + 1 :]) for tile, place in sources)
            elif axis.startswith("vthread"):
                vthreads *= extent
        return threads, vthreads, outputs


class TraceSpace:
    """The design space `space` of `problem` on `arch`.

    Raises ConfigError if the space is for other targets, or its rules do not match the problem; ToolchainError if its
    kernels could not be compiled here.  `rejected` counts what became of points that were drawn and are no candidates.
    """

    def __init__(self, problem: Problem, arch: Arch, space: str) -> None:
        if space not in auto.SPACES or arch.kind not in auto.SPACES[space]:
            known = [name for name, kinds in auto.SPACES.items() if arch.kind in kinds]
            raise ConfigError(f"space={space} is not one for {arch}; use {' or '.join(known)}")
        self.name, self.arch = space, arch
        self.mod = auto.program(problem)
        self.target = search_target(arch, space)
        self.rejected: Counter[str] = Counter()
        if space == "cuda-tensorcore":
            require_headers("#include <mma.h>")
            auto.register_intrinsics()
        rules = RULES[space]
        self._generator = ms.space_generator.PostOrderApply(sch_rules=rules, postprocs=rules, mutator_probs=rules)
        self._context = _context(self.mod, self.target, self._generator)
        self._extractor = ms.feature_extractor.PerStoreFeature()
        try:
            made = list(self._generator.generate_design_space(self.mod))
        except Exception as error:  # TVM raises many types; its rules do not know every program
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ConfigError(f"TVM's rules make no space of {problem} ({reason}); use --search template") from error
        if space == "cuda-tensorcore":
            made = [sch for sch in made if _annotated(sch.mod, TENSORIZE)]
            if not made:
                op = operator_of(problem)
                raise ConfigError(f"TVM's tensor-core rules do not match {op.name} {problem}; use space=cuda")
        self._outlines = [_Outline.of(sch.trace.simplified(True)) for sch in made]
        checks = (ms.postproc.VerifyGPUCode, ms.postproc.DisallowDynamicLoop)
        self._steps = [postproc for postproc in self._generator.postprocs if not isinstance(postproc, checks)]
        self._checks = [postproc for postproc in self._generator.postprocs if isinstance(postproc, checks)]
        self._mutators = [(mutator, float(share)) for mutator, share in self._generator.mutator_probs.items()]

    def draw(self, rng: random.Random) -> Trace:
        """A trace with every tile and choice drawn, plausible if one can be had; the rest is drawn when it is
        applied."""
        for _ in range(DRAWS):
            outline = rng.choice(self._outlines)
            outer = rng.choice(OUTER_WEIGHTS[self.arch.is_gpu])
            tiles = [_tile(math.prod(t.factors), len(t.factors), t.innermost, outer, rng) for t in outline.tiles]
            if self._plausible(outline, tiles):
                break
        decisions: dict[Any, Any] = {tile.step: factors for tile, factors in zip(outline.tiles, tiles, strict=True)}
        for step, weights in outline.choices:
            decisions[step] = rng.choices(range(len(weights)), weights)[0]
        return Trace(outline.trace.insts, decisions)

    def mutate(self, trace: Trace, rng: random.Random) -> Trace | None:
        """`trace` with one decision changed by one of MetaSchedule's mutators; None if it found nothing to change."""
        mutators, shares = zip(*self._mutators, strict=True)
        mutator = rng.choices(mutators, shares)[0]
        changed: Trace | None = ms_ffi.MutatorApply(mutator, trace, rng.randrange(1, 2**30))
        return changed

    def _plausible(self, outline: _Outline, tiles: Sequence[Sequence[int]]) -> bool:
        """Whether the extents that the decisions give to threads are possible, as far as the trace tells them."""
        if not self.arch.is_gpu:
            return True
        threads, vthreads, outputs = outline.threads(tiles)
        if outline.warps:
            threads, outputs = threads * self.arch.wave, outputs * FRAGMENT
        fits = vthreads <= MAX_VTHREADS and vthreads * outputs <= MAX_ACCUMULATORS
        return fits and outline.least_threads <= threads <= self.arch.max_threads

    def finish(self, trace: Trace, seed: int) -> Schedule | None:
        """The schedule after the steps of `trace` and the postprocessors that add some; None, counted in `rejected`, if
        it is not sound.  `verified` says so of the rest."""
        outline = _Outline.of(trace)
        if not self._plausible(outline, [tile.factors for tile in outline.tiles]):
            self.rejected["threads"] += 1
            return None
        sch = Schedule(self.mod, seed=seed, error_render_level="none")
        try:
            trace.apply_to_schedule(sch, remove_postproc=True)
            if self.arch.is_gpu and _shared_bytes(sch.mod) > int(self.target.attrs["max_shared_memory_per_block"]):
                self.rejected["shared memory"] += 1
                return None
            sch.enter_postproc()
        except Exception as error:  # TVM raises many types; the rules promise only that some points are sound
            logger.debug("trace: %s", error)
            self.rejected["trace"] += 1
            return None
        return sch if all(self._processed(sch, postproc) for postproc in self._steps) else None

    def verified(self, sch: Schedule) -> bool:
        """Whether the program, lowered, keeps to the target's limits: for a finished schedule, and the slower part."""
        with tvm.transform.PassContext(config=pipeline.config(self.arch.kind, sch.mod)):
            return all(self._processed(sch, postproc) for postproc in self._checks)

    def _processed(self, sch: Schedule, postproc: Any) -> bool:
        name = type(postproc).__name__
        try:
            if postproc.apply(sch):
                return True
        except Exception as error:  # as above
            logger.debug("%s: %s", name, error)
        self.rejected[name] += 1
        return False

    def features(self, schedules: Sequence[Schedule]) -> list[Features]:
        """MetaSchedule's features of each schedule: (stores, 164) float32."""
        candidates = [ms.MeasureCandidate(sch, []) for sch in schedules]
        return [found.numpy().astype(np.float32) for found in self._extractor.extract_from(self._context, candidates)]


def _context(mod: tvm.IRModule, target: Target, generator: Any) -> Any:
    """A TuneContext, without what its constructor does first: import every target's intrinsics, some ten seconds."""
    context = ms.TuneContext.__new__(ms.TuneContext)
    context.__init_handle_by_constructor__(
        ms_ffi.TuneContext, mod, target, generator, None, "main", 1, 1, get_logging_func(logger)
    )
    ms_ffi.TuneContextInitialize(context)
    return context


@lru_cache(maxsize=256)
def _primes(number: int) -> tuple[int, ...]:
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(found)


def _tile(extent: int, parts: int, innermost: int, outer: float, rng: random.Random) -> list[int]:
    """`extent` as a product of `parts` factors, outermost first, the innermost at most `innermost`."""
    weights = [outer] + [1.0] * (parts - 1)
    factors = [1] * parts
    for prime, place in zip(_primes(extent), rng.choices(range(parts), weights, k=len(_primes(extent))), strict=True):
        inside = place == parts - 1 and factors[-1] * prime <= innermost
        factors[place if inside or place < parts - 1 else 0] *= prime
    return factors


def _annotated(mod: tvm.IRModule, key: str) -> bool:
    found: list[bool] = []
    tvm_ffi.structural_walk(mod["main"].body, (SBlock, lambda block: found.append(key in dict(block.annotations))))
    return any(found)


def _shared_bytes(mod: tvm.IRModule) -> int:
    """Bytes of the tiles that all threads of a block fetch together, in all stages of a pipeline.

    Each is copied by one fused loop.
    """
    total, waiting, stages = 0, 0, 1

    def block(node: Any) -> None:
        nonlocal waiting
        if COOPERATIVE in dict(node.annotations):
            waiting = tvm.DataType(str(node.writes[0].source.dtype)).bits // 8

    def loop(node: Any) -> None:  # the first loop after a block, since children are visited first
        nonlocal waiting, total, stages
        if PIPELINE in dict(node.annotations):
            stages = max(stages, 1 + max(int(stage) for stage in node.annotations[PIPELINE]))
        if waiting:
            total += waiting * int(node.extent) if isinstance(node.extent, tirx.IntImm) else 0
            waiting = 0

    tvm_ffi.structural_walk(mod["main"].body, ((SBlock, block), (tirx.For, loop)))
    return total * stages
