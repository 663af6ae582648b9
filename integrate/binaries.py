"""A patch's kernel, callable: a binary that was built for this machine, else built from source."""

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
    """A build of this machine, as a manifest names it."""
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
    """The binary of a bundle's folder that was built for a machine like this one.

    None where there is none, or where it was left out of the bundle.
    """
    carried = [known for known in manifest.binaries if (folder / known.file).is_file()]
    if not carried:
        return None
    here = _here(manifest.guards.device)
    fits = (known for known in carried if (known.platform, known.processor) == here)
    return next(fits, None)


def load_kernel(folder: Path, manifest: Manifest, candidate: Candidate) -> Callable[..., object]:
    """The kernel of a bundle's folder.

    Raises:
        MissingError: it must be built, and its compiler is not here.
        UsageError: the cache folder cannot be written.
        VerificationError: it does not build or load here.
    """
    from patcher.bench.toolchains import build, load

    if binary := fitting_binary(folder, manifest):
        try:
            return loading.load(str(folder / binary.file), binary.binding, manifest.entry)
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            log.warning("%s does not load here (%s): built anew", binary.file, error)
    built = build(candidate, manifest.contract)
    if not built.ok:
        raise VerificationError(
            f"the source of {manifest.id} does not build here",
            f"build the patch again on this machine; the compiler said: {built.log[-500:]}",
        )
    try:
        return load(built, manifest.entry)
    except Exception as error:
        raise VerificationError(
            f"{manifest.id} cannot be loaded here: {type(error).__name__}: {error}",
            "build the patch again on this machine",
        ) from error


def _here(device: str) -> tuple[str, str]:
    """Platform and processor for which a binary that is built here is."""
    name = f"{platform.system().lower()}-{platform.machine()}"
    if device == "cpu":
        return name, f"{device_name('cpu')} {cpu_instructions()}"
    from patcher.bench.toolchains.native import cuda_capability

    return name, "{}.{}".format(*cuda_capability())
