"""What a judged process may see on this machine: the policies for `confine`.

All that is on Python's path, but not the project: the reference, the judge and its thresholds are
not on the candidate's file system.
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
    """For the process that runs a candidate on `cpu` or `cuda`; `also` becomes visible too (a
    built library, a cache that it may read).
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
    """For compilers: `folder` is written, `also` (precompiled headers, say) is read."""
    return runner_policy(
        folder, device="cpu", also=also, processes=128, file_bytes=1 << 30, cpu_s=600
    )


def command(policy: Policy, *program: str, without: tuple[str, ...] = ()) -> list[str]:
    """The command line that runs a program confined; without a program it prints what is in
    force. The environment is the caller's to scrub.
    """
    told = json.dumps({**asdict(policy), "without": without})
    return [sys.executable, "-IS", confine.__file__, told, *program]


def detect(without: tuple[str, ...] = ()) -> Confinement:
    """What this machine allows to a runner, tried in a process that is then thrown away."""
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
    found = json.loads(result.stdout)
    missing = tuple((part, reason) for part, reason in found["missing"])
    return Confinement(found["rung"], tuple(found["in_force"]), missing)


def sandbox_description() -> tuple[bool, str]:
    """Whether verdicts on foreign code can be trusted here (R1 or better), and the line that tells
    what is in force.
    """
    found = detect()
    return found.isolated, found.describe()


def _devices(cuda: bool) -> tuple[str, ...]:
    plain = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
    return (*plain, *sorted(glob.glob("/dev/nvidia*"))) if cuda else plain


def _visible(also: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Visible paths, and folders that are shown in part."""
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
    """Where Python finds packages; not the folder of a script, nor what a test runner adds."""
    asked = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path if path.endswith("-packages")]
    return [path for path in (*asked, *installed) if not _is_checkout(path)]


def _is_checkout(path: str) -> bool:
    """An environment inside of a checkout is Python's, the rest of it is the project's."""
    real = Path(path).resolve()
    if (ROOT / "pyproject.toml").is_file() and real.is_relative_to(ROOT):
        return not real.is_relative_to(Path(sys.prefix).resolve())
    return False


def _hidden() -> set[str]:
    """Real paths of the project, wherever a Python of this machine has it installed."""
    systems = glob.glob("/usr/lib/python3*/*-packages") + glob.glob(
        "/usr/local/lib/python3*/*-packages"
    )
    found = {str(ROOT)} if (ROOT / "pyproject.toml").is_file() else set()
    for folder in {*sys.path, *_python_paths(), *systems, str(ROOT)}:
        place = Path(folder)
        if not folder or not place.is_dir():
            continue
        for pattern in _OWN_PATTERNS:
            found |= {os.path.realpath(path) for path in place.glob(pattern)}
        if (place / "patcher/bench/runner/confine.py").is_file():
            # in a site-packages `kernels` and `bench` are other projects'
            checkout = (place / "pyproject.toml").is_file()
            names = _OWN_CHECKOUT if checkout else _OWN
            found |= {os.path.realpath(place / name) for name in names}
    return found


def _show(path: str, hidden: set[str], visible: dict[str, None], listed: dict[str, None]) -> None:
    """The path whole, or, where something hidden lies beneath, entry by entry."""
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
