"""From what a person says of a served model to a workload."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, cast

from patcher.bench import (
    Count,
    DType,
    Threads,
    UsageError,
    Workload,
    check_arguments,
    fit_context,
    pick_device,
    presets,
)
from patcher.bench.engines import ENGINES, check_model
from patcher.bench.engines.architecture import longest_context, own_dtype
from patcher.bench.engines.model_config import refuse_gguf

Device = Literal["cpu", "cuda"]
USUAL_DTYPE: dict[Device, DType] = {"cpu": "float32", "cuda": "bfloat16"}
"""Of a model that is no preset. On a GPU, one that was published in float16 stays so."""
WEIGHTS = ("random", "hub", "local")


@check_arguments
def workload_of(
    model: str,
    device: str | None,
    engine: str,
    batch: Count | None,
    input_len: Count | None,
    output_len: Count | None,
    weights: str,
    threads: Threads | None = None,
    dtype: DType | None = None,
) -> Workload:
    """A workload from options, each of which may be wrong.

    Raises:
        UsageError: a size out of bounds, an unknown engine, device, dtype, preset or kind of
            weights.
    """
    if engine not in ENGINES:
        raise UsageError(f"engine {engine!r} is not supported", f"engines: {ENGINES.listing()}")
    if weights == "dummy":
        raise UsageError(
            "an engine's dummy weights are near zero: all tokens pick the same experts, decode "
            "reads a fraction of the model, and the faster backend can even change",
            "use --weights random, whose routing is spread out",
        )
    if weights not in WEIGHTS:
        raise UsageError(f"unknown weights {weights!r}", "say random, hub or local")
    return workload_for(
        model,
        pick_device(device),
        engine=engine,
        batch=batch,
        input_len=input_len,
        output_len=output_len,
        weights=cast(Any, weights),
        threads=threads,
        dtype=dtype,
    )


def workload_for(
    model: str,
    device: Device,
    *,
    batch: int | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    engine: str = "transformers",
    weights: Literal["random", "hub", "local"] = "random",
    threads: int | None = None,
    dtype: DType | None = None,
) -> Workload:
    """The preset's traffic, or a usual one, with what was asked for instead.

    Raises:
        UsageError: no such model, one that the engine does not know, weights that it does not have,
            or a prompt that fills its context.
        MissingError: what the model needs is not on this machine, see `check_model`.
    """
    known = presets().get(model)
    if known is not None:
        defaults: dict[str, Any] = {
            "dtype": known.dtype,
            "batch": known.batch,
            "input_len": known.input_len,
            "output_len": known.output_len,
        }
    else:
        defaults = {"dtype": USUAL_DTYPE[device], "batch": 8, "input_len": 128, "output_len": 64}
    asked = {"dtype": dtype, "batch": batch, "input_len": input_len, "output_len": output_len}
    chosen = {**defaults, **{name: value for name, value in asked.items() if value is not None}}
    workload = Workload(
        model=model, engine=engine, device=device, weights=weights, threads=threads, **chosen
    )
    if known is not None:
        fit_context(workload, known.config.get("max_position_embeddings"))
    elif weights == "local" and not Path(model).is_dir():
        refuse_gguf(model, Path(os.path.expanduser(model)))
        raise UsageError(
            f"there is no folder {model}", "give the model's folder, or use --weights hub"
        )
    else:
        check_model(workload)
        if dtype is None and device == "cuda" and own_dtype(workload) == "float16":
            workload = workload.model_copy(update={"dtype": "float16"})
        fit_context(workload, longest_context(model))
    return workload
