"""The doctor names what is missing, how to get it, and what cannot be done without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from schedules.build.toolchain import cuda, devices, link
from schedules.build.toolchain.devices import LocalDevice
from schedules.check.emulate import toolchain as emulate_toolchain
from schedules.core import versions
from schedules.core.errors import ToolchainError
from schedules.show import doctor
from schedules.show.doctor import examine


def target(report: doctor.Report, name: str) -> doctor.TargetState:
    return next(state for state in report.targets if state.target == name)


def test_this_machine() -> None:
    report = examine()
    for name in ("python", "apache-tvm", "apache-tvm-ffi", "numpy"):
        assert report.part(name).ok, report.part(name)
    assert report.devices[0].kind == "llvm"
    assert "device" in target(report, "llvm").verify and target(report, "llvm").run
    assert all(part.remedy for part in report.parts)


def test_nothing_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ToolchainError("no")

    monkeypatch.setattr(cuda, "nvrtc_available", lambda: False)
    monkeypatch.setattr(cuda, "load_cudart", missing)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    report = examine()
    assert report.part("CUDA compiler").found is None
    assert report.part("CUDA compiler").remedy == "pip install 'te-schedules[cuda]'"
    state = target(report, "cuda:sm_80")
    assert not state.build and "pip install 'te-schedules[cuda]'" in state.note


def test_nvcc_serves_where_nvrtc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "nvrtc_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert examine().part("CUDA compiler").found == "nvcc at /usr/bin/nvcc"


def test_no_linker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "find_lld", lambda: None)
    state = target(examine(), "rocm:gfx942")
    assert not state.build and "pip install 'te-schedules[rocm]'" in state.note


def test_no_cxx_means_no_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ToolchainError("no")

    monkeypatch.setattr(emulate_toolchain, "find_cxx", missing)
    report = examine()
    assert not report.part("C++ compiler").ok and "g++" in report.part("C++ compiler").remedy
    for name in ("cuda:sm_80", "rocm:gfx942"):
        assert "emulated" not in target(report, name).verify and "serial" in target(report, name).verify


def test_a_gpu_runs_its_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LocalDevice("cuda", "RTX 3090", "8.6")
    monkeypatch.setattr(devices, "all_devices", lambda: (devices.cpu(), gpu))
    report = examine()
    if not target(report, "cuda:sm_86").build:
        pytest.skip(target(report, "cuda:sm_86").note)
    assert target(report, "cuda:sm_86").run and "device" in target(report, "cuda:sm_86").verify
    assert target(report, "cuda:sm_80").run and "device" not in target(report, "cuda:sm_80").verify
    assert not target(report, "cuda:sm_90a").run


def test_an_amd_gpu_runs_its_arch_where_hip_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver's library: TVM from pip has no runtime for it, so that `verify` has no route there."""
    gpu = LocalDevice("rocm", "AMD gfx1100", "gfx1100")
    monkeypatch.setattr(devices, "all_devices", lambda: (devices.cpu(), gpu))
    monkeypatch.setattr(doctor, "_hip", lambda: None)
    state = target(examine(), "rocm:gfx1100")
    if not state.build:
        pytest.skip(state.note)
    assert not state.run and "install ROCm" in state.note
    monkeypatch.setattr(doctor, "_hip", lambda: "libamdhip64.so.7")
    states = examine().targets
    assert [state.target for state in states if state.run] == ["llvm", "rocm:gfx1100"]
    state = next(state for state in states if state.target == "rocm:gfx1100")
    assert "device" not in state.verify and "by load.py and schedules.torch" in state.note


def test_amd_gpus_are_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, version in enumerate((0, 90010, 90402, 110000)):
        node = tmp_path / str(index)
        node.mkdir()
        (node / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\n")
    monkeypatch.setattr(devices, "KFD_NODES", tmp_path)
    devices.rocm.cache_clear()
    try:
        assert [device.capability for device in devices.rocm()] == ["gfx90a", "gfx942", "gfx1100"]
    finally:
        devices.rocm.cache_clear()


@pytest.mark.parametrize(
    ("version", "ok"), [("0.1.14.post0", True), ("0.1.14.post1", True), ("0.1.13", False), ("0.1.15.post2", False)]
)
def test_a_version_out_of_range_is_reported(monkeypatch: pytest.MonkeyPatch, version: str, ok: bool) -> None:
    real = versions.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: version if name == "apache-tvm-ffi" else real(name))
    part = examine().part("apache-tvm-ffi")
    assert part.ok is ok
    assert part.remedy.startswith("pip install 'apache-tvm-ffi") and "<0.1.15" in part.remedy
