"""What one decode step of a model has to read, by role: weights in their format, and KV cache.

Parameters are those of the model that transformers builds on no device, so that any architecture
is counted as it is. Their roles and formats come from `roles.toml`.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from patcher.bench import DTYPES, DType, UsageError
from patcher.bench.engines.architecture import (
    ModelSizes,
    has_cache,
    keeps_state,
    layer_kinds,
    published_config,
    sizes_of,
)
from patcher.bench.engines.model_config import model_config
from patcher.hotspot.coverage import PLAIN
from patcher.hotspot.rules import rules

_UNCONVERTED = {"norms", "embedding", "head", "router"}
"""Roles that checkpoints leave in the model's own dtype, unless a format is for them alone."""
_EXCEPTIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""Where a checkpoint lists the modules that it leaves as they are."""
_STATE = ("heads", "keys", "values", "key_heads", "kernel")


@dataclass
class RoleBytes:
    """What one role of a step reads, writes and computes, over all layers."""

    weights: float = 0.0
    """Bytes of weights that are read: of experts, of those that are expected to be chosen."""
    kv: float = 0.0
    """Bytes of the KV cache, or of the state in its place, that are read or written."""
    activations: float = 0.0
    """Bytes that its parts take in and give out; on the chip if all parts were one kernel."""
    flops: float = 0.0

    def __add__(self, other: RoleBytes) -> RoleBytes:
        return RoleBytes(
            self.weights + other.weights,
            self.kv + other.kv,
            self.activations + other.activations,
            self.flops + other.flops,
        )


@dataclass(frozen=True)
class StepBytes:
    """What a decode step reads, by role."""

    roles: dict[str, RoleBytes]
    batch: int
    context: int
    """Tokens of a sequence that attention reads."""
    distinct_experts: float | None = None
    """Expected experts of a layer that a step reads, of `experts`; None for a dense model."""
    experts: int = 0
    weight_format: str = ""
    """Of the weights, in words."""
    formats: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Formats of a role's matrices, by their names in `roles.toml`; `plain`: not quantised."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the model by the axis names of the op contracts."""
    missing: tuple[str, ...] = field(default=())
    """What is not counted, in sentences."""


def step_bytes(
    model: str, batch: int, context: int, quantised: bool = True, dtype: DType | None = None
) -> StepBytes:
    """Count what a decode step of a model reads.

    Args:
        model: a preset, a folder with a config.json, such a file, or a Hugging Face id.
        batch: sequences in a step.
        context: tokens of each sequence that attention reads.
        quantised: whether weights are in the format of the published checkpoint.
        dtype: of what is not quantised; None: as published, or bfloat16.

    Raises:
        UsageError: transformers cannot build the model, or its weights have an unknown format.
        MissingError: its config.json is not to be had.
    """
    from patcher.bench.engines.causal_model import skeleton

    config = model_config(model)
    text, sizes = config.get_text_config(decoder=True), sizes_of(config)
    said = published_config(model).get("quantization_config") if quantised else None
    item = _item_bytes(text, config) if dtype is None else DTYPES[dtype].item_bytes
    weights = _Weights(said or {}, item)
    distinct = expected_experts(sizes, batch)
    roles: dict[str, RoleBytes] = {}
    formats: dict[str, frozenset[str]] = {}
    for part in _parameters(skeleton(_unquantised(config), model)):
        share, chosen = 1.0, 1.0
        if part.role.startswith("experts.") and distinct is not None:
            share, chosen = distinct / sizes.experts, sizes.experts_per_token / sizes.experts
        counted = part.counted(batch, weights, share, chosen)
        roles[part.role] = roles.get(part.role, RoleBytes()) + counted
        if part.is_matrix:
            formats[part.role] = formats.get(part.role, frozenset()) | {weights.format_of(part)}
    cache = _cache(text, sizes, batch, context, weights.item)
    states, missing = _states(text, batch, weights.item)
    for role, more in [*cache.items(), ("attention", states)]:
        roles[role] = roles.get(role, RoleBytes()) + more
    return StepBytes(
        roles=roles,
        batch=batch,
        context=context,
        distinct_experts=distinct,
        experts=sizes.experts,
        weight_format=weights.words,
        formats=formats,
        axes={**sizes.axes(), "tokens": batch},
        missing=missing,
    )


def expected_experts(sizes: ModelSizes, batch: int) -> float | None:
    """Experts of a layer that at least one token of a step goes to, if every choice is as likely.

    Real routing is less even and reads fewer; None for a dense model.
    """
    if not sizes.experts or not sizes.experts_per_token:
        return None
    missed = (1 - sizes.experts_per_token / sizes.experts) ** batch
    return sizes.experts * (1 - missed)


@dataclass(frozen=True)
class _Parameter:
    name: str
    role: str
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or one for each expert."""
        return len(self.shape) > 1 and not self.name.endswith("bias")

    def counted(self, batch: int, weights: _Weights, share: float, chosen: float) -> RoleBytes:
        """What a step reads of it.

        Args:
            share: fraction of it that a step reads.
            chosen: fraction of it that one token goes through.
        """
        size, item = math.prod(self.shape), weights.item
        if self.role == "embedding":  # one row for each token
            row = item * batch * self.shape[-1]
            return RoleBytes(weights=row, activations=row)
        if self.role == "norms":  # the input, the residual, and both again
            return RoleBytes(size * item, activations=4 * size * item * batch)
        read = RoleBytes(weights=size * share * weights.bytes_of(self))
        if not self.is_matrix:
            return read
        ends = sum(self.shape[-2:]) * math.prod(self.shape[:-2]) * chosen
        read.activations = ends * item * batch
        read.flops = 2 * size * chosen * batch
        return read


class _Weights:
    """How many bytes a weight has, by what a checkpoint says of its quantisation."""

    def __init__(self, said: Mapping[str, Any], item: int) -> None:
        self.item = item
        self.words = f"{8 * item}-bit"
        self._only: list[str] = []
        self._kept = [str(each) for key in _EXCEPTIONS for each in said.get(key) or ()]
        self._bits, self._format = 8.0 * item, PLAIN
        if said:
            method = f"{said.get('quant_method', '')} {said.get('quant_algo', '')}".strip()
            self._bits, self._only, self._format = _format(method, said)
            self.words = f"{method}, {self._bits:.4g} bits, the rest {8 * item}-bit"

    def bytes_of(self, part: _Parameter) -> float:
        return self._bits / 8 if self._converts(part) else float(self.item)

    def format_of(self, part: _Parameter) -> str:
        return self._format if self._converts(part) else PLAIN

    def _converts(self, part: _Parameter) -> bool:
        converted = part.role in self._only if self._only else part.role not in _UNCONVERTED
        kept = any(_names(each, part.name) for each in self._kept)
        return part.is_matrix and converted and not kept


def _format(method: str, said: Mapping[str, Any]) -> tuple[float, list[str], str]:
    """Bits of a weight with its share of the scales, the roles that have the format, its name."""
    for row in rules("roles")["format"]:
        if re.search(row["method"], method, re.IGNORECASE):
            bits = row.get("bits") or _said(said, row["bits_key"])
            group = row.get("group") or _said(said, row["group_key"])
            name = str(row["name"])
            if isinstance(group, list):
                name, group = f"{name} in blocks", math.prod(group)
            if not isinstance(bits, int):
                break
            scales = row["scale_bits"] / group if isinstance(group, int) and group > 0 else 0.0
            return bits + scales, list(row.get("only", ())), name
    raise UsageError(
        f"the bytes of its weights are not known: their format is {method!r}",
        "add the format to hotspot/roles.toml",
    )


def _said(said: Mapping[str, Any], key: str) -> Any:
    """A value that a checkpoint says at any depth; None if it does not."""
    if said.get(key) is not None:
        return said[key]
    inner = (_said(each, key) for each in said.values() if isinstance(each, dict))
    return next((found for found in inner if found is not None), None)


def _names(pattern: str, parameter: str) -> bool:
    """Whether a checkpoint's pattern names the module of a parameter."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], parameter) is not None
    return fnmatch.fnmatch(parameter, f"{pattern}.*") or fnmatch.fnmatch(parameter, pattern)


def _parameters(model: Any) -> Iterator[_Parameter]:
    """Every parameter that a decode step reads; a head that is the embedding, as both."""
    heads = {id(each) for each in _own(model.get_output_embeddings())}
    lookups = {id(each) for each in _own(model.get_input_embeddings())}
    for name, parameter in model.named_parameters():
        if id(parameter) in heads:
            yield _Parameter(name, "head", tuple(parameter.shape))
        if id(parameter) in lookups:
            yield _Parameter(name, "embedding", tuple(parameter.shape))
        elif id(parameter) not in heads and (role := _role_of(name)):
            yield _Parameter(name, role, tuple(parameter.shape))


def _own(module: Any) -> Iterable[Any]:
    return () if module is None else module.parameters()


def _role_of(name: str) -> str:
    """The role of a parameter; empty if a decode step does not read it."""
    found = (row["role"] for row in rules("roles")["parameter"] if re.search(row["name"], name))
    return str(next(found, "other"))


def _cache(
    text: Any, sizes: ModelSizes, batch: int, context: int, item: int
) -> dict[str, RoleBytes]:
    """The KV cache that attention reads, the keys and values that a step writes."""
    read = write = flops = 0.0
    values = 2 * sizes.latent if sizes.latent else 2 * sizes.head_dim
    layers = 0
    for window in _windows(text, sizes.layers):
        if window is None:
            continue
        seen = min(context, window) if window else context
        layers += 1
        read += sizes.cached * seen
        write += sizes.cached
        flops += 2 * sizes.q_heads * values * seen
    ends = 2 * sizes.q_heads * sizes.head_dim * layers
    return {
        "attention": RoleBytes(
            kv=read * item * batch, activations=ends * item * batch, flops=flops * batch
        ),
        "rope_kv": RoleBytes(kv=write * item * batch, activations=ends * item * batch),
    }


def _windows(text: Any, layers: int) -> list[int | None]:
    """Of each layer the tokens that its attention sees, 0 for all; None without a KV cache."""
    window = getattr(text, "sliding_window", None) or 0
    kinds = layer_kinds(text)
    if not kinds:
        used = getattr(text, "use_sliding_window", True)
        return [window if used else 0] * layers
    chunk = getattr(text, "attention_chunk_size", None) or 0
    found: list[int | None] = []
    for kind in kinds:
        if not has_cache(kind):
            found.append(None)
        else:
            found.append(window if "sliding" in kind else chunk if "chunked" in kind else 0)
    return found


def _state_bytes(text: Any, item: int) -> float | None:
    """Bytes of the state that a layer without a KV cache keeps of a sequence; None: not known."""
    for row in rules("roles")["state"]:
        found = [getattr(text, row[name], None) for name in _STATE]
        sizes = [size for size in found if isinstance(size, int)]
        if len(sizes) < len(_STATE):
            continue
        heads, keys, values, key_heads, kernel = sizes
        said = getattr(text, "mamba_ssm_dtype", None)
        matrix = (
            DTYPES[str(said).removeprefix("torch.")].bits if said else row.get("bits", 8 * item)
        )
        convolved = (kernel - 1) * (heads * values + 2 * key_heads * keys)
        return heads * keys * values * matrix / 8 + convolved * item
    return None


def _states(text: Any, batch: int, item: int) -> tuple[RoleBytes, tuple[str, ...]]:
    """The states that a step reads and writes, and what of them is not known, in sentences."""
    layers = sum(map(keeps_state, layer_kinds(text)))
    size = _state_bytes(text, item)
    if not layers:
        return RoleBytes(), ()
    if size is None:
        said = f"{layers} layers keep a state in place of a KV cache, and its bytes are not counted"
        return RoleBytes(), (said,)
    return RoleBytes(kv=2 * size * layers * batch), ()


def _unquantised(config: Any) -> Any:
    """The configuration without its quantisation, whose modules transformers may not have."""
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def _item_bytes(text: Any, config: Any) -> int:
    """Bytes of an element of the model's own dtype; bfloat16 if its configuration says none."""
    import torch

    for each in (text, config):
        dtype = getattr(each, "dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype.itemsize
        if isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype):
            found: torch.dtype = getattr(torch, dtype)
            return found.itemsize
    return 2
