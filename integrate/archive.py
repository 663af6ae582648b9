"""A patch bundle as one file, `<name>.zip`: nothing of when or where in it, safe to open."""

from __future__ import annotations

import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from patcher.bench import UsageError, VerificationError
from patcher.integrate.patch import MANIFEST, Patch

SUFFIX = ".zip"
_DATE = (1980, 1, 1, 0, 0, 0)
_MOST_FILES = 256
_MOST_BYTES = 256 << 20
"""Of all files, unpacked; a kernel's binary has a few megabytes."""
_AGAIN = "get the patch again from where it was made"


def is_archive(path: Path) -> bool:
    """Whether a bundle of that name is one file."""
    return path.suffix == SUFFIX


def pack(patch: Patch, path: Path) -> None:
    """Write a bundle as one file, without the binaries that its folder lacks.

    Names are sorted and dates fixed: the bytes depend on the bundle and on zlib's release alone.
    What identifies a bundle is its digest, over the files.

    Raises:
        UsageError: the file is there and no patch, or cannot be written.
    """
    if path.exists() and not _holds_a_patch(path):
        raise UsageError(f"{path} exists and is not a patch", "choose another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".patch-") as scratch:
            staged = Path(scratch) / path.name
            with zipfile.ZipFile(staged, "w") as archive:
                for name in sorted([MANIFEST, *patch.files]):
                    entry = zipfile.ZipInfo(name, _DATE)
                    entry.create_system = 3
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    entry.external_attr = (stat.S_IFREG | 0o644) << 16
                    archive.writestr(entry, (patch.folder / name).read_bytes())
            staged.replace(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", "choose a file in a folder of yours"
        ) from error


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """A bundle's folder: the path itself, or for one file a folder that lives as long as this.

    Raises:
        UsageError: no archive there, or one that cannot be read.
        VerificationError: it is damaged, or holds what no bundle holds.
    """
    if not is_archive(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="patcher-bundle-") as scratch:
        folder = Path(scratch) / "patch"
        folder.mkdir()
        _unpack(path, folder)
        yield folder


def _unpack(path: Path, folder: Path) -> None:
    if not path.is_file():
        raise UsageError(f"{path} is not a patch bundle", f"give a folder or a {SUFFIX} file")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            names = [_checked(entry) for entry in entries]
            if len(set(names)) != len(names):
                raise VerificationError(f"{path.name} names a file twice", _AGAIN)
            # what is read of an entry is never more than it declares
            total = sum(entry.file_size for entry in entries)
            if len(entries) > _MOST_FILES or total > _MOST_BYTES:
                raise VerificationError(
                    f"{path.name} unpacks to {len(entries)} files of {total:,} bytes: no patch "
                    "is so large",
                    _AGAIN,
                )
            for entry, name in zip(entries, names, strict=True):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise VerificationError(f"{path.name} is damaged, or not a zip archive", _AGAIN) from error
    except RuntimeError as error:  # zipfile's word for one that wants a password
        raise VerificationError(f"{path.name} is encrypted", _AGAIN) from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise VerificationError(
            f"{path.name} holds a file whose name is a folder's", _AGAIN
        ) from error
    except OSError as error:
        raise UsageError(f"cannot unpack {path.name}: {error.strerror}", _AGAIN) from error


def _checked(entry: zipfile.ZipInfo) -> str:
    """The entry's name, when it is a plain file inside of the bundle."""
    name = PurePosixPath(entry.filename)
    outside = name.is_absolute() or ".." in name.parts or not name.parts
    if outside or "\\" in entry.filename or ":" in entry.filename:
        raise VerificationError(f"the archive names {entry.filename!r}, outside the bundle", _AGAIN)
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise VerificationError(f"{entry.filename!r} in the archive is not a regular file", _AGAIN)
    return os.fspath(name)


def _holds_a_patch(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return MANIFEST in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
