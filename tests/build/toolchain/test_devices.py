from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from schedules.build.toolchain import devices
from schedules.core.arch import Arch, parse_arch
from schedules.core.device import H200, find_device
from schedules.core.errors import UnknownNameError, UsageError

# by the numbers of CUdevice_attribute: multiprocessors, memory clock and bus, L2, compute capability
PCIE = {16: 114, 36: 1593000, 37: 5120, 38: 50 * 2**20, 75: 9, 76: 0}
ADA = {16: 142, 36: 9001000, 37: 384, 38: 96 * 2**20, 75: 8, 76: 9}
WHOLE = {16: 132, 36: 3201000, 37: 6016, 38: 60 * 2**20, 75: 9, 76: 0}


class FakeDriver:
    """NVIDIA's driver with the given GPUs: name to attributes."""

    def __init__(self, gpus: dict[str, dict[int, int]]) -> None:
        self._gpus = list(gpus.items())

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, device: Any) -> int:
        buffer.value = self._gpus[device.value][0].encode()
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> int:
        attributes = self._gpus[device.value][1]
        value._obj.value = attributes.get(number, -1)
        return 0 if number in attributes else 1


Driver = Callable[[dict[str, dict[int, int]]], None]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    def install(gpus: dict[str, dict[int, int]]) -> None:
        fake = FakeDriver(gpus)
        monkeypatch.setattr(devices, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda name: fake}))
        devices.cuda.cache_clear()

    yield install
    devices.cuda.cache_clear()


def test_a_device_without_a_row_is_as_its_driver_says(driver: Driver, sm_90a: Arch) -> None:
    driver({"NVIDIA H100 PCIe": PCIE})
    found = devices.on_local(sm_90a).device
    assert (found.name, found.arch, found.multiprocessors) == ("NVIDIA H100 PCIe", "sm_90a", 114)
    assert found.l2_bytes == 50 * 2**20 and found.bandwidth == 2039  # 2 x 1593 MHz x 640 bytes
    assert found.timings == H200.timings and not found.peaks and found.watts is None
    assert [found.resident(cluster) for cluster in (1, 2, 4)] == [114, 114, 112]


def test_a_device_with_a_row_is_its_row(driver: Driver, sm_90a: Arch) -> None:
    driver({"NVIDIA H200": WHOLE})
    assert devices.on_local(sm_90a) == sm_90a and devices.on_local(sm_90a).device is H200
    (here,) = devices.cuda()
    assert (here.l2_bytes, here.bandwidth) == (H200.l2_bytes, H200.bandwidth)  # which the row has from the driver


def test_a_part_of_a_device_is_not_its_row(driver: Driver, sm_90a: Arch) -> None:
    driver({"NVIDIA H200": {**WHOLE, 16: 60}})
    found = devices.on_local(sm_90a).device
    assert found.multiprocessors == 60 and found.resident(4) == 60 and not found.peaks


def test_only_a_device_of_the_arch_counts_unasked(driver: Driver, sm_90a: Arch) -> None:
    driver({"NVIDIA L40S": ADA})
    assert devices.on_local(sm_90a) is sm_90a
    older = parse_arch("sm_86")  # whose code runs there, and whose name in the journals is another
    assert devices.on_local(older) is older
    assert devices.on_local(parse_arch("sm_89")).device.multiprocessors == 142
    assert devices.on_named(older, "NVIDIA L40S").device.multiprocessors == 142
    for target in ("llvm", "gfx942"):
        assert devices.on_local(parse_arch(target)) is parse_arch(target)


def test_what_the_driver_does_not_say_is_not_made_up(driver: Driver) -> None:
    driver({"Old GPU": {75: 7, 76: 5}})
    (here,) = devices.cuda()
    assert (here.multiprocessors, here.l2_bytes, here.bandwidth) == (0, 0, 0)
    arch = parse_arch("sm_75")
    assert devices.on_local(arch).device is arch.device


def test_devices_by_name(driver: Driver, sm_90a: Arch) -> None:
    driver({"NVIDIA H100 PCIe": PCIE})
    assert devices.on_named(sm_90a, "nvidia-h100-pcie").device.multiprocessors == 114
    assert devices.on_named(sm_90a, "NVIDIA H100 80GB HBM3").device is find_device("NVIDIA H100 80GB HBM3")
    with pytest.raises(UnknownNameError, match="unknown device 'NVIDIA H201'; did you mean 'NVIDIA H200'"):
        devices.on_named(sm_90a, "NVIDIA H201")
    assert devices.on_named(sm_90a, "NVIDIA H201", ["nvidia-h201"]) is sm_90a  # journals know it, no row does
    with pytest.raises(UsageError, match="NVIDIA H200 is of sm_90a, not of sm_80"):
        devices.on_named(parse_arch("sm_80"), "NVIDIA H200")
    assert devices.on_named(parse_arch("llvm"), "any CPU") is parse_arch("llvm")
