"""Intrinsics of AMD GPUs by hand-written kernels; what they should do is from LLVM's "User Guide for AMDGPU Backend"
and AMD's ISA documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from schedules.check.emulate import EmulationMode, Emulator
from schedules.check.emulate.amdgcn import translate_ir
from schedules.core.errors import EmulationError

LANES = np.arange(64)
ORDERS = [EmulationMode(order=order) for order in ("forward", "reverse", "strided")]  # type: ignore[arg-type]
PLACE = "i32 @llvm.amdgcn.workitem.id.x()"


def declarations(body: str) -> str:
    """Of the intrinsics that a body calls."""
    found = {}
    for result, name, arguments in re.findall(r"call (.+?) (@llvm\.amdgcn\.[\w.]+)\((.*)\)", body):
        types = re.findall(r"(?:^|, )(<[^>]*>|ptr addrspace\(\d\)|\w+) ", arguments)
        found[name] = f"declare {result} {name}({', '.join(types)})"
    return "\n".join(found.values())


def kernel(body: str, before: str = "") -> str:
    """A kernel of lines that know %lane, %v (= 100 + lane) and %out."""
    body = f"  %lane = call {PLACE}\n  %v = add i32 %lane, 100\n{body}\n  ret void\n"
    return f"{before}\ndefine amdgpu_kernel void @k(ptr addrspace(1) %out) #0 {{\n{body}}}\n{declarations(body)}\n"


def stored(value: str, index: int = 0, lane: str = "%lane") -> str:
    return (
        f"  %to{index} = getelementptr [64 x i32], ptr addrspace(1) %out, i32 {index}, i32 {lane}\n"
        f"  store i32 {value}, ptr addrspace(1) %to{index}"
    )


def launch(
    emulator: Emulator, source: str, size: int, threads: int = 64, wave: int = 64, mode: EmulationMode = ORDERS[0]
) -> np.ndarray:
    gpu = {"kind": "rocm", "wave": wave, "mode": mode}
    return emulator.launch(source, "k", (1, 1, 1), (threads, 1, 1), [np.full(size, -7, "int32")], [0], **gpu)[0]


def on_wave(emulator: Emulator, calls: Sequence[str], before: str = "", mode: EmulationMode = ORDERS[0]) -> np.ndarray:
    """What each of the calls gives each lane, all in one kernel."""
    lines = [before]
    for index, call in enumerate(calls):
        lines += [f"  %r{index} = call i32 @llvm.amdgcn.{call}", stored(f"%r{index}", index)]
    return launch(emulator, kernel("\n".join(lines)), 64 * len(calls), mode=mode).reshape(-1, 64)


PRIMITIVES: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # the lane that is read, -1 for none
    0b00_01_10_11: lambda lane: lane // 4 * 4 + 3 - lane % 4,  # quad_perm
    0x101: lambda lane: np.where(lane % 16 < 15, lane + 1, -1),  # row_shl
    0x118: lambda lane: np.where(lane % 16 >= 8, lane - 8, -1),  # row_shr
    0x124: lambda lane: lane // 16 * 16 + (lane - 4) % 16,  # row_ror
    0x130: lambda lane: np.where(lane < 63, lane + 1, -1),  # wave_shl
    0x138: lambda lane: lane - 1,  # wave_shr
    0x13C: lambda lane: (lane - 1) % 64,  # wave_ror
    0x140: lambda lane: lane ^ 15,  # row_mirror
    0x141: lambda lane: lane ^ 7,  # row_half_mirror
    0x142: lambda lane: lane // 16 * 16 - 1,  # row_bcast:15
    0x143: lambda lane: np.where(lane >= 32, 31, -1),  # row_bcast:31
    0x155: lambda lane: lane // 16 * 16 + 5,  # row_share
    0x161: lambda lane: lane ^ 1,  # row_xmask
}


@pytest.mark.parametrize("mode", ORDERS, ids=lambda mode: mode.order)
def test_data_parallel_primitives(emulator: Emulator, mode: EmulationMode) -> None:
    calls = [
        f"update.dpp.i32(i32 -5, i32 %v, i32 {control}, i32 15, i32 15, i1 {bound})"
        for control in PRIMITIVES
        for bound in ("false", "true")
    ]
    calls += ["update.dpp.i32(i32 -5, i32 %v, i32 321, i32 10, i32 3, i1 true)"]  # rows 1 and 3, banks 0 and 1
    found = on_wave(emulator, calls, mode=mode)
    for number, source in enumerate(PRIMITIVES.values()):
        lanes = source(LANES)
        assert (found[2 * number] == np.where(lanes < 0, -5, 100 + lanes)).all()
        assert (found[2 * number + 1] == np.where(lanes < 0, 0, 100 + lanes)).all()
    taken = (LANES // 16 % 2 == 1) & (LANES % 16 < 8)
    assert (found[-1] == np.where(taken, 100 + (LANES ^ 7), -5)).all()


def test_moves_between_lanes(emulator: Emulator) -> None:
    swap = "  %s = call { i32, i32 } @llvm.amdgcn.permlane32.swap(i32 %v, i32 %lane, i1 false, i1 false)\n"
    swap += "  %s0 = extractvalue { i32, i32 } %s, 0\n  %s1 = extractvalue { i32, i32 } %s, 1\n"
    before = swap + "  %a = mul i32 %lane, 28\n  %odd = trunc i32 %lane to i1"
    found = on_wave(
        emulator,
        [
            "ds.bpermute(i32 %a, i32 %v)",
            "ds.permute(i32 %a, i32 %v)",
            "ds.swizzle(i32 %v, i32 1055)",  # the lane, with bit 0 flipped
            "ds.swizzle(i32 %v, i32 32795)",  # quads in reverse
            "readlane.i32(i32 %v, i32 9)",
            "readfirstlane.i32(i32 %v)",
            "writelane.i32(i32 -1, i32 3, i32 %v)",
            "permlane64.i32(i32 %v)",
            "permlanex16.i32(i32 0, i32 %v, i32 1985229328, i32 -19088744, i1 false, i1 false)",
            "mbcnt.lo(i32 -1, i32 0)",
            "mbcnt.hi(i32 -1, i32 0)",
            "mov.dpp.i32(i32 %s0, i32 228, i32 15, i32 15, i1 true)",
            "mov.dpp.i32(i32 %s1, i32 228, i32 15, i32 15, i1 true)",
        ],
        before,
    )
    pushed = np.zeros(64, int)
    pushed[LANES * 7 % 64] = 100 + LANES
    wanted = [
        100 + LANES * 7 % 64,
        pushed,
        100 + (LANES ^ 1),
        100 + (LANES ^ 3),
        np.full(64, 109),
        np.full(64, 100),
        np.where(LANES == 3, -1, 100 + LANES),
        100 + (LANES ^ 32),
        100 + (LANES ^ 16),
        np.minimum(LANES, 32),
        np.maximum(LANES - 32, 0),
        np.where(LANES < 32, 100 + LANES, LANES - 32),
        np.where(LANES < 32, 132 + LANES, LANES),
    ]
    assert (found == wanted).all(axis=1).all(), np.flatnonzero((found != wanted).any(axis=1))


@pytest.mark.parametrize("mode", ORDERS, ids=lambda mode: mode.order)
def test_lanes_in_a_branch_are_a_part_of_the_wave_until_it_ends(emulator: Emulator, mode: EmulationMode) -> None:
    body = f"""  %c = icmp uge i32 %lane, 40
  br i1 %c, label %in, label %on
in:
  %f = call i32 @llvm.amdgcn.readfirstlane.i32(i32 %v)
  %b = call i64 @llvm.amdgcn.ballot.i64(i1 true)
  %s = lshr i64 %b, 40
  %t = trunc i64 %s to i32
  %n = call i32 @llvm.amdgcn.update.dpp.i32(i32 -5, i32 %v, i32 312, i32 15, i32 15, i1 false)
  br label %on
on:
  %x = phi i32 [ %f, %in ], [ 0, %0 ]
  %y = phi i32 [ %t, %in ], [ 0, %0 ]
  %z = phi i32 [ %n, %in ], [ 0, %0 ]
  %g = call i32 @llvm.amdgcn.readfirstlane.i32(i32 %v)
{stored("%x", 0)}
{stored("%y", 1)}
{stored("%z", 2)}
{stored("%g", 3)}"""
    first, votes, left, whole = launch(emulator, kernel(body), 256, mode=mode).reshape(4, 64)
    assert (first == np.where(LANES >= 40, 140, 0)).all()
    assert (votes == np.where(LANES >= 40, 0xFFFFFF, 0)).all()
    assert (left == np.where(LANES > 40, 99 + LANES, np.where(LANES == 40, -5, 0))).all()
    assert (whole == 100).all()


def test_dot_products(emulator: Emulator) -> None:
    words = "i32 -2130640895, i32 33686018"  # bytes 1, 0, 1, -127 (129) and 2, 2, 2, 2
    found = on_wave(
        emulator,
        [
            f"sdot4({words}, i32 %v, i1 false)",
            f"udot4({words}, i32 %v, i1 false)",
            "sudot4(i1 true, i32 -2130640895, i1 false, i32 -16843010, i32 %v, i1 false)",
            "sdot4(i32 2139062143, i32 2139062143, i32 2147483600, i1 true)",
        ],
    )
    assert (found[0] == 100 + LANES + 2 * (1 + 1 - 127)).all()
    assert (found[1] == 100 + LANES + 2 * (1 + 1 + 129)).all()
    assert (found[2] == 100 + LANES + 254 * (1 + 1 - 127)).all()
    assert (found[3] == 2**31 - 1).all()


def test_dot_products_of_halves_and_bfloats(emulator: Emulator) -> None:
    cases, lines = (("fdot2", "half", 0x40003C00), ("fdot2.f32.bf16", "bfloat", 0x40003F80)), []
    for index, (name, kind, pair) in enumerate(cases):
        lines += [
            f"  %a{index} = bitcast i32 {pair} to <2 x {kind}>",  # 1 and 2
            f"  %s{index} = call float @llvm.amdgcn.{name}("
            f"<2 x {kind}> %a{index}, <2 x {kind}> %a{index}, float 5.0, i1 0)",
            f"  %i{index} = bitcast float %s{index} to i32",
            stored(f"%i{index}", index),
        ]
    assert (launch(emulator, kernel("\n".join(lines)), 128).view("float32") == 10).all()


def test_conversions(emulator: Emulator) -> None:
    """To bfloat16, and from double to half, which few CPUs have instructions for."""
    body = f"""  %f = sitofp i32 %v to float
  %third = fdiv float %f, 3.0
  %b = fptrunc float %third to bfloat
  %wide = fpext bfloat %b to float
  %d = fpext float %third to double
  %h = fptrunc double %d to half
  %tripled = fmul half %h, 3.0
  %back = fpext half %tripled to float
  %x = bitcast float %wide to i32
  %y = bitcast float %back to i32
{stored("%x", 0)}
{stored("%y", 1)}"""
    bfloats, halves = launch(emulator, kernel(body), 128).view("float32").reshape(2, 64)
    third = ((100 + LANES) / 3).astype("float32")
    bits = third.view("uint32").astype("uint64")
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16) << np.uint64(16)
    assert (bfloats.view("uint32") == rounded).all()
    assert (halves == third.astype("float16") * np.float16(3)).all()


# name, wave, element of A and B in NumPy and in IR, sums' type, rows, k, elements of a lane: of A, of sums
MATRICES = [
    ("mfma.f32.16x16x4f32", 64, "float32", "float", "float32", 16, 4, 1, 4),
    ("mfma.f32.16x16x8.xf32", 64, "float32", "float", "float32", 16, 8, 2, 4),
    ("mfma.f32.32x32x4.xf32", 64, "float32", "float", "float32", 32, 4, 2, 16),
    ("mfma.f32.32x32x8f16", 64, "float16", "half", "float32", 32, 8, 4, 16),
    ("mfma.i32.16x16x32.i8", 64, "int8", "i64", "int32", 16, 32, 8, 4),
    ("wmma.f32.16x16x16.f16.v8f32.v16f16", 32, "float16", "half", "float32", 16, 16, 16, 8),
    ("wmma.f32.16x16x16.f16.v8f32.v8f16", 32, "float16", "half", "float32", 16, 16, 8, 8),
]


def layout(name: str, rows: int, elements: int, sums: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row and k of each lane's elements of A (B's column and k are the same), and the row of its sums."""
    wave = 32 if name.startswith("wmma") else 64
    lane, element, number = np.arange(wave)[:, None], np.arange(elements)[None], np.arange(sums)[None]
    row, half = np.broadcast_to(lane % rows, (wave, elements)), lane // rows
    if name.startswith("mfma"):  # groups of four rows go round the groups of lanes
        return row, half * elements + element, number // 4 * (4 * wave // rows) + half * 4 + number % 4
    if elements == 16:  # RDNA3: both halves of the wave hold all of k, and every second row of sums
        return row, np.broadcast_to(element, (wave, 16)), 2 * number + half
    return row, half * elements + element, 8 * half + number


@pytest.mark.parametrize("case", MATRICES, ids=lambda case: case[0])
def test_matrices(emulator: Emulator, case: tuple) -> None:
    name, wave, dtype, kind, sum_dtype, rows, depth, elements, sums = case
    r = np.random.default_rng(0)
    a, b, c = (r.integers(-9, 9, shape) for shape in ((rows, depth), (depth, rows), (rows, rows)))
    row, k, sum_row = layout(name, rows, elements, sums)
    column = np.arange(wave)[:, None] % rows
    inputs = [a[row, k].astype(dtype), b[k, row].astype(dtype), c[sum_row, column].astype(sum_dtype)]
    if "xf32" in name:  # bits below 10 of the mantissa are cut off
        inputs[:2] = [
            (values.view("uint32") | np.where(values == 0, 0, 0x1FFF).astype("uint32")).view("float32")
            for values in inputs[:2]
        ]
    number = 1 if kind == "i64" else elements
    given = kind if number == 1 else f"<{number} x {kind}>"
    total = f"<{sums} x {'i32' if sum_dtype == 'int32' else 'float'}>"
    constants = ", i32 0, i32 0, i32 0" if name.startswith("mfma") else ""
    types = ", ".join([given, given, total, *(["i32"] * constants.count("i32"))])
    source = f"""define amdgpu_kernel void @k(ptr addrspace(1) %a, ptr addrspace(1) %b, ptr addrspace(1) %c) {{
  %lane = call {PLACE}
  %pa = getelementptr {given}, ptr addrspace(1) %a, i32 %lane
  %pb = getelementptr {given}, ptr addrspace(1) %b, i32 %lane
  %pc = getelementptr {total}, ptr addrspace(1) %c, i32 %lane
  %x = load {given}, ptr addrspace(1) %pa, align 1
  %y = load {given}, ptr addrspace(1) %pb, align 1
  %z = load {total}, ptr addrspace(1) %pc, align 4
  %d = call {total} @llvm.amdgcn.{name}({given} %x, {given} %y, {total} %z{constants})
  store {total} %d, ptr addrspace(1) %pc, align 4
  ret void
}}
declare {PLACE}
declare {total} @llvm.amdgcn.{name}({types})
"""
    gpu = {"kind": "rocm", "wave": wave}
    (found,) = emulator.launch(source, "k", (1, 1, 1), (wave, 1, 1), inputs, [2], **gpu)
    assert (found == (a @ b + c)[sum_row, column]).all()


SHARED = "@memory = internal addrspace(3) global [256 x i32] undef, align 4"
EXCHANGE = f"""  %own = getelementptr i32, ptr addrspace(3) @memory, i32 %lane
  store i32 %v, ptr addrspace(3) %own, align 4
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  %turned = sub i32 255, %lane
  %other = getelementptr i32, ptr addrspace(3) @memory, i32 %turned
  %got = load i32, ptr addrspace(3) %other, align 4
{stored("%got")}"""


def test_a_barrier_between_waves_and_its_absence(emulator: Emulator) -> None:
    source = kernel(EXCHANGE, SHARED)
    without = kernel(EXCHANGE.replace("  call void @llvm.amdgcn.s.barrier()\n", ""), SHARED)
    for mode in ORDERS:
        assert (launch(emulator, source, 256, 256, mode=mode) == 355 - np.arange(256)).all()
        assert (launch(emulator, without, 256, 256, mode=mode) == -1).any()  # poison


def test_a_barrier_needs_a_release_before_it_where_there_are_several_waves(emulator: Emulator) -> None:
    bare = EXCHANGE.replace('  fence syncscope("workgroup") release\n', "")
    with pytest.raises(EmulationError, match=r"s_barrier with no release fence before it.*kernel line 7"):
        launch(emulator, kernel(bare, SHARED), 256, 256)
    one_wave = kernel(bare.replace("255", "63"), SHARED)
    assert (launch(emulator, one_wave, 64) == 163 - LANES).all()


def test_volatile_accesses_of_a_wave_go_in_lockstep(emulator: Emulator) -> None:
    own, other = ("  %own = getelementptr i32, ptr addrspace(3) @memory, i32 %lane\n", "")
    body = own + "  store volatile i32 %v, ptr addrspace(3) %own, align 4\n"
    for step, distance in enumerate((32, 16, 8, 4, 2, 1)):
        other = f"""  %n{step} = add i32 %lane, {distance}
  %p{step} = getelementptr i32, ptr addrspace(3) @memory, i32 %n{step}
  %a{step} = load volatile i32, ptr addrspace(3) %own, align 4
  %b{step} = load volatile i32, ptr addrspace(3) %p{step}, align 4
  %c{step} = add i32 %a{step}, %b{step}
  store volatile i32 %c{step}, ptr addrspace(3) %own, align 4
"""
        body += other
    for mode in ORDERS:
        found = launch(emulator, kernel(body + stored("%c5"), SHARED), 64, mode=mode)
        assert found[0] == (100 + LANES).sum()


def test_memory_out_of_bounds(emulator: Emulator) -> None:
    beyond = kernel("  %far = add i32 %lane, 1000\n" + stored("%v", lane="%far"))
    with pytest.raises(EmulationError, match=r"past the end of a device buffer of 256 bytes \(kernel line \d+"):
        launch(emulator, beyond, 64)
    shared = kernel(EXCHANGE.replace("sub i32 255", "add i32 255"), SHARED)
    with pytest.raises(EmulationError, match=r"0 bytes past the end of a shared variable of 1024 bytes \(kernel line"):
        launch(emulator, shared, 256, 256, mode=ORDERS[0])


def test_buffers_with_a_range(emulator: Emulator) -> None:
    """One offset gives zero, and the elements of a vector there; any other that lies beyond is a mistake."""
    make = "call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %out, i16 0, i64 {}, i32 0)"
    body = f"""  %b = {make}
  %inside = icmp slt i32 %lane, 25
  %far = mul i32 %lane, 4
  %o = select i1 %inside, i32 %far, i32 -2147483648
  %x = call i32 @llvm.amdgcn.raw.ptr.buffer.load.i32(ptr addrspace(8) %b, i32 %o, i32 0, i32 0)
{stored("%x", 1)}"""
    for outside in (0, 4, 12):
        found = body.replace("-2147483648", str(outside - 2**31)).format(100)
        _, read = launch(emulator, kernel(found), 128).reshape(2, 64)
        assert (read == np.where(LANES < 25, -7, 0)).all()
    with pytest.raises(EmulationError, match=r"a load past the end of a device buffer of 100 bytes"):
        launch(emulator, kernel(body.replace("-2147483648", str(16 - 2**31)).format(100)), 128)
    with pytest.raises(EmulationError, match=r"a load past the end of a device buffer of 99 bytes \(kernel line"):
        launch(emulator, kernel(body.format(99)), 128)


def test_what_is_not_known_is_named(emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match=r"does not know llvm.amdgcn.interp.mov"):
        on_wave(emulator, ["interp.mov(i32 %v)"])
    with pytest.raises(EmulationError, match=r"does not know llvm.amdgcn.mfma.f32.16x16x16.f8 in waves of 64"):
        on_wave(emulator, ["mfma.f32.16x16x16.f8(i32 %v, i32 %v, i32 %v, i32 0, i32 0, i32 0)"])
    function = kernel(f"  %r = call i32 @__ocml_popc(i32 %v)\n{stored('%r')}", "declare i32 @__ocml_popc(i32)")
    with pytest.raises(EmulationError, match="does not know __ocml_popc"):
        launch(emulator, function, 64)
    with pytest.raises(EmulationError, match=r"DPP control 0x170 is not emulated \(kernel line"):
        on_wave(emulator, ["mov.dpp.i32(i32 %v, i32 368, i32 15, i32 15, i1 true)"])
    with pytest.raises(EmulationError, match="line 4: inline assembly"):
        launch(emulator, kernel('  call void asm sideeffect "s_nop 0", ""()').lstrip(), 64)
    with pytest.raises(EmulationError, match="LDS of a size that the launch gives"):
        launch(emulator, kernel("", "@m = external addrspace(3) global [0 x i8], align 16"), 64)
    with pytest.raises(EmulationError, match="no amdgpu_kernel"):
        launch(emulator, "", 64)


def test_functions_that_nothing_calls_are_left_out() -> None:
    unused = "define weak i16 @__truncsfhf2(float %a0) {\n  ret i16 0\n}\n"
    used = unused.replace("__truncsfhf2", "helper")
    text = translate_ir(unused + used + kernel("  %h = call i16 @helper(float 0.0)"), "{}")
    assert "__truncsfhf2" not in text and "define weak i16 @helper" in text


def test_local_variables(emulator: Emulator) -> None:
    body = f"""  %m = alloca [4 x i32], align 4, addrspace(5)
  %p = getelementptr [4 x i32], ptr addrspace(5) %m, i32 0, i32 2
  %g = addrspacecast ptr addrspace(5) %p to ptr
  store i32 %v, ptr %g, align 4
  %r = load i32, ptr addrspace(5) %p, align 4
{stored("%r")}"""
    assert (launch(emulator, kernel(body), 64) == 100 + LANES).all()
