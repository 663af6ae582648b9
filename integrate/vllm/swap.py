"""See `patcher.integrate.swap`."""

from __future__ import annotations

from patcher.integrate.swap import AttributePatch, SharedPatch, remove_all

__all__ = ["AttributePatch", "SharedPatch", "remove_all"]
