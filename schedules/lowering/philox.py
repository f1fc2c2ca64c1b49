"""Random numbers in kernels: a call of a tensor expression that becomes arithmetic of 32 x 32 -> 64 bits.

In a schedule it is one small node, whatever is split, unrolled or inlined around it.  For LLVM it is written out in
64-bit variables of which the upper half is 0, so that lanes are multiplied by one instruction; in CUDA it is a function
of four words, of which the compiler leaves what is not used, and computes what neighbours share once.  Its products are
asked for by name: the compiler makes 64-bit arithmetic of wide ones, and of a high and a low half two multiplications.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.core.philox import KEYS, LOW, MULTIPLIERS, ROUNDS

NAME = "philox"
SOURCE = f"""
__device__ __forceinline__ unsigned philox(long long seed, long long offset, long long group, int word) {{
  unsigned k0 = (unsigned)seed, k1 = (unsigned)((unsigned long long)seed >> 32);
  unsigned long long counter = (unsigned long long)offset >> 2;
  unsigned c0 = (unsigned)counter, c1 = (unsigned)(counter >> 32);
  unsigned c2 = (unsigned)group, c3 = (unsigned)((unsigned long long)group >> 32);
#pragma unroll
  for (int i = 0; i < {ROUNDS}; ++i) {{
    unsigned long long a, b;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(a) : "r"(c0), "r"({MULTIPLIERS[0]:#x}u));
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(b) : "r"(c2), "r"({MULTIPLIERS[1]:#x}u));
    c0 = (unsigned)(b >> 32) ^ c1 ^ k0; c1 = (unsigned)b;
    c2 = (unsigned)(a >> 32) ^ c3 ^ k1; c3 = (unsigned)a;
    k0 += {KEYS[0]:#x}u; k1 += {KEYS[1]:#x}u;
  }}
  return word < 2 ? (word == 0 ? c0 : c1) : (word == 2 ? c2 : c3);
}}
"""


def word(seed: Any, offset: Any, element: Any) -> Any:
    """The uint32 of an element by its number, of `core.philox`; all int64."""
    return tirx.call_pure_extern("uint32", NAME, seed, offset, element // 4, tirx.Cast("int32", element % 4))


def written_out(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` with its calls in what its functions' target computes."""

    def lowered(function: tirx.PrimFunc) -> tirx.PrimFunc:
        on_cuda = function.attrs["target"].kind.name == "cuda"

        def visit(call: Any) -> Any:
            if str(getattr(call.op, "name", "")) != "tirx.call_pure_extern" or call.args[0].value != NAME:
                return call
            if not on_cuda:
                return _expression(*call.args[1:])
            from tvm.script import tirx as T

            return T.cuda.func_call(NAME, *call.args[1:], source_code=SOURCE, return_type="uint32")

        return function.with_body(tvm_ffi.structural_map(function.body, (ir.Call, visit)))

    functions = {
        name: lowered(function) if isinstance(function, tirx.PrimFunc) else function
        for name, function in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)


def _expression(seed: Any, offset: Any, group: Any, word: Any) -> Any:
    """Word `word` of four."""
    bound: list[tuple[Any, Any]] = []
    low, half = tirx.const(LOW, "uint64"), tirx.const(32, "uint64")

    def let(name: str, value: Any) -> Any:
        variable = tirx.Var(name, "uint64")
        bound.append((variable, value))
        return variable

    def halves(name: str, value: Any, shift: int = 0) -> tuple[Any, Any]:
        whole = let(name, tirx.Cast("uint64", value) >> tirx.const(shift, "uint64"))
        return let(f"{name}_low", whole & low), let(f"{name}_high", whole >> half)

    key, (c0, c1), (c2, c3) = halves("seed", seed), halves("offset", offset, 2), halves("group", group)
    for step in range(ROUNDS):
        first, second = (
            let(f"product{i}", part * tirx.const(MULTIPLIERS[i], "uint64")) for i, part in enumerate((c0, c2))
        )
        k0, k1 = (part + tirx.const(KEYS[i] * step & LOW, "uint64") & low for i, part in enumerate(key))
        c0, c1 = let("c0", second >> half ^ c1 ^ k0), let("c1", second & low)
        c2, c3 = let("c2", first >> half ^ c3 ^ k1), let("c3", first & low)
    chosen = tirx.Select(word < 2, tirx.Select(word == 0, c0, c1), tirx.Select(word == 2, c2, c3))
    made = tirx.Cast("uint32", chosen)
    for variable, value in reversed(bound):
        made = tirx.Let(variable, value, made)
    return made
