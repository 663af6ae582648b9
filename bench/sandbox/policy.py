"""Sandbox policies for `confine`: what a candidate's process may see on this machine.

It sees everything on Python's path except this project. The reference, the judge and its thresholds
are not on the candidate's file system.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from patcher.bench.machine.environment import ROOT
from patcher.bench.runner import confine
from patcher.bench.runner.confine import Confinement, Policy

_OWN = ("patcher",)
_OWN_CHECKOUT = ("bench", "hotspot", "integrate", "patcher", "kernels", "tests")
_OWN_PATTERNS = ("patcher-*.dist-info", "patcher.egg-*", "__editable__*", "*.egg-link")
_SYSTEM = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/sbin",
    "/opt/nvidia",
    "/opt/cuda",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/etc/nvidia*",
    "/usr/local/cuda*",
)
_CPU_FACTS = ("/sys/devices/system/cpu", "/sys/devices/system/node")


def runner_policy(
    folder: Path,
    *,
    device: str,
    also: Iterable[Path] = (),
    memory_bytes: int = 8 << 30,
    processes: int = 256 + 4 * (os.cpu_count() or 1),
    file_bytes: int = 4 << 30,
    cpu_s: int = 1800,
    nested: bool = False,
) -> Policy:
    """The policy for a process that runs a candidate.

    Args:
        folder: the only folder that the process may write.
        device: `cpu` or `cuda`.
        also: further readable paths, such as a built library or a cache.
        memory_bytes: memory limit in bytes.
        processes: limit on the number of processes.
        file_bytes: limit on the size of a file in bytes.
        cpu_s: limit on CPU time in seconds.
        nested: whether a child of the process uses CUDA, as under a profiler.
    """
    cuda = device == "cuda"
    visible, listed = _visible([*map(str, also), "/sys" if cuda else "", *_CPU_FACTS])
    return Policy(
        folder=str(folder),
        visible=visible,
        devices=_devices(cuda),
        cpu_only=not cuda,
        memory_bytes=memory_bytes,
        processes=processes,
        file_bytes=file_bytes,
        cpu_s=cpu_s,
        listed=listed,
        nested=nested,
    )


def build_policy(folder: Path, *, also: Iterable[Path] = ()) -> Policy:
    """The policy for compilers.

    Args:
        folder: the only folder that they may write.
        also: further readable paths, such as precompiled headers.
    """
    return runner_policy(
        folder, device="cpu", also=also, processes=128, file_bytes=1 << 30, cpu_s=600
    )


def command(policy: Policy, *program: str, without: tuple[str, ...] = ()) -> list[str]:
    """Build the command line that runs a program in the sandbox.

    The caller must clean the environment.

    Args:
        policy: the sandbox policy.
        program: the program with its arguments. Without one, the command prints the confinement.
        without: parts of the sandbox to leave out, for tests.
    """
    document = json.dumps({**asdict(policy), "without": without})
    if program and os.path.isabs(program[0]):  # a folder that a `..` leaves is not visible there
        program = (os.path.normpath(program[0]), *program[1:])
    return [sys.executable, "-IS", confine.__file__, document, *program]


def detect(without: tuple[str, ...] = ()) -> Confinement:
    """Determine the confinement that this machine supports, in a throwaway process."""
    with tempfile.TemporaryDirectory(prefix="patcher-detect-") as folder:
        policy = runner_policy(Path(folder), device="cpu")
        result = subprocess.run(
            command(policy, without=without),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        return Confinement("below R0", (), (("sandbox", last),))
    document = json.loads(result.stdout)
    missing = tuple((part, reason) for part, reason in document["missing"])
    return Confinement(document["rung"], tuple(document["in_force"]), missing)


def sandbox_description() -> tuple[bool, str]:
    """Whether verdicts on foreign code can be trusted here (rung R1 or better), and a description
    of the confinement in one line.
    """
    confinement = detect()
    return confinement.isolated, confinement.describe()


def _devices(cuda: bool) -> tuple[str, ...]:
    plain = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
    return (*plain, *sorted(glob.glob("/dev/nvidia*"))) if cuda else plain


def _visible(also: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths that are visible, and folders that are visible in part."""
    hidden = _hidden()
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    roots = [
        *(path for pattern in _SYSTEM for path in sorted(glob.glob(pattern))),
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        sys.base_exec_prefix,
        sys.executable,
        *_python_paths(),
        *libraries,
        *homes,
        *also,
    ]
    visible: dict[str, None] = {}
    listed: dict[str, None] = {}
    for root in roots:
        if os.path.isabs(root) and os.path.exists(root) and os.path.realpath(root) != "/":
            _show(os.path.normpath(root), hidden, visible, listed)
    return tuple(visible), tuple(listed)


def _python_paths() -> list[str]:
    """Folders of Python packages, without a script's folder or paths that a test runner adds."""
    configured = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path if path.endswith("-packages")]
    return [path for path in (*configured, *installed) if not _is_checkout(path)]


def _is_checkout(path: str) -> bool:
    """Whether a path is in this project's checkout, but not in its virtual environment."""
    real = Path(path).resolve()
    if (ROOT / "pyproject.toml").is_file() and real.is_relative_to(ROOT):
        return not real.is_relative_to(Path(sys.prefix).resolve())
    return False


def _hidden() -> set[str]:
    """Real paths of this project in all Python installations of this machine."""
    systems = glob.glob("/usr/lib/python3*/*-packages") + glob.glob(
        "/usr/local/lib/python3*/*-packages"
    )
    hidden = {str(ROOT)} if (ROOT / "pyproject.toml").is_file() else set()
    for folder in {*sys.path, *_python_paths(), *systems, str(ROOT)}:
        place = Path(folder)
        if not folder or not place.is_dir():
            continue
        for pattern in _OWN_PATTERNS:
            hidden |= {os.path.realpath(path) for path in place.glob(pattern)}
        if (place / "patcher/bench/runner/confine.py").is_file():
            # in a site-packages folder, `kernels` and `bench` belong to other projects
            checkout = (place / "pyproject.toml").is_file()
            names = _OWN_CHECKOUT if checkout else _OWN
            hidden |= {os.path.realpath(place / name) for name in names}
    return hidden


def _show(path: str, hidden: set[str], visible: dict[str, None], listed: dict[str, None]) -> None:
    """Show a path whole, or entry by entry if something hidden lies below it."""
    real = os.path.realpath(path)
    if real in hidden or path in visible or path in listed:
        return
    if not any(other.startswith(f"{real}/") for other in hidden):
        visible[path] = None
        return
    listed[path] = None
    if path != real:
        _show(real, hidden, visible, listed)
        return
    for entry in sorted(os.listdir(path)):
        _show(os.path.join(path, entry), hidden, visible, listed)
