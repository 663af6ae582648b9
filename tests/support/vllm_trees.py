"""`make engines`: the tests of vLLM's patch points against the Python of each version, on a CPU.

vLLM's wheels need CUDA, but most of its Python does not. A version's wheel is downloaded without
its dependencies and its Python is unpacked; dependencies that are pure or small are installed once,
beside it; `vllm_doubles` stands for the rest. Each version runs in a process of its own, for one to
two minutes. Without arguments, every version that `sources.json` names is run.

`PATCHER_VLLM_TREES` names a folder that holds such trees, each named by its version, and `deps`;
else they lie in the cache.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from patcher.bench import MissingError, PatcherError
from patcher.bench.toolchains import cache_root
from patcher.integrate.vllm.sources import versions_read

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/integrate/vllm",
    "tests/patcher/ab/test_served_client.py",
    "tests/patcher/ab/test_offline_client.py",
    *(
        f"tests/bench/engines/test_vllm_{name}.py"
        for name in ("block_table", "engine", "options", "routing", "runners", "weights")
    ),
)
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35))
DEPENDENCIES = ROOT / "tests" / "data" / "vllm-dependencies.txt"


def folder() -> Path:
    """Where trees lie: the user's folder, or the cache."""
    chosen = os.environ.get("PATCHER_VLLM_TREES")
    return Path(chosen) if chosen else cache_root() / "vllm-trees"


def tree(version: str) -> Path:
    """The unpacked wheel of a version, which is downloaded if it is not there.

    Raises:
        MissingError: pip does not get the wheel.
    """
    return unpacked("vllm", version, folder() / version, (".py", ".json"))


def unpacked(package: str, version: str, place: Path, endings: tuple[str, ...]) -> Path:
    """A folder with those files of a wheel, which is downloaded if it is not there.

    Raises:
        MissingError: pip does not get the wheel.
    """
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        platforms = [word for name in PLATFORMS for word in ("--platform", name)]
        _pip(
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version=3.12",
            "--implementation=cp",
            *platforms,
            f"--dest={scratch}",
            f"{package}=={version}",
        )
        [wheel] = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "tree"
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(endings) or ".dist-info/" in name:
                    archive.extract(name, unpacked)
        unpacked.rename(place)
    return place


def dependencies() -> Path:
    """The folder of the dependencies, which are installed if they are not there.

    Raises:
        MissingError: pip does not get them.
    """
    if os.environ.get("PATCHER_VLLM_TREES"):
        return folder() / "deps"
    return installed(DEPENDENCIES)


def installed(requirements: Path) -> Path:
    """A folder of the cache with those packages, which are installed if they are not there.

    Raises:
        MissingError: pip does not get them.
    """
    place = folder() / f"deps-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            _pip(
                "install", "--no-deps", f"--target={scratch}/deps", f"--requirement={requirements}"
            )
            (Path(scratch) / "deps").rename(place)
    return place


def python_path(version: str) -> str:
    """The `PYTHONPATH` under which a version is imported; `vllm_doubles` must be imported first."""
    return os.pathsep.join(map(str, (tree(version), dependencies(), ROOT / "tests" / "support")))


def run(version: str, arguments: list[str]) -> bool:
    """Whether the tests pass against a version; pytest prints what it does."""
    print(f"\nvLLM {version}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "vllm_doubles", *TESTS, *arguments]
    environment = {**os.environ, "PYTHONPATH": python_path(version)}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode == 0


def main(arguments: list[str]) -> int:
    """Run the versions that are given, or else all that were read; the rest is for pytest."""
    rest = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    versions = arguments[:rest] or list(versions_read())
    try:
        failed = [version for version in versions if not run(version, arguments[rest:])]
    except PatcherError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"\nfailed: {', '.join(failed)}" if failed else f"\npassed: {', '.join(versions)}")
    return 1 if failed else 0


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    if subprocess.run(command).returncode != 0:
        raise MissingError(
            f"pip {arguments[0]} failed, see above", "check the network, or set PATCHER_VLLM_TREES"
        )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
