"""Signed bundles and libraries: what verify accepts, and what it refuses before anything is loaded."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schedules.build.builder import build
from schedules.bundle.bundle import Bundle, check_destination, write_bundle
from schedules.bundle.library.collect import Made, entry_of
from schedules.bundle.library.write import Library, write_library
from schedules.bundle.package import loader
from schedules.bundle.signature import public_key, sign, signing_key
from schedules.cli import main
from schedules.core.arch import Arch
from schedules.core.errors import BundleError, ToolchainError, UsageError
from schedules.measure.choice import default_choice
from tests.conftest import problem_of

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

SOFTMAX = ["softmax", "rows=4", "cols=32"]
PEM, RAW = serialization.Encoding.PEM, serialization.NoEncryption()


def write_keys(folder: Path, name: str, key: Any, encryption: Any = RAW) -> tuple[Path, Path]:
    """The files of a private and its public key."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_keys(tmp_path_factory.mktemp("keys"), "ours", ed25519.Ed25519PrivateKey.generate())


@pytest.fixture(scope="module")
def written(keys: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("written") / "bundle"
    assert main(["build", *SOFTMAX, "--default", "--out", str(out), "--sign", str(keys[0])]) == 0
    return out


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "bundle"))


def test_what_is_signed_is_verified(folder: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for key in keys:  # a private key has its public one in it
        assert main(["verify", str(folder), "--key", str(key)]) == 0
    assert main(["verify", str(folder)]) == 0  # a signature is asked for, or not
    capsys.readouterr()
    assert main(["verify", str(folder), "--key", str(keys[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["signed"] is True


def unsigned(folder: Path) -> str:
    (folder / "kernel.json.sig").unlink()
    return "is not signed"


def damaged_signature(folder: Path) -> str:
    (folder / "kernel.json.sig").write_bytes(b"\0" * 64)
    return "not what the key's owner signed"


def short_signature(folder: Path) -> str:
    (folder / "kernel.json.sig").write_bytes(b"")
    return "not what the key's owner signed"


def altered(folder: Path) -> str:
    """With all checksums made anew."""
    (folder / "kernel.so").write_bytes((folder / "kernel.so").read_bytes() + b"\0")
    manifest = json.loads((folder / "kernel.json").read_text())
    manifest["files"]["kernel.so"] = loader.sha256((folder / "kernel.so").read_bytes())
    (folder / "kernel.json").write_text(json.dumps({**manifest, "sha256": loader.digest(manifest)}))
    return "not what the key's owner signed"


def altered_file(folder: Path) -> str:
    (folder / "load.py").write_text("print('hello')")
    return "load.py is not what was built"


def with_another_file(folder: Path) -> str:
    (folder / "tvm_ffi.py").write_text("print('hello')")
    return "holds tvm_ffi.py, which is not signed"


SPOIL = [unsigned, damaged_signature, short_signature, altered, altered_file, with_another_file]


@pytest.mark.parametrize("spoil", SPOIL)
def test_what_is_not_as_it_was_signed_is_refused_before_it_is_loaded(
    folder: Path,
    keys: tuple[Path, Path],
    spoil: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Bundle, "load", lambda _: pytest.fail("it was loaded"))
    reason = spoil(folder)
    assert main(["verify", str(folder), "--key", str(keys[1])]) == 2
    said = capsys.readouterr().err
    assert reason in said and len(said.splitlines()) == 1


def test_the_signature_of_another_is_refused(folder: Path, tmp_path: Path) -> None:
    _, other = write_keys(tmp_path, "theirs", ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(BundleError, match="not what the key's owner signed"):
        Bundle.open(folder, public_key(other))


def passphrase(folder: Path) -> Path:
    encryption = serialization.BestAvailableEncryption(b"secret")
    return write_keys(folder, "locked", ed25519.Ed25519PrivateKey.generate(), encryption)[0]


def other_kind(folder: Path) -> Path:
    return write_keys(folder, "ec", ec.generate_private_key(ec.SECP256R1()))[0]


def no_key(folder: Path) -> Path:
    (folder / "text").write_text("no key")
    return folder / "text"


def only_public(folder: Path) -> Path:
    return write_keys(folder, "ours", ed25519.Ed25519PrivateKey.generate())[1]


@pytest.mark.parametrize("make", [passphrase, other_kind, no_key, only_public, lambda f: f, lambda f: f / "none"])
def test_a_key_that_does_not_sign_is_named_before_anything_is_built(
    make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make(tmp_path)
    assert main(["build", *SOFTMAX, "--out", str(tmp_path / "out"), "--sign", str(file)]) == 2
    said = capsys.readouterr().err
    assert str(file) in said and len(said.splitlines()) == 1 and not (tmp_path / "out").exists()
    with pytest.raises(UsageError):
        signing_key(file)


def test_without_cryptography_the_remedy_is_named(keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for read, file in ((signing_key, keys[0]), (public_key, keys[1])):
        with pytest.raises(ToolchainError, match=r"pip install 'te-schedules\[sign\]'"):
            read(file)


@pytest.mark.parametrize("words", [["build", *SOFTMAX, "--sign", "k"], ["verify", *SOFTMAX, "--key", "k"]])
def test_a_key_without_a_folder_is_a_mistake(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "give" in capsys.readouterr().err


def test_a_signed_bundle_is_replaced_like_any(folder: Path) -> None:
    check_destination(folder, force=True)
    with pytest.raises(BundleError, match="holds a bundle"):
        check_destination(folder)


def test_a_library_is_signed_with_its_code(
    host: Arch, keys: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = problem_of("softmax", rows=4, cols=32)

    def make(folder: Path) -> list[Made]:
        chosen = default_choice(problem, host)
        built = build(problem, host, chosen.schedule, chosen.config)
        return [Made("small", entry_of(write_bundle(built, folder / "small"), built, chosen))]

    library = write_library(tmp_path, host, "1.0", make, key=signing_key(keys[0]))
    owner = public_key(keys[1])
    assert Library.open(library.path, owner).index == library.index
    assert main(["verify", str(library.path), "--key", str(keys[1])]) == 0
    assert "passed" in capsys.readouterr().out

    (library.home / "extra.py").write_text("")
    with pytest.raises(BundleError, match="holds extra.py, which is not signed"):
        Library.open(library.path, owner)
    (library.home / "extra.py").unlink()
    (library.home / "__init__.py").write_text("print('hello')")
    assert main(["verify", str(library.path), "--key", str(keys[1])]) == 2
    assert "__init__.py is not what was built" in capsys.readouterr().err
    (library.home / "index.json").write_text("{}")
    with pytest.raises(BundleError, match="not what the key's owner signed"):
        Library.open(library.path, owner)


def test_signing_again_is_the_same(folder: Path, keys: tuple[Path, Path]) -> None:
    before = (folder / "kernel.json.sig").read_bytes()
    sign(folder / "kernel.json", signing_key(keys[0]))
    assert (folder / "kernel.json.sig").read_bytes() == before
