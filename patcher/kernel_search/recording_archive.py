"""Recordings in one archive: `tar -cJf recordings.tar.xz FOLDER...`."""

from __future__ import annotations

import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from patcher.bench import MOST_BYTES, UsageError
from patcher.kernel_search.recording import FILES


@contextmanager
def recordings(path: Path) -> Iterator[list[Path]]:
    """The recordings at a path: the folder itself, or every folder of a `.tar.xz` archive.

    An archive is unpacked into a scratch folder that lives as long as this context.

    Raises:
        UsageError: the archive is damaged, cut off, too large, or holds something else.
    """
    if path.suffix != ".xz":
        yield [path]
        return
    with tempfile.TemporaryDirectory(prefix="patcher-recordings-") as scratch:
        try:
            _unpack(path, Path(scratch))
        except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise UsageError(
                f"{path.name} is a damaged archive, or is truncated", "restore it from a backup"
            ) from error
        except OSError as error:
            raise UsageError(
                f"cannot unpack {path}: {error.strerror}", "give an archive of recordings"
            ) from error
        found = sorted(Path(scratch).iterdir())
        if not found:
            raise UsageError(f"{path.name} holds no recording", "give an archive of recordings")
        yield found


def _unpack(path: Path, into: Path) -> None:
    left = MOST_BYTES
    with tarfile.open(path, "r|xz") as archive:
        for member in archive:
            parts: tuple[str, ...] = PurePosixPath(member.name).parts
            if member.isdir() and len(parts) == 1 and parts[0] != "..":
                continue
            content = archive.extractfile(member) if member.isfile() else None
            known = len(parts) == 2 and parts[0] not in ("..", "/") and parts[1] in FILES
            left -= member.size
            if left < 0:
                raise UsageError(
                    f"{path.name} unpacks to more than {MOST_BYTES >> 20} MiB",
                    "give an archive of fewer recordings",
                )
            if content is None or not known:
                raise UsageError(
                    f"{path.name} holds {member.name!r}, which is no file of a recording",
                    "give an archive of folders that `patcher record` wrote, and of nothing else",
                )
            target = into / member.name
            target.parent.mkdir(exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file)
