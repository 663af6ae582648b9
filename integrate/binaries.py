"""Load a patch's kernel: a binary that fits this machine, or one built from source."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from patcher.bench import Candidate, VerificationError
from patcher.bench.machine.environment import cpu_instructions, device_name
from patcher.bench.runner import loading
from patcher.integrate.manifest import Binary, Manifest

if TYPE_CHECKING:
    from patcher.bench.toolchains import Built

log = logging.getLogger("patcher")


def describe_binary(entry: str, built: Built, device: str) -> Binary:
    """The manifest's record of a binary that was built on this machine."""
    platform_name, processor = _here(device)
    place = re.sub(r"[^A-Za-z0-9.]+", "-", f"{platform_name}-{processor}").strip("-")
    return Binary(
        file=f"binaries/{place}/{entry}.so",
        binding="tvm-ffi",
        platform=platform_name,
        processor=processor,
        command=built.command,
    )


def fitting_binary(folder: Path, manifest: Manifest) -> Binary | None:
    """The bundle's binary for this kind of machine; None if the folder holds none."""
    present = [known for known in manifest.binaries if (folder / known.file).is_file()]
    if not present:
        return None
    here = _here(manifest.guards.device)
    fits = (known for known in present if (known.platform, known.processor) == here)
    return next(fits, None)


def load_kernel(folder: Path, manifest: Manifest, candidate: Candidate) -> Callable[..., object]:
    """Load the kernel of a bundle, and build it first if no binary fits.

    Raises:
        MissingError: the kernel must be built, but its compiler is not installed.
        UsageError: the cache folder cannot be written.
        VerificationError: the kernel does not build or load on this machine.
    """
    from patcher.bench.toolchains import build, load

    if binary := fitting_binary(folder, manifest):
        try:
            return loading.load(str(folder / binary.file), binary.binding, manifest.entry)
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            log.warning("%s does not load (%s): rebuilding it", binary.file, error)
    built = build(candidate, manifest.contract)
    if not built.ok:
        raise VerificationError(
            f"the source of {manifest.id} does not build on this machine",
            f"make the patch again here; the compiler's output: {built.log[-500:]}",
        )
    try:
        return load(built, manifest.entry)
    except Exception as error:
        raise VerificationError(
            f"{manifest.id} does not load on this machine: {type(error).__name__}: {error}",
            "make the patch again here",
        ) from error


def _here(device: str) -> tuple[str, str]:
    """The platform and processor of binaries that are built on this machine."""
    name = f"{platform.system().lower()}-{platform.machine()}"
    if device == "cpu":
        return name, f"{device_name('cpu')} {cpu_instructions()}"
    from patcher.bench.toolchains.native import cuda_capability

    return name, "{}.{}".format(*cuda_capability())
