"""Parts of vLLM's source text that the patch points replace or rely on, and whether they changed.

Every name is `module:attribute`, read in vLLM 0.25.1's wheel. When another version has been read
and found to be the same in what matters, `python -m patcher.integrate.vllm.points` writes its
digests.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

from patcher.bench import MissingError, VerificationError
from patcher.integrate.points import source_text

_USER = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"

DIGESTS = Path(__file__).with_name("sources.json")
READ = "0.25.1"
"""The version that the adapter was read against; `sources.json` holds its digests."""


def module(name: str) -> Any:
    """A module of the installed vLLM.

    Raises:
        MissingError: vLLM, or something that this module of it needs, is not installed.
        VerificationError: this version of vLLM has no such module.
    """
    try:
        if name.startswith("triton_kernels"):
            # vLLM carries a copy, answers to this name for it and changes it; all of that is done
            # by whoever uses it
            importlib.import_module(_USER)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing.startswith(("vllm.", "triton_kernels")) and missing in name:
            raise VerificationError(
                f"this vLLM has no module {missing}", f"serve with vLLM {READ}"
            ) from error
        raise MissingError(
            f"{missing} is not installed", f"pip install vllm=={READ}, in its own environment"
        ) from error


def part(name: str) -> Any:
    """What `module:attribute.attribute` names; None where this version has no such thing.

    Raises:
        MissingError: see `module`.
    """
    where, _, path = name.partition(":")
    found: Any = module(where)
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    return found


def text(name: str) -> str:
    """The source text of a function, a class, or what a decorator of vLLM or Triton wraps."""
    found = part(name)
    # an IR operator and one of its implementations; a Triton function
    for wrapped in ("impls", "impl_fn", "fn"):
        inner = getattr(found, wrapped, None)
        found = inner["native"].impl_fn if isinstance(inner, dict) else inner or found
    return "" if found is None else source_text(found)


def fingerprint(names: tuple[str, ...]) -> str:
    """sha256 of the source texts, in order.

    Raises:
        MissingError: see `module`.
    """
    return hashlib.sha256("".join(map(text, names)).encode()).hexdigest()


def changes(names: tuple[str, ...]) -> list[str]:
    """The parts whose source text is not that of `READ`."""
    known: dict[str, str] = json.loads(DIGESTS.read_text(encoding="utf-8"))
    return [name for name in names if known.get(name) != short(name)]


def short(name: str) -> str:
    """What `sources.json` holds of a part."""
    return hashlib.sha256(text(name).encode()).hexdigest()[:16]


def must_be_as_read(point: str, names: tuple[str, ...]) -> None:
    """Refuse an engine whose code differs; a later version with the same code is fine.

    Raises:
        VerificationError: names the parts.
    """
    if changed := changes(names):
        version = module("vllm").__version__
        raise VerificationError(
            f"{', '.join(changed)} of vLLM {version} differ from {READ}, "
            f"which the adapter of {point} was written for",
            f"serve with vLLM {READ}, or bring the adapter up to date",
        )
