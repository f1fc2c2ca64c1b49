"""What TVM's own host code launches: `recorder.py RUNTIME` reads JSON of libraries and tensors, and writes launches.

The emulator's worker stands for the GPU; kernels are noted down instead of run.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from tensor import FakeTensor  # beside this script

from schedules.check.emulate.device_module import HANDLE_CODE, KernelSignature
from schedules.check.emulate.worker import Worker, _address

_MAP_BYTES = 128
_TYPES = {"int8": 0, "uint8": 0, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}  # of CUtensorMapDataType


class Recorder(Worker):
    def __init__(self, runtime: Path) -> None:
        super().__init__(runtime)
        self.launches: list[dict[str, Any]] = []
        self.sizes: dict[str, list[int]] = {}
        self.maps: list[Any] = []

    def _kernel(self, name: str, signature: KernelSignature) -> Any:
        kinds = list(enumerate(signature.arguments))
        self.sizes[name] = [
            _MAP_BYTES if at in signature.tensor_maps else 8 if kind.code == HANDLE_CODE else kind.bits // 8
            for at, kind in kinds
        ]

        def call(*values: Any) -> None:
            shape = signature.launch_shape(tuple(int(value) for value in values[len(kinds) :]))
            passed = []
            for (at, kind), value in zip(kinds, values[: len(kinds)], strict=True):
                number = _address(value) if kind.code == HANDLE_CODE or at in signature.tensor_maps else int(value)
                passed.append(self._map(number) if at in signature.tensor_maps else number)
            self.launches.append(
                {
                    "symbol": name,
                    "grid": shape.grid,
                    "block": shape.block,
                    "cluster": shape.cluster,
                    "shared": shape.dynamic_shared,
                    "dependent": any(tag.endswith("programtic_dependent_launch") for tag in signature.launch_tags),
                    "arguments": passed,
                }
            )

        return call

    def _map(self, address: int) -> Any:
        return self.maps[ctypes.c_uint64.from_address(address).value]

    def encode_tensor_map(self, target: Any, dtype: Any, rank: int, data: Any, *rest: Any) -> None:
        words = [int(word) for word in rest]
        forced = words.pop() if len(words) == 4 * rank + 4 else -1
        lists = []
        for count in (rank, rank - 1, rank, rank, 4):
            lists.append(words[:count])
            words = words[count:]
        ctypes.c_uint64.from_address(_address(target)).value = len(self.maps)
        self.maps.append([_address(data), _TYPES[str(dtype)] if forced < 0 else forced, *lists])

    def record(self, library: str, tensors: list[dict[str, Any]]) -> dict[str, Any]:
        self.launches, self.sizes, self.maps = [], {}, []
        self.tvm_ffi.load_module(library)["main"](*[FakeTensor(**tensor) for tensor in tensors])
        return {"launches": self.launches, "sizes": self.sizes}


if __name__ == "__main__":
    recorder = Recorder(Path(sys.argv[1]))
    print(json.dumps([recorder.record(**each) for each in json.load(sys.stdin)]))
