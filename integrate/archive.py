"""A patch bundle as one reproducible file, `<name>.zip`, which is safe to open."""

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
from patcher.integrate.patch import MANIFEST, Patch, require_free

SUFFIX = ".zip"
_DATE = (1980, 1, 1, 0, 0, 0)
_MOST_FILES = 256
_MOST_BYTES = 256 << 20
"""Limit of the unpacked size; a kernel's binary has a few megabytes."""
_AGAIN = "get the patch again from its source"


def is_archive(path: Path) -> bool:
    """Whether the path names a bundle in one `.zip` file."""
    return path.suffix == SUFFIX


def require_target(path: Path) -> None:
    """Refuse to write a bundle, a folder or one file, over something else.

    Raises:
        UsageError: the path exists and is not a patch.
    """
    if not is_archive(path):
        require_free(path)
    elif path.exists() and not _holds_a_patch(path):
        raise UsageError(f"{path} exists and is not a patch", "choose another file")


def pack(patch: Patch, path: Path) -> None:
    """Write a bundle as one file, without binaries that its folder lacks.

    Names are sorted and dates are fixed, so the bytes depend only on the bundle and zlib's version.
    The digest over the files identifies a bundle, not the bytes of the archive.

    Args:
        patch: the bundle.
        path: the `.zip` file to write.

    Raises:
        UsageError: the file exists and is not a patch, or it cannot be written.
    """
    require_target(path)
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
            f"cannot write {path}: {error.strerror}", "choose a file in a writable folder"
        ) from error


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Open a bundle as a folder: the path itself, or for a `.zip` file a temporary folder.

    Args:
        path: a bundle's folder or `.zip` file.

    Yields:
        The folder; a temporary one is removed at the end of the context.

    Raises:
        UsageError: there is no archive, or it cannot be read.
        VerificationError: the archive is damaged, or its contents are not those of a bundle.
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
            # zipfile never reads more of an entry than its declared size
            total = sum(entry.file_size for entry in entries)
            if len(entries) > _MOST_FILES or total > _MOST_BYTES:
                raise VerificationError(
                    f"{path.name} unpacks to {len(entries)} files of {total:,} bytes, which is "
                    "too large for a patch",
                    _AGAIN,
                )
            for entry, name in zip(entries, names, strict=True):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise VerificationError(f"{path.name} is damaged or not a zip archive", _AGAIN) from error
    except RuntimeError as error:  # zipfile's error for an encrypted archive
        raise VerificationError(f"{path.name} is encrypted", _AGAIN) from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise VerificationError(f"{path.name} names a file that is a folder", _AGAIN) from error
    except OSError as error:
        raise UsageError(f"cannot unpack {path.name}: {error.strerror}", _AGAIN) from error


def _checked(entry: zipfile.ZipInfo) -> str:
    """The entry's name; it must be a regular file inside the bundle."""
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
