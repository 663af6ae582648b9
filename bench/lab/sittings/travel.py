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
from patcher.bench.lab.sittings.loops import LoopFolder
from patcher.bench.machine.environment import ROOT

HERE = Path(__file__).parent
PARTS = "cache.tar.xz.*"
"""What the host compiled for baselines, in parts; the name is `sitting.sh`'s, too."""
EXPECTED, LATE = "expected.txt", "late.txt"
ON_HOST = (HERE.parent / "__init__.py", Path(gpu_queue.__file__), HERE / "__init__.py")
"""Of the lab, which the loops' code leaves out: with `sit.py`, what the host runs."""


def pack(loops: LoopFolder, anew: bool = False) -> list[Path]:
    """Fill LOOPS/travel; returns its files.

    Args:
        anew: also what is the same in each sitting: the loops' code and the packages of `wheels`.
    """
    root, travel = loops.root, loops.root / "travel"
    freeze(root, loops.say)
    travel.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".travel-") as scratch:
        if anew or not (travel / "site.tar.xz").is_file():
            site = Path(scratch, "site")
            for wheel in sorted((root / "wheels").glob("*.whl")):
                zipfile.ZipFile(wheel).extractall(site)
            shutil.copytree(
                root / "code", site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pyc")
            )
            compress(travel / "site.tar.xz", Path(scratch), ["site"])
        count = _jobs(loops, Path(scratch, "jobs"))
        compress(travel / "jobs.tar.xz", Path(scratch, "jobs"), ["."])
    for part in travel.glob(PARTS):
        part.unlink()
    for file in (HERE / "sitting.sh", *sorted((root / "cache").glob(PARTS))):
        shutil.copy(file, travel / file.name)
    loops.say(f"{count} jobs to be judged")
    return sorted(travel.iterdir())


def _jobs(loops: LoopFolder, target: Path) -> int:
    """Lay out what is another each time; returns the number of jobs."""
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
    return len(jobs)


def back(loops: LoopFolder, folder: Path) -> str:
    """Take in what a sitting put into OUT; returns what was judged.

    Raises:
        UsageError: nothing of a sitting is there.
        VerificationError: it came back damaged.
    """
    archive, exchange = folder / "back.tar.xz", loops.exchange
    if not archive.is_file():
        raise UsageError(f"no {archive.name} in {folder}", "give the OUT of sitting.sh")
    with tempfile.TemporaryDirectory(dir=loops.root, prefix=".back-") as name:
        scratch = Path(name)
        extract(archive, scratch)
        for kind in ("results", "machines"):
            (exchange / kind).mkdir(parents=True, exist_ok=True)
            for made in sorted(scratch.glob(f"exchange/{kind}/[!.]*")):
                if kind == "machines":
                    shutil.copy(made, exchange / kind / made.name)
                elif not (exchange / kind / made.name).exists():  # a verdict stays as it is
                    shutil.copytree(made, exchange / kind / made.name)
        late = exchange / LATE
        known = late.read_text(encoding="utf-8").split() if late.is_file() else []
        put_off = [path.name for path in sorted(scratch.glob("exchange/put-off/*"))]
        if put_off:
            names = dict.fromkeys([*known, *put_off])
            late.write_text("".join(f"{each}\n" for each in names), encoding="utf-8")
        sittings = loops.root / "sittings"
        sittings.mkdir(exist_ok=True)
        numbers = [int(path.name) for path in sittings.iterdir() if path.name.isdecimal()]
        log = sittings / str(max(numbers, default=0) + 1)
        shutil.copytree(scratch / "log", log)
    if not (exchange / EXPECTED).exists() and any((exchange / "results").glob("[!.]*")):
        shutil.copy(log / "machine.txt", exchange / EXPECTED)
    if parts := sorted(folder.glob(PARTS)):
        shutil.rmtree(loops.root / "cache", ignore_errors=True)
        (loops.root / "cache").mkdir()
        for part in parts:  # without its mode: what came back may be read-only
            shutil.copyfile(part, loops.root / "cache" / part.name)
    return (log / "verdicts.txt").read_text(encoding="utf-8")


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
        VerificationError: the archive is damaged, or holds something else.
    """
    try:
        with lzma.open(archive) as whole:  # tarfile would take one that was cut off between files
            while whole.read(1 << 20):
                continue
        with tarfile.open(archive, "r:xz") as opened:
            opened.extractall(target, filter="data")
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise VerificationError(f"cannot unpack {archive}: {error}", "copy it again") from error
