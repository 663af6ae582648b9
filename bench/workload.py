"""What is run: a model, an engine, a batch, lengths, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from patcher.bench.errors import UsageError
from patcher.bench.presets import presets
from patcher.bench.records import SCHEMA_VERSION, Record

DType = Literal["float32", "bfloat16", "float16"]


class Workload(Record):
    """A model on an engine with one shape of traffic."""

    schema_version: int = SCHEMA_VERSION
    model: str
    """Preset name, Hugging Face id, folder, or a config.json alone."""
    engine: str = "transformers"
    """A name of `patcher.bench.engines.ENGINES`."""
    device: Literal["cpu", "cuda"]
    """Device that the engine runs on."""
    dtype: DType
    """Dtype of weights and activations."""
    batch: int = Field(ge=1)
    """Number of sequences."""
    input_len: int = Field(ge=1)
    """Prompt tokens per sequence."""
    output_len: int = Field(ge=1)
    """Decode steps per window, not counting the first token, which prefill produces."""
    weights: Literal["random", "hub", "local"] = "random"
    """Source of the weights: random, the Hugging Face hub, or a local folder."""
    seed: int = 0
    """Seed of random weights and prompts."""
    threads: int | None = None
    """CPU threads; None: the engine's default."""


class Shape(Record):
    """Another batch and context for the same engine and model."""

    batch: int = Field(ge=1)
    """Number of sequences."""
    context: int = Field(ge=1)
    """Tokens per sequence when decode begins."""

    @property
    def label(self) -> str:
        """The shape as text: `batch 8, context 1,024`."""
        return f"batch {self.batch}, context {self.context:,}"

    def of(self, workload: Workload) -> Workload:
        """The workload with this batch and context."""
        return workload.model_copy(update={"batch": self.batch, "input_len": self.context})


def fit_context(workload: Workload, longest: int | None) -> None:
    """Check that the model takes a prompt and a token after it.

    Args:
        longest: the model's context in tokens; None: unknown.

    Raises:
        UsageError: the prompt leaves no room for a token.
    """
    if longest is not None and workload.input_len >= longest:
        raise UsageError(
            f"{workload.input_len:,} prompt tokens leave no room in {workload.model}, whose "
            f"context has {longest:,}",
            f"give at most {longest - 1:,} prompt tokens",
        )


def named_model(workload: Workload) -> str:
    """The model whose config.json is asked: for random weights as it was named, else `weights_id`.

    Raises:
        UsageError: as `weights_id`.
    """
    return workload.model if workload.weights == "random" else weights_id(workload)


def weights_id(workload: Workload) -> str:
    """Hugging Face id or folder of the workload's weights.

    Raises:
        UsageError: the workload's preset has no published weights, or the model is a config.json.
    """
    known = presets().get(workload.model)
    if known is None:
        if Path(workload.model).is_file():
            raise UsageError(
                f"{workload.model} is a file, which has no weights beside it",
                "use --weights random, or give the model's folder",
            )
        return workload.model
    if known.hub_id is None:
        raise UsageError(f"{known.name} has no published weights", "use --weights random")
    return known.hub_id


def pick_device(asked: str | None) -> Literal["cpu", "cuda"]:
    """Choose a device.

    Args:
        asked: `cpu`, `cuda`, or None for CUDA if it is available, else the CPU.

    Raises:
        UsageError: `asked` is neither `cpu` nor `cuda`.
    """
    match asked:
        case "cpu":
            return "cpu"
        case "cuda":
            return "cuda"
        case str():
            raise UsageError(f"unknown device {asked!r}", "use cpu or cuda")
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
