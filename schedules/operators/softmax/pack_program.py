"""The row program on packs as they lie in memory: what kernels share, wherever their packs come from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.core.tolerance import LARGEST
from schedules.lowering.annotations import TIRX
from schedules.operators.softmax import pack_sources as sources
from schedules.operators.softmax.definition import Reduction, SoftmaxProblem, Values, row_values
from schedules.operators.softmax.row_packs import PackConfig, R, RowPacks, Scalar, repeated, where
from schedules.steps.story import part
from schedules.tirx.values import kept, named

LANES = 4  # sums of a thread that do not wait for each other


def module(
    problem: SoftmaxProblem,
    warps: int,
    blocks: Callable[[Any], Any],
    min_blocks: int,
    emit: Callable[[dict[str, Any], Any, Any, Any, Any], None],
    cluster: int = 1,
    before: Callable[[dict[str, Any], Any], dict[str, Any]] = lambda tensors, rows: tensors,
) -> tvm.IRModule:
    """The module with one function "main" that takes ``problem.arguments()``.

    `blocks` makes their number of that of rows, `emit` the body of (tensors, rows, block, warp, lane), where the
    compiler knows that a warp's threads agree on `warp`; with `min_blocks` registers are capped for as many on a
    multiprocessor.  Blocks are launched in clusters of `cluster`, neighbours together.  `before` emits a kernel
    before, of (tensors, rows), and returns the tensors with those that it fills.
    """
    arguments = problem.arguments()
    names = [argument.name for argument in arguments]

    def matched(handles: list[Any], rows: Any) -> dict[str, Any]:
        buffers = {}
        for argument, handle in zip(arguments, handles, strict=False):
            shape = argument.shape if argument.runtime_axis is None else (rows, *argument.shape[1:])
            buffer = T.match_buffer(handle, shape, argument.dtype, align=16)
            IRBuilder.name(argument.name, buffer)
            buffers[argument.name] = buffer
        return buffers

    def bounds() -> Any:
        return T.attr({"tirx.launch_bounds_min_blocks_per_sm": min_blocks}) if min_blocks else None

    def clusters() -> Any:
        return T.cta_id_in_cluster([cluster]) if cluster > 1 else None

    # fmt: off
    @T.prim_func
    def main(
        a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, f: T.handle, g: T.handle, h: T.handle
    ) -> None:
        rows = T.int64()
        tensors = T.meta_var(before(matched([a, b, c, d, e, f, g, h], rows), rows))
        T.device_entry()
        part("The launch: blocks, warps and lanes")
        bounds()
        clusters()
        block = T.cta_id([blocks(rows)])
        warp = T.warp_id([warps])
        lane = T.lane_id([32])
        emit(tensors, rows, block, warp, lane)
    # fmt: on

    function = tirx.PrimFunc(main.params[: len(names)], main.body, main.ret_type, main.attrs)
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main").with_attr(TIRX, 1)})


class PackKernel(RowPacks[R]):
    """The body of a kernel for one thread; its methods emit statements.

    `exchange` and `turn`, where a row is more than a warp's, are for whoever emits the kernel to set.
    """

    thread: Any  # of those that synchronize together
    of_row: Any  # the number of the thread among those of its row
    peak_of_numerators: Callable[[int], Any]  # which those of the thread's pack of that number are relative to
    zero: Any = None  # 0, though the compiler does not know; set where rows are kept packed
    exchange: Any = None  # floats in shared memory
    redux: bool = False  # whether a warp's largest is one instruction, from sm_80 on
    first_in_registers: int = 0  # the first round whose packs stay in registers, where rows are kept packed
    turn: Scalar | None = None  # which half of `exchange` is next, where a row has one reduction

    def __init__(
        self, problem: SoftmaxProblem, config: PackConfig, tensors: dict[str, Any], rows: Any, warp: Any, lane: Any
    ) -> None:
        super().__init__(problem, config, tensors, rows, warp, lane)
        # a block's reductions: barriers of a row
        self.exchanges = 1 if problem.is_grad or config.online else 2
        self.wide = config.threads > 32  # whether a row is more than a warp's

    def know(self, row: R) -> None:
        """Have what is known of a row in variables."""

        def number(name: str) -> Any:
            return self.tensors[name][row.number]

        values = row_values(self.problem, number, lambda col: self.element_of_row(row, col))
        self.known = {name: named(name, value) for name, value in values.items()}
        if "target" in self.known:
            self.known["target"] = named("taken", T.Cast("int32", self.known["target"]))

    def element_of_row(self, row: R, col: Any) -> Any:
        """Element `col` of the row as float32, read now: the output may lie where the row does."""
        value = T.Cast("float32", self.tensors["x"][row.number * self.problem.cols + col])
        return T.reinterpret("float32", kept("picked", T.reinterpret("int32", value)))

    def compute(self, row: R) -> None:
        """Reduce a row and store it."""
        part("Reduce a row: each thread the packs it has, its warp by shuffles, the warps through shared memory")
        self.know(row)
        self.allocate()
        if self.problem.is_grad:
            reductions = self.reduce_gradient(row)
        elif self.online:
            reductions = self.reduce_online(row)
        else:
            reductions = self.reduce_in_turn(row)
        self.write(row, self.finished(self.combined(reductions)))

    def allocate(self) -> None:
        """Registers for the words of a row."""
        self.words = {name: T.alloc_local((self.rounds * self.words_of(name),), "uint32") for name in self.read_names()}
        for name, array in self.words.items():
            IRBuilder.name(f"{name}_words", array)

    def combined(self, reductions: Values) -> Values:
        """The reductions over the row, from those of the threads that synchronize, where these are not all."""
        return reductions

    def read_names(self) -> list[str]:
        """What a row is computed from: its inputs, the mask, and which elements dropout keeps."""
        return [*(argument.name for argument in self.problem.of_columns), *["drop"] * self.problem.is_drawn]

    @abstractmethod
    def behind_first(self, row: R) -> None:
        """What to do behind a row's first reduction."""

    def sync(self) -> None:
        T.evaluate(T.cuda.cta_sync() if self.team > 32 else T.cuda.warp_sync())

    def sums(self, name: str, value: float) -> Any:
        array = T.alloc_local((LANES,), "float32")
        IRBuilder.name(name, array)
        for k in range(LANES):
            T.buffer_store(array, T.float32(value), [k])
        return array

    def total_of(self, array: Any, kind: str) -> Any:
        """What a thread's sums come to."""
        combine: Callable[[Any, Any], Any] = T.max if kind == "max" else lambda a, b: a + b
        return combine(combine(array[0], array[1]), combine(array[2], array[3]))

    def peak_of_thread(self, row: R) -> Any:
        """The largest of a thread's part."""
        peaks = self.no_peaks()
        for p, i in self.each_pack(row, "x", "mask"):
            self.raise_peaks(peaks, row, p, i)
        return self.peak_of(peaks)

    @property
    def by_twos(self) -> bool:
        """Whether elements are compared two at a time: where they are 16 bits and stand as they are."""
        return not (self.added or self.item == 4 or self.pack == 1)

    def no_peaks(self) -> Any:
        """A thread's largest so far, before there is one: as many as need not wait for each other."""
        if not self.by_twos:
            return self.sums("peaks", self.program.lowest)
        lowest = repeated(LARGEST[self.in_dtype] * (-1 if self.problem.scale > 0 else 1), self.in_dtype)
        peaks = T.alloc_local((self.each,), "uint32")
        IRBuilder.name("peaks", peaks)
        for k in range(self.each):
            T.buffer_store(peaks, T.uint32(lowest), [k])
        return peaks

    def raise_peaks(self, peaks: Any, row: R, p: int, i: Any) -> None:
        """To those of pack i, the thread's number p."""
        if self.by_twos:
            for k in range(self.each):
                T.buffer_store(peaks, self.larger_of_two(peaks[k], self.word("x", p, k), self.problem.scale > 0), [k])
            return
        step = self.program.reductions[0]
        for v in range(self.pack):
            k = (p * self.pack + v) % LANES
            T.buffer_store(peaks, T.max(peaks[k], step.element(self.columns(row, p, i, v), self.known)), [k])

    def peak_of(self, peaks: Any) -> Any:
        """What they come to."""
        if not self.by_twos:
            return self.total_of(peaks, "max")
        rising = self.problem.scale > 0
        pairs = [peaks[k] for k in range(self.each)]
        while len(pairs) > 1:
            pairs = [self.larger_of_two(a, b, rising) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        word = named("peaks_of_two", pairs[0])
        low, high = (self.widened(word, half, self.in_dtype) for half in (0, 1))
        return T.max(low, high) if rising else T.float32(0) - T.min(low, high)

    def larger_of_two(self, a: Any, b: Any, rising: bool) -> Any:
        """The larger of each half of two words, the smaller if not `rising`."""
        if self.in_dtype == "bfloat16":
            return T.cuda.hmax2(a, b) if rising else T.cuda.hmin2(a, b)
        function = "max" if rising else "min"
        source = sources.LARGEST.format(function=function)
        return T.cuda.func_call(f"pack_{function}", a, b, source_code=source, return_type="uint32")

    @property
    def sum_steps(self) -> list[Reduction]:
        return [step for step in self.program.reductions if step.kind == "sum"]

    def no_sums(self) -> dict[str, Any]:
        """A thread's sums before there is anything to add; and where numerators wait, if they are kept."""
        if self.kept == "numerators":
            self.numerators = T.alloc_local((self.rounds * self.pack,), "float32")
            IRBuilder.name("numerators", self.numerators)
        # -0: the one number that none need add
        return {step.name: self.sums(f"{step.name}s", -0.0) for step in self.sum_steps}

    def add_pack(self, sums: dict[str, Any], row: R, p: int, i: Any, results: Values, factors: Values) -> None:
        """Add pack i, the thread's number p, to sums that are first multiplied by `factors`."""
        left = {name: set(range(LANES)) for name in factors}
        for v in range(self.pack):
            k = (p * self.pack + v) % LANES
            for step in self.sum_steps:
                value = step.element(self.columns(row, p, i, v), {**self.known, **results})
                if self.kept == "numerators":
                    T.buffer_store(self.numerators, value, [p * self.pack + v])
                    value = self.numerators[p * self.pack + v]
                before = sums[step.name][k]
                if k in left.get(step.name, ()):
                    left[step.name].remove(k)
                    before = before * factors[step.name]
                T.buffer_store(sums[step.name], before + value, [k])
        for name, rest in left.items():
            for k in rest:
                T.buffer_store(sums[name], sums[name][k] * factors[name], [k])

    def sums_of_thread(self, row: R, results: Values) -> Values:
        """The sums over a thread's part, of softmax by way of its numerators if those are kept."""
        if self.kept == "numerators":
            self.peak_of_numerators = lambda p: results["peak"]
        sums = self.no_sums()
        needs = ("dy", "drop") if self.problem.function == "log_softmax_grad" else ("y", "dy", "drop")
        for p, i in self.each_pack(row, *(needs if self.problem.is_grad else ("x", "mask"))):
            self.add_pack(sums, row, p, i, results, {})
        return {name: self.total_of(array, "sum") for name, array in sums.items()}

    def online_of_thread(self, row: R) -> Values:
        """The reductions over a thread's part, each pack added as it comes, relative to the largest so far: what the
        first packs come to is computed while the last are on their way."""
        sums, peak = self.no_sums(), Scalar("peak_so_far", T.float32(self.program.lowest), "float32")
        if self.kept == "numerators":
            peaks = T.alloc_local((self.rounds,), "float32")
            IRBuilder.name("peaks_of_packs", peaks)
            self.peak_of_numerators = lambda p: peaks[p]
        for number, (p, i) in enumerate(self.each_pack(row, "x", "mask")):
            own = self.no_peaks()
            self.raise_peaks(own, row, p, i)
            higher = {**self.known, "peak": named("higher", T.max(peak.value, self.peak_of(own)))}
            lower = {"peak": peak.value, **{step.name: T.float32(1) for step in self.sum_steps}}
            shrunk = [step for step in self.sum_steps if step.share and number]
            factors = {step.name: named("factor", step.of_part(lower, higher)) for step in shrunk}
            if self.kept == "numerators":
                T.buffer_store(peaks, higher["peak"], [p])
            self.add_pack(sums, row, p, i, higher, factors)
            peak.set(higher["peak"])
        return {"peak": peak.value, **{name: self.total_of(array, "sum") for name, array in sums.items()}}

    def across(self, kind: str, value: Any, lanes: int) -> Any:
        """Over `lanes` neighbouring lanes, by shuffles; the largest by one instruction where `redux`: in rows of more
        than a warp the other lanes have no others."""
        if lanes == 1:
            return value
        if kind == "max" and self.redux and (self.wide or lanes == 32):
            source = sources.LARGEST_OF_WARP
            return T.cuda.func_call("pack_largest_of_warp", value, source_code=source, return_type="float32")
        return T.cuda.warp_reduce(value, kind, lanes)

    def over_warps(self, mine: Values, first: R | None) -> Values:
        """Of the warp's numbers `mine` those of the warp number `lane` modulo the warps: one barrier for all.

        `first` is the row where this is its first reduction."""
        warps = self.threads // 32
        base = {step.name: warps * k for k, step in enumerate(self.program.reductions)}
        exchange = self.turn.value * (self.exchanged * warps) if self.turn else 0
        with where(self.lane == 0):
            for name, value in mine.items():
                T.buffer_store(self.exchange, value, [exchange + base[name] + self.warp])
        self.sync()
        if first:
            self.behind_first(first)
        of_warps = {
            name: named(f"{name}_of_lane", self.exchange[exchange + base[name] + self.lane % warps]) for name in mine
        }
        if self.turn:
            self.turn.set(T.bitwise_xor(self.turn.value, 1))
        return of_warps

    @property
    def shares(self) -> int:
        """Neighbouring lanes that have what `over_warps` leaves."""
        return self.threads // 32

    @property
    def exchanged(self) -> int:
        """Numbers that a warp exchanges with others, at most."""
        return max(2, len(self.program.reductions))

    def reduced(self, kind: str, of_thread: Values, first: R | None) -> Values:
        """Reductions of a `kind` over the row, from a thread's part of each."""
        lanes = min(32, self.threads)
        found = {name: named(f"{name}_of_warp", self.across(kind, v, lanes)) for name, v in of_thread.items()}
        if self.wide:
            found = self.over_warps(found, first)
            found = {name: named(name, self.across(kind, value, self.shares)) for name, value in found.items()}
        elif first:
            self.behind_first(first)
        return found

    def finished(self, results: Values) -> Values:
        """`results`, what is known of the row, and what is derived of both."""
        derived = {**self.known, **results}
        for name, formula in self.program.derived:
            derived[name] = named(name, formula(derived))
        return derived

    def reduce_gradient(self, row: R) -> Values:
        return self.reduced("sum", self.sums_of_thread(row, {}), row)

    def reduce_in_turn(self, row: R) -> Values:
        results = self.reduced("max", {"peak": self.peak_of_thread(row)}, row)
        return {**results, **self.reduced("sum", self.sums_of_thread(row, results), None)}

    def reduce_online(self, row: R) -> Values:
        """Peaks and sums at once: of threads, of warps, and of the row by one exchange."""
        of_warp = self.merged([self.online_of_thread(row)], 32, "_of_warp")
        return self.merged([self.over_warps(of_warp, row)], self.shares)

    def merged(self, parts: Sequence[Values], lanes: int, of: str = "") -> Values:
        """The reductions over a thread's `parts` and those of as many neighbouring lanes."""
        results: Values = {}
        for step in self.program.reductions:
            share, *others = (step.of_part(part, {**self.known, **results}) for part in parts)
            for other in others:
                share = T.max(share, other) if step.kind == "max" else share + other
            results[step.name] = named(f"{step.name}{of}", self.across(step.kind, share, lanes))
        return results

    def unknown_zero(self) -> Any:
        """0, for `settle`: no number of elements is negative."""
        elements = self.rows * self.problem.cols
        # a variable, or TVM would write what it is at every use
        return Scalar("zero", T.Cast("uint32", T.shift_right(elements, T.int64(63))), "uint32").value

    def settle(self) -> None:
        """Have the compiler widen packed words anew for each use, instead of keeping them widened in twice the
        registers."""
        for name in self.words:
            each = self.words_of(name)
            for k in range(self.first_in_registers * each, self.rounds * each):
                T.buffer_store(self.words[name], T.bitwise_xor(self.words[name][k], self.zero), [k])

    @property
    def leads(self) -> Any:
        """Whether the thread is a row's first."""
        return self.of_row == 0

    def write(self, row: R, results: Values) -> None:
        part("Write the row: packs of the output from what the reductions came to")
        with where(row.own):
            name, of_row = self.problem.row_output, self.program.of_row
            if name is not None and of_row is not None:
                with where(self.leads):
                    T.buffer_store(self.tensors[name], of_row(results), [row.number])
            if self.outputs:
                self.write_packs(row, results)

    def write_packs(self, row: R, results: Values) -> None:
        numerators = self.kept == "numerators"
        for p, i in self.each_pack(row, *self.words, stored=True):
            factor = self.factor(p, results) if numerators else None

            def value(v: int, p: int = p, i: Any = i, factor: Any = factor) -> Any:
                if numerators:
                    return self.numerators[p * self.pack + v] * factor
                return self.program.output(self.columns(row, p, i, v), results)

            words = self.packed("out", [value(v) for v in range(self.pack)])
            self.store(self.outputs[0], row, p, i, words)
            dropped = self.program.dropped
            if dropped is not None:
                per = 4 // self.out_item
                values = [
                    dropped(self.widened(words[v // per], v % per, self.out_dtype), self.element("drop", p, v))
                    for v in range(self.pack)
                ]
                self.store(self.outputs[1], row, p, i, self.packed("dropped", values))

    def factor(self, p: int, results: Values) -> Any:
        """What makes outputs of the numerators of the thread's pack number p."""
        peak = self.peak_of_numerators(p)
        if peak is results["peak"]:
            return results["inverse"]
        part = {"peak": peak, "total": T.float32(1)}
        return named("factor", results["inverse"] * self.program.reductions[-1].of_part(part, results))
