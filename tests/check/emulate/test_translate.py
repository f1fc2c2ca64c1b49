from __future__ import annotations

import re

import pytest

from schedules.check.emulate.translate import find_kernels, parse_asm, tokenize, translate


def test_code_without_cuda_passes_unchanged() -> None:
    source = '#define __asm__ asm\n// asm("x")\nconst char* s = "asm(\\"y\\")"; /* __shared__ */ int a = 0x1p+0f;\n'
    assert translate(source).source == source + "\n"


def test_asm_operands() -> None:
    statement = parse_asm(
        tokenize('"mma.sync {%0}, " /* c */ "[%1];\\n" : "=f"(((float *)(c + 0))[0]) : "r"(f(a, b)), "l"(p) : "memory"')
    )
    assert statement.text == "mma.sync {%0}, [%1];\n"
    assert [(o.constraint, o.expression) for o in statement.outputs] == [("=f", "(((float *)(c + 0))[0])")]
    assert [(o.constraint, o.expression) for o in statement.inputs] == [("r", "(f(a, b))"), ("l", "(p)")]


def test_percent_signs_are_doubled_only_with_operands() -> None:
    assert parse_asm(tokenize('"mov.u32 %0, %%laneid;" : "=r"(x) :')).text == "mov.u32 %0, %laneid;"
    assert parse_asm(tokenize('"mov.u32 r, %laneid;"')).text == "mov.u32 r, %laneid;"


def test_line_numbers_stay() -> None:
    source = 'void f() {\nasm volatile(\n"cp.async.wait_all;"\n::: "memory");\n__shared__ float\n a[4];\nlast();\n}'
    translated = translate(source).source
    assert translated.splitlines()[6] == source.splitlines()[6] == "last();"


def test_unknown_ptx_becomes_a_call() -> None:
    translated = translate('asm("strange.op %0, \\"q\\";" :: "r"(x));').source
    assert translated.strip() == 'emu::unknown_ptx("strange.op %0, \\"q\\";", 1);'


@pytest.mark.parametrize(
    "declaration, expected",
    [
        ("__shared__ alignas(64) half a[2][8];", "auto& a = emu::shared_variable<half[2][8], (64), 0, 0>();"),
        ("__shared__ __align__(16) uint a[8];", "auto& a = emu::shared_variable<uint[8], (16), 0, 0>();"),
        (
            "__shared__ int a, b[N + 1];",
            "auto& a = emu::shared_variable<int, (0), 0, 0>(); auto& b = emu::shared_variable<int[N+1], (0), 0, 1>();",
        ),
        (
            "extern __shared__ alignas(1024) uchar buf[];",
            "uchar* buf = emu::dynamic_shared<uchar, (1024)>();",
        ),
    ],
)
def test_shared_variables(declaration: str, expected: str) -> None:
    assert translate(declaration).source.strip() == expected


def test_kernels_are_found_once_behind_attributes() -> None:
    source = """
      extern "C" __global__ void __launch_bounds__(32) first(half* __restrict__ a);
      extern "C" __global__ void __launch_bounds__(32) first(half* __restrict__ a) { call(a); }
      __global__ __launch_bounds__(64, 2) void second() {}
      __device__ void helper() {}
    """
    assert list(find_kernels(tokenize(source))) == ["first", "second"]
    assert translate(source).source.rstrip().endswith("EMU_EXPORT_KERNEL(first, 0)\nEMU_EXPORT_KERNEL(second, 1)")


def test_shared_variables_are_of_their_kernel() -> None:
    """Declared before, in another order than they are defined in."""
    source = """
      __global__ void first(int* a);
      __global__ void second(int* a);
      __global__ void second(int* a) { __shared__ int b[4]; b[0] = a[0]; }
      __global__ void first(int* a) { __shared__ int c[8]; __shared__ int d[2]; c[0] = d[0] = a[0]; }
    """
    found = re.findall(r"shared_variable<(int\[\d\]), \(0\), (\d), \d>", translate(source).source)
    assert found == [("int[4]", "1"), ("int[8]", "0"), ("int[2]", "0")]


def test_unbalanced_brackets() -> None:
    with pytest.raises(ValueError, match="unbalanced"):
        translate('asm volatile("x"')
