"""Each tensor intrinsic against its description: matrices pass through fragments and come out where they belong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import Built, build, build_scheduled
from schedules.build.present import to_device
from schedules.check.emulate.serial import serialize
from schedules.check.verify import emulated_runs, poisoned
from schedules.core.arch import ARCHES, Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.operator import Array, Operator, ScheduleSpec
from schedules.core.problem import Argument, Config, Problem, numpy_dtype
from schedules.steps.fragments import MATRIX, MMA, Atom, atom_for
from schedules.steps.intrinsics import as_described, load_matrix, multiply, per_lane, tensorize
from schedules.steps.tensor_core import bind_lanes as bind_sums
from tests.conftest import assert_correct, problem_of


@dataclass(frozen=True)
class Matrices(Problem):
    """Inputs a and b, output c, as the kernel has them."""

    given: tuple[Argument, ...] = ()

    def arguments(self) -> tuple[Argument, ...]:
        return self.given


class NoConfig(Config):
    def check(self, problem: Any, arch: Any) -> str | None:
        return None


def build_kernel(sch: Any, arch: Arch, *arguments: Argument) -> Built:
    spec = ScheduleSpec(
        "test", "", (arch.kind,), NoConfig, lambda *_: sch.mod, lambda *_: NoConfig(), lambda *_: iter(())
    )
    op = Operator("test", "", Matrices, lambda _: [], lambda *_: [], lambda *_: [], (spec,), lambda *_: "test")
    return build_scheduled(op, Matrices(arguments), spec, NoConfig(), arch, sch.mod, device_code=False)


def run(built: Built, inputs: Sequence[Array]) -> Array:
    _, call = next(emulated_runs(built, str(built.sources["cu"])))
    return call([*inputs, *poisoned(built.problem)])[0]


def numbers(shape: tuple[int, ...], dtype: str) -> Array:
    """Small whole numbers, whose products and sums every dtype holds exactly."""
    return np.random.default_rng(0).integers(-8, 9, shape).astype(numpy_dtype(dtype))


def bind_lanes(sch: Any, block: Any, atom: Atom, row: Any, k: Any) -> None:
    """Deal (row, k) of an operand out to the lanes that hold them."""
    half, row = sch.split(row, [None, 8])
    k_half, k, word = sch.split(k, [None, 4, atom.word])
    sch.reorder(half, k_half, row, k, word)
    sch.bind(sch.fuse(row, k), "threadIdx.x")


def copy_through(atom: Atom, operand: str, rows: int, transposed: bool, scope: str) -> Any:
    """A kernel that copies a matrix through shared memory and fragments."""
    from tvm import te
    from tvm.s_tir import Schedule

    shape = (atom.k, rows) if transposed else (rows, atom.k)
    a = te.placeholder(shape, name="a", dtype=atom.source)
    c = te.compute(shape, lambda i, j: a[i, j], name="c")
    sch = Schedule(te.create_prim_func([a, c]))
    out = sch.get_sblock("c")
    shared = sch.cache_read(out, 0, scope)
    fragment = sch.cache_read(out, 0, "local")
    grid = sch.add_unit_loop(sch.get_loops(out)[0])
    sch.bind(grid, "blockIdx.x")
    for stage in (fragment, shared):
        sch.compute_at(stage, grid, preserve_unit_loops=True)
    x, y = sch.get_loops(out)[1:]
    bind_lanes(sch, out, atom, *((y, x) if transposed else (x, y)))
    fused = sch.fuse(*sch.get_loops(shared)[1:])
    _, lane = sch.split(fused, [None, 32])
    sch.bind(lane, "threadIdx.x")
    size, place = (atom.m, atom.a) if operand == "a" else (atom.n, atom.b)

    def layout(x: Any, y: Any) -> list[Any]:
        row, k = (y, x) if transposed else (x, y)
        return [row // size, *place(row % size, k)]

    sch.transform_layout(fragment, ("write", 0), layout, assume_injective_transform=True)
    tensorize(sch, sch.get_loops(fragment)[1], load_matrix(atom, operand, scope, rows=rows, transposed=transposed))
    return sch


LOADS = [
    (dtype, operand, rows, transposed)
    for dtype in MMA
    for operand, rows in (("a", 16), ("b", 16), ("b", 8))
    for transposed in (False, True)
    if not (dtype == "int8" and transposed)
]


@pytest.mark.parametrize("scope", ["shared", "shared.dyn"])
@pytest.mark.parametrize(("dtype", "operand", "rows", "transposed"), LOADS)
def test_ldmatrix(emulation: None, dtype: str, operand: str, rows: int, transposed: bool, scope: str) -> None:
    atom = MMA[dtype]
    shape = (atom.k, rows) if transposed else (rows, atom.k)
    arguments = Argument("a", shape, dtype), Argument("c", shape, dtype, output=True)
    built = build_kernel(copy_through(atom, operand, rows, transposed, scope), parse_arch("sm_80"), *arguments)
    source = str(built.sources["cu"])
    assert f".x{4 if rows == 16 else 2}{'.trans' if transposed else ''}.shared" in source
    slots = rows * atom.k // 32
    assert re.search(rf"local_ptr\[{slots}\]", source), "a lane has more than its own slots"
    matrix = numbers(shape, dtype)
    np.testing.assert_array_equal(run(built, [matrix]), matrix)


def product(atom: Atom, arch: Arch) -> Any:
    """A kernel of one matrix instruction; operands reach their fragments by plain loads."""
    from tvm import te
    from tvm.s_tir import Schedule

    a = te.placeholder((atom.m, atom.k), name="a", dtype=atom.source)
    b = te.placeholder((atom.n, atom.k), name="b", dtype=atom.source)
    k = te.reduce_axis((0, atom.k), "k")
    total = te.compute(
        (atom.m, atom.n), lambda i, j: te.sum(a[i, k].astype(atom.sum) * b[j, k].astype(atom.sum), axis=k), name="sum"
    )
    c = te.compute((atom.m, atom.n), lambda i, j: total[i, j], name="c")
    sch = Schedule(te.create_prim_func([a, b, c]))
    multiplied, out = sch.get_sblock("sum"), sch.get_sblock("c")
    sch.set_scope(multiplied, 0, "local")
    grid = sch.add_unit_loop(sch.get_loops(out)[0])
    sch.bind(grid, "blockIdx.x")
    fragments = [sch.cache_read(multiplied, index, "local") for index in (0, 1)]
    for block in (multiplied, *fragments):
        sch.compute_at(block, grid, preserve_unit_loops=True)
    for fragment, place in zip(fragments, (atom.a, atom.b), strict=True):
        sch.transform_layout(fragment, ("write", 0), place, assume_injective_transform=True)
        per_lane(sch, fragment)
        row, at_k = sch.get_loops(fragment)[1:]
        if atom.ldmatrix:
            bind_lanes(sch, fragment, atom, row, at_k)
        else:
            at_k, word = sch.split(at_k, [None, atom.word])
            sch.reorder(at_k, row, word)
            sch.bind(sch.fuse(at_k, row), "threadIdx.x")
    sch.transform_layout(multiplied, ("write", 0), atom.c, assume_injective_transform=True)
    per_lane(sch, multiplied)
    for block in (out, sch.decompose_reduction(multiplied, sch.get_loops(multiplied)[1])):
        bind_sums(sch, *sch.get_loops(block)[1:], atom)
    tensorize(sch, sch.get_loops(multiplied)[1], multiply(atom, arch))
    return sch


def arguments_of(atom: Atom) -> tuple[Argument, ...]:
    return (
        Argument("a", (atom.m, atom.k), atom.source),
        Argument("b", (atom.n, atom.k), atom.source),
        Argument("c", (atom.m, atom.n), atom.sum, output=True),
    )


def operands_of(atom: Atom) -> list[Array]:
    a, b = numbers((atom.m, atom.k), atom.source), numbers((atom.k, atom.n), atom.source)
    return [a, np.ascontiguousarray(b.T)]


PRODUCTS = {
    ("sm_75", "float16"): "m16n8k8.row.col.f32.f16.f16.f32",
    ("sm_75", "int8"): "m8n8k16.row.col.s32.s8.s8.s32",
    ("sm_80", "float16"): "m16n8k16.row.col.f32.f16.f16.f32",
    ("sm_80", "bfloat16"): "m16n8k16.row.col.f32.bf16.bf16.f32",
    ("sm_80", "int8"): "m16n8k32.row.col.s32.s8.s8.s32",
}


@pytest.mark.parametrize(("arch", "dtype"), PRODUCTS)
def test_mma(emulation: None, arch: str, dtype: str) -> None:
    atom = atom_for(dtype, parse_arch(arch))
    built = build_kernel(product(atom, parse_arch(arch)), parse_arch(arch), *arguments_of(atom))
    assert f"mma.sync.aligned.{PRODUCTS[arch, dtype]}" in str(built.sources["cu"])
    a, b = operands_of(atom)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_array_equal(run(built, [a, b]), expected)


ALL_ATOMS = [*MMA.values(), *(atom for _, atom in MATRIX)]


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1200"])
def test_matrix_cores_of_rdna_take_turned_operands(emulation: None, arch: str) -> None:
    """Filters and images of HWCN both lie along the product's rows, and those of NCHW the images."""
    fields: dict[str, Any] = dict(n=3, h=3, w=4, ci=9, co=21, kh=2, kw=1, dtype="float16")
    for operator in ("conv2d_hwcn", "conv2d_nchw"):
        assert_correct(problem_of(operator, **fields), parse_arch(arch), "mma", routes=["emulated"])


@pytest.mark.parametrize(
    "atom", ALL_ATOMS, ids=lambda atom: f"{atom.instruction}-{atom.name}{'-doubled' * atom.doubled}"
)
def test_the_description_is_a_product(host: Arch, atom: Atom) -> None:
    with as_described():
        feature = next((feature for feature, other in MATRIX if other is atom), "mma")
        scheduled = product(atom, next(arch for arch in ARCHES.values() if feature in arch.features))
    spec = ScheduleSpec("test", "", ("llvm",), NoConfig, lambda *_: None, lambda *_: NoConfig(), lambda *_: iter(()))
    op = Operator("test", "", Matrices, lambda _: [], lambda *_: [], lambda *_: [], (spec,), lambda *_: "test")
    problem = Matrices(arguments_of(atom))
    built = build_scheduled(op, problem, spec, NoConfig(), host, serialize(scheduled.mod))
    a, b = operands_of(atom)
    tensors = [to_device(array, host) for array in (a, b, *poisoned(problem))]
    built(*tensors)
    np.testing.assert_array_equal(tensors[-1].numpy(), a.astype(np.float64) @ b.astype(np.float64).T)


MATRIX_CORES = {
    ("gfx908", "float32"): "v_mfma_f32_16x16x4f32",
    ("gfx908", "bfloat16"): "v_mfma_f32_16x16x8bf16",
    ("gfx90a", "float16"): "v_mfma_f32_16x16x16f16",
    ("gfx90a", "bfloat16"): "v_mfma_f32_16x16x16bf16_1k",
    ("gfx90a", "int8"): "v_mfma_i32_16x16x16i8",
    ("gfx942", "float32"): "v_mfma_f32_16x16x4_f32",
    ("gfx942", "tf32"): "v_mfma_f32_16x16x8_xf32",
    ("gfx942", "bfloat16"): "v_mfma_f32_16x16x16_bf16",
    ("gfx942", "int8"): "v_mfma_i32_16x16x32_i8",
    ("gfx942", "float16"): "v_mfma_f32_16x16x16_f16",
    ("gfx950", "int8"): "v_mfma_i32_16x16x64_i8",
    ("gfx950", "float16"): "v_mfma_f32_16x16x32_f16",
    ("gfx950", "bfloat16"): "v_mfma_f32_16x16x32_bf16",
    ("gfx1100", "float16"): "v_wmma_f32_16x16x16_f16",
    ("gfx1100", "bfloat16"): "v_wmma_f32_16x16x16_bf16",
    ("gfx1100", "int8"): "v_wmma_i32_16x16x16_iu8",
    ("gfx1200", "float16"): "v_wmma_f32_16x16x16_f16",
    ("gfx1200", "bfloat16"): "v_wmma_f32_16x16x16_bf16",
    ("gfx1200", "int8"): "v_wmma_i32_16x16x16_iu8",
}


@pytest.mark.parametrize(("arch", "dtype"), MATRIX_CORES)
def test_matrix_cores_of_amd(emulation: None, amd_linker: None, arch: str, dtype: str) -> None:
    """A product in one convolution of odd extents, run in the emulator."""
    if dtype == "int8":
        problem = problem_of("conv2d_nchw32", n=1, h=3, w=5, ci=40, co=33, kh=2, kw=1)
    else:
        source = "float32" if dtype == "tf32" else dtype
        problem = problem_of("conv2d_nhwc", n=1, h=3, w=7, ci=9, co=21, kh=2, kw=1, dtype=source)
    schedule = "mma_tf32" if dtype == "tf32" else "mma"
    assert_correct(problem, parse_arch(arch), schedule, routes=["emulated"])
    assembly = str(build(problem, parse_arch(arch), schedule).sources["s"])
    assert set(re.findall(r"v_w?mf?ma_\w+", assembly)) == {MATRIX_CORES[arch, dtype]}


@pytest.mark.parametrize(
    "atom", ALL_ATOMS, ids=lambda atom: f"{atom.instruction}-{atom.name}{'-doubled' * atom.doubled}"
)
def test_every_element_has_one_place(atom: Atom) -> None:
    def places(rows: int, columns: int, place: Callable[[int, int], tuple[int, int]]) -> Iterator[tuple[int, int]]:
        return (place(i, j) for i in range(rows) for j in range(columns))

    shapes = ((atom.m, atom.k, atom.a), (atom.n, atom.k, atom.b), (atom.m, atom.n, atom.c))
    for (rows, columns, place), slots in zip(shapes, atom.slots, strict=True):
        holders = atom.wave if place == atom.c else atom.holders
        wanted = {(lane, slot) for lane in range(holders) for slot in range(slots)}
        assert set(places(rows, columns, place)) == wanted
        assert len(wanted) == rows * columns


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="bfloat16 needs sm_80"):
        atom_for("bfloat16", parse_arch("sm_75"))
    with pytest.raises(ConfigError, match="no matrix instruction for dtype=float32"):
        atom_for("float32", parse_arch("sm_80"))
    with pytest.raises(ConfigError, match="rocm:gfx1100 has no matrix instruction for dtype=float32"):
        atom_for("float32", parse_arch("gfx1100"))
    with pytest.raises(ConfigError, match="rocm:gfx1030 has no matrix instruction"):
        atom_for("float16", parse_arch("gfx1030"))
    with pytest.raises(ConfigError, match="rocm:gfx950 has no matrix instruction that takes float32 as TF32"):
        atom_for("float32", parse_arch("gfx950"), tf32=True)
    with pytest.raises(ConfigError, match="dtype=float16 is not float32, which alone is rounded to TF32"):
        atom_for("float16", parse_arch("gfx942"), tf32=True)
    with pytest.raises(ValueError, match="transposes 16-bit elements"):
        load_matrix(MMA["int8"], "a", "shared", transposed=True)
    with pytest.raises(ValueError, match="no ldmatrix of 8 rows of a"):
        load_matrix(MMA["float16"], "a", "shared", rows=8)
