"""What nsys stats printed, kept in one archive: the files repeat each other's figures."""

from __future__ import annotations

import tarfile
from functools import cache
from pathlib import Path

ARCHIVE = Path(__file__).parents[1] / "data/nsys/printed.tar.xz"


@cache
def printed() -> dict[str, bytes]:
    """The files by name: `golden/h_cuda_gpu_kern_sum.csv`."""
    with tarfile.open(ARCHIVE) as archive:
        found = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read() for name, file in found.items() if file is not None}


def content(name: str) -> str:
    """The text of a file of the archive, or of one beside it."""
    raw = printed()[name] if "/" in name else ARCHIVE.with_name(name).read_bytes()
    return raw.decode("utf-8")
