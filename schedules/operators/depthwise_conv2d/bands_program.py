"""The kernel of `bands`: a block's data in, its products, its results out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.definitions.epilogue import unrounded
from schedules.lowering.annotations import TIRX
from schedules.operators.depthwise_conv2d.bands_tile import ITEM, OCTET, POSITIONS, Bands, BandsConfig
from schedules.operators.depthwise_conv2d.definition import DepthwiseProblem
from schedules.steps.story import part
from schedules.steps.tiles import widest_vector
from schedules.tirx.arguments import flattened, matched
from schedules.tirx.types import Buffer, Expr, Index
from schedules.tirx.values import kept, named
from schedules.tirx.words import pack_16, read, widened
from schedules.windows.fetch import clear, put_words
from schedules.windows.geometry import WORD

COPIED = 16  # rows of a column whose copies are written out
IN_FLIGHT = 8  # words that a thread loads before it stores them, where data pass through registers
# zeros where it is not there
_COPY = """
__device__ __forceinline__ void bands_copy_{0}(void* to, const void* from, bool there) {{
  unsigned int at = (unsigned int)__cvta_generic_to_shared(to);
  asm volatile("cp.async.{1}.shared.global [%0], [%1], {0}, %2;" :: "r"(at), "l"(from), "r"(there ? {0} : 0)
    : "memory");
}}
"""
_AGAIN = """
__device__ __forceinline__ float bands_again(const void* window, const void* taps) {{
  float sum = 0.f;
  #pragma unroll 1
  for (int i = 0; i < {taps}; ++i) {{
    unsigned short a = ((const unsigned short*)window)[i / {kw} * {down} + i % {kw} * {right}];
    sum = fmaf({a}, {b}, sum);
  }}
  return sum;
}}
"""
_ELEMENT = """
__device__ __forceinline__ unsigned int bands_element(const void* from, bool there) {
  return there ? *(const unsigned short*)from : 0u;
}
"""
_TAP = """
__device__ __forceinline__ unsigned int bands_tap(const void* from) { return *(const unsigned short*)from; }
"""
_MOVES = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short"}
_MOVE = """
__device__ __forceinline__ void bands_move_{0}(void* to, const void* from) {{ *({1}*)to = *(const {1}*)from; }}
"""
_PUT = """
__device__ __forceinline__ void bands_put_{0}(void* to, unsigned int value) {{ *({1}*)to = ({1})value; }}
"""
_LOAD = {
    4: """
__device__ __forceinline__ void bands_load_4(unsigned int& a, unsigned int& b, unsigned int& c, unsigned int& d,
    const void* from) {
  unsigned int at = (unsigned int)__cvta_generic_to_shared(from);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at));
}
""",
    2: """
__device__ __forceinline__ void bands_load_2(unsigned int& a, unsigned int& b, const void* from) {
  unsigned int at = (unsigned int)__cvta_generic_to_shared(from);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(at));
}
""",
}
_MULTIPLY = {
    2: """
__device__ __forceinline__ void bands_mma_16(float& d0, float& d1, float& d2, float& d3, unsigned int a0,
    unsigned int a1, unsigned int a2, unsigned int a3, unsigned int b0, unsigned int b1) {{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
    "{{%0, %1, %2, %3}};" : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}}
""",
    1: """
__device__ __forceinline__ void bands_mma_8(float& d0, float& d1, float& d2, float& d3, unsigned int a0,
    unsigned int a1, unsigned int b0) {{
  asm("mma.sync.aligned.m16n8k8.row.col.f32.{0}.{0}.f32 {{%0, %1, %2, %3}}, {{%4, %5}}, {{%6}}, {{%0, %1, %2, %3}};"
    : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a0), "r"(a1), "r"(b0));
}}
""",
}
_NAN = """
__device__ __forceinline__ bool bands_nan(float x) { return x != x; }
"""
_KINDS = {"float16": "f16", "bfloat16": "bf16"}
_WIDENED = {
    "float16": "__half2float(__ushort_as_half({}))",
    "bfloat16": "__uint_as_float((unsigned int)({}) << 16)",
}


def _put(nbytes: int, target: Expr, value: Expr) -> None:
    text = _PUT.format(nbytes, _MOVES[nbytes])
    T.evaluate(T.cuda.func_call(f"bands_put_{nbytes}", target, value, source_code=text))


def _move(nbytes: int, target: Expr, source: Expr) -> None:
    text = _MOVE.format(nbytes, _MOVES[nbytes])
    T.evaluate(T.cuda.func_call(f"bands_move_{nbytes}", target, source, source_code=text))


def _element(source: Expr, there: Expr) -> Expr:
    return T.cuda.func_call("bands_element", source, there, source_code=_ELEMENT, return_type="uint32")


def program(problem: DepthwiseProblem, config: BandsConfig) -> tvm.IRModule:
    """The module with one function "main" that takes ``problem.arguments()``."""
    w, ranged = Bands(problem, config), problem.n_from > 0
    names = [argument.name for argument in problem.arguments()]

    # fmt: off
    @T.prim_func
    def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle) -> None:
        n = T.int32()  # images, where the problem leaves them open
        images = T.meta_var(n if ranged else problem.n)
        arguments = T.meta_var(problem.unchecked(n=images).arguments())
        tensors = T.meta_var(matched(arguments, [a, b, c, d, e]))
        T.device_entry()
        part("The launch: blocks, warps and lanes")
        views = T.meta_var(flattened(arguments, tensors))
        high, wide = T.meta_var(w.tiles)
        block = T.cta_id([(images + (config.images - 1)) // config.images * (high * wide)])
        warp = T.warp_id([config.threads // 32])
        lane = T.lane_id([32])
        Kernel(w, views, images, block, warp, lane).emit()
    # fmt: on

    function = tirx.PrimFunc(main.params[: len(names)], main.body, main.ret_type, main.attrs)
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main").with_attr(TIRX, 1)})


class Kernel:
    """The body of the kernel for one thread; its methods emit statements."""

    def __init__(
        self, w: Bands, tensors: dict[str, Buffer], images: Index, block: Expr, warp: Expr, lane: Expr
    ) -> None:
        self.w, self.tensors, self.images = w, tensors, images
        self.warp, self.lane = warp, lane
        (high, wide), c = w.tiles, w.config
        rest = named("rest", T.truncdiv(block, high * wide))
        within = named("within", T.truncmod(block, high * wide))
        last, inner = (wide, T.truncmod(within, wide)) if w.problem.channels_last else (high, T.truncmod(within, high))
        outer = T.truncdiv(within, last)
        y, channel = (outer, inner) if w.problem.channels_last else (inner, outer)
        self.n0 = named("n0", rest * c.images)
        self.y0 = named("y0", y * c.tile_h)
        self.c0 = named("c0", channel * c.channels)
        self.thread = named("thread", warp * 32 + lane)

    def emit(self) -> None:
        w = self.w
        part("Shared memory: data with zeros around them, and results")
        pool = T.SMEMPool()
        self.memory = pool.alloc((w.shared_bytes,), "uint8", align=128)
        pool.commit()
        part("The block's data, on their way into shared memory")
        if w.run > 1:
            self._runs()
        else:
            self._columns_of_data()
            self._clear()
        self._warps()

    # ---- In ----

    def _clear(self) -> None:
        """Zeros at both ends of the rows, where nothing is brought."""
        w, p, threads = self.w, self.w.problem, self.w.config.threads
        pixel = w.config.together
        first, last = w.left * pixel, (w.left + p.w) * pixel
        unit = widest_vector(math.gcd(first, last), OCTET)
        before, each = first // unit, (first + w.pitch - last) // unit
        count = w.config.images * w.groups * w.in_rows * each
        if not count:
            return
        with T.serial(-(-count // threads)) as turn:
            at = named("at", turn * threads + self.thread)
            place, line = T.truncmod(at, each), named("line", T.truncdiv(at, each))
            place = T.Select(place < before, place, place + (last - first) // unit)
            plane, row = T.truncdiv(line, w.in_rows), T.truncmod(line, w.in_rows)
            target = self.memory.ptr_to([(plane * w.plane + row * w.pitch + place * unit) * ITEM])
            with T.If(at < count), T.Then():
                if unit >= 2:
                    put_words(target, [T.uint32(0)] * (unit // 2))
                else:
                    _put(ITEM, target, T.uint32(0))

    def _columns(self, columns: int, rows: int, emit: Callable[[Expr, Expr, Expr, int, int], None]) -> None:
        """Deal `rows` of each of `columns` out to the threads: ``emit(column, its first row, whether it is one, rows
        from one to the next, how many)``; the last of them may be beyond the end."""
        threads = self.w.config.threads
        lanes = max(1, min(rows, threads // columns))
        count = -(-rows // lanes)
        if lanes > 1 or columns <= threads:
            column, first = T.truncmod(self.thread, columns), T.truncdiv(self.thread, columns)
            emit(named("column", column), named("first", first), first < lanes, lanes, count)
            return
        with T.serial(-(-columns // threads)) as turn:
            column = named("column", turn * threads + self.thread)
            emit(column, T.int32(0), column < columns, 1, count)

    def _columns_of_data(self) -> None:
        """Pieces by cp.async, or single elements by way of registers, a column of them at a time."""
        w, p, c = self.w, self.w.problem, self.w.config
        nbytes, top = w.piece * ITEM, self.y0 * p.stride[0] - p.pad[0]
        pieces = p.w if p.channels_last else p.w // w.piece

        def emit(column: Expr, first: Expr, real: Expr, lanes: int, count: int) -> None:
            if p.channels_last:
                group, rest = T.truncmod(column, w.groups), T.truncdiv(column, w.groups)
                x, image = T.truncmod(rest, pieces), T.truncdiv(rest, pieces)
            else:
                x, rest = T.truncmod(column, pieces) * w.piece, T.truncdiv(column, pieces)
                group, image = T.truncmod(rest, w.groups), T.truncdiv(rest, w.groups)
            at = {"n": self.n0 + image, "h": top + first, "w": x, "co": self.c0 + group * c.together}
            y, start, step = kept("y", at["h"]), T.int32(0), 1
            for axis in p.data_axes:
                start = start * p.extents[axis] + at[axis] if axis != "n" else at[axis]
            for axis in p.data_axes[p.data_axes.index("h") + 1 :]:
                step *= p.extents[axis]
            start = kept("start", start)
            own = (image * w.groups + group) * w.plane + first * w.pitch + (w.left + x) * c.together
            own = kept("own", own)
            held = named("held", tirx.all(at["n"] < self.images, at["co"] < p.ci))
            together = COPIED if nbytes >= 4 else IN_FLIGHT

            def some(begin: Index, number: int) -> None:
                values = None if nbytes >= 4 else T.alloc_local((number,), "uint32")
                for stored in (False,) if values is None else (False, True):
                    for i in range(number):
                        row = (begin + i) * lanes
                        there = named("there", tirx.all(held, y + row >= 0, y + row < p.h))
                        source = self.tensors["data"].ptr_to([start + row * step])
                        target = self.memory.ptr_to([(own + row * w.pitch) * ITEM])
                        if values is not None and not stored:
                            T.buffer_store(values, _element(source, there), [i])
                            continue
                        with T.If(tirx.all(real, first + row < w.in_rows)), T.Then():
                            if values is not None:
                                _put(ITEM, target, values[i])
                                continue
                            text = _COPY.format(nbytes, "cg" if nbytes == 16 else "ca")
                            T.evaluate(
                                T.cuda.func_call(f"bands_copy_{nbytes}", target, source, there, source_code=text)
                            )

            if count <= together:
                some(0, count)
            else:
                with T.serial(-(-count // together)) as turn:
                    some(turn * together, together)

        self._columns(c.images * w.groups * pieces, w.in_rows, emit)
        if nbytes >= 4:
            T.evaluate(T.ptx.cp.async_.commit_group())

    def _runs(self) -> None:
        """Whole planes by vectors, which pass through registers and part in shared memory, among zeros."""
        w, p, c = self.w, self.w.problem, self.w.config
        words, threads = w.run // 2, c.threads
        of_image = c.channels * p.h * p.w // w.run
        count = c.images * of_image
        together = min(max(1, IN_FLIGHT // words), -(-count // threads))
        turns = -(-count // (threads * together))

        def zeros() -> None:
            clear(self.memory, range(w.data_elements * ITEM // WORD), self.thread, threads)
            T.evaluate(T.cuda.cta_sync())

        if turns > 1:
            zeros()
        with T.serial(turns) as turn:
            values = T.alloc_local((together * words,), "uint32")
            parts = []
            for k in range(together):
                at = named("at", (turn * together + k) * threads + self.thread)
                element, there = self._of_run(at, of_image)
                there = named("there", tirx.all(at < count, there))
                parts.append((at, there))
                with T.If(there), T.Then():
                    _move(w.run * ITEM, values.ptr_to([k * words]), self.tensors["data"].ptr_to([element]))
            if turns == 1:
                zeros()
            for k, (at, there) in enumerate(parts):
                with T.If(there), T.Then():
                    first = named("first", T.truncmod(at, of_image) * w.run)
                    image = named("image", T.truncdiv(at, of_image))
                    for i in range(w.run):
                        element = named("element", first + i)
                        line, x = named("line", T.truncdiv(element, p.w)), T.truncmod(element, p.w)
                        y, group = T.truncmod(line, p.h), T.truncdiv(line, p.h)
                        own = (image * w.groups + group) * w.plane + (y + p.pad[0]) * w.pitch + w.left + x
                        value = values[k * words + i // 2]
                        value = T.shift_right(value, T.uint32(16)) if i % 2 else value
                        with T.If(y + p.pad[0] < w.in_rows), T.Then():
                            _put(ITEM, self.memory.ptr_to([own * ITEM]), value)

    def _of_run(self, at: Expr, of_image: int) -> tuple[Expr, Expr]:
        """(element in memory, whether it is there) of vector number `at` of the block's planes."""
        w, p, c = self.w, self.w.problem, self.w.config
        image, first = named("image", T.truncdiv(at, of_image)), T.truncmod(at, of_image) * w.run
        element = ((self.n0 + image) * p.ci + self.c0) * (p.h * p.w) + first
        there = [self.n0 + image < self.images]
        if p.ci % c.channels:
            there.append(first < (p.ci - self.c0) * (p.h * p.w))
        return element, tirx.all(*there)

    # ---- Products ----

    def _warps(self) -> None:
        w, c = self.w, self.w.config
        part("A warp's bands: zeros but for the taps of a kernel row")
        bands = self._array("bands", w.problem.kh * w.octets, "uint32")
        sums = self._array("sums", 4 * c.rows, "float32")
        inputs = self._array("inputs", 2 * w.octets, "uint32")
        warp_c = named("warp_c", T.truncmod(self.warp, c.warps_c))
        warp_m = named("warp_m", T.truncdiv(self.warp, c.warps_c))
        rounds, waits = w.groups // c.warps_c, w.run == 1 and w.piece * ITEM >= 4

        def ready() -> None:
            part("Products of windows and bands, when all data are there")
            if waits:
                T.evaluate(T.ptx.cp.async_.wait_group(0))
            T.evaluate(T.cuda.cta_sync())

        if rounds == 1:  # the bands are on their way while data are
            self._bands(bands, warp_c)
            ready()
            self._group(warp_c, warp_m, bands, sums, inputs)
        else:
            ready()
            with T.serial(rounds) as turn:
                group = named("group", turn * c.warps_c + warp_c)
                self._bands(bands, group)
                self._group(group, warp_m, bands, sums, inputs)
        part("Results, when all are there, as vectors")
        T.evaluate(T.cuda.cta_sync())
        self._store()

    @staticmethod
    def _array(name: str, count: int, dtype: str) -> Buffer:
        array = T.alloc_local((count,), dtype)
        IRBuilder.name(name, array)
        return array

    def _bands(self, bands: Buffer, group: Expr) -> None:
        """The lane's words of the bands of a group: of column lane / 4 the rows 2 * (lane % 4) and the next of each
        octet."""
        w, p, b = self.w, self.w.problem, self.w.config.together
        column, quad = named("column", T.truncdiv(self.lane, 4)), named("quad", T.truncmod(self.lane, 4))
        own, x = named("own", T.truncmod(column, b)), named("x", T.truncdiv(column, b))
        channel = named("channel", tirx.min(self.c0 + group * b + own, p.ci - 1))
        base = named("base", channel * (p.kh * p.kw))
        for octet in range(w.octets):
            taps = []  # (element of the filter's first row, bits that are kept of it where it is in a word) of a half
            for half in range(2):
                k = octet * OCTET + quad * 2 + half
                far = named("far", T.truncdiv(k, b) - (w.lead + x * p.stride[1]))
                tap = T.truncdiv(far, p.dilation[1])
                tests = [far >= 0, tap < p.kw]
                if p.dilation[1] > 1:
                    tests.append(T.truncmod(far, p.dilation[1]) == 0)
                if b > 1:
                    tests.append(T.truncmod(k, b) == own)
                mask = T.Select(tirx.all(*tests), T.uint32(0xFFFF << 16 * half), T.uint32(0))
                taps.append((base + tirx.max(0, tirx.min(tap, p.kw - 1)), mask))
            (low, low_mask), (high, high_mask) = taps
            if b > 1:  # a lane's two rows are neighbouring channels of one pixel, of which one at most is its own
                taps = [(low, T.bitwise_or(low_mask, high_mask))]
            taps = [(kept("tap", at), named("mask", mask)) for at, mask in taps]
            for ry in range(p.kh):
                word = T.uint32(0)
                for half, (at, mask) in enumerate(taps):
                    source = self.tensors["filter"].ptr_to([at + ry * p.kw])
                    value = T.cuda.func_call("bands_tap", source, source_code=_TAP, return_type="uint32")
                    if b > 1:
                        value = T.bitwise_or(value, T.shift_left(value, T.uint32(16)))
                    elif half:
                        value = T.shift_left(value, T.uint32(16))
                    word = T.bitwise_or(word, T.bitwise_and(value, mask))
                T.buffer_store(bands, word, [ry * w.octets + octet])

    def _position(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """(image, row, column) of a position of a group: rows and columns counted in positions."""
        w = self.w
        x, rest = T.truncmod(number, w.positions_x), T.truncdiv(number, w.positions_x)
        return T.truncdiv(rest, w.positions_y), T.truncmod(rest, w.positions_y), x

    def _group(self, group: Expr, warp_m: Expr, bands: Buffer, sums: Buffer, inputs: Buffer) -> None:
        w, c = self.w, self.w.config
        turns = -(-w.fragments // c.warps_m)
        with T.serial(turns) as turn:
            number = named("fragment", turn * c.warps_m + warp_m)

            def emit() -> None:
                self._fragment(group, number, bands, sums, inputs)

            if w.fragments % c.warps_m:
                with T.If(number < w.fragments), T.Then():
                    emit()
            else:
                emit()

    def _fragment(self, group: Expr, number: Expr, bands: Buffer, sums: Buffer, inputs: Buffer) -> None:
        w, p, c = self.w, self.w.problem, self.w.config
        own = tirx.min(number * POSITIONS + T.truncmod(self.lane, POSITIONS), w.positions - 1)
        image, y, x = self._position(named("position", own))
        start = (image * w.groups + group) * w.plane + y * (c.rows * p.stride[0] * w.pitch) + x * (OCTET * p.stride[1])
        start = named("start", (start + T.truncdiv(self.lane, POSITIONS) * OCTET) * ITEM)
        for i in range(4 * c.rows):
            T.buffer_store(sums, T.float32(0), [i])
        for row in range(p.under(c.rows, 1)[0]):
            users = [
                (t, ry) for t in range(c.rows) for ry in range(p.kh) if t * p.stride[0] + ry * p.dilation[0] == row
            ]
            if users:
                self._row(start + row * w.pitch * ITEM, users, bands, sums, inputs)
        self._finish(group, number, sums)

    def _row(self, start: Expr, users: list[tuple[int, int]], bands: Buffer, sums: Buffer, inputs: Buffer) -> None:
        """Multiply a row of inputs by all kernel rows that meet it: pairs of output row and kernel row."""
        w = self.w
        for octet in range(0, w.octets, 2):
            both = min(2, w.octets - octet)
            words = [inputs[2 * octet + i] for i in range(2 * both)]
            at = self.memory.ptr_to([start + octet * OCTET * ITEM])
            name = f"bands_load_{2 * both}"
            T.evaluate(T.cuda.func_call(name, *words, at, source_code=_LOAD[2 * both]))
            for t, ry in users:
                own = [sums[4 * t + i] for i in range(4)]
                band = [bands[ry * w.octets + octet + i] for i in range(both)]
                text = _MULTIPLY[both].format(_KINDS[w.problem.dtype])
                T.evaluate(T.cuda.func_call(f"bands_mma_{8 * both}", *own, *words, *band, source_code=text))

    def _finish(self, group: Expr, number: Expr, sums: Buffer) -> None:
        """A lane's results to shared memory: of positions lane / 4 and eight further, two columns of each."""
        w, p, rows = self.w, self.w.problem, self.w.config.rows
        last = p.channels_last
        paired = w.config.together > 1 if last else p.out_w % 2 == 0  # whether both columns are neighbours in memory
        for half in range(2):
            place = self._place(number, half)
            both = [self._column(group, place, i) for i in range(2)]
            biases = [self._channel_terms(column) for column in both]
            ways = [self._way(place, column) for column in both]
            starts = [kept("result", self._result(place, column)) for column in both]
            for t in range(rows):
                values = [self._finished(sums[4 * t + 2 * half + i], place, both[i], t, biases[i]) for i in range(2)]
                word = named("word", pack_16(p.dtype, *values))
                for i in range(1 if paired else 2):
                    inside = tirx.all(ways[i], place[2] + t < w.out_rows)
                    with T.If(inside), T.Then():
                        target = self.memory.ptr_to([starts[i] + t * w.out_line * ITEM])
                        _put(4 if paired else 2, target, T.shift_right(word, T.uint32(16)) if i else word)

        totals = [sums[i] for i in range(4 * rows)]
        while len(totals) > 1:
            totals = [a + b for a, b in itertools.zip_longest(totals[::2], totals[1::2], fillvalue=T.float32(0))]
        spoilt = T.cuda.func_call("bands_nan", totals[0], source_code=_NAN, return_type="bool")
        with T.If(spoilt), T.Then(), T.serial(4 * rows) as i:
            t, place = T.truncdiv(i, 4), self._place(number, T.truncmod(T.truncdiv(i, 2), 2))
            column = self._column(group, place, T.truncmod(i, 2))
            with T.If(tirx.all(self._way(place, column), place[2] + t < w.out_rows)), T.Then():
                again = named("again", self._again(group, place, column, t))
                value = self._finished(again, place, column, t, self._channel_terms(column))
                target = self.memory.ptr_to([self._result(place, column) + t * (w.out_line * ITEM)])
                _put(ITEM, target, pack_16(p.dtype, value, value))

    def _place(self, number: Expr, half: Index) -> tuple[Expr, Expr, Expr, Expr]:
        """(number, image, row, column) of a position of the lane's results."""
        own = named("position", number * POSITIONS + (T.truncdiv(self.lane, 4) + half * 8))
        image, y, x = self._position(own)
        return own, named("image", image), named("y", y * self.w.config.rows), named("x", x * self.w.across)

    def _column(self, group: Expr, place: tuple[Expr, ...], i: Index) -> tuple[Expr, Expr]:
        """(column of the image, channel of the block) of one of a lane's two results of a position."""
        b, column = self.w.config.together, T.truncmod(self.lane, 4) * 2 + i
        return named("ox", place[3] + T.truncdiv(column, b)), named("oc", group * b + T.truncmod(column, b))

    def _way(self, place: tuple[Expr, ...], column: tuple[Expr, Expr]) -> Expr:
        """Whether a column of results is one."""
        inside = [place[0] < self.w.positions]
        if self.w.problem.out_w % self.w.across:
            inside.append(column[0] < self.w.problem.out_w)
        return named("inside", tirx.all(*inside))

    def _result(self, place: tuple[Expr, ...], column: tuple[Expr, Expr]) -> Expr:
        """The byte of shared memory where the first result of a column goes."""
        w, (_, image, y, _), (x, channel) = self.w, place, column
        element = y * w.out_line + x + channel * (w.out_rows * w.problem.out_w)
        if w.problem.channels_last:
            element = y * w.out_line + x * w.out_pixel + channel
        return (w.data_elements + image * w.out_image + element) * ITEM

    def _channel_terms(self, column: tuple[Expr, Expr]) -> dict[str, Expr]:
        at = tirx.min(self.c0 + column[1], self.w.problem.ci - 1)
        terms = self.w.problem.epilogue.of_axis("channel")
        return {term.name: named(term.name, widened(self.tensors[term.name][at])) for term in terms}

    def _finished(
        self, total: Expr, place: tuple[Expr, ...], column: tuple[Expr, Expr], t: Index, given: dict[str, Expr]
    ) -> Expr:
        """A sum after the epilogue."""
        p, (own, image, y, _), (x, channel) = self.w.problem, place, column
        terms = []
        for term in p.epilogue.terms:
            if term.axis == "channel":
                terms.append(given[term.name])
                continue
            at = {"n": self.n0 + image, "y": self.y0 + y + t, "x": x, "co": self.c0 + channel}
            ends = {"n": self.images, "y": p.out_h, "x": p.out_w, "co": p.ci}
            there = named("there", tirx.all(own < self.w.positions, *(at[axis] < ends[axis] for axis in at)))
            element: Expr = T.int32(0)
            for axis in p.output_axes:
                element = element * ends[axis] + at[axis]
            terms.append(named(term.name, read(self.tensors[term.name], T.Select(there, element, 0), there)))
        return unrounded(p.epilogue, total, terms)

    def _again(self, group: Expr, place: tuple[Expr, ...], column: tuple[Expr, Expr], t: Index) -> Expr:
        """A sum, product by product."""
        w, p, (_, image, y, _), (x, channel) = self.w, self.w.problem, place, column
        b = w.config.together
        text = _AGAIN.format(
            **{"taps": p.kh * p.kw, "kw": p.kw, "down": p.dilation[0] * w.pitch, "right": p.dilation[1] * b},
            a=_WIDENED[p.dtype].format("a"),
            b=_WIDENED[p.dtype].format("((const unsigned short*)taps)[i]"),
        )
        start = (image * w.groups + group) * w.plane + (y + t) * (p.stride[0] * w.pitch)
        start = start + (x * p.stride[1] + w.lead) * b + (channel - group * b)
        taps = self.tensors["filter"].ptr_to([tirx.min(self.c0 + channel, p.ci - 1) * (p.kh * p.kw)])
        at = self.memory.ptr_to([start * ITEM])
        return T.cuda.func_call("bands_again", at, taps, source_code=text, return_type="float32")

    # ---- Out ----

    def _store(self) -> None:
        w, p, c = self.w, self.w.problem, self.w.config
        v, pixels = w.stored, w.out_rows * p.out_w

        def move(own: Expr, element: Expr, *there: Expr) -> None:
            with T.If(tirx.all(*there)), T.Then():
                source = self.memory.ptr_to([(w.data_elements + own) * ITEM])
                _move(v * ITEM, self.tensors["output"].ptr_to([element]), source)

        def emit(column: Expr, first: Expr, real: Expr, lanes: int, count: int) -> None:
            parts = c.channels // v
            channel, rest = T.truncmod(column, parts) * v, T.truncdiv(column, parts)
            x, image = T.truncmod(rest, p.out_w), T.truncdiv(rest, p.out_w)
            own = kept("own", image * w.out_image + first * w.out_line + x * w.out_pixel + channel)
            line = (self.n0 + image) * p.out_h + self.y0 + first
            start = kept("start", (line * p.out_w + x) * p.ci + self.c0 + channel)
            rows = kept("rows", tirx.min(p.out_h - self.y0, w.out_rows) - first)
            held = named("held", tirx.all(real, self.n0 + image < self.images, self.c0 + channel < p.ci))
            for i in range(count):
                row = i * lanes
                move(own + row * w.out_line, start + row * (p.out_w * p.ci), held, rows > row)

        if p.channels_last:
            self._columns(c.images * p.out_w * c.channels // v, w.out_rows, emit)
            return
        count = c.images * pixels * c.channels // v
        with T.serial(-(-count // c.threads)) as turn:
            at = named("at", turn * c.threads + self.thread)
            # planes follow each other in memory if they are whole, else parts of them lie apart
            length = pixels * (c.channels if w.whole else 1)
            run, inner = named("run", T.truncdiv(at, length // v)), named("inner", T.truncmod(at, length // v) * v)
            if w.whole:
                image, own = run, run * w.out_image + inner
                element = ((self.n0 + image) * p.ci + self.c0) * pixels + inner
                there = [inner < (p.ci - self.c0) * pixels]
            else:
                image, channel = T.truncdiv(run, c.channels), T.truncmod(run, c.channels)
                own = image * w.out_image + channel * pixels + inner
                plane = (self.n0 + image) * p.ci + self.c0 + channel
                element = (plane * p.out_h + self.y0) * p.out_w + inner
                there = [inner < (p.out_h - self.y0) * p.out_w, self.c0 + channel < p.ci]
            move(own, element, at < count, self.n0 + image < self.images, *there)
