"""To the host and back: what a sitting needs, and what it made."""

from __future__ import annotations

import lzma
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from patcher.bench import MissingError, UsageError, VerificationError
from patcher.bench.lab import gpu_queue
from patcher.bench.lab.sittings.frozen import freeze
from patcher.bench.lab.sittings.loops import PACKED, LoopFolder
from patcher.bench.machine.environment import ROOT
from patcher.bench.records import write_atomically

HERE = Path(__file__).parent
PARTS = "cache.tar.xz.*"
"""What the host compiled for baselines, in parts; the name is `sitting.sh`'s, too."""
EXPECTED, LATE = "expected.txt", "late.txt"
VERDICTS, MACHINE = "verdicts.txt", "machine.txt"
MOST_BYTES = 4 << 30
"""Of what an archive may hold, unpacked."""
ON_HOST = (HERE.parent / "__init__.py", Path(gpu_queue.__file__), HERE / "__init__.py")
"""Of the lab, which the loops' code leaves out: with `sit.py`, what the host runs."""


def pack(loops: LoopFolder, anew: bool = False) -> list[Path]:
    """Fill LOOPS/travel; returns its files.

    Args:
        anew: also what is the same in each sitting: the loops' code and the packages of `wheels`.

    Raises:
        VerificationError: one of these packages is damaged.
    """
    root, travel = loops.root, loops.root / "travel"
    freeze(root, loops.say)
    travel.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".travel-") as scratch:
        if anew or not (travel / "site.tar.xz").is_file():
            site = Path(scratch, "site")
            for wheel in sorted((root / "wheels").glob("*.whl")):
                try:
                    zipfile.ZipFile(wheel).extractall(site)
                except zipfile.BadZipFile as error:
                    raise VerificationError(
                        f"{wheel} is damaged: {error}", "get it again (bench/lab/wheels.sh)"
                    ) from error
            shutil.copytree(
                root / "code", site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pyc")
            )
            compress(travel / "site.tar.xz", Path(scratch), ["site"])
        jobs = _jobs(loops, Path(scratch, "jobs"))
        (travel / PACKED).unlink(missing_ok=True)
        compress(travel / "jobs.tar.xz", Path(scratch, "jobs"), ["."])
    write_atomically(travel / PACKED, "".join(f"{name}\n" for name in jobs))
    for part in travel.glob(PARTS):
        part.unlink()
    for file in (HERE / "sitting.sh", *sorted((root / "cache").glob(PARTS))):
        shutil.copy(file, travel / file.name)
    loops.say(f"{len(jobs)} jobs to be judged")
    return sorted(travel.iterdir())


def _jobs(loops: LoopFolder, target: Path) -> list[str]:
    """Lay out what is another each time; returns the names of the jobs."""
    jobs = loops.open_jobs()
    exchange = target / "exchange"
    exchange.mkdir(parents=True)
    for job in jobs:
        shutil.copytree(job, exchange / "jobs" / job.name)
        own = loops.root / "imported" / job.name.rpartition("-")[0]
        if own.is_dir():  # else the op is the library's; all of its folder counts for its digest
            shutil.copytree(own, target / "imported" / own.name, dirs_exist_ok=True)
    for name in (EXPECTED, LATE):
        if (loops.exchange / name).is_file():
            shutil.copy(loops.exchange / name, exchange / name)
    for file in (*ON_HOST, HERE / "sit.py"):
        place = target / "site/patcher" / file.relative_to(ROOT / "patcher")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    return [job.name for job in jobs]


def back(loops: LoopFolder, folder: Path) -> str:
    """Take in what a sitting put into OUT; returns what was judged.

    Raises:
        UsageError: nothing of a sitting is there.
        VerificationError: it came back damaged.
    """
    archive, exchange = folder / "back.tar.xz", loops.exchange
    if not archive.is_file():
        raise UsageError(f"no {archive.name} in {folder}", "give the OUT of sitting.sh")
    if not loops.root.is_dir():
        raise UsageError(f"no folder {loops.root}", "give that of the loops")
    with tempfile.TemporaryDirectory(dir=loops.root, prefix=".back-") as name:
        scratch = Path(name)
        extract(archive, scratch)
        for told in (VERDICTS, MACHINE):
            if not (scratch / "log" / told).is_file():
                raise VerificationError(f"{archive} holds no {told}", "give the OUT of sitting.sh")
        for made in sorted(scratch.glob("exchange/machines/[!.]*")):
            if made.is_file():
                write_atomically(exchange / "machines" / made.name, made.read_bytes())
        for made in sorted(scratch.glob("exchange/results/[!.]*")):
            if _is_whole(made):
                _take(made, exchange / "results" / made.name)
        late = exchange / LATE
        known = late.read_text(encoding="utf-8").split() if late.is_file() else []
        jobs = {job.name for job in (exchange / "jobs").glob("[!.]*")}
        put_off = [path.name for path in sorted(scratch.glob("exchange/put-off/*"))]
        if names := dict.fromkeys([*known, *(each for each in put_off if each in jobs)]):
            write_atomically(late, "".join(f"{each}\n" for each in names))
        sittings = loops.root / "sittings"
        sittings.mkdir(exist_ok=True)
        numbers = [int(path.name) for path in sittings.iterdir() if path.name.isdecimal()]
        log = sittings / str(max(numbers, default=0) + 1)
        shutil.copytree(scratch / "log", log)
    if not (exchange / EXPECTED).exists() and any((exchange / "results").glob("[!.]*")):
        write_atomically(exchange / EXPECTED, (log / MACHINE).read_bytes())
    if parts := sorted(folder.glob(PARTS)):
        shutil.rmtree(loops.root / "cache", ignore_errors=True)
        (loops.root / "cache").mkdir()
        for part in parts:  # without its mode: what came back may be read-only
            shutil.copyfile(part, loops.root / "cache" / part.name)
    return (log / VERDICTS).read_text(encoding="utf-8", errors="replace")


def _is_whole(result: Path) -> bool:
    """Whether a worker ended a result: the manifest is what it writes last."""
    return (result / "manifest.json").is_file()


def _take(made: Path, target: Path) -> None:
    """Copy a result, all of it or nothing. A whole one that is there stays as it is."""
    if _is_whole(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(staged, ignore_errors=True)  # of a command that was interrupted
    shutil.copytree(made, staged)
    shutil.rmtree(target, ignore_errors=True)
    staged.replace(target)


def compress(
    target: Path, folder: Path, names: Sequence[str], *options: str, level: str = "-6"
) -> None:
    """Pack names of a folder, without saying who owns them.

    Args:
        options: of tar.
        level: of xz.

    Raises:
        MissingError: tar or xz is not there, or failed.
    """
    staged = target.with_name(f".{target.name}.tmp")
    owner = ("--owner=0", "--group=0", "--numeric-owner", "--sort=name")
    command = [
        "tar",
        "-C",
        str(folder),
        "-I",
        f"xz -T0 {level}",
        *owner,
        *options,
        "-cf",
        str(staged),
    ]
    try:
        subprocess.run([*command, *names], check=True, capture_output=True, text=True)
        staged.replace(target)
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise MissingError(f"cannot pack {target}: {said}", "install GNU tar and xz") from error
    finally:
        staged.unlink(missing_ok=True)


def extract(archive: Path, target: Path) -> None:
    """Unpack plain files and folders, none outside of the target.

    Raises:
        VerificationError: the archive is damaged, too large, or holds something else.
    """
    size = 0
    try:
        with lzma.open(archive) as whole:  # tarfile would take one that was cut off between files
            while part := whole.read(1 << 20):
                if (size := size + len(part)) > MOST_BYTES:
                    raise VerificationError(
                        f"{archive} holds more than {MOST_BYTES:,} bytes", "look what it holds"
                    )
        with tarfile.open(archive, "r:xz") as opened:
            opened.extractall(target, filter=_plain)
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise VerificationError(f"cannot unpack {archive}: {error}", "copy it again") from error


def _plain(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo:
    """A link inside of the target is refused, too: two that lead to their own folder would be
    copied without an end. A sparse file may be any size."""
    if not (member.isfile() or member.isdir()) or member.issparse():
        raise tarfile.SpecialFileError(member)
    return tarfile.data_filter(member, target)
