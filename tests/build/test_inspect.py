"""Views and summaries: the counts are checked on hand-written lines and on the tutorial's kernel."""

from __future__ import annotations

import dataclasses

import pytest

from schedules.build import inspect
from schedules.build.builder import Built, build
from schedules.build.matrix_cores import busy
from schedules.build.toolchain import cuda
from schedules.core.arch import parse_arch, waves_by_llvm
from schedules.core.errors import ToolchainError, UnknownNameError, UsageError
from schedules.core.presets import preset
from schedules.operators.conv2d_hwcn.tutorial import TutorialConfig
from schedules.show.doctor import examine
from scripts.remarks import resource_remarks
from tests.conftest import problem_of

STATES = {state.target: state for state in examine().targets}
needs_cuda = pytest.mark.skipif(not STATES["cuda:sm_90a"].build, reason=STATES["cuda:sm_90a"].note)
needs_nvdisasm = pytest.mark.skipif(
    cuda.find_tool("nvdisasm") is None, reason="no nvdisasm; pip install nvidia-cuda-nvdisasm"
)
needs_rocm = pytest.mark.skipif(not STATES["rocm:gfx90a"].build, reason=STATES["rocm:gfx90a"].note)


@pytest.fixture(scope="module")
def on_cuda() -> Built:
    return build(preset("tutorial").problem(), parse_arch("cuda:sm_90a"), "tutorial", TutorialConfig())


@pytest.fixture(scope="module")
def on_rocm() -> Built:
    return build(preset("tutorial").problem(), parse_arch("rocm:gfx90a"), "tutorial", TutorialConfig())


@pytest.fixture(scope="module")
def on_cpu() -> Built:
    return build(preset("tutorial").problem({"n": 32, "h": 7, "w": 7, "ci": 16, "co": 32}), parse_arch("llvm"))


# ---- counting, on lines as the disassemblers write them


def test_count_sass() -> None:
    lines = [
        "        /*0000*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;",
        "        /*0010*/              @!P0 LDG.E R4, [R2.64] ;",
        "        /*0020*/              @UP1 STG.E.128 desc[UR4][R2.64], R4 ;",
        "        /*0030*/                   LDS.128 R4, [R2] ;",
        "        /*0040*/                   LDS.U.64 R4, [R2] ;",
        "        /*0050*/                   LDSM.16.MT88.4 R4, [R2] ;",
        "        /*0060*/                   STS [R2], R4 ;",
        "        /*0070*/                   HMMA.16816.F32 R4, R8, R2, R4 ;",
        "        /*0080*/                   HGMMA.64x128x16.F32 R24, gdesc[UR4], R24 ;",
        "        /*0090*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;",
        "        /*00a0*/                   SHFL.BFLY PT, R3, R2, 0x1, 0x1f ;",
        "        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;",
        "        /*00c0*/                   HFMA2.MMA R9, -RZ, RZ, 0, 0 ;",
        "        /*00d0*/                   UTMALDG.2D [UR8], [UR4] ;",
        "        /*00e0*/                   FFMA.FTZ R4, R4, R5, R6 ;",
        "        /*00f0*/                   LDL R4, [R1] ;",
        "        /*0100*/                   MUFU.EX2 R4, R5 ;",
    ]
    assert inspect.count_sass("\n".join(lines)) == {
        "global load 128-bit": 1,
        "global load": 1,
        "global store 128-bit": 1,
        "shared load 128-bit": 1,
        "shared load 64-bit": 1,
        "shared store": 1,
        "local load (spill or indexed)": 1,
        "wgmma": 1,
        "mma": 1,
        "ldmatrix": 1,
        "cp.async": 1,
        "tma": 1,
        "shuffle": 1,
        "barrier": 1,
        "fp32 multiply-add": 1,
        "special function": 1,
    }


def test_sums_read_early() -> None:
    product = "/*08d0*/                   HGMMA.64x16x16.F32 R24, gdesc[UR12], R24, gsb0 ;"
    some = "/*08e0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"
    packed = "/*0930*/                   F2FP.F16.F32.PACK_AB R5, R26, R24 ;"
    last = "/*0931*/              @!P0 FADD R31, R5, R6 ;"
    other = "/*0932*/                   FADD R32, R5, R6 ;"
    wait = "/*0940*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    assert inspect.sums_read_early("\n".join([product, some, other, wait, packed, last])) == []
    found = inspect.sums_read_early("\n".join([product, some, packed, last, other, wait]))
    assert found == ["F2FP.F16.F32.PACK_AB R5, R26, R24", "@!P0 FADD R31, R5, R6"]
    assert inspect.sums_read_early("\n".join([product.replace("x16x16", "x8x16"), packed])) == found[:1]
    assert inspect.sums_read_early("\n".join([product.replace("H", "I", 1).replace("x16x16", "x8x32"), last])) == []


def test_count_ptx() -> None:
    lines = [
        "\tld.global.nc.v4.u32 \t{%r1, %r2, %r3, %r4}, [%rd1];",
        "\t@%p1 ld.global.v2.u64 {%rd1, %rd2}, [%rd3];",
        "\t@!%p1 ld.global.f32 %f1, [%rd3];",
        "\tst.shared.v4.f32 \t[%r1], {%f1, %f2, %f3, %f4};",
        "\tld.shared.v2.f32 \t{%f1, %f2}, [%r1];",
        "\tmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};",
        "\twgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%f1}, %rd1, %rd2, 1;",
        "\tldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}, [%r2];",
        "\tcp.async.cg.shared.global [%r1], [%rd1], 16;",
        "\tcp.async.commit_group;",
        "\tcp.async.wait_group 1;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier [%r1], [%rd1];",
        "\tshfl.sync.bfly.b32 \t%r1|%p1, %r2, 1, 31, -1;",
        "\tbar.sync \t0;",
        "\tfma.rn.ftz.f32 \t%f1, %f2, %f3, %f1;",
        "\tex2.approx.ftz.f32 \t%f1, %f2;",
    ]
    assert inspect.count_ptx("\n".join(lines)) == {
        "global load 128-bit": 2,
        "global load": 1,
        "shared load 64-bit": 1,
        "shared store 128-bit": 1,
        "wgmma": 1,
        "mma": 1,
        "ldmatrix": 1,
        "tma": 1,
        "cp.async": 1,
        "shuffle": 1,
        "barrier": 1,
        "fp32 multiply-add": 1,
        "special function": 1,
    }


AMDGCN = """
main_kernel:
	global_load_dwordx4 v[0:3], v[4:5], off
	global_load_ushort v0, v[4:5], off
	buffer_load_dwordx4 v[0:3], off, s[0:3], 0
	global_store_b128 v[0:1], v[2:5], off
	ds_read_b128 v[0:3], v4
	ds_read2_b64 v[0:3], v4 offset0:1
	ds_load_b64 v[0:1], v4
	ds_write2st64_b32 v4, v0, v1
	ds_write_b16 v4, v0
	v_mfma_f32_32x32x8f16 a[0:15], v[0:1], v[2:3], a[0:15]
	v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]
	ds_bpermute_b32 v0, v1, v2
	v_add_f32_dpp v0, v0, v0 row_shr:1
	v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[0:1]
	v_fmac_f32_e32 v0, v1, v2
	v_exp_f32_e32 v0, v1
	v_add_u32_e32 v0, v1, v2
	s_waitcnt vmcnt(0)
	s_barrier
.Lfunc_end0:
	.amdhsa_kernel main_kernel
__helper:
	global_load_dwordx4 v[0:3], v[4:5], off
.Lfunc_end1:
amdhsa.kernels:
  - .agpr_count:     16
    .args:
      - .name:           data
        .offset:         0
    .group_segment_fixed_size: 4096
    .max_flat_workgroup_size: 256
    .name:           main_kernel
    .private_segment_fixed_size: 8
    .sgpr_count:     26
    .vgpr_count:     120
    .vgpr_spill_count: 2
"""


def test_count_amdgcn_counts_kernels_only() -> None:
    assert inspect.count_amdgcn(AMDGCN) == {
        "global load 128-bit": 2,
        "global load": 1,
        "global store 128-bit": 1,
        "shared load 128-bit": 2,
        "shared load 64-bit": 1,
        "shared store 64-bit": 1,
        "shared store": 1,
        "mfma": 1,
        "wmma": 1,
        "shuffle": 2,
        "barrier": 1,
        "fp32 multiply-add": 2,
        "special function": 1,
        "other vector instruction": 1,
        "wait": 1,
    }


def test_amdgcn_resources() -> None:
    (used,) = inspect.amdgcn_resources(AMDGCN, parse_arch("rocm:gfx90a"))
    assert used == cuda.KernelResources("main_kernel", 120, 4096, 8, 8, 0)
    assert inspect.amdgcn_resources(AMDGCN, parse_arch("llvm")) == ()


def test_the_larger_of_two_register_files_counts() -> None:
    more = AMDGCN.replace(".agpr_count:     16", ".agpr_count:     140")
    (used,) = inspect.amdgcn_resources(more, parse_arch("rocm:gfx908"))
    assert used.registers == 140 and inspect.amdgcn_registers(more) == {"accumulators": 140, "scalars": 26}


LOOP = """
	v_mfma_f32_16x16x16f16 v[0:3], v[4:5], v[6:7], v[0:3]
.LBB0_1:
	ds_read_b128 v[0:3], v4
	ds_read2_b64 v[0:3], v4 offset0:1
	v_add_u32_e32 v4, 16, v4
	v_exp_f32_e32 v0, v1
	v_mfma_f32_16x16x16{}f16 v[0:3], v[4:5], v[6:7], v[0:3]
	v_mfma_f32_32x32x4{}f16 v[0:15], v[4:5], v[6:7], v[0:15]
	s_cbranch_scc1 .LBB0_1
"""


def test_the_time_that_products_could_take() -> None:
    cdna2 = busy([LOOP.format("", "_2b_")], parse_arch("gfx90a"))
    # 2 x 16^3 and 2 x 2 x 32 x 32 x 4 operations at 256 a cycle; two reads of 16 bytes by 64 lanes, for four SIMDs
    assert cdna2 and (cdna2.products, cdna2.longest, cdna2.unit) == (32 + 64, 96, "matrix cores")
    cdna3 = busy([LOOP.format("_", "_2b_")], parse_arch("gfx942"))
    assert cdna3 and (cdna3.products, cdna3.longest, cdna3.unit) == (16 + 32, 64, "LDS") and cdna3.share == 0.75
    rdna3 = busy(
        [LOOP.replace("v_mfma_f32_16x16x16{}f16", "v_wmma_f32_16x16x16_f16").replace("\tv_mfma", "\ts_nop")],
        parse_arch("gfx1100"),
    )
    assert rdna3 and (rdna3.products, rdna3.longest, rdna3.unit) == (32, 32 + 1 + 4, "vector instructions")
    assert busy(["\tv_add_f32_e32 v0, v1, v2\n"], parse_arch("gfx942")) is None
    vectors = busy(
        [".LBB0_1:\n\tv_pk_fma_f32 v[0:1]\n\tv_dot4_i32_i8 v0\n\tv_mad_u32_u24 v1\n\ts_branch .LBB0_1\n"],
        parse_arch("gfx942"),
    )
    assert vectors and (vectors.products, vectors.longest, vectors.unit) == (8, 12, "vector instructions")


def test_count_cpu() -> None:
    lines = [
        "\tvfmadd231ps\t%zmm21, %zmm17, %zmm11",
        "\tvfmadd231ps\t(%rax){1to8}, %ymm17, %ymm11",
        "\tvfmadd231ss\t%xmm1, %xmm2, %xmm3",
        "\tvmovups\t%zmm22, 960(%r8)",
        "\tvmovups\t-3932160(%r15,%rbx,4), %zmm17",
        "\tvmovups\t%ymm0, (%rax) {%k1}",
        "\tvbroadcastss\t-2056(%rdx,%r13), %zmm21",
        "\tvmovaps\t%xmm1, %xmm2",
        "\tfmla\tv0.4s, v1.4s, v2.s[0]",
        "\tldp\tq0, q1, [x0]",
    ]
    assert inspect.count_cpu("\n".join(lines)) == {
        "512-bit multiply-add": 1,
        "512-bit load": 1,
        "512-bit store": 1,
        "512-bit broadcast": 1,
        "256-bit multiply-add": 1,
        "256-bit store": 1,
        "128-bit multiply-add": 1,
        "128-bit load": 2,
        "128-bit move": 1,
    }


def test_dynamic_shared() -> None:
    assert inspect.dynamic_shared('    buf_dyn_shmem = T.alloc_buffer((4096,), "uint8", scope="shared.dyn")\n') == 4096
    assert inspect.dynamic_shared("T.alloc_shared((512,))") == 0


# ---- whole kernels


@needs_cuda
@needs_nvdisasm
def test_summary_of_the_tutorial_in_sass(on_cuda: Built) -> None:
    found = inspect.summary(on_cuda)
    assert (found.threads, found.grid, found.block) == (64, (4, 8, 196), (8, 8, 1))
    assert found.shared == 4096 and found.spills == 0
    assert found.registers is not None and 64 <= found.registers <= 255
    assert found.limit == "registers" and found.blocks_sm and found.occupancy == found.blocks_sm * 64 / 2048
    assert found.counted_in == "SASS"
    # two 64x8 tiles of floats, fetched by 64 threads, 4 floats at a time
    assert found.counts["global load 128-bit"] == 4 and "global load" not in found.counts
    assert found.counts["barrier"] == 2
    assert found.counts["fp32 multiply-add"] % 64 == 0


@needs_cuda
def test_without_a_disassembler_ptx_is_counted(on_cuda: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_tool", lambda name: None)
    found = inspect.summary(on_cuda)
    assert found.counted_in == "PTX" and found.counts["global load 128-bit"] == 4
    assert "pip install nvidia-cuda-nvdisasm" in found.notes[0]
    with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvdisasm"):
        inspect.view(on_cuda, "sass")


@needs_rocm
def test_summary_on_rocm(on_rocm: Built) -> None:
    found = inspect.summary(on_rocm)
    assert found.counted_in == "AMDGCN" and found.shared == 4096 and found.registers
    assert found.counts["global load 128-bit"] >= 4 and found.counts["barrier"] == 2
    assert found.scalars and found.spills == found.scratch == 0 and found.busy and 0.5 < found.busy < 1


@needs_rocm
def test_registers_and_waves_are_what_llvm_says(on_rocm: Built) -> None:
    found = inspect.summary(on_rocm)
    (said,) = resource_remarks(str(on_rocm.sources["ll"]), on_rocm.arch.name).values()
    assert (found.registers, found.accumulators, found.scalars) == (said.registers, said.accumulators, said.scalars)
    assert found.threads and found.shared == said.shared and found.waves == said.waves
    (said,) = resource_remarks(str(on_rocm.sources["ll"]), on_rocm.arch.name, found.threads).values()
    held = (found.threads, said.vector(on_rocm.arch), said.shared, said.scalars)
    assert waves_by_llvm(on_rocm.arch, *held) == said.waves


def test_summary_on_the_cpu(on_cpu: Built) -> None:
    found = inspect.summary(on_cpu)
    assert found.threads is None and found.registers is None and found.occupancy is None
    assert any("multiply-add" in name for name in found.counts)


@needs_cuda
@pytest.mark.parametrize(
    ("name", "contains"),
    [
        ("definition", "T.axis.remap"),
        ("scheduled", 'thread="threadIdx.x"'),
        ("lowered", "T.tvm_storage_sync"),
        ("cuda", "__global__"),
        ("ptx", ".target sm_90a"),
        pytest.param("sass", "FFMA", marks=needs_nvdisasm),
    ],
)
def test_views_on_cuda(on_cuda: Built, name: str, contains: str) -> None:
    assert contains in inspect.view(on_cuda, name)
    assert name in inspect.available(on_cuda)


@needs_rocm
@pytest.mark.parametrize(("name", "contains"), [("llvm", "amdgcn"), ("amdgcn", ".amdhsa_kernel main_kernel")])
def test_views_on_rocm(on_rocm: Built, name: str, contains: str) -> None:
    assert contains in inspect.view(on_rocm, name)


def test_views_on_the_cpu(on_cpu: Built) -> None:
    assert inspect.available(on_cpu) == ["definition", "scheduled", "lowered", "llvm", "asm"]
    assert "define" in inspect.view(on_cpu, "llvm") and "ret" in inspect.view(on_cpu, "asm")


def test_a_view_that_the_target_does_not_have(on_cpu: Built) -> None:
    with pytest.raises(UsageError, match="a kernel for llvm has no cuda; it has definition, scheduled"):
        inspect.view(on_cpu, "cuda")


def test_unknown_view(on_cpu: Built) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'sass'"):
        inspect.view(on_cpu, "sas")


@needs_cuda
def test_spills_and_occupancy_come_from_the_resources(on_cuda: Built) -> None:
    used = dataclasses.replace(on_cuda.resources[0], registers=255, spill_stores=8, spill_loads=12, shared=48 * 1024)
    found = inspect.summary(dataclasses.replace(inspect.material(on_cuda), resources=(used,)))
    assert (found.registers, found.spills, found.blocks_sm, found.limit) == (255, 20, 4, "registers")
    launch = 'buf_dyn_shmem = T.alloc_buffer((102400,), "uint8", scope="shared.dyn")'
    found = inspect.summary(dataclasses.replace(inspect.material(on_cuda), lowered=launch))
    assert (found.shared, found.blocks_sm, found.limit) == (4096 + 102400, 2, "shared memory")


def test_the_definition_is_the_graph_that_is_scheduled() -> None:
    problem = problem_of("conv2d_nchw", n=1, h=4, w=8, ci=16, co=16, kh=3, kw=3, pad=1, dtype="float16")
    arch = parse_arch("cuda:sm_90a")
    for schedule in ("mma", "mma_channels_last", "simt"):
        built = build(problem, arch, schedule, device_code=False)
        text = inspect.view(built, "definition")
        assert built.schedule.graph is not None
        assert built.schedule.graph(problem, built.config, arch).script() in text
        assert ("data_last" in text) == (schedule == "mma_channels_last") and "columns" in text
