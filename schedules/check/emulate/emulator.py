"""Runs libraries built for CUDA or ROCm on the CPU, in a worker process that may crash without harm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from schedules.check.emulate.device_module import LaunchShape
from schedules.check.emulate.protocol import read_frame, write_frame
from schedules.check.emulate.tensor_map import TensorMap
from schedules.check.emulate.toolchain import build_kernels, build_runtime, source_line
from schedules.core.errors import EmulationError
from schedules.core.process import shielded_children

_START_TIMEOUT_S = 60.0
_LAST_WORDS_S = 1.0


@dataclass(frozen=True)
class EmulationMode:
    """The choices that a GPU leaves open and that a correct kernel must not depend on.

    copies: when the data of cp.async and of bulk copies land: "late" at the wait that requires them, "early" at issue.
    order: in which order the warps of a block, and the lanes of a warp, run between barriers.
    """

    copies: Literal["late", "early"] = "late"
    order: Literal["forward", "reverse", "strided"] = "forward"


class _Worker:
    """One worker process and the pipes to it."""

    def __init__(self) -> None:
        runtime = build_runtime()
        request_read, self.requests = os.pipe()
        self.responses, response_write = os.pipe()
        package_root = str(Path(__file__).resolve().parents[3])
        inherited = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([package_root, *([inherited] if inherited else [])]),
            "TVM_USE_RUNTIME_LIB": "1",  # should anything import tvm: the compiler is not needed
        }
        descriptors = [str(request_read), str(response_write)]
        command = [sys.executable, "-m", "schedules.check.emulate.worker", *descriptors, str(os.getpid()), str(runtime)]
        self.owner = os.getpid()
        try:
            with shielded_children():
                self.process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(request_read, response_write),
                )
        except OSError:
            os.close(self.requests)
            os.close(self.responses)
            raise
        finally:
            os.close(request_read)
            os.close(response_write)
        try:
            read_frame(self.responses, time.monotonic() + _START_TIMEOUT_S)
        except (EOFError, TimeoutError) as error:
            self.stop()
            raise EmulationError("the emulator's worker process did not start; its error is on stderr") from error

    def usable(self) -> bool:
        """False once the process has ended, and in a fork of the process that started it."""
        return self.owner == os.getpid() and self.process.poll() is None

    def stop(self) -> None:
        os.close(self.requests)
        os.close(self.responses)
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()

    def call(
        self, header: dict[str, Any], payload: Sequence[memoryview], timeout_s: float
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """Sends a request and waits for the answer.

        Raises:
            EOFError, BrokenPipeError: if the process died without a word.
            TimeoutError: if it gave no answer in time and could not say where it was.
        """
        write_frame(self.requests, header, payload)
        try:
            return read_frame(self.responses, time.monotonic() + timeout_s)
        except TimeoutError:
            self.process.send_signal(signal.SIGTERM)  # a running kernel answers with its position
            try:
                return read_frame(self.responses, time.monotonic() + _LAST_WORDS_S)
            except EOFError:
                raise TimeoutError from None


class Emulator:
    """Runs kernels in a persistent worker process, which starts at the first run and again after a crash.

    A context manager; usable from several threads, one run at a time.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker process; a later run starts another."""
        with self._lock:
            self._discard()

    def run(
        self,
        library: Path,
        source: str,
        arguments: Sequence[np.ndarray],
        outputs: Sequence[int],
        *,
        mode: EmulationMode = EmulationMode(),
        entry: str = "main",
        kind: str = "cuda",
        wave: int = 32,
        timeout_s: float = 120.0,
    ) -> list[np.ndarray]:
        """Runs the packed function `entry` of an exported library, its kernels taken from `source`.

        Args:
            library: what `export_library` wrote: the host code and the serialised device module.
            source: the CUDA C++ of that module, or of `kind` "rocm" the LLVM IR.
            arguments: all tensors of the function in order, outputs included; they are copied, not changed.
            outputs: indices of the arguments to return.
            mode: the scheduling choices.
            entry: name of the packed function.
            kind: of the GPU, "cuda" or "rocm".
            wave: how many of its threads go together, 32 or 64.
            timeout_s: seconds the run may take, compilation not counted.

        Raises:
            EmulationError: for whatever goes wrong in the kernel or the host code before it.
            ToolchainError: if there is no C++ compiler.
        """
        header = {"library": str(Path(library).resolve()), "entry": entry}
        return self._call(header, source, arguments, outputs, mode, kind, wave, timeout_s)

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[np.ndarray],
        outputs: Sequence[int],
        *,
        dynamic_shared: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
        tensor_maps: Sequence[TensorMap] = (),
        mode: EmulationMode = EmulationMode(),
        kind: str = "cuda",
        wave: int = 32,
        timeout_s: float = 120.0,
    ) -> list[np.ndarray]:
        """Launches one kernel of a source without any host code.

        Its parameters are a pointer for each of `arguments`, then a CUtensorMap for each of `tensor_maps`.  Args and
        errors are those of `run`; `dynamic_shared` is in bytes, `cluster` in blocks.
        """
        shape = LaunchShape(list(grid), list(block), list(cluster), dynamic_shared)
        header = {"kernel": kernel, "shape": asdict(shape), "tensor_maps": [asdict(each) for each in tensor_maps]}
        return self._call(header, source, arguments, outputs, mode, kind, wave, timeout_s)

    def _call(
        self,
        header: dict[str, Any],
        source: str,
        arguments: Sequence[np.ndarray],
        outputs: Sequence[int],
        mode: EmulationMode,
        kind: str,
        wave: int,
        timeout_s: float,
    ) -> list[np.ndarray]:
        kernels = build_kernels(source, kind)
        arrays = [np.ascontiguousarray(argument).reshape(argument.shape) for argument in arguments]
        header |= {
            "kernels": str(kernels),
            "mode": asdict(mode),
            "kind": kind,
            "wave": wave,
            "arguments": [{"dtype": array.dtype.name, "shape": array.shape} for array in arrays],
            "outputs": list(outputs),
        }
        payload = [array.reshape(-1).view(np.uint8).data for array in arrays]
        with self._lock:
            answer, data = self._answer(header, payload, timeout_s)
        if "crash" in answer:
            raise EmulationError(_describe_crash(answer, kernels, timeout_s))
        if "error" in answer:
            raise EmulationError(answer["error"])
        results = []
        for index, content in zip(outputs, data, strict=True):
            results.append(np.frombuffer(content, arrays[index].dtype).reshape(arrays[index].shape))
        return results

    def _answer(
        self, header: dict[str, Any], payload: Sequence[memoryview], timeout_s: float
    ) -> tuple[dict[str, Any], list[bytearray]]:
        if self._worker is None or not self._worker.usable():
            self._discard()
            self._worker = _Worker()
        worker = self._worker
        try:
            answer, data = worker.call(header, payload, timeout_s)
        except TimeoutError as error:
            self._discard()
            raise EmulationError(f"the emulated program was still running after {timeout_s:g} s") from error
        except (EOFError, BrokenPipeError) as error:
            status = worker.process.wait()
            self._discard()
            raise EmulationError(f"the emulator's worker process died (exit status {status})") from error
        except BaseException:  # an answer may still be on its way: the pipes cannot be used again
            self._discard()
            raise
        if "crash" in answer:
            self._discard()
        return answer, data

    def _discard(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            with contextlib.suppress(OSError):
                worker.stop()


def _describe_crash(answer: dict[str, Any], kernels: Path, timeout_s: float) -> str:
    where = answer["where"]
    if answer["module"] == str(kernels):
        line = source_line(kernels, answer["offset"])
        if line is not None:
            where = f"kernel line {line}, {where}"
    crash = answer["crash"].replace("at the time limit", f"after {timeout_s:g} s")
    return f"{crash} ({where})"
