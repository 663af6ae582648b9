"""The model that a serving engine loads, and the longest sequence that it must have room for."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from patcher.bench.engines.architecture import full_config
from patcher.bench.errors import UsageError
from patcher.bench.toolchains import cache_root
from patcher.bench.workload import Shape, Workload, weights_id

SPARE_TOKENS = 2048
"""Tokens of decode per sequence beyond those of the workload."""
LENGTH_STEP = 1024
"""The longest sequence is rounded up to a multiple of this."""


def served_model(workload: Workload) -> str:
    """A Hugging Face id or a folder; for random weights, a folder with a config.json alone.

    Raises:
        UsageError: the model is no preset and no folder with a config.json, or has no published
            weights, or its own folder cannot be written.
    """
    if workload.weights != "random":
        return weights_id(workload)
    config = full_config(workload.model) | {"torch_dtype": workload.dtype}
    return str(_model_folder(json.dumps(config, sort_keys=True)))


def longest(workload: Workload, room: Sequence[Shape]) -> int:
    """Longest sequence in tokens, rounded up.

    The number is part of the hash of compiled code, so that rounding lets windows of different
    lengths share it.
    """
    context = max(workload.input_len, *(shape.context for shape in room), 1)
    needed = context + workload.output_len + SPARE_TOKENS
    return -(-needed // LENGTH_STEP) * LENGTH_STEP


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
