"""The command line: what it prints, its exit codes, and one line for every mistake."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schedules import cli
from schedules.build.toolchain import cuda, link
from schedules.bundle.bundle import Bundle
from schedules.check.verify import Check
from schedules.cli.output import dimensions
from schedules.core.device import slug
from schedules.core.errors import BuildError
from schedules.core.presets import planned
from schedules.core.problem import Problem
from schedules.core.registry import operator
from schedules.show.doctor import examine
from tests.command import Run, one_line

SMALL = ["conv2d_hwcn", "n=8", "h=5", "w=4", "ci=3", "co=6", "kh=3", "kw=3", "pad=1"]
STATES = {state.target: state for state in examine().targets}
needs_cuda = pytest.mark.skipif(not STATES["cuda:sm_90a"].build, reason=STATES["cuda:sm_90a"].note)
needs_rocm = pytest.mark.skipif(not STATES["rocm:gfx90a"].build, reason=STATES["rocm:gfx90a"].note)


# ---- bad input: one line, exit code 2, nothing started


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no command given; use one of list, show, build"),
        (["biuld"], "unknown command 'biuld'; did you mean 'build'?"),
        (["--vresion"], "unknown option '--vresion'; did you mean '--version'?"),
        (["build"], "name an operator or a preset"),
        (["build", "conv2d_hwcnn"], "unknown operator or preset 'conv2d_hwcnn'; did you mean 'conv2d_hwcn'?"),
        (["build", "zzz"], "unknown operator or preset 'zzz'; `schedules list` shows them"),
        (["build", "tutorail"], "unknown operator or preset 'tutorail'; did you mean 'tutorial'?"),
        (
            ["build", "tutorial", "--schedule", "tutorail"],
            "unknown schedule of conv2d_hwcn 'tutorail'; did you mean 'tutorial'?",
        ),
        (["build", "tutorial", "--schedule", "tutorial"], "schedule tutorial runs on cuda and rocm, not on llvm"),
        (["build", "tutorial", "--target", "cuda:sm_90"], "unknown target 'cuda:sm_90'; did you mean 'cuda:sm_90a'?"),
        (["build", "tutorial", "--target", "llvm:haswel"], "unknown CPU 'haswel'; did you mean 'haswell'?"),
        (["build", "tutorial", "--target"], "argument --target: expected one argument"),
        (["build", "tutorial", "--targte", "llvm"], "unknown option '--targte'; did you mean '--target'?"),
        (["build", *SMALL[:-3], "kw=3"], "missing problem kh; give kh=..."),
        (["build", *SMALL, "kd=3"], "unknown problem field 'kd'; did you mean"),
        (["build", *SMALL, "n=9"], "n is given twice: 8 and 9"),
        (["build", *SMALL, "dtype"], "word 'dtype' is not name=value"),
        (["build", *SMALL, "stride="], "word 'stride=' is not name=value"),
        (["build", "tutorial", "n=0"], "n=0 must be at least 1"),
        (["build", "tutorial", "co=-4"], "co=-4 must be at least 1"),
        (["build", "tutorial", "n=2.5"], "problem n='2.5' is not a whole number"),
        (["build", "tutorial", "pad=1,2,3"], "is not one or two whole numbers"),
        (["build", "tutorial", "kh=17"], "kh=17 reaches over 17 pixels but the padded input has 16"),
        (["build", "tutorial", "dtype=int4"], "dtype=int4 is not one this operator takes; use float32"),
        (
            ["build", "tutorial", "--target", "cuda:sm_80", "--schedule", "simt", "--config", "tile=7"],
            "illegal config: block=64 is not a multiple",
        ),
        (
            ["build", "tutorial", "--target", "cuda:sm_80", "--config", "til=8"],
            "unknown config field 'til'; did you mean 'tile'",
        ),
        (
            ["build", "tutorial", "--target", "cuda:sm_80", "--config", "tile=8,4"],
            "--config item '4' is not name=value",
        ),
        (
            ["build", "tutorial", "--target", "rocm:gfx90a", "--schedule", "tutorial", "--config", "num_thread=64"],
            "illegal config: num_thread",
        ),
        (["build", "tutorial", "--force"], "--force replaces the bundle in --out; give --out DIR"),
        (["verify", *SMALL, "--route", "emualted"], "unknown route 'emualted'; did you mean 'emulated'?"),
        (["verify", *SMALL, "--seeds", "a"], "--seeds 'a' is not a list of whole numbers"),
        (["bench", *SMALL, "--seconds", "0"], "--seconds 0.0 must be over 0"),
        (["bench", *SMALL, "--seconds", "inf"], "--seconds inf must be at most 10000"),
        (["bench", *SMALL, "--seed", "99999999999999999999"], "--seed 99999999999999999999 must be at most"),
        (["verify", *SMALL, "--seeds", "0,99999999999999999999"], "--seeds 99999999999999999999 must be at most"),
        (["replay", "a.jsonl:1", "--seconds", "nan"], "--seconds nan must be at most 10000"),
        (["resume", "--minutes", "inf"], "--minutes inf must be at most 1000000"),
        (["resume", "--builders", "100000"], "--builders 100000 must be at most 1024"),
        (["top", "tutorial", "--count", "99999999999999999999"], "--count 99999999999999999999 must be at most"),
        (["bench", *SMALL, "--seconds", "x"], "argument --seconds: invalid float value: 'x'"),
        (["bench", *SMALL, "--target", "rocm:gfx942"], "no device for rocm:gfx942 here"),
        (["inspect", "tutorial", "--view", "sas"], "unknown view 'sas'; did you mean 'sass'?"),
        (["inspect", *SMALL, "--view", "cuda"], "a kernel for llvm has no cuda; it has"),
        (["inspect", "./nothing"], "nothing is not a folder"),
        (["list", "everything"], "unexpected 'everything'"),
        (["show", "softmx"], "did you mean 'softmax'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(run: Run, words: list[str], says: str) -> None:
    assert says in one_line(run(*words))


@pytest.mark.parametrize("command", ["build", "show", "verify", "bench", "inspect"])
def test_planned_operators(run: Run, command: str) -> None:
    if not planned():
        pytest.skip("every operator with presets is in this version")
    assert "is planned and not in this version" in one_line(run(command, planned()[0]))


def test_out_is_a_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr("schedules.build.builder.build", lambda *_: pytest.fail("it was built in vain"))
    assert "is a file" in one_line(run("build", *SMALL, "--out", tmp_path / "file"))
    assert "is a file" in one_line(run("build", *SMALL, "--out", tmp_path / "file" / "below"))
    assert (tmp_path / "file").read_text() == "mine"


def test_out_is_someones_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for extra in ([], ["--force"]):
        assert "not empty and not a bundle" in one_line(run("build", *SMALL, "--out", tmp_path, *extra))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_out_holds_a_bundle(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    assert run("build", *SMALL, "--out", out).code == 0
    said = one_line(run("build", *SMALL, "--out", out))
    assert "holds a bundle (conv2d_hwcn for llvm)" in said and "--force" in said
    assert run("build", "tutorial", "n=4", "h=4", "w=4", "ci=2", "co=2", "--out", out, "--force").code == 0
    assert Bundle.open(out).problem.to_json()["n"] == 4


@pytest.mark.parametrize("name", ["kernel.so", "kernel.ll", "kernel.json"])
def test_altered_bundle(run: Run, tmp_path: Path, name: str) -> None:
    out = tmp_path / "bundle"
    assert run("build", *SMALL, "--out", out).code == 0
    (out / name).write_bytes((out / name).read_bytes()[:-20])
    said = one_line(run("inspect", out))
    assert name in said and "build it again" in said


def test_a_bundle_takes_no_options(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    assert run("build", *SMALL, "--out", out).code == 0
    assert "already built" in one_line(run("inspect", out, "n=4"))
    assert "already built" in one_line(run("inspect", out, "--target", "cuda:sm_80"))


def test_no_cuda_compiler(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "nvrtc_available", lambda: False)
    monkeypatch.setattr(cuda.shutil, "which", lambda name: None)
    said = one_line(run("build", *SMALL, "--target", "cuda:sm_80", "--out", tmp_path / "new" / "out"))
    assert "pip install 'te-schedules[cuda]'" in said
    assert not list(tmp_path.iterdir())


def test_no_amd_linker(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "find_lld", lambda: None)
    # TVM's own warnings about AMD GPUs come from C++ and go to standard error as well
    result = run("build", *SMALL, "--target", "rocm:gfx90a", "--out", tmp_path / "out")
    assert result.code == 2 and "pip install 'te-schedules[rocm]'" in result.err.splitlines()[-1]
    assert "Traceback" not in result.err and not list(tmp_path.iterdir())


def test_no_cxx_for_the_emulator(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what was compiled before would serve
    said = one_line(run("verify", *SMALL, "--target", "cuda:sm_80", "--route", "emulated"))
    assert "'no-such-compiler'" in said and "install g++" in said


# ---- failures of the work itself: exit code 1


def test_failed_build(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BuildError("TVM refused\nthe program")

    monkeypatch.setattr("schedules.build.builder.build", refuse)
    said = one_line(run("build", *SMALL, "--out", tmp_path / "out"), code=1)
    assert said == "TVM refused the program"
    assert not list(tmp_path.iterdir())


def wrong(problem: Problem) -> Check:
    return Check("serial", problem, 0, float("inf"), False, "wrong at (0, 0)", 0.1)


@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_result(run: Run, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    monkeypatch.setattr("schedules.check.verify.verify", lambda problem, *_, **__: [wrong(problem)])
    result = run("verify", *SMALL, *(["--json"] if as_json else []))
    assert result.code == 1 and result.err == ""
    if as_json:
        assert result.json["passed"] is False and result.json["checks"][0]["error"] is None
    else:
        assert "FAILED" in result.out and "wrong at (0, 0)" in result.out


def test_bench_of_a_wrong_kernel_measures_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedules.check.verify.verify", lambda problem, *_, **__: [wrong(problem)])
    monkeypatch.setattr("schedules.measure.timer.measure", lambda *_, **__: pytest.fail("it was measured"))
    result = run("bench", *SMALL, "--log", tmp_path)
    assert result.code == 1 and "FAILED" in result.out and not list(tmp_path.iterdir())


def test_a_fault_of_the_package_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("schedules.cli.listing.collect", fail)
    assert one_line(run("list"), code=1).startswith("internal: RuntimeError: two lines; set SCHEDULES_DEBUG=1")


def test_interrupt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("schedules.cli.listing.collect", interrupt)
    assert one_line(run("list"), code=130) == "interrupted"


# ---- what the commands do


def test_list(run: Run) -> None:
    result = run("list")
    assert result.code == 0
    for name in ("conv2d_hwcn", "softmax", "simt", "tutorial", "oneflow-32768", "k100-6", "cuda:sm_90a"):
        assert name in result.out
    found = run("list", "--json").json
    assert {op["name"] for op in found["operators"] if op["available"]} >= {"conv2d_hwcn", "softmax"}
    assert next(p for p in found["presets"] if p["name"] == "tutorial")["fields"]["co"] == 512
    assert [op["name"] for op in found["operators"] if not op["available"]] == planned()
    nhwc = next(op for op in found["operators"] if op["name"] == "conv2d_nhwc")["schedules"]
    assert {s["name"]: s["language"] for s in nhwc if s["name"].endswith("wgmma")} == {
        "tma_wgmma": "TIRx",
        "wgmma": "TE",
    }
    assert next(s for s in nhwc if s["name"] == "tma_wgmma")["tirx"]["siblings"][0] == "wgmma"
    assert next(s for s in nhwc if s["name"] == "wgmma")["tirx"] is None
    assert re.search(r"conv2d_nhwc +tma_wgmma +TIRx +cuda", result.out)


def test_show_operator(run: Run) -> None:
    result = run("show", "conv2d_hwcn")
    assert result.code == 0 and "def textbook" in result.out and "n=required" in result.out
    assert re.search(r"^tma_wgmma +mma +one warp loads by TMA", result.out, re.M)
    found = run("show", "conv2d_hwcn", "--json").json
    assert found["fields"]["pad"] == [0, 0] and "vthread" in found["schedules"][0]["config"]


def test_show_problem(run: Run) -> None:
    found = run("show", "tutorial", "--target", "cuda:sm_90a", "--json").json
    assert (found["schedule"], found["flops"]) == ("winograd_bf16x6", 118_380_036_096)
    assert found["config"]["block_k"] == 32 and 0 < found["config_space_legal"] <= found["config_space"]
    assert [a["name"] for a in found["arguments"]] == ["data", "filter", "output"]
    result = run("show", "tutorial")
    assert result.code == 0 and "T.axis.remap" in result.out and "(14, 14, 256, 256)" in result.out


def test_build_json(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "a" / "bundle"
    result = run("build", "--target", "llvm", "tutorial", "n=8", "--json", "h=5", "w=5", "ci=4", "co=4", "--out", out)
    assert result.code == 0
    assert result.json["bundle"] == str(out) and "kernel.so" in result.json["files"]
    assert result.json["problem"]["n"] == 8 and result.json["problem"]["kh"] == 3


def test_build_without_out_writes_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("build", *SMALL)
    assert result.code == 0 and "cpu: vector=" in result.out and not list(tmp_path.iterdir())


@needs_cuda
def test_build_and_inspect_cuda(run: Run, tmp_path: Path) -> None:
    words = [
        "--target",
        "cuda:sm_90a",
        "--schedule",
        "tutorial",
        "--config",
        "num_thread=8,tile=8x4,vthread=2",
        "--config",
        "step=4",
    ]
    result = run("build", *SMALL, *words, "--out", tmp_path / "out")
    assert result.code == 0 and "registers" in result.out and result.err == ""
    assert Bundle.open(tmp_path / "out").manifest["config"]["tile"] == [8, 4]
    for view, text in (("cuda", "__global__"), ("ptx", ".target"), ("lowered", "T.alloc_shared")):
        result = run("inspect", tmp_path / "out", "--view", view)
        assert result.code == 0 and text in result.out and "\x1b" not in result.out
    found = run("inspect", tmp_path / "out", "--view", "summary,cuda", "--json").json
    assert found["summary"]["threads"] == 64 and "__global__" in found["views"]["cuda"]
    text = run("inspect", tmp_path / "out").out
    assert "registers" in text and "occupancy" in text and "global load" in text


@needs_rocm
def test_build_and_inspect_rocm(run: Run) -> None:
    result = run("inspect", *SMALL, "--target", "rocm:gfx1100", "--view", "amdgcn,summary")
    assert result.code == 0 and ".amdhsa_kernel main_kernel" in result.out and "scalars" in result.out


def test_verify(run: Run) -> None:
    found = run("verify", *SMALL, "--seeds", "0,1", "--json").json
    assert found["passed"] and [(c["route"], c["seed"]) for c in found["checks"]] == [("device", 0), ("device", 1)]
    result = run("verify", *SMALL, "--target", "rocm:gfx90a", "--route", "serial,emulated")
    assert result.code == 0 and "emulated late forward" in result.out and "FAILED" not in result.out


def test_bench_logs_a_line(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        result = run("bench", *SMALL, "--seconds", "0.01", "--log", tmp_path, "--json")
        assert result.code == 0, result.err
    (file,) = tmp_path.rglob("*.jsonl")
    assert file == tmp_path / slug(result.json["device"]) / "conv2d_hwcn.jsonl"
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert second.keys() >= set(
        [
            "device",
            "versions",
            "date",
            "operator",
            "problem",
            "schedule",
            "config",
            "target",
            "median_us",
            "p10_us",
            "p90_us",
            "error",
        ]
    )
    assert first["median_us"] > 0 and 0 <= first["error"] <= 1
    # the rates follow from the time
    flops, seconds = 2 * 8 * 5 * 4 * 6 * 3 * 9, second["p10_us"] * 1e-6  # what a CPU is judged by
    assert result.json["median_us"] == second["median_us"]
    assert result.json["tflops"] == pytest.approx(flops / seconds / 1e12)
    text = run("bench", *SMALL, "--seconds", "0.01").out
    assert " us " in text and "TFLOP/s" in text and "GB/s" in text and "verified" in text


def test_slug() -> None:
    assert slug("NVIDIA H200") == "nvidia-h200" and slug("AMD EPYC (TM) x2 ") == "amd-epyc-tm-x2"


def test_log_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file" in one_line(run("bench", *SMALL, "--log", tmp_path / "file"))


def test_doctor(run: Run) -> None:
    result = run("doctor")
    assert result.code == 0 and "apache-tvm" in result.out and "cuda:sm_90a" in result.out
    found = run("doctor", "--json").json
    assert {"parts", "devices", "targets"} == found.keys()


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in cli.COMMANDS)])
def test_help(run: Run, words: list[str]) -> None:
    result = run(*words)
    assert result.code == 0 and "usage: schedules" in result.out and result.err == ""


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("te-schedules ")


# ---- as a process


def process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "schedules", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_list_and_help_do_not_import_tvm() -> None:
    code = """
import sys
from schedules.cli import main
words = (["list"], ["--help"], ["build", "--help"], ["tune", "--help"], ["build", "tutorial", "n=0"])
codes = [main(list(each)) for each in words]
assert codes == [0, 0, 0, 0, 2], codes
assert "tvm" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_module_as_a_process() -> None:
    done = process("show", "tutorail")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "schedules: error: unknown operator or preset 'tutorail'; did you mean 'tutorial'?\n"


def test_a_reader_that_stops_reading() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "schedules", "list"], stdout=stream, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 0 and done.stderr == ""


def test_highlighting_only_on_a_terminal(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "schedules", "show", "conv2d_hwcn"]
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=environment) as running:
        os.close(slave)
        shown = b""
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        assert running.wait() == 0
    assert b"\x1b[" in shown and b"textbook" in shown
    piped = process("show", "conv2d_hwcn").stdout
    assert "\x1b" not in piped and inspect.getsource(operator("conv2d_hwcn").definition) in piped


def test_dimensions() -> None:
    assert dimensions((4, 8, 196)) == "4x8x196"
    assert dimensions(("(rows + T.int64(3)) // T.int64(4)", 1, 1)) == "[(rows + 3) // 4]x1x1"
