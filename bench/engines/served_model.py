"""The model that a serving engine loads, and the longest sequence that it must have room for."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from patcher.bench.engines.architecture import full_config, longest_context
from patcher.bench.errors import UsageError
from patcher.bench.toolchains import cache_root
from patcher.bench.workload import Shape, Workload, named_model, weights_id

SPARE_TOKENS = 2048
"""Tokens of decode per sequence beyond those of the workload."""
LENGTH_STEP = 1024
"""The longest sequence is rounded up to a multiple of this."""


def served_model(workload: Workload) -> str:
    """A Hugging Face id or a folder; for random weights, a folder with a config.json alone.

    Raises:
        UsageError, MissingError: as `full_config`; or it has no published weights, or its own
            folder cannot be written.
    """
    if workload.weights != "random":
        found = weights_id(workload)
        folder = Path(os.path.expanduser(found))
        # engines and clients start in folders of their own
        return str(folder.absolute()) if folder.is_dir() else found
    config = full_config(workload.model) | {"torch_dtype": workload.dtype}
    return str(_model_folder(json.dumps(config, sort_keys=True)))


def check_model(workload: Workload) -> None:
    """Refuse a model that names no class, by which a serving engine knows its architecture.

    Raises:
        UsageError, MissingError: as `full_config`, or its config.json names no class.
    """
    if not full_config(named_model(workload)).get("architectures"):
        raise UsageError(
            f"the config.json of {workload.model} says no architectures, by which "
            f"{workload.engine} knows models",
            "add `architectures`, the name of its class",
        )


def longest(workload: Workload, room: Sequence[Shape]) -> int:
    """Longest sequence in tokens, rounded up.

    The number is part of the hash of compiled code, so that rounding lets windows of different
    lengths share it. It is no more than the model takes, unless the traffic itself is. Raises as
    `published_config`.
    """
    needed = max(workload.input_len, *(shape.context for shape in room), 1) + workload.output_len
    rounded = -(-(needed + SPARE_TOKENS) // LENGTH_STEP) * LENGTH_STEP
    most = longest_context(workload.model)
    return rounded if most is None else min(rounded, max(most, needed))


def _model_folder(config: str) -> Path:
    """A folder with this config.json, the same in every process.

    The model's path is part of vLLM's hash of compiled code (`ModelConfig.compute_hash`). With a
    new folder, each start would compile again, which takes a minute and a half.
    """
    name = hashlib.sha256(config.encode()).hexdigest()[:16]
    folder = cache_root() / "served-models" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # several processes may write it concurrently
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(config)
        Path(file.name).replace(folder / "config.json")
    except OSError as error:
        raise UsageError(
            f"cannot write {folder}: {error.strerror}", "set PATCHER_CACHE to a writable folder"
        ) from error
    return folder
