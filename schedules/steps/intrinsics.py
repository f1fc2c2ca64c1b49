"""Tensor intrinsics: matrix products and fragment loads of NVIDIA's and AMD's matrix cores.

Each has a description (the loops it stands for) and an implementation; `tensorize` puts one in place of a block's
loops.  Fragments are buffers of scope "local" whose last axes are (lane, slot); see `steps.fragments`.

How to use, for a product of block ``gemm`` with operands in shared memory::

    atom = atom_for("float16", arch)
    a, b = (sch.cache_read(gemm, i, "local") for i in (0, 1))            # after the shared stages
    sch.transform_layout(a, ("write", 0), lambda m, k: [m // atom.m, k // atom.k, *atom.a(m % atom.m, k % atom.k)])
    sch.transform_layout(b, ("write", 0), lambda n, k: [n // atom.n, k // atom.k, *atom.b(n % atom.n, k % atom.k)])
    sch.transform_layout(gemm, ("write", 0), lambda m, n: [m // atom.m, n // atom.n, *atom.c(m % atom.m, n % atom.n)])
    per_lane(sch, a); per_lane(sch, b); per_lane(sch, gemm)
    ...                                                                  # a: (.., 16 rows, k); gemm: (.., m, n, k)
    tensorize(sch, row_loop_of_a, load_matrix(atom, "a", "shared.dyn"))
    tensorize(sch, m_loop_of_gemm, multiply(atom, arch))

A stage of shared memory that ldmatrix reads holds rows of 16-byte multiples; annotated with SWIZZLE, it is read and
written without bank conflicts.  `schedules.steps.tensor_core.schedule_product` does all of this.

Importing TVM's own collection of intrinsics takes ten seconds, hence this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from schedules.core.arch import Arch
from schedules.core.tvm import LoopRV, PrimFunc, SBlockRV, Schedule, T
from schedules.lowering.annotations import LANE_AXIS, PER_THREAD, PREFIX
from schedules.steps.fragments import Atom
from schedules.steps.tiles import widest

_described: ContextVar[bool] = ContextVar("described", default=False)


@dataclass(frozen=True)
class Intrinsic:
    """A registered tensor intrinsic."""

    name: str
    description: PrimFunc
    implementation: PrimFunc


_made: dict[str, Intrinsic] = {}


def _register(name: str, description: PrimFunc, implementation: PrimFunc) -> Intrinsic:
    from tvm.s_tir import TensorIntrin

    TensorIntrin.register(name, description, implementation, override=True)
    _made[name] = Intrinsic(name, description, implementation)
    return _made[name]


def register_once(name: str, make: Callable[[], tuple[PrimFunc, PrimFunc]]) -> Intrinsic:
    """The intrinsic called `name`, whose description and implementation `make` gives the first time."""
    return _made[name] if name in _made else _register(name, *make())


@contextlib.contextmanager
def as_described() -> Iterator[None]:
    """Within this, `tensorize` only checks that the description fits and leaves the loops, which any target can run."""
    token = _described.set(True)
    try:
        yield
    finally:
        _described.reset(token)


def described() -> bool:
    """Whether this runs within `as_described`."""
    return _described.get()


def tensorize(sch: Schedule, loop: LoopRV | SBlockRV, intrinsic: Intrinsic) -> None:
    """Put `intrinsic` in place of `loop` and what is in it.  Raises TVM's ScheduleError if its description differs."""
    if described():
        trial = sch.copy()
        trial.tensorize(loop, intrinsic.name)
    else:
        sch.tensorize(loop, intrinsic.name)


def per_lane(sch: Schedule, block: SBlockRV, *others: int) -> None:
    """Declare that the buffer which `block` writes ends in (lane, slot), and that a thread only touches its own lane.

    `others` are further axes, counted from the end, of which a thread touches one index: those of its warp.
    """
    sch.annotate(block, PER_THREAD, [LANE_AXIS, *others])


# ---- matrix products ----

_PTX_TYPE = {"float16": "f16", "bfloat16": "bf16", "int8": "s8", "float32": "f32", "int32": "s32"}


def _mma_source(atom: Atom, arch: Arch) -> tuple[str, str]:
    """Name and text of the CUDA function ``(sums, a, b)`` over one lane's slots."""
    source, total = _PTX_TYPE[atom.source], _PTX_TYPE[atom.sum]
    constraint, ctype = ("r", "int") if atom.sum == "int32" else ("f", "float")
    small = "mma" not in arch.features
    # instructions as (m, n, k, sums, registers of a, registers of b); the small ones cover the same fragments in parts
    parts: list[tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    if not small:
        parts = [(16, 8, atom.k, (0, 1, 2, 3), (0, 1, 2, 3), (0, 1))]
    elif atom.source == "int8":
        parts = [(8, 8, 16, (2 * h, 2 * h + 1), (2 * k + h,), (k,)) for k in (0, 1) for h in (0, 1)]
    else:
        parts = [(16, 8, 8, (0, 1, 2, 3), (2 * k, 2 * k + 1), (k,)) for k in (0, 1)]
    lines = []
    for m, n, k, sums, a, b in parts:
        places = iter(range(len(sums) + len(a) + len(b)))
        c_text, a_text, b_text = (", ".join(f"%{next(places)}" for _ in group) for group in (sums, a, b))
        outputs = ", ".join(f'"+{constraint}"(c[{i}])' for i in sums)
        inputs = ", ".join([*(f'"r"(a[{i}])' for i in a), *(f'"r"(b[{i}])' for i in b)])
        lines.append(
            f'  asm("mma.sync.aligned.m{m}n{n}k{k}.row.col.{total}.{source}.{source}.{total} "\n'
            f'               "{{{c_text}}}, {{{a_text}}}, {{{b_text}}}, {{{c_text}}};\\n"\n'
            f"               : {outputs}\n               : {inputs});"
        )
    name = f"mma_{source}" + ("_small" if small else "")
    body = "\n".join(lines)
    return name, (
        f"__device__ __forceinline__ void {name}({ctype}* c, const void* a_slots, const void* b_slots) {{\n"
        "  const unsigned* a = (const unsigned*)a_slots;\n  const unsigned* b = (const unsigned*)b_slots;\n"
        f"{body}\n}}\n"
    )


def multiply(atom: Atom, arch: Arch) -> Intrinsic:
    """c (m, n) += a (m, k) x b (n, k), all three in fragments: `mma.sync`, `v_mfma` or `v_wmma`."""
    if not atom.ldmatrix:
        name = f"{PREFIX}{atom.instruction}_{atom.holders}"
        return register_once(name, lambda: (_describe_multiply(atom), _implement_matrix(atom)))
    function, source = _mma_source(atom, arch)
    return register_once(
        f"{PREFIX}{function}", lambda: (_describe_multiply(atom), _implement_mma(atom, function, source))
    )


def _describe_multiply(atom: Atom) -> PrimFunc:
    wave, holders, (slots_a, slots_b, slots_c) = atom.wave, atom.holders, atom.slots

    @T.prim_func(s_tir=True)
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (holders, slots_a), atom.source, offset_factor=1, scope="local")
        B = T.match_buffer(b, (holders, slots_b), atom.source, offset_factor=1, scope="local")
        C = T.match_buffer(c, (wave, slots_c), atom.sum, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:wave, 0:slots_c], A[0:holders, 0:slots_a], B[0:holders, 0:slots_b])
            T.writes(C[0:wave, 0:slots_c])
            for i, j, k in T.grid(atom.m, atom.n, atom.k):
                with T.sblock("update"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    lane_c, slot_c = T.meta_var(atom.c(vi, vj))
                    lane_a, slot_a = T.meta_var(atom.a(vi, vk))
                    lane_b, slot_b = T.meta_var(atom.b(vj, vk))
                    T.reads(C[lane_c, slot_c], A[lane_a, slot_a], B[lane_b, slot_b])
                    T.writes(C[lane_c, slot_c])
                    C[lane_c, slot_c] = C[lane_c, slot_c] + T.Cast(atom.sum, A[lane_a, slot_a]) * T.Cast(
                        atom.sum, B[lane_b, slot_b]
                    )

    return description


def _implement_mma(atom: Atom, function: str, source: str) -> PrimFunc:
    wave, (slots_a, slots_b, slots_c) = atom.wave, atom.slots

    @T.prim_func(s_tir=True)
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (wave, slots_a), atom.source, offset_factor=1, scope="local")
        B = T.match_buffer(b, (wave, slots_b), atom.source, offset_factor=1, scope="local")
        C = T.match_buffer(c, (wave, slots_c), atom.sum, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:wave, 0:slots_c], A[0:wave, 0:slots_a], B[0:wave, 0:slots_b])
            T.writes(C[0:wave, 0:slots_c])
            for lane in T.thread_binding(0, wave, "threadIdx.x"):
                T.evaluate(
                    T.cuda.func_call(
                        function,
                        T.address_of(C[lane, 0]),
                        T.address_of(A[lane, 0]),
                        T.address_of(B[lane, 0]),
                        source_code=source,
                    )
                )

    return implementation


def _mma_split_source(atom: Atom, arch: Arch) -> tuple[str, str]:
    """Name and text of the CUDA function ``(sums, a_high, a_low, b_high, b_low)`` over one lane's slots."""
    function, product = _mma_source(atom, arch)
    name = f"{function}_split"
    # the smaller products first: less of them is cut off
    return name, product + (
        f"__device__ __forceinline__ void {name}(float* c, const void* a_high, const void* a_low, "
        "const void* b_high, const void* b_low) {\n"
        f"  {function}(c, a_low, b_high);\n"
        f"  {function}(c, a_high, b_low);\n"
        f"  {function}(c, a_high, b_high);\n}}\n"
    )


def multiply_split(atom: Atom, arch: Arch) -> Intrinsic:
    """c (m, n) += a_high x b_high + a_high x b_low + a_low x b_high, for operands (m, k) and (n, k) split in two parts;
    all in fragments, on NVIDIA's tensor cores.

    The block reads c, a_high, b_high, b_low, a_low, in this order.  Tensor cores cut sums off towards zero: c should be
    a short sum (`annotations.TILE_SUMS`).  Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor
    Cores while surpassing the FP32 theoretical peak performance" (2022).
    """
    if not atom.ldmatrix or atom.sum != "float32":
        raise ValueError(f"no split product of {atom.name}")
    function, source = _mma_split_source(atom, arch)
    name = f"{PREFIX}{function}"
    if name in _made:
        return _made[name]
    wave, (slots_a, slots_b, slots_c) = atom.wave, atom.slots

    @T.prim_func(s_tir=True)
    def description(a: T.handle, b: T.handle, b_low: T.handle, a_low: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (wave, slots_a), atom.source, offset_factor=1, scope="local")
        B = T.match_buffer(b, (wave, slots_b), atom.source, offset_factor=1, scope="local")
        BL = T.match_buffer(b_low, (wave, slots_b), atom.source, offset_factor=1, scope="local")
        AL = T.match_buffer(a_low, (wave, slots_a), atom.source, offset_factor=1, scope="local")
        C = T.match_buffer(c, (wave, slots_c), atom.sum, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(
                C[0:wave, 0:slots_c],
                A[0:wave, 0:slots_a],
                B[0:wave, 0:slots_b],
                BL[0:wave, 0:slots_b],
                AL[0:wave, 0:slots_a],
            )
            T.writes(C[0:wave, 0:slots_c])
            for i, j, k in T.grid(atom.m, atom.n, atom.k):
                with T.sblock("update"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    lane_c, slot_c = T.meta_var(atom.c(vi, vj))
                    lane_a, slot_a = T.meta_var(atom.a(vi, vk))
                    lane_b, slot_b = T.meta_var(atom.b(vj, vk))
                    T.reads(
                        C[lane_c, slot_c],
                        A[lane_a, slot_a],
                        B[lane_b, slot_b],
                        BL[lane_b, slot_b],
                        AL[lane_a, slot_a],
                    )
                    T.writes(C[lane_c, slot_c])
                    C[lane_c, slot_c] = C[lane_c, slot_c] + (
                        T.Cast(atom.sum, A[lane_a, slot_a]) * T.Cast(atom.sum, B[lane_b, slot_b])
                        + T.Cast(atom.sum, A[lane_a, slot_a]) * T.Cast(atom.sum, BL[lane_b, slot_b])
                        + T.Cast(atom.sum, AL[lane_a, slot_a]) * T.Cast(atom.sum, B[lane_b, slot_b])
                    )

    @T.prim_func(s_tir=True)
    def implementation(a: T.handle, b: T.handle, b_low: T.handle, a_low: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (wave, slots_a), atom.source, offset_factor=1, scope="local")
        B = T.match_buffer(b, (wave, slots_b), atom.source, offset_factor=1, scope="local")
        BL = T.match_buffer(b_low, (wave, slots_b), atom.source, offset_factor=1, scope="local")
        AL = T.match_buffer(a_low, (wave, slots_a), atom.source, offset_factor=1, scope="local")
        C = T.match_buffer(c, (wave, slots_c), atom.sum, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(
                C[0:wave, 0:slots_c],
                A[0:wave, 0:slots_a],
                B[0:wave, 0:slots_b],
                BL[0:wave, 0:slots_b],
                AL[0:wave, 0:slots_a],
            )
            T.writes(C[0:wave, 0:slots_c])
            for lane in T.thread_binding(0, wave, "threadIdx.x"):
                T.evaluate(
                    T.cuda.func_call(
                        function,
                        T.address_of(C[lane, 0]),
                        T.address_of(A[lane, 0]),
                        T.address_of(AL[lane, 0]),
                        T.address_of(B[lane, 0]),
                        T.address_of(BL[lane, 0]),
                        source_code=source,
                    )
                )

    return _register(name, description, implementation)


def _implement_matrix(atom: Atom) -> PrimFunc:
    wave, holders, (slots_a, slots_b, slots_c) = atom.wave, atom.holders, atom.slots
    width, total = slots_a // atom.parts, f"{atom.sum}x{slots_c}"

    def operand(value: Any) -> Any:
        return T.reinterpret(atom.packed, value) if atom.packed else value

    def instruction(a: Any, b: Any, c: Any) -> Any:
        if not atom.instruction.startswith("llvm."):
            return T.call_extern(total, atom.instruction, a, b, c)
        if "mfma" in atom.instruction:
            operands = [a, b, c, T.int32(0), T.int32(0), T.int32(0)]
        elif atom.sum == "int32":  # both operands are signed; sums are not clamped
            operands = [T.bool(True), a, T.bool(True), b, c, T.bool(False)]
        else:
            operands = [a, b, c]
        return T.call_llvm_pure_intrin(T.llvm_lookup_intrinsic_id(atom.instruction), *operands, dtype=total)

    def part(number: Any) -> Any:
        return T.ramp(number * width, 1, width) if width > 1 else number

    @T.prim_func(s_tir=True)
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (holders, slots_a), atom.source, offset_factor=1, scope="local")
        B = T.match_buffer(b, (holders, slots_b), atom.source, offset_factor=1, scope="local")
        C = T.match_buffer(c, (wave, slots_c), atom.sum, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:wave, 0:slots_c], A[0:holders, 0:slots_a], B[0:holders, 0:slots_b])
            T.writes(C[0:wave, 0:slots_c])
            for lane in T.thread_binding(0, wave, "threadIdx.x"):
                for number in T.unroll(atom.parts):
                    C[lane, T.ramp(0, 1, slots_c)] = instruction(
                        operand(A[lane % holders, part(number)]),
                        operand(B[lane % holders, part(number)]),
                        C[lane, T.ramp(0, 1, slots_c)],
                    )

    return implementation


# ---- fragment loads ----


def _ldmatrix_source(count: int, transposed: bool) -> tuple[str, str]:
    """Name and text of the CUDA function ``(slots, row)``: `row` is the 16-byte row this lane points at."""
    name = f"ldmatrix_x{count}" + ("_trans" if transposed else "")
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"=r"(to[{i}])' for i in range(count))
    return name, (
        f"__device__ __forceinline__ void {name}(void* slots, const void* row) {{\n"
        "  unsigned* to = (unsigned*)slots;\n"
        "  unsigned from = (unsigned)__cvta_generic_to_shared(row);\n"
        f'  asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{".trans" if transposed else ""}.shared.b16 "\n'
        f'               "{{{registers}}}, [%{count}];\\n" : {outputs} : "r"(from));\n}}\n'
    )


def load_doubled(atom: Atom, scope: str, *, transposed: bool = False) -> Intrinsic:
    """An operand's 16 rows of k from shared memory (`scope`) into both halves of a wave, by a stage over (rows, k), or
    over (k, rows) if `transposed`."""
    rows, slots, wave = atom.holders, atom.slots[0], atom.wave
    vector = min(slots, widest(atom.source))
    extents = (slots, rows) if transposed else (rows, slots)

    def make() -> tuple[PrimFunc, PrimFunc]:
        @T.prim_func(s_tir=True)
        def description(shared: T.handle, fragment: T.handle) -> None:
            S = T.match_buffer(shared, (rows, slots), atom.source, offset_factor=1, scope=scope)
            F = T.match_buffer(fragment, (rows, slots), atom.source, offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(S[0:rows, 0:slots])
                T.writes(F[0:rows, 0:slots])
                for x, y in T.grid(*extents):
                    with T.sblock("load"):
                        vx, vy = T.axis.remap("SS", [x, y])
                        row, k = T.meta_var((vy, vx) if transposed else (vx, vy))
                        T.reads(S[row, k])
                        T.writes(F[row, k])
                        F[row, k] = S[row, k]

        @T.prim_func(s_tir=True)
        def implementation(shared: T.handle, fragment: T.handle) -> None:
            s0, s1 = T.int32(), T.int32()
            S = T.match_buffer(shared, (rows, slots), atom.source, offset_factor=1, scope=scope, strides=[s0, s1])
            F = T.match_buffer(fragment, (rows, slots), atom.source, offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(S[0:rows, 0:slots])
                T.writes(F[0:rows, 0:slots])
                T.sblock_attr({PER_THREAD: [LANE_AXIS]})
                for lane in T.thread_binding(0, wave, "threadIdx.x"):
                    for part in T.unroll(slots // vector):
                        for element in T.vectorized(vector):
                            F[lane % rows, part * vector + element] = S[lane % rows, part * vector + element]

        return description, implementation

    return register_once(f"{PREFIX}load_doubled_{atom.source}_{scope}{'_trans' if transposed else ''}", make)


def load_matrix(atom: Atom, operand: str, scope: str, *, rows: int = 16, transposed: bool = False) -> Intrinsic:
    """`ldmatrix` of `rows` rows of operand "a" or "b" from shared memory (`scope` "shared" or "shared.dyn").

    "a": 16 rows, x4.  "b": 16 rows into the fragments of two products, x4, or 8 rows into one, x2.  Shared memory holds
    (rows, k), or (k, rows) if `transposed`, which only 16-bit dtypes allow.  The fragment is (lane, slot) for "a" and
    (rows / n, lane, slot) for "b".
    """
    count = 4 if rows == 16 else 2
    name = f"{PREFIX}ldmatrix_x{count}_{atom.source}_{operand}_{scope}" + ("_trans" if transposed else "")
    if name in _made:
        return _made[name]
    if not atom.ldmatrix or (operand, rows) not in (("a", 16), ("b", 16), ("b", 8)):
        raise ValueError(f"no ldmatrix of {rows} rows of {operand} for {atom.name}")
    if transposed and atom.word != 2:
        raise ValueError(f"ldmatrix transposes 16-bit elements, not {atom.source}")
    function, source = _ldmatrix_source(count, transposed)
    tiles = 1 if operand == "a" else rows // atom.n
    slots = atom.slots[0] if operand == "a" else atom.slots[1]
    shape = (atom.k, rows) if transposed else (rows, atom.k)
    half = atom.k // 2  # elements of a 16-byte row

    def place(row: Any, k: Any) -> tuple[Any, ...]:
        lane, slot = atom.a(row, k) if operand == "a" else atom.b(row % atom.n, k)
        return (0 if tiles == 1 else row // atom.n), lane, slot

    def pointed(lane: Any) -> tuple[Any, Any]:
        """The (row, k) of the element where the row that `lane` points at begins."""
        if operand == "a" and not transposed:
            return lane % 16, lane // 16 * half
        if operand == "a":
            return lane % 16 // 8 * 8, lane // 16 * 8 + lane % 8
        if not transposed:
            return (lane // 16 * 8 if rows == 16 else 0) + lane % 8, lane % 16 // 8 * half
        return (lane // 16 * 8 if rows == 16 else 0), lane % 16

    @T.prim_func(s_tir=True)
    def description(shared: T.handle, fragment: T.handle) -> None:
        S = T.match_buffer(shared, shape, atom.source, offset_factor=1, scope=scope)
        F = T.match_buffer(fragment, (tiles, 32, slots), atom.source, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(S[0 : shape[0], 0 : shape[1]])
            T.writes(F[0:tiles, 0:32, 0:slots])
            for x, y in T.grid(shape[0], shape[1]):
                with T.sblock("load"):
                    vx, vy = T.axis.remap("SS", [x, y])
                    tile, lane, slot = T.meta_var(place(vy, vx) if transposed else place(vx, vy))
                    T.reads(S[vx, vy])
                    T.writes(F[tile, lane, slot])
                    F[tile, lane, slot] = S[vx, vy]

    @T.prim_func(s_tir=True)
    def implementation(shared: T.handle, fragment: T.handle) -> None:
        s0, s1 = T.int32(), T.int32()
        S = T.match_buffer(shared, shape, atom.source, offset_factor=1, scope=scope, strides=[s0, s1])
        F = T.match_buffer(fragment, (tiles, 32, slots), atom.source, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(S[0 : shape[0], 0 : shape[1]])
            T.writes(F[0:tiles, 0:32, 0:slots])
            T.sblock_attr({PER_THREAD: [LANE_AXIS]})
            for lane in T.thread_binding(0, 32, "threadIdx.x"):
                row, k = T.meta_var(pointed(lane))
                x, y = T.meta_var((k, row) if transposed else (row, k))
                T.evaluate(
                    T.cuda.func_call(function, T.address_of(F[0, lane, 0]), T.address_of(S[x, y]), source_code=source)
                )

    return _register(name, description, implementation)
