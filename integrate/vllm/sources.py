"""The parts of vLLM's source that patch points replace or rely on, and their changes.

Every name is `module:attribute` in vLLM 0.25.1's wheel. After a review of another version,
`python -m patcher.integrate.vllm.points` writes its digests.
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
"""The version that the adapter was written for; `sources.json` holds its digests."""


def module(name: str) -> Any:
    """Import a module of the installed vLLM.

    Raises:
        MissingError: vLLM, or a package that its module needs, is not installed.
        VerificationError: this version of vLLM has no such module.
    """
    try:
        if name.startswith("triton_kernels"):
            # vLLM ships, aliases and modifies a copy when the module that uses it is imported
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
    """The object `module:attribute.attribute`; None if this version has none.

    Raises:
        MissingError: see `module`.
    """
    where, _, path = name.partition(":")
    value: Any = module(where)
    for attribute in path.split("."):
        value = getattr(value, attribute, None)
    return value


def text(name: str) -> str:
    """The source text of a function or class, without decorators of vLLM or Triton; or ""."""
    value = part(name)
    # an IR operator and one of its implementations; a Triton function
    for wrapped in ("impls", "impl_fn", "fn"):
        inner = getattr(value, wrapped, None)
        value = inner["native"].impl_fn if isinstance(inner, dict) else inner or value
    return "" if value is None else source_text(value)


def fingerprint(names: tuple[str, ...]) -> str:
    """sha256 of the source texts in order.

    Raises:
        MissingError: see `module`.
    """
    return hashlib.sha256("".join(map(text, names)).encode()).hexdigest()


def changes(names: tuple[str, ...]) -> list[str]:
    """The parts whose source text differs from that of version `READ`."""
    known: dict[str, str] = json.loads(DIGESTS.read_text(encoding="utf-8"))
    return [name for name in names if known.get(name) != short(name)]


def short(name: str) -> str:
    """The digest of a part in `sources.json`."""
    return hashlib.sha256(text(name).encode()).hexdigest()[:16]


def must_be_as_read(point: str, names: tuple[str, ...]) -> None:
    """Refuse an engine whose code differs; a later version with the same code is allowed.

    Raises:
        VerificationError: parts differ; the message names them.
    """
    if changed := changes(names):
        version = module("vllm").__version__
        raise VerificationError(
            f"{', '.join(changed)} of vLLM {version} differ from {READ}, "
            f"which the adapter of {point} was written for",
            f"serve with vLLM {READ}, or update the adapter",
        )
