"""AMD's matrix cores: exact as serial loops, each lane its own registers, and a code object within the machine."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.s_tir.stmt import SBlockRealize

from schedules.build.builder import Built, build
from schedules.build.inspect import amdgcn_resources
from schedules.core.arch import Arch, parse_arch
from schedules.core.presets import preset, presets
from schedules.operators.conv2d_nchw32.matrix import MatrixConfig, schedule
from schedules.operators.conv2d_nchw32.mma import default
from tests.conftest import assert_correct, problem_of
from tests.operators.conv2d_nchw32.shapes import EPILOGUE_SHAPE, EPILOGUES, SHAPES

ARCHES = [parse_arch("gfx90a"), parse_arch("gfx942")]
INSTRUCTIONS = {"gfx90a": "v_mfma_i32_16x16x16i8", "gfx942": "v_mfma_i32_16x16x32_i8"}
LAYERS = [name for name, found in presets().items() if found.operator == "conv2d_nchw32"]


@pytest.mark.parametrize("arch", ARCHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_schedule_is_exact(arch: Arch, shape: str) -> None:
    assert_correct(problem_of("conv2d_nchw32", **SHAPES[shape]), arch, "mma", routes=["serial"])


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogue_is_exact(epilogue: str) -> None:
    problem = problem_of("conv2d_nchw32", **{**EPILOGUE_SHAPE, **EPILOGUES[epilogue]})
    assert_correct(problem, ARCHES[0], "mma", routes=["serial"])


@pytest.mark.parametrize(
    "config",
    [dict(block_m=128, block_n=128, warps_m=2, warps_n=2), dict(block_m=48, block_n=64, block_k=128, warps_m=3)],
    ids=str,
)
def test_other_configs_are_exact(config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_nchw32", n=1, h=7, w=9, ci=100, co=70, kh=2, kw=3, pad=1, bias=True)
    assert_correct(problem, ARCHES[1], "mma", config, ["serial"])


@pytest.fixture(scope="module", params=ARCHES, ids=str)
def layer(request: pytest.FixtureRequest, amd_linker: None) -> Built:
    problem = preset("resnet50-14-256-256-3x3").problem({"n": 256, "bias": True, "residual": True})
    return build(problem, request.param, "mma")


def test_code_object_fits_the_machine(layer: Built) -> None:
    assembly = str(layer.sources["s"])
    (resources,) = amdgcn_resources(assembly, layer.arch)
    assert resources.shared <= 64 * 1024
    assert resources.stack == resources.spill_loads == 0
    assert resources.registers <= layer.arch.registers_thread
    assert re.search(r"^main_kernel:", assembly, re.M)
    assert layer.launch is not None
    flat = re.search(r"\.max_flat_workgroup_size: *(\d+)", assembly)
    assert flat and layer.launch.threads <= int(flat[1])
    assert bytes(layer.sources["hsaco"])[:4] == b"\x7fELF"


def test_main_loop_is_matrix_instructions(layer: Built) -> None:
    assembly = str(layer.sources["s"])
    assert set(re.findall(r"v_mfma_\w+", assembly)) == {INSTRUCTIONS[layer.arch.name]}
    loops = [
        assembly[label.end() : back.end()]
        for label in re.finditer(r"^(\.LBB\d+_\d+):", assembly, re.M)
        for back in re.finditer(rf"s_c?branch\w*\s+{re.escape(label[1])}\b", assembly)
        if back.start() > label.end()
    ]
    main = min((loop for loop in loops if "v_mfma" in loop), key=len)
    # 64 x 64 x 64 of a wave in products of 16 x 16 x k
    assert main.count("v_mfma") == 64 // {"gfx90a": 16, "gfx942": 32}[layer.arch.name] * 16
    assert "global_load_dwordx4" in assembly
    assert "ds_write_b128" in main
    assert main.count("s_barrier") <= 2


def test_lanes_touch_their_own_registers() -> None:
    """Where a fragment or a sum is used outside the instruction, the lane of the index is the lane that runs.

    As serial loops all lanes share one array, so that only this shows a lane that takes another's sums.
    """
    problem = problem_of("conv2d_nchw32", **SHAPES["whole tiles"], bias=True)
    mod = schedule(problem, MatrixConfig(64, 64, 64, 2, 2, 2), parse_arch("gfx942"))
    analyzer = tvm.sym.Analyzer()
    lanes: dict[Any, Any] = {}

    def bind(loop: Any) -> None:
        analyzer.bind(loop.loop_var, ir.Range(loop.min, loop.min + loop.extent))
        if loop.kind == tirx.ForKind.THREAD_BINDING and str(loop.thread_binding.thread_tag) == "threadIdx.x":
            lanes[loop.loop_var] = loop

    tvm_ffi.structural_walk(mod["main"].body, (tirx.For, bind))
    checked = []

    def visit(realize: Any) -> None:
        block = realize.block
        if block.name_hint not in ("result", "conv_init"):
            return
        values = {axis.var: value for axis, value in zip(block.iter_vars, realize.iter_values, strict=True)}

        def access(node: Any) -> None:
            buffer = node.source if hasattr(node, "source") else node.buffer
            if buffer.name != "conv_local":
                return
            lane = tvm_ffi.structural_map(node.indices[-2], (ir.Var, lambda var: values.get(var, var)))
            running = [var for var in lanes if uses(lane, var)]
            assert len(running) == 1
            assert analyzer.can_prove_equal(lane, running[0]), (block.name_hint, lane)
            checked.append(block.name_hint)

        tvm_ffi.structural_walk(block.body, ((ir.TensorLoad, access), (tirx.BufferStore, access)))

    tvm_ffi.structural_walk(mod["main"].body, (SBlockRealize, visit))
    assert set(checked) == {"result", "conv_init"}


def uses(node: Any, var: Any) -> bool:
    found = []
    tvm_ffi.structural_walk(node, (ir.Var, lambda other: found.append(other.same_as(var))))
    return any(found)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_default_config_is_legal(name: str, arch: Arch) -> None:
    for n in (1, 16, 256):
        problem = preset(name).problem({"n": n})
        assert default(problem, arch).check(problem, arch) is None
