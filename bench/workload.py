"""What is run: a model preset, a batch, lengths, weights."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import Field

from patcher.bench.errors import UsageError
from patcher.bench.records import SCHEMA_VERSION, Record


class Preset(Record):
    """A model whose public geometry we ship, so that it can be built with random weights and no
    download.
    """

    name: str
    summary: str
    architecture: Literal["gpt_oss"]
    config: dict[str, Any]
    """Keyword arguments of the Hugging Face configuration class."""
    dtype: Literal["float32", "bfloat16", "float16"]
    fits_cpu: bool
    """Whether a CPU runs it in seconds."""
    parameters_b: float
    """Billions of parameters."""
    published: dict[str, Any] = Field(default_factory=dict)
    """What the published checkpoint's config.json says beside it: its quantisation."""
    hub_id: str | None = None
    """Where published weights are, if any."""
    batch: int
    input_len: int
    output_len: int

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])


class Workload(Record):
    """One model, one engine, one shape of traffic."""

    schema_version: int = SCHEMA_VERSION
    model: str
    """Preset name, Hugging Face id or folder."""
    engine: Literal["transformers", "vllm"] = "transformers"
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    batch: int = Field(ge=1)
    input_len: int = Field(ge=1)
    """Prompt tokens per sequence."""
    output_len: int = Field(ge=1)
    """Decode steps per window, after the token that comes from prefill."""
    weights: Literal["random", "hub", "local"] = "random"
    seed: int = 0
    threads: int | None = None
    """CPU threads; None leaves the engine's default."""


class Shape(Record):
    """Other traffic on the same engine; all else is the workload's."""

    batch: int = Field(ge=1)
    context: int = Field(ge=1)
    """Tokens of each sequence when its decode begins."""

    @property
    def label(self) -> str:
        """For people."""
        return f"batch {self.batch}, context {self.context:,}"

    def of(self, workload: Workload) -> Workload:
        return workload.model_copy(update={"batch": self.batch, "input_len": self.context})


@cache
def presets() -> dict[str, Preset]:
    """Every preset shipped in `bench/workloads/`, by name."""
    found = {}
    for file in sorted(
        resources.files("patcher.bench").joinpath("workloads").iterdir(), key=lambda item: item.name
    ):
        if file.name.endswith(".toml"):
            preset = Preset(**tomllib.loads(file.read_text(encoding="utf-8")))
            found[preset.name] = preset
    return found


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UsageError: no such preset.
    """
    try:
        return presets()[name]
    except KeyError:
        raise UsageError(
            f"unknown model {name!r}", f"presets are: {', '.join(presets())}"
        ) from None


def weights_id(workload: Workload) -> str:
    """Id or folder of the workload's published weights.

    Raises:
        UsageError: a preset that has none.
    """
    known = presets().get(workload.model)
    if known is None:
        return workload.model
    if known.hub_id is None:
        raise UsageError(f"{known.name} has no published weights", "use --weights random")
    return known.hub_id


def pick_device(asked: str | None) -> Literal["cpu", "cuda"]:
    """The device asked for, else CUDA where there is one.

    Raises:
        UsageError: neither `cpu` nor `cuda`.
    """
    match asked:
        case "cpu":
            return "cpu"
        case "cuda":
            return "cuda"
        case str():
            raise UsageError(f"unknown device {asked!r}", "say cpu or cuda")
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
