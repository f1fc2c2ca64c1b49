from __future__ import annotations

import pytest

from schedules.build.builder import build
from schedules.build.toolchain import cuda, nvrtc_headers
from schedules.core.arch import parse_arch
from schedules.core.presets import preset

PRELUDE = """
#include <cuda/std/cstdint>
using cuda::std::int64_t;
using cuda::std::uint8_t;
#include <cuda/std/type_traits>
namespace std { using cuda::std::enable_if; using cuda::std::conditional; using cuda::std::is_same; }
"""
TRAITS = """
template <class A> constexpr bool floating = cuda::std::is_floating_point<A>::value;
static_assert(cuda::std::is_same_v<int, int> && !cuda::std::is_same_v<int, long>);
static_assert(std::is_same<std::conditional<true, int, float>::type, int>::value);
static_assert(std::is_same<std::conditional<false, int, float>::type, float>::value);
static_assert(std::is_same<std::enable_if<true, int>::type, int>::value);
static_assert(floating<float> && floating<double> && !floating<int>);
static_assert(cuda::std::is_integral<int64_t>::value && cuda::std::is_integral<bool>::value);
static_assert(!cuda::std::is_integral<float>::value && !cuda::std::is_integral<int*>::value);
static_assert(cuda::std::is_signed<float>::value && cuda::std::is_signed<int64_t>::value);
static_assert(!cuda::std::is_signed<uint8_t>::value && cuda::std::is_unsigned<uint8_t>::value);
static_assert(!cuda::std::is_unsigned<int>::value && !cuda::std::is_unsigned<double>::value);
static_assert(cuda::std::is_signed<char>::value != cuda::std::is_unsigned<char>::value);
static_assert(sizeof(cuda::std::int8_t) == 1 && sizeof(cuda::std::uint16_t) == 2 && sizeof(cuda::std::int32_t) == 4);
extern "C" __global__ void f(int64_t* x) { x[0] = 1; }
"""


@pytest.fixture(autouse=True)
def nvrtc() -> None:
    if not cuda.nvrtc_available():
        pytest.skip(f"no NVRTC; {cuda.INSTALL}")


@pytest.mark.parametrize("real", [False, True])
def test_traits_say_what_the_real_ones_do(real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if real:
        monkeypatch.setattr(nvrtc_headers, "STAND_INS", {})
    cuda.compile_cuda(PRELUDE + TRAITS, "sm_80")


@pytest.mark.parametrize("name", ["tutorial", "k100-nhwc-3", "oneflow-1000"])
def test_the_same_instructions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = build(preset(name).problem(), parse_arch("sm_80")).sources["cu"]
    assert isinstance(source, str)
    assert nvrtc_headers.stand_ins(source)
    ours = cuda.compile_cuda(source, "sm_80")
    monkeypatch.setattr(cuda, "stand_ins", lambda source: {})
    theirs = cuda.compile_cuda(source, "sm_80")
    assert "numeric_limits" not in ours.ptx

    def instructions(ptx: str) -> list[str]:  # without libcu++'s constants, which nothing uses
        return [line for line in ptx.splitlines() if line and ".global .align" not in line]

    assert instructions(ours.ptx) == instructions(theirs.ptx)


@pytest.mark.parametrize("header", ["cuda/barrier", "cooperative_groups.h", "cuda/std/array", "cuda_fp8.h"])
def test_what_needs_the_real_headers_gets_them(header: str) -> None:
    assert nvrtc_headers.stand_ins(PRELUDE)
    assert nvrtc_headers.stand_ins(PRELUDE + f"#include <{header}>\n") == {}


def test_real_headers_still_work() -> None:
    made = cuda.compile_cuda(
        PRELUDE + '#include <cuda/std/array>\nextern "C" __global__ void f(cuda::std::array<int, 4>* x) {}', "sm_80"
    )
    assert ".entry f" in made.ptx
