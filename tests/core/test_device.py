from __future__ import annotations

import io
import pickle
import tokenize
from dataclasses import replace
from pathlib import Path

import pytest

from schedules.core.arch import ARCHES, parse_arch
from schedules.core.device import DEVICES, GENERIC, H200, Device, Timings, find_device
from schedules.core.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_rows_are_whole(device: Device) -> None:
    arch = parse_arch(device.arch)
    assert device.l2_bytes and device.bandwidth and device.watts
    assert arch.on(device).device is device
    assert {"float16", "int8", "float32"} <= set(device.peaks) <= set(H200.peaks)
    assert device.by_datasheet != (device.arch == "sm_90a")
    assert ("not measured" in str(device)) == device.by_datasheet
    if device.resident_blocks:
        assert device.resident_blocks[1] == device.multiprocessors
    for cluster, blocks in device.resident_blocks.items():
        assert blocks % cluster == 0 and device.multiprocessors // 2 < blocks <= device.multiprocessors


def test_an_arch_is_for_a_device_of_its_own() -> None:
    for arch in ARCHES.values():
        rows = [device for device in DEVICES.values() if device.arch == arch.name]
        assert arch.device in rows if rows else arch.device is GENERIC


def test_devices_are_found_as_drivers_and_folders_call_them() -> None:
    assert find_device("NVIDIA H200") is find_device("nvidia-h200") is H200
    assert find_device("NVIDIA H201") is None
    assert all(find_device(device.name) is device for device in DEVICES.values())


def test_what_was_not_measured_is_one_block_to_a_multiprocessor_in_whole_clusters() -> None:
    device = Device("some GPU", multiprocessors=78)
    assert [device.resident(cluster) for cluster in (1, 2, 4, 8, 16)] == [78, 78, 76, 72, 64]
    assert [H200.resident(cluster) for cluster in (1, 2, 4)] == [132, 132, 120]


def test_an_arch_is_for_a_device_and_stays_itself() -> None:
    arch = parse_arch("sm_90a")
    assert arch.device is H200 and parse_arch("sm_87").device is GENERIC
    small = arch.on(Device("small", "sm_90a", 78))
    assert str(small) == str(arch) and small != arch and hash(small) != hash(arch)
    assert replace(small, device=H200) == arch
    assert pickle.loads(pickle.dumps(small)) == small  # worker processes are sent arches
    with pytest.raises(UsageError, match="NVIDIA A100-SXM4-80GB is of sm_80, not of sm_90a; choose another device"):
        arch.on(DEVICES["nvidia-a100-sxm4-80gb"])


def test_timings_say_on_what_they_were_fitted() -> None:
    assert {device.timings.fitted_on for device in DEVICES.values()} == {Timings().fitted_on} == {H200.name}


def test_no_schedule_holds_the_number_of_a_devices_multiprocessors() -> None:
    counts = {str(device.multiprocessors) for device in DEVICES.values() if device.arch == "sm_90a"}
    for file in (ROOT / "schedules").rglob("*.py"):
        if file.name == "device.py":
            continue
        tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
        found = [token.start[0] for token in tokens if token.type == tokenize.NUMBER and token.string in counts]
        assert not found, f"{file}:{found[0]} has the multiprocessors of a device; ask arch.device"


def test_no_arch_is_legal_or_illegal_by_its_device() -> None:
    """What an arch allows is what it allows on every device: limits stand in the arch alone."""
    for arch in ARCHES.values():
        other = arch.on(Device("other", multiprocessors=3))
        assert replace(other, device=arch.device) == arch
