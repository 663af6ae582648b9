"""Sealed folders: files and a manifest with their digests, made whole under another name and then
renamed.

Whoever copies one (rsync, scp, a network file system) may stop half-way: what is missing or short
is not there yet, what differs was changed. The digest of the manifest stands for all of it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from patcher.bench import Record, VerificationError, problem
from patcher.runs.durable import sync_folder

MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 1 << 16
_Name = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]{0,99}$")]
_HINT = "remove the folder and have it made again"


class _Entry(Record):
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _Manifest(Record):
    schema_version: Literal[1] = 1
    files: dict[_Name, _Entry] = Field(min_length=1, max_length=8)


@dataclass(frozen=True)
class SealedFolder:
    """What a sealed folder holds."""

    digest: str
    """sha256 of the manifest, which holds those of all files."""
    files: Mapping[str, str]


def digest_of(files: Mapping[str, str]) -> str:
    """The digest that a folder with these files has."""
    return hashlib.sha256(_manifest(files)).hexdigest()


def seal(folder: Path, files: Mapping[str, str]) -> None:
    """Make the folder with these files and their manifest, at once. One that is there and whole
    stays as it is; what lies there half-copied gives way.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    staged.mkdir()
    try:
        for name, content in {**_encoded(files), MANIFEST: _manifest(files)}.items():
            with (staged / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(staged)
        if folder.is_dir() and read_sealed(folder, 1 << 30) is None:
            shutil.rmtree(folder)
        try:
            staged.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise  # else: another process was first
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def read_sealed(folder: Path, most_bytes: int) -> SealedFolder | None:
    """What the folder holds, read without following a link; None: it is not there (yet).

    Raises:
        VerificationError: it is no such folder, larger than `most_bytes`, or was changed.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise VerificationError(f"{folder.name} is no folder", _HINT) from error
    try:
        return _read_folder(handle, folder.name, most_bytes)
    finally:
        os.close(handle)


def _read_folder(handle: int, name: str, most_bytes: int) -> SealedFolder | None:
    content = _read_file(handle, MANIFEST, _MOST_MANIFEST_BYTES, name)
    if content is None or not content.endswith(b"}\n"):  # it is one line: the end comes last
        return None
    try:
        manifest = _Manifest.model_validate_json(content)
    except ValidationError as error:
        raise VerificationError(f"the manifest of {name}: {problem(error)}", _HINT) from None
    if sum(entry.size for entry in manifest.files.values()) > most_bytes:
        raise VerificationError(f"{name} is larger than {most_bytes:,} bytes", _HINT)
    files = {}
    for file, entry in manifest.files.items():
        found = _read_file(handle, file, entry.size, name)
        if found is None or len(found) < entry.size:
            return None
        if hashlib.sha256(found).hexdigest() != entry.sha256:
            raise VerificationError(f"{file} of {name} was changed", _HINT)
        try:
            files[file] = found.decode()
        except UnicodeDecodeError as error:
            raise VerificationError(f"{file} of {name} is not UTF-8 text", _HINT) from error
    return SealedFolder(hashlib.sha256(content).hexdigest(), files)


def _read_file(folder: int, file: str, most_bytes: int, name: str) -> bytes | None:
    """At most that many bytes of a plain file; None: it is not there.

    Raises:
        VerificationError: it is longer, a link, a pipe, or cannot be read.
    """
    try:
        # a pipe must not make us wait for its writer
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(file, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise VerificationError(f"{file} of {name} is not a regular file", _HINT) from error
    with os.fdopen(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise VerificationError(f"{file} of {name} is not a regular file", _HINT)
        content = opened.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise VerificationError(f"{file} of {name} is longer than {most_bytes:,} bytes", _HINT)
    return content


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in files.items()}


def _manifest(files: Mapping[str, str]) -> bytes:
    entries = {
        name: _Entry(size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in sorted(_encoded(files).items())
    }
    told = _Manifest(files=entries).model_dump(mode="json")
    return json.dumps(told, sort_keys=True).encode() + b"\n"
