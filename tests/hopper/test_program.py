"""The kernel that every operator shares: it begins while the one before it runs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.toolchain import cuda
from schedules.core.arch import Arch
from tests.conftest import problem_of
from tests.hopper.works import NCHW, NHWC, PLAIN

TERMS = dict(bias=True, residual=True, activation="relu")
TILE = PLAIN | dict(block_m=128, block_n=64, block_k=16)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("conv2d_nhwc", NHWC | TERMS, TILE | dict(ping_pong=True, grid=4)),
        ("conv2d_nhwc", NHWC | TERMS | dict(co=41), TILE | dict(cluster_n=2)),  # threads read the residual
        ("conv2d_nchw", NCHW | TERMS, TILE),
    ],
    ids=str,
)
def test_nothing_is_read_before_the_kernel_before_is_done(
    cuda_compiler: None, sm_90a: Arch, name: str, fields: dict[str, Any], words: dict[str, Any]
) -> None:
    """In the device code too: compilers may move loads of what they take for constant."""
    built = build(problem_of(name, **fields), sm_90a, "tma_wgmma", words)
    listing = cuda.disassemble(built.sources["cubin"])
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]+)", listing or "")
    waits = [at for at, opcode in enumerate(opcodes) if opcode == "ACQBULK"]
    touches = [
        at for at, opcode in enumerate(opcodes) if opcode in ("LDG", "STG", "UBLKPF", "UTMALDG", "UTMASTG", "ATOMG")
    ]
    assert len(waits) == 1 and touches and min(touches) > waits[0]
    assert any(kernel["dependent"] for kernel in built.launches["kernels"])
