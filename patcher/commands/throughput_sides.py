"""The sides of `patcher throughput compare-engines`, in words."""

from __future__ import annotations

import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from patcher.bench import UsageError

if TYPE_CHECKING:
    from patcher.ab.served_records import SideSetup

STOCK = "stock"
"""A side as the baseline is."""
_HINT = "a side is stock, or NAME=VALUE words, each name once"


def side_of(text: str, engine: str, base: SideSetup, stack: ExitStack) -> SideSetup:
    """A side from `NAME=VALUE` words: arguments of the engine, and `python`, `store`, `patch`,
    whose values are paths, whatever they look like.

    Raises:
        UsageError: a word is none of these, or the store holds no patch of the engine.
        VerificationError: the store is damaged.
    """
    from patcher.ab.options import argument, named_once
    from patcher.ab.served_records import SideSetup
    from patcher.ab.server import interpreter
    from patcher.integrate import Patch, unpacked

    arguments, patches = dict(base.arguments), list[Patch]()
    python, store = base.python, None
    try:
        words = shlex.split(text) if text != STOCK else []
    except ValueError as error:
        raise UsageError(f"the side {text!r}: {error}", "close the quote") from error
    seen = set[str]()
    for word in words:
        first, _, given = word.partition("=")
        ours = first in ("python", "store", "patch")
        name, value = argument(word) if ours else named_once(word, ())
        if name in seen and name != "patch":
            raise UsageError(f"the side {text!r} says {name} twice", _HINT)
        seen.add(name)
        match name:
            case "python":
                python = interpreter(given)
            case "store":
                store = Path(os.path.expanduser(given))
            case "patch":
                bundle = Path(os.path.expanduser(given))
                patches.append(Patch.load(stack.enter_context(unpacked(bundle))))
            case _:
                arguments[name] = value
    if store is not None and patches:
        raise UsageError("patches, and a store of patches", "give patch= or store= for a side")
    side = SideSetup(text, arguments, tuple(patches), store, python)
    if store is not None and not side.digests(engine):
        raise UsageError(
            f"no patch of {engine} is applied in {store}",
            f"give a folder that was PATCHER_HOME of `patcher apply`, or say {STOCK}",
        )
    return side
