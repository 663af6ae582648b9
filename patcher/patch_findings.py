"""What `patcher doctor` finds out about patches: the store, the switches, what engines did."""

from __future__ import annotations

import os
import shlex
import site
from collections.abc import Callable
from importlib.metadata import distributions, entry_points

from patcher.bench import PatcherError
from patcher.finding import Finding
from patcher.integrate import Switches, home_store, idle_patches, read_receipts


def _store() -> Finding:
    try:
        store = home_store()
        count = len(store.applied())
    except PatcherError as error:
        return Finding(name="patch store", status="fail", detail=error.message, fix=error.hint)
    there = next(path for path in (store.root, *store.root.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        return Finding(
            name="patch store",
            status="fail",
            detail=f"{count} applied, not writable",
            fix="set PATCHER_HOME to a writable folder",
        )
    return Finding(name="patch store", status="ok", detail=f"{count} applied")


def _switches() -> Finding:
    """What an engine that starts from this environment would do."""
    switches = Switches.read()
    if switches.patches == "off":
        detail = "off: engines run unpatched; PATCHER_PATCHES=on switches applied patches on"
        return Finding(name="patch switches", status="ok", detail=detail)
    mode = "what fails raises" if switches.strict else "what fails leaves the engine as it is"
    detail = f"PATCHER_PATCHES={switches.patches}, {mode}"
    try:
        unknown = switches.unknown(home_store())
    except PatcherError:
        unknown = []  # the store's own line says so
    if unknown:
        return Finding(
            name="patch switches",
            status="fail",
            detail=f"{detail}; not applied: {', '.join(unknown)}",
            fix="see `patcher patches`, or set PATCHER_PATCHES=on",
        )
    if switches.receipts is None:
        return Finding(
            name="patch switches",
            status="warn",
            detail=f"{detail}; no receipts are kept",
            fix="set PATCHER_RECEIPTS to a folder, which then holds what ran",
        )
    return Finding(name="patch switches", status="ok", detail=f"{detail}; receipts are kept")


def vllm_plugin() -> Finding:
    """Whether vLLM would load patcher's plugin from this environment."""
    name, allowed = "vLLM plugin", os.environ.get("VLLM_PLUGINS")
    on = Switches.read().patches != "off"
    if not entry_points(group="vllm.general_plugins", name="patcher"):
        detail = "this Python has no entry point of patcher, so vLLM runs unpatched"
        fix = "install patcher with pip in vLLM's environment, rather than run it from a folder"
        users = site.getusersitepackages()
        if not site.ENABLE_USER_SITE and list(distributions(name="patcher", path=[users])):
            detail += f"; it is installed in {users}, which this Python leaves out"
            fix = "unset PYTHONNOUSERSITE, or install patcher without --user"
    elif allowed is not None and "patcher" not in allowed.split(","):
        detail = f"VLLM_PLUGINS={allowed} excludes patcher's plugin, so vLLM runs unpatched"
        fix = "add patcher to VLLM_PLUGINS, or unset it"
    else:
        return Finding(name=name, status="ok", detail="vLLM loads it")
    return Finding(name=name, status="fail" if on else "warn", detail=detail, fix=fix, likely=on)


def _receipts() -> Finding:
    """What the receipts of engines in this environment say of patches without effect."""
    folder = Switches.read().receipts
    try:
        found = read_receipts(folder) if folder is not None else []
    except PatcherError as error:
        return Finding(name="receipts", status="warn", detail=error.message, fix=error.hint)
    idle = idle_patches(found)
    if not idle:
        detail = f"{len(found)}, every patch ran" if found else "none yet"
        return Finding(name="receipts", status="ok", detail=detail)
    said = "; ".join(
        f"{patch_id} never ran: {why or 'not installed'}" for patch_id, why in idle.items()
    )
    fix = f"see `patcher receipts {shlex.quote(str(folder))}`; revert what is not needed"
    return Finding(name="receipts", status="warn", detail=said, fix=fix)


PATCH_CHECKS: tuple[Callable[[], Finding], ...] = (_store, _switches, vllm_plugin, _receipts)
