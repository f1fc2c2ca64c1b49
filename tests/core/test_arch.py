from __future__ import annotations

from itertools import product

import pytest

from schedules.core import arch as arch_module
from schedules.core.arch import (
    ARCHES,
    WIDE_PIPES,
    Arch,
    VectorUnit,
    llvm_cpus,
    occupancy,
    parse_arch,
    vector_unit,
    waves_by_llvm,
    waves_by_registers,
)
from schedules.core.errors import UnknownNameError, UsageError
from scripts.remarks import resource_remarks


def test_every_target_of_the_plan_is_there() -> None:
    assert set(ARCHES) == {
        "llvm",
        *(f"cuda:sm_{name}" for name in (75, 80, 86, 87, 89, "90a", "100a", "103a", "110a", "120a")),
        *(f"rocm:gfx{name}" for name in (908, "90a", 942, 950, 1030)),
        *(f"rocm:gfx{name}" for name in (1100, 1101, 1102, 1103, 1150, 1151, 1200, 1201)),
    }


def test_what_llvm_says_of_amd_processors_is_what_the_rows_say() -> None:
    from tvm.target import Target, codegen

    for arch in ARCHES.values():
        if arch.kind == "rocm":
            target = Target({"kind": "llvm", "mtriple": "amdgcn-amd-amdhsa", "mcpu": arch.name})
            has = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
            more = {"mfma": "mai-insts", "sdot4": "dot1-insts", "sudot4": "dot8-insts"}
            assert {name for name in more if name in arch.features} == {n for n, llvm in more.items() if llvm in has}
            assert f"wavefrontsize{arch.wave}" in has
            assert f"addressablelocalmemorysize{arch.shared_block}" in has
            assert (arch.registers_simd == 1536) == ("allocate1_5xvgprs" in has)
            assert ("agprs_apart" in arch.features) == ("mai-insts" in has and "gfx90a-insts" not in has)
            assert bool({"mfma_i8_k32", "mfma_i8_k64"} & arch.features) == ("gfx940-insts" in has)
            assert ("mfma_f16_k32" in arch.features) == ("gfx950-insts" in has)
            assert ("wmma_split" in arch.features) == ("gfx12-insts" in has)


@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_targets_name_their_arch(arch: Arch) -> None:
    target = arch.target()
    assert target.kind.name == arch.kind
    if arch.is_gpu:
        assert arch.name in str(target)
        assert arch.shared_block <= arch.shared_sm
        assert arch.max_threads <= arch.threads_sm


def test_short_names_parse() -> None:
    assert parse_arch("sm_80") is ARCHES["cuda:sm_80"]
    assert parse_arch("gfx942") is ARCHES["rocm:gfx942"]
    assert parse_arch("llvm:x86-64-v3").target().attrs["mcpu"] == "x86-64-v3"


@pytest.mark.parametrize(
    ("text", "near"),
    [("cuda:sm_90", "cuda:sm_90a"), ("sm_100f", "cuda:sm_100a"), ("sm_88", "cuda:sm_86"), ("rocm:gx942", "rocm:gfx942")]
    + [("llvm:haswel", "haswell")],
)
def test_unknown_target_names_the_nearest(text: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=near):
        parse_arch(text)


@pytest.mark.parametrize("text", ["rocm:gfx941", "gfx906", "gfx1152", "cuda:sm_121", "sm_70", "sm_101a"])
def test_no_target_is_suggested_whose_code_would_not_run(text: str) -> None:
    with pytest.raises(UsageError, match=r"runs no target's code; `schedules list` has them"):
        parse_arch(text)


@pytest.mark.parametrize(
    ("target", "runs", "others"),
    [
        ("sm_80", ["8.0", "8.6", "8.9"], ["7.5", "8.7", "9.0"]),
        ("sm_86", ["8.6", "8.8", "8.9"], ["8.0", "8.7"]),
        ("sm_87", ["8.7"], ["8.6", "8.8", "8.9"]),
        ("sm_90a", ["9.0"], ["9.1", "10.0"]),
        ("sm_120a", ["12.0"], ["12.1"]),
        ("gfx1100", ["gfx1100"], ["gfx1101", "gfx1103"]),
    ],
)
def test_what_code_runs_on(target: str, runs: list[str], others: list[str]) -> None:
    arch = parse_arch(target)
    assert all(map(arch.runs_on, runs)) and not any(map(arch.runs_on, others))


def test_compute_capability() -> None:
    assert parse_arch("sm_103a").compute_capability == "10.3"
    assert parse_arch("sm_90a").compute_capability == "9.0"
    assert parse_arch("sm_75").compute_capability == "7.5"


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "expected"),
    # by NVIDIA's occupancy calculator for compute capability 9.0
    [
        (64, 101, 4096, (8, "registers")),
        (96, 65, 10000, (9, "registers")),
        (1024, 32, 0, (2, "threads")),
        (128, 32, 100 * 1024, (2, "shared memory")),
        (32, 16, 0, (32, "blocks")),
    ],
)
def test_occupancy(threads: int, registers: int, shared: int, expected: tuple[int, str]) -> None:
    assert occupancy(parse_arch("sm_90a"), threads, registers, shared) == expected


def kernels_of(arch: Arch) -> str:
    """LLVM IR of kernels that need so many registers and bytes of LDS, for blocks of so many threads."""
    lds, kernels = {}, []
    sizes = [0, 1000, 5000, 12288, 21000, 40000, 65536]
    for number, (threads, registers) in enumerate(product((64, 100, 192, 256, 1024), (8, 40, 65, 84, 128, 168, 256))):
        if waves_by_registers(arch, registers) * arch.simds < -(-threads // arch.wave):
            continue
        shared = sizes[number % len(sizes)]
        lds[shared] = f"@lds_{shared} = internal addrspace(3) global [{shared} x i8] poison, align 16"
        used = f"store volatile i8 0, ptr addrspace(3) @lds_{shared}" if shared else ""
        accumulator = f"~{{a{registers // 3}}}" if "agprs" in arch.features and number % 3 == 0 else ""
        scalar = f"~{{s{90 + number % 12}}}" if number % 4 == 0 else ""
        clobbered = ",".join(filter(None, (f"~{{v{registers * 2 // 3}}}", accumulator, scalar)))
        size = f'"amdgpu-flat-work-group-size"="{threads},{threads}"'
        kernels.append(
            f"define amdgpu_kernel void @kernel_{threads}_{number}() {size} {{\n"
            f'  call void asm sideeffect "", "{clobbered}"()\n  {used}\n  ret void\n}}\n'
        )
    return "\n".join([*lds.values(), *kernels])


@pytest.mark.parametrize("arch", [arch for arch in ARCHES.values() if arch.kind == "rocm"], ids=str)
def test_waves_of_a_simd_are_what_llvm_says(amd_linker: None, arch: Arch) -> None:
    said = resource_remarks(kernels_of(arch), arch.name)
    assert len(said) > 25 and len({kernel.waves for kernel in said.values()}) > 4
    for name, kernel in said.items():
        threads, registers = int(name.split("_")[1]), kernel.vector(arch)
        counted = waves_by_llvm(arch, threads, registers, kernel.shared, kernel.scalars)
        assert counted == kernel.waves, (name, kernel)
        # whole blocks, and LDS in units, are fewer or as many
        waves = -(-threads // arch.wave)
        assert occupancy(arch, threads, registers, kernel.shared, kernel.scalars)[0] * waves <= counted * arch.simds


@pytest.mark.parametrize(
    ("target", "unit"),
    [
        ("llvm:x86-64-v4", VectorUnit(16, 32, 8)),
        ("llvm:x86-64-v3", VectorUnit(8, 16, 8)),
        ("llvm:x86-64", VectorUnit(4, 16, 4)),
        ("llvm:znver4", VectorUnit(16, 32, 8)),
        ("llvm:znver5", VectorUnit(16, 32, 16)),
        ("llvm:icelake-client", VectorUnit(16, 32, 8)),
        ("llvm:sapphirerapids", VectorUnit(16, 32, 16)),
    ],
)
def test_vector_units(target: str, unit: VectorUnit) -> None:
    assert vector_unit(parse_arch(target)) == unit


@pytest.mark.parametrize(("features", "pipe"), [({"amx_tile"}, 16), ({"avx512_fp16"}, 16), ({"avx512f"}, 8), (None, 8)])
def test_pipes_of_this_cpu_are_told_by_its_features(
    monkeypatch: pytest.MonkeyPatch, features: set[str] | None, pipe: int
) -> None:
    """A hypervisor may show a model of narrow ones; of a CPU that is named nothing is known but its name."""
    monkeypatch.setattr(arch_module, "host_cpu", lambda name: {"mcpu": "rocketlake"})
    monkeypatch.setattr(arch_module, "cpu_features", lambda: features)
    assert vector_unit.__wrapped__(parse_arch("llvm")) == VectorUnit(16, 32, pipe)
    assert vector_unit.__wrapped__(parse_arch("llvm:rocketlake")) == VectorUnit(16, 32, 8)


def test_wide_pipes_are_names_that_llvm_knows() -> None:
    assert set(WIDE_PIPES) <= set(llvm_cpus())
