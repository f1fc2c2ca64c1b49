"""Bundles of what was measured: built from a record, unless they are there already."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from schedules.build.builder import CODE_OBJECT, build
from schedules.bundle.bundle import Bundle, write_bundle
from schedules.bundle.package.loader import MANIFEST
from schedules.bundle.signature import sign
from schedules.core.arch import Arch
from schedules.core.errors import BundleError
from schedules.measure.records import Record

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def export_record(
    record: Record, arch: Arch, out: Path, key: Ed25519PrivateKey | None = None, code_object: int = CODE_OBJECT
) -> Path:
    """The bundle of what `record` is of in the folder `out`, with a `key` signed; one that is there and the same stays.

    Raises BundleError, BuildError, ToolchainError.
    """
    with contextlib.suppress(BundleError):
        if holds(Bundle.open(out), record, arch, code_object):
            if key is not None:
                sign(out / MANIFEST, key)
            return out
    built = build(record.problem, arch, record.schedule, record.config, code_object=code_object)
    return write_bundle(built, out, force=True, measured=record.to_json(), key=key).path


def holds(bundle: Bundle, record: Record, arch: Arch, code_object: int = CODE_OBJECT) -> bool:
    """Whether `bundle` is what `record` is of, built with the same TVM and compiler."""
    manifest = bundle.manifest
    same = ("apache-tvm", "apache-tvm-ffi")
    return (
        manifest["operator"] == record.operator
        and bundle.problem == record.problem
        and manifest["schedule"] == record.schedule
        and type(record.config).parse(manifest["config"]) == record.config
        and manifest["target"]["arch"] == str(arch)
        and manifest["target"]["code_object"] in (None, code_object)
        and all(manifest["versions"].get(name) == record.versions.get(name) for name in same)
        and manifest["compiler"] == record.versions.get("compiler")
    )
