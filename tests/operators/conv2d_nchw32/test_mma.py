"""The tensor-core schedule: exact by every route, and made of what it says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import Built, build
from schedules.build.inspect import count_ptx
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.presets import preset, presets
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw32.matrix import MatrixConfig
from schedules.operators.conv2d_nchw32.mma import space
from tests.conftest import CUDA_ARCHES, assert_correct, problem_of
from tests.operators.conv2d_nchw32.shapes import EPILOGUE_SHAPE, EPILOGUES, SHAPES

LAYERS = [name for name, found in presets().items() if found.operator == "conv2d_nchw32"]


# without cp.async and with it: each shape by one of them, every third by both
@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        (arch, shape)
        for i, shape in enumerate(SHAPES)
        for j, arch in enumerate(("sm_75", "sm_80"))
        if (i + j) % 2 == 0 or i % 3 == 0
    ],
)
def test_schedule_is_exact(emulation: None, arch: str, shape: str) -> None:
    assert_correct(problem_of("conv2d_nchw32", **SHAPES[shape]), parse_arch(arch), "mma", routes=["emulated"])


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogue_is_exact(emulation: None, sm_90a: Arch, epilogue: str) -> None:
    problem = problem_of("conv2d_nchw32", **{**EPILOGUE_SHAPE, **EPILOGUES[epilogue]})
    assert_correct(problem, sm_90a, "mma", routes=["emulated"])


@pytest.mark.parametrize(
    "config",
    [
        dict(block_m=128, block_n=128, warps_m=2, warps_n=2, stages=4),
        dict(block_m=64, block_n=96, block_k=128, warps_m=4, warps_n=3, stages=2),
        dict(block_m=32, block_n=32, warps_m=1, warps_n=1, stages=6),
        dict(block_m=48, block_n=64, block_k=192, warps_m=1, warps_n=2, stages=3, min_blocks=2),
    ],
    ids=str,
)
def test_other_configs_are_exact(emulation: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_nchw32", n=1, h=7, w=9, ci=100, co=70, kh=2, kw=3, pad=1, bias=True)
    assert_correct(problem, sm_90a, "mma", config, ["serial", "emulated"])


@settings(max_examples=6)
@given(data=st.data())
def test_any_shape_is_exact(emulation: None, data: st.DataObject) -> None:
    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    kh, kw, dilation = number(1, 4), number(1, 4), number(1, 2)
    pad, stride = (number(0, 2), number(0, 2)), (number(1, 3), number(1, 3))
    h, w = ((k - 1) * dilation + 1 + number(0, 5) for k in (kh, kw))
    fields = dict(n=number(1, 3), h=h, w=w, ci=number(1, 80), co=number(1, 80), kh=kh, kw=kw)
    problem = problem_of(
        "conv2d_nchw32", **fields, pad=pad, stride=stride, dilation=dilation, residual=number(0, 1) == 1
    )
    assert_correct(problem, parse_arch("sm_86"), "mma", routes=["emulated"])


@pytest.fixture(scope="module")
def layer(cuda_compiler: None) -> Built:
    """A ResNet-50 layer with its whole epilogue."""
    problem = preset("resnet50-28-128-128-3x3").problem({"n": 256, "bias": True, "residual": True})
    config = dict(block_m=128, block_n=128, block_k=64, warps_m=2, warps_n=2, stages=4, min_blocks=1)
    return build(problem, parse_arch("sm_90a"), "mma", config)


def loop_of(ptx: str, opcode: str) -> str:
    """The innermost loop of `ptx` that has `opcode`: from a label to the last branch back to it."""
    found = []
    for label in re.finditer(r"^(\$L\w+):", ptx, re.M):
        back = [
            m.end() for m in re.finditer(rf"bra(?:\.uni)?\s+{re.escape(label[1])};", ptx) if m.start() > label.end()
        ]
        body = ptx[label.end() : back[-1]] if back else ""
        if opcode in body:
            found.append(body)
    return min(found, key=len)


def test_main_loop_does_not_divide(layer: Built) -> None:
    loop = loop_of(str(layer.sources["ptx"]), "mma.sync")
    assert "cp.async" in loop
    assert not re.search(r"\b(div|rem|mul\.hi|mad\.hi)\.", loop)


def test_main_loop_is_tensor_cores_fed_by_ldmatrix(layer: Built) -> None:
    loop = loop_of(str(layer.sources["ptx"]), "mma.sync")
    # a step of 64 channels by a warp's 64 x 64: 2 x 4 x 8 products from 2 x (4 + 4) loads of four matrices
    assert len(re.findall(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32", loop)) == 64
    assert len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared", loop)) == 16
    assert re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]+\], \[[^]]+\], (\d+)", loop) == ["16"] * 8
    assert len(re.findall(r"bar\.sync|barrier\.sync", loop)) == 1


def test_nothing_spills(layer: Built) -> None:
    (resources,) = layer.resources
    assert resources.spill_loads == resources.spill_stores == resources.stack == 0
    counts = count_ptx(str(layer.sources["ptx"]))
    assert "local load (spill or indexed)" not in counts


def test_sm_75_uses_its_own_instruction(cuda_compiler: None) -> None:
    problem = preset("resnet50-28-128-128-3x3").problem()
    built = build(problem, parse_arch("sm_75"), "mma")
    ptx = str(built.sources["ptx"])
    loop = loop_of(ptx, "mma.sync")
    assert set(re.findall(r"mma\.sync\.aligned\.(m\w+)\.", ptx)) == {"m8n8k16"}
    assert "ldmatrix.sync.aligned.m8n8.x4" in loop
    assert re.search(r"ld\.global\.\S*v4\.[a-z]32", loop)
    assert not re.search(r"\b(div|rem|mul\.hi|mad\.hi)\.", loop)
    assert built.resources[0].spill_loads == 0


def test_fragments_are_those_of_one_thread(layer: Built) -> None:
    sizes = dict(re.findall(r"^  alignas\(\d+\) .*?(\w+)_local_ptr\[(\d+)\];", str(layer.sources["cu"]), re.M))
    assert int(sizes["conv"]) == 64 * 64 // 32
    # two sets of 64 x 32 bytes over 32 threads
    assert int(sizes["rows_shared_dyn"]) == int(sizes["columns_shared_dyn"]) == 2 * 64


# ---- shared memory and the way out, from the addresses in the generated source ----


def address(expression: str, **values: int) -> int:
    """A C expression over threadIdx and loop variables, evaluated; what is not given is zero."""
    text = re.sub(r"\(\(int\)(\w+)\.(\w)\)", r"\1_\2", expression)
    text = re.sub(r"(at|stage)_ptr\[\d+\]", "0", text).replace("/", "//")
    names = {name: values.get(name, 0) for name in re.findall(r"[A-Za-z_]\w*", text)}
    return int(eval(text, {"__builtins__": {}}, names))


def balanced(text: str, start: int) -> str:
    """What stands in the bracket that opens at `start`."""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] in "([") - (text[end] in ")]")
        if depth == 0:
            return text[start + 1 : end]
    raise ValueError("unbalanced")


def shared_addresses(source: str, function: str) -> list[str]:
    """The shared-memory index of each call of `function` in the kernel, cursors where the loop starts."""
    found = []
    cursors = dict(re.findall(r"^  (cursor_ptr\w*\[0\]) = (.*);", source, re.M))
    for call in re.finditer(rf"^\s+{function}\(", source, re.M):
        arguments = balanced(source, call.end() - 1)
        index = arguments.index("buf_dyn_shmem_ptr)[") + len("buf_dyn_shmem_ptr)")
        found.append(re.sub(r"cursor_ptr\w*\[0\]", lambda match: cursors[match[0]], balanced(arguments, index)))
    return found


@pytest.mark.parametrize("function", ["ldmatrix_x4", "cp_async_16"])
def test_no_bank_conflicts(layer: Built, function: str) -> None:
    """Eight lanes at a time move 16 bytes each: they must fall into the eight different sixteenths of the banks."""
    expressions = shared_addresses(str(layer.sources["cu"]), function)
    assert len(expressions) >= 4
    for expression in expressions:
        loops = [name for name in re.findall(r"\bax\w+", expression)]
        for warp in range(4):
            for iteration in range(2):
                values = dict.fromkeys(loops, iteration)
                banks = [
                    address(expression, threadIdx_x=lane, threadIdx_y=warp, **values) // 16 % 8 for lane in range(32)
                ]
                for phase in range(0, 32, 8):
                    assert sorted(banks[phase : phase + 8]) == list(range(8))


def test_shared_rows_lie_as_the_article_draws_them(layer: Built) -> None:
    """Four rows of one group of 32 channels fill the banks; vectors swap places from line to line; no padding."""
    rows = shared_addresses(str(layer.sources["cu"]), "cp_async_16")[0]
    placed = [address(rows, threadIdx_x=lane) for lane in range(32)]
    assert sorted(placed) == list(range(0, 512, 16))
    for lane, place in enumerate(placed):
        row, vector = divmod(lane, 2)
        assert place == row * 32 + (vector ^ (row // 4 % 2)) * 16


def test_a_warp_stores_contiguous_pixels_from_registers(layer: Built) -> None:
    source = str(layer.sources["cu"])
    end = source[source.rindex("mma_s8(") :]
    stores = [balanced(end, m.end() - 1) for m in re.finditer(r"\*\(int2\*\)\(output_ptr \+ \(", end)]
    assert len(stores) == 1
    assert "shmem" not in end.split("__syncthreads();")[-1]
    places = [address(stores[0], threadIdx_x=lane) for lane in range(32)]
    assert places == list(range(places[0], places[0] + 256, 8))


# ---- configs ----


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("arch", CUDA_ARCHES, ids=str)
def test_default_config_is_legal(name: str, arch: Arch) -> None:
    from schedules.operators.conv2d_nchw32.mma import default

    for n in (1, 16, 256):
        problem = preset(name).problem({"n": n})
        config = default(problem, arch)
        assert config.check(problem, arch) is None
        # at most a quarter of the channels computed are thrown away
        channels = -(-problem.co // config.block_n) * config.block_n
        assert problem.co * 4 >= channels * 3


def test_space_has_the_default_and_legal_neighbours(sm_90a: Arch) -> None:
    problem = preset("resnet50-14-256-256-3x3").problem()
    legal = [config for config in space(problem, sm_90a) if config.check(problem, sm_90a) is None]
    assert len(legal) > 100
    assert MatrixConfig() in legal


@pytest.mark.parametrize(
    ("arch", "config", "message"),
    [
        ("sm_80", dict(block_m=40), "block_m=40 gives each of 2 warps 20"),
        ("sm_80", dict(block_n=48), "block_n=48 gives each of 2 warps 24, not a multiple of 32"),
        ("sm_80", dict(block_k=32), "block_k=32 is not a multiple of 64"),
        ("sm_80", dict(stages=1), "stages=1 must be at least 2"),
        ("sm_75", dict(stages=3), "no cp.async"),
        ("sm_86", dict(stages=8), "bytes shared"),
        ("sm_80", dict(warps_m=1, warps_n=1), "registers"),
        ("sm_80", dict(stages=0), "stages=0 must be at least 1"),
        ("sm_80", dict(min_blocks=20), "threads"),
    ],
)
def test_illegal_config_says_why(arch: str, config: dict[str, Any], message: str) -> None:
    problem = problem_of("conv2d_nchw32", **SHAPES["whole tiles"])
    concrete = MatrixConfig(**{**MatrixConfig(stages=2).to_json(), **config})
    with pytest.raises(ConfigError, match=message):
        concrete.require(problem, parse_arch(arch))


@pytest.mark.parametrize(
    ("arch", "ci", "co", "name"),
    [
        ("sm_90a", 32, 256, "mma"),
        ("sm_90a", 256, 32, "mma"),
        ("sm_80", 256, 256, "mma"),
        ("gfx90a", 256, 256, "mma"),
        ("gfx1100", 256, 256, "mma"),
        ("gfx1201", 256, 256, "mma"),
        ("gfx1030", 256, 256, "simt"),
        ("llvm", 256, 256, "cpu"),
    ],
)
def test_the_rule(arch: str, ci: int, co: int, name: str) -> None:
    problem = problem_of("conv2d_nchw32", n=16, h=14, w=14, ci=ci, co=co, kh=3, kw=3, pad=1)
    assert operator("conv2d_nchw32").choose(problem, parse_arch(arch)) == name
