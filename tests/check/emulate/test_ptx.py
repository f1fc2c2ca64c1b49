from __future__ import annotations

import pytest

from schedules.check.emulate.ptx import Operand, UnknownPtxError, emit, parse


def test_parse_of_a_predicated_block() -> None:
    program = parse(
        "{\n .reg .pred p, q;\n .reg .b64 a<2>; // scratch\n setp.eq.u32 p, %3, 1;\n"
        " @!p st.shared.v2.u32 [%0+4], {%4, %4};\n}\n"
    )
    assert program.registers == {"p": "bool", "q": "bool", "a0": "uint64_t", "a1": "uint64_t"}
    compare, store = program.instructions
    assert (compare.opcode, compare.guard) == ("setp.eq.u32", "")
    assert (store.guard, store.negated) == ("p", True)
    vector = Operand("vector", elements=(Operand("value", "%4"), Operand("value", "%4")))
    assert store.operands == (Operand("address", "%0+4"), vector)


def test_vector_directly_behind_the_opcode() -> None:
    (load,) = parse("ldmatrix.sync.aligned.m8n8.x2.shared.b16{%0, %1}, [%2];\n").instructions
    assert load.opcode == "ldmatrix.sync.aligned.m8n8.x2.shared.b16"
    assert [operand.kind for operand in load.operands] == ["vector", "address"]


def test_empty_text_and_several_instructions() -> None:
    assert emit("", 1) == ""
    assert emit("cp.async.commit_group; cp.async.wait_group 2;", 1) == (
        "{ emu::async_commit(); } { emu::async_wait_group(2); }"
    )


def test_labels_are_local_to_their_statement() -> None:
    text = "{ .reg .pred p;\nAGAIN%=: setp.eq.u32 p, %0, 1; @p bra.uni OUT$1;\nbra AGAIN%=; OUT$1:\n}"
    program = parse(text)
    assert program.labels == ("AGAIN", "OUT_1")
    assert [instruction.labels for instruction in program.instructions] == [("AGAIN",), (), (), ("OUT_1",)]
    code = emit(text, 1)
    assert code.startswith("{ __label__ ptx_AGAIN, ptx_OUT_1; bool ptx_p{}; ptx_AGAIN: {")
    assert "if (ptx_p) { goto ptx_OUT_1; }" in code and code.endswith("ptx_OUT_1: { ; } }")


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.cp.cta_group::1.128x256b [%0], %1;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%0, %1}, %2, %3, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2}, %3, %4, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1;",
        "wgmma.mma_async.sync.aligned.m64n12k32.s32.s8.s8 {%0, %1, %2, %3, %4, %5}, %6, %7, 1;",
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];",
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {0, 0, 0}], [%2];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 16;",
        "elect.sync %0|%1, %2;",
        "LOOP: bra LOST;",
        "mov.u32 %0, %clock;",
        "mov.u32 %0, undeclared;",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6,%7}, {%8,%9,%10,%11};",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1}, [%2];",
        "cp.async.ca.shared.global [%0];",
        "setp.eq.u32 p, %0;",
        "st.shared.u32 %0, %1;",
    ],
)
def test_unknown_ptx(text: str) -> None:
    with pytest.raises(UnknownPtxError):
        emit(text, 1)
