"""What the library holds, whether it is intact, and how long its kernels take to load.

python -m te_kernels_llvm [--check] [--times] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from . import HERE, DamagedError, check, index

# in a process of its own, so that nothing is imported yet; sys.argv: the folder above the package, its name
_TIMES = """
import importlib, json, sys, time
sys.path.insert(0, sys.argv[1])
start = time.perf_counter()
library = importlib.import_module(sys.argv[2])
names = list(library.index()["kernels"])
imported = time.perf_counter() - start
times, failed = {}, {}
for name in names:
    start = time.perf_counter()
    try:
        library.load(name)
    except library.LibraryError as error:
        failed[name] = str(error)
        continue
    times[name] = 1000 * (time.perf_counter() - start)
print(json.dumps({"import_ms": 1000 * imported, "kernels_ms": times, "failed": failed}))
"""


def load_times() -> dict[str, Any]:
    """Milliseconds, in a fresh process, to import the library and to load each kernel in turn; the first kernel also
    loads tvm_ffi and TVM's runtime library.  `failed` says why a kernel cannot be loaded on this machine."""
    command = [sys.executable, "-B", "-c", _TIMES, str(HERE.parent), HERE.name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"import_ms": None, "kernels_ms": {}, "failed": dict.fromkeys(index()["kernels"], last)}
    return dict(json.loads(done.stdout))


def summary(times: dict[str, Any]) -> str:
    """Load times as a sentence."""
    loaded = list(times["kernels_ms"].values())
    if not loaded:
        why = next(iter(times["failed"].values()), "there is no kernel")
        return f"load times were not measured: {why}"
    first, *rest = loaded
    each = f"; each of {len(rest)} more: {sum(rest) / len(rest):.1f} ms (at most {max(rest):.1f})" if rest else ""
    failed = f"; {len(times['failed'])} do not load here" if times["failed"] else ""
    return f"import {times['import_ms']:.0f} ms, first kernel {first:.0f} ms{each}{failed}"


def main() -> int:
    """List, check or time; 1 if something is damaged."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE.name}", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare every file with its checksum")
    parser.add_argument("--times", action="store_true", help="load every kernel in a fresh process, and time it")
    parser.add_argument("--json", action="store_true", help="print the index, or the times, as JSON")
    args = parser.parse_args()
    about = index()
    if args.check:
        check()
    times = load_times() if args.times else None
    if args.json:
        print(json.dumps(times or about, indent=1))
        return 0
    for name, entry in about["kernels"].items():
        problem = " ".join(f"{word}={value}" for word, value in entry["problem"].items())
        took = f"  {times['kernels_ms'][name]:.1f} ms" if times and name in times["kernels_ms"] else ""
        print(
            f"{name}: {entry['operator']} {problem}; {entry['schedule']}, {entry['why']}; {entry['bytes']} bytes{took}"
        )
    for name, why in about["missing"].items():
        print(f"{name} is not here: {why}")
    total = sum(entry["bytes"] for entry in about["kernels"].values())
    print(f"{about['name']} {about['version']} for {about['target']}: {len(about['kernels'])} kernels, {total} bytes")
    if times:
        print(summary(times))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DamagedError as damaged:
        sys.exit(f"error: {damaged}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
