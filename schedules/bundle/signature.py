"""Signatures: who made a bundle or a library.

A signature is Ed25519 of the very bytes of the manifest, kernel.json or index.json, which has a checksum of every other
file; it lies beside the manifest with `.sig` at the end, 64 bytes.  Whoever checks needs the public key alone, and
nothing with which to sign.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules.core.errors import BundleError, ToolchainError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ENDING = ".sig"
_MAKE = "openssl genpkey -algorithm ed25519 -out key.pem"
_MOST_BYTES = 1 << 16  # of a key's file


def signing_key(file: str | Path) -> Ed25519PrivateKey:
    """The private key in `file`, PEM.  Raises UsageError; ToolchainError if cryptography is not installed."""
    key = _key(Path(file), "load_pem_private_key", password=None)
    if key is None:
        raise UsageError(f"{file} holds no private Ed25519 key in PEM, without a passphrase; make one: {_MAKE}")
    found: Ed25519PrivateKey = key
    return found


def public_key(file: str | Path) -> Ed25519PublicKey:
    """The public key in `file`, PEM, or that of the private one there.  Raises as `signing_key`."""
    key = _key(Path(file), "load_pem_public_key")
    if key is None and (private := _key(Path(file), "load_pem_private_key", password=None)):
        key = private.public_key()
    if key is None:
        raise UsageError(f"{file} holds no Ed25519 key in PEM; take the public one: openssl pkey -in key.pem -pubout")
    found: Ed25519PublicKey = key
    return found


def sign(manifest: Path, key: Ed25519PrivateKey) -> None:
    """Write the signature of `manifest` beside it.  Raises BundleError if the file system refuses."""
    file = signature_of(manifest)
    try:
        file.write_bytes(key.sign(manifest.read_bytes()))
    except OSError as error:
        raise BundleError(f"cannot write {file}: {error.strerror}; choose another --out") from None


def signature_of(manifest: Path) -> Path:
    """Where the signature of `manifest` lies."""
    return manifest.with_name(manifest.name + ENDING)


def require_signed(manifest: Path, key: Ed25519PublicKey) -> None:
    """Raise BundleError unless `manifest` has the signature of the owner of `key`."""
    from cryptography.exceptions import InvalidSignature

    file = signature_of(manifest)
    if not file.is_file():
        raise BundleError(f"{manifest.parent} is not signed: it has no {file.name}; get it from who signs, or sign it")
    try:
        key.verify(file.read_bytes(), manifest.read_bytes())
    except (InvalidSignature, OSError):
        raise BundleError(f"{manifest} is not what the key's owner signed; get it again, or the right key") from None


def _key(file: Path, load: str, **options: Any) -> Any:
    """The Ed25519 key that `load` of cryptography finds in `file`; None if it finds none."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ToolchainError("signatures need cryptography; pip install 'te-schedules[sign]'") from None
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"{file} is not a file; give a key in PEM")
        with file.open("rb") as text:
            key = getattr(serialization, load)(text.read(_MOST_BYTES), **options)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise UsageError(f"{file} cannot be read ({error.strerror}); give a key in PEM") from None
        return None
    except Exception:  # a passphrase is a TypeError, a foreign algorithm a type of cryptography's own
        return None
    return key if isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey) else None
