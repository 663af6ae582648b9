"""Activate patches in a program that knows nothing of them, as it imports transformers."""

from __future__ import annotations

from dataclasses import replace

from patcher.integrate.activation import Activation, activate
from patcher.integrate.switches import Switches, home_store
from patcher.integrate.transformers.places import LAYERS


def activate_after_import(of_any_model: bool) -> Activation | None:
    """Activate the enabled patches of gpt-oss, or those of layers that any model may have.

    The latter are refused, in the log and in a receipt: their layers are found in a built model.

    Args:
        of_any_model: whether the module that was imported is one that every model needs.

    Raises:
        PatcherError: see `activate`.
    """
    switches = Switches.read()
    try:
        entries = switches.chosen("transformers", home_store())
    except Exception:  # `activate` tells it
        entries = []
    if not entries:
        return activate("transformers") if of_any_model else None
    ids = [one.id for one in entries if (LAYERS.get(one.point, "") is None) is of_any_model]
    if not ids:
        return None
    return activate("transformers", switches=replace(switches, patches=",".join(ids)))
