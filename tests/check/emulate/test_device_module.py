from __future__ import annotations

import struct

import pytest

from schedules.check.emulate.device_module import ArgumentType, KernelSignature, LaunchShape, parse_device_module


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def count(value: int) -> bytes:
    return struct.pack("<Q", value)


BLOB = b"".join(
    [text("cubin"), count(1), text("main_kernel"), text("main_kernel"), count(2), struct.pack("<BBH", 3, 64, 1),
     struct.pack("<BBH", 0, 32, 1), count(2), text("blockIdx.x"), text("threadIdx.y"), count(2), b"\0" * 8,
     text("code")]
)  # fmt: skip


def test_signature_and_launch_shape() -> None:
    signature = parse_device_module(BLOB)["main_kernel"]
    assert signature == KernelSignature((ArgumentType(3, 64, 1), ArgumentType(0, 32, 1)), ("blockIdx.x", "threadIdx.y"))
    assert signature.launch_shape((7, 8)) == LaunchShape([7, 1, 1], [1, 8, 1])
    dynamic = KernelSignature((), ("threadIdx.x", "tirx.use_dyn_shared_memory"))
    assert dynamic.launch_shape((32, 4096)) == LaunchShape(block=[32, 1, 1], dynamic_shared=4096)
    cluster = KernelSignature((), ("clusterCtaIdx.y", "blockIdx.x"))
    assert cluster.launch_shape((2, 8)) == LaunchShape([8, 1, 1], cluster=[1, 2, 1])
    flagged = KernelSignature((), ("tirx.use_programtic_dependent_launch", "blockIdx.x"))
    assert flagged.launch_shape((8,)) == LaunchShape([8, 1, 1])


def test_arguments_that_are_tensor_maps() -> None:
    blob = BLOB.replace(count(2) + b"\0" * 8, count(2) + struct.pack("<2I", 1, 0))
    assert parse_device_module(blob)["main_kernel"].tensor_maps == {0}


def test_unknown_launch_tag() -> None:
    with pytest.raises(ValueError, match="preferredClusterCtaIdx.x"):
        KernelSignature((), ("preferredClusterCtaIdx.x",)).launch_shape((2,))


@pytest.mark.parametrize("size", range(0, len(BLOB) - 12, 7))
def test_truncated_module(size: int) -> None:
    with pytest.raises(ValueError):
        parse_device_module(BLOB[:size])
