"""From what a person asks of a served model to a workload."""

from __future__ import annotations

from typing import Any, Literal

from bench import Workload, preset, presets


def workload_for(
    model: str,
    device: Literal["cpu", "cuda"],
    *,
    batch: int | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    engine: Literal["transformers", "vllm"] = "transformers",
    weights: Literal["random", "hub", "local"] = "random",
    threads: int | None = None,
) -> Workload:
    """The preset's traffic with what was asked for instead.

    Raises:
        UsageError: unknown preset (a folder or hub id needs --weights hub or local).
    """
    if model in presets() or weights == "random":
        known = preset(model)
        defaults: dict[str, Any] = {
            "dtype": known.dtype,
            "batch": known.batch,
            "input_len": known.input_len,
            "output_len": known.output_len,
        }
    else:
        dtype = "bfloat16" if device == "cuda" else "float32"
        defaults = {"dtype": dtype, "batch": 8, "input_len": 128, "output_len": 64}
    asked = {"batch": batch, "input_len": input_len, "output_len": output_len}
    chosen = {**defaults, **{name: size for name, size in asked.items() if size is not None}}
    return Workload(
        model=model, engine=engine, device=device, weights=weights, threads=threads, **chosen
    )
