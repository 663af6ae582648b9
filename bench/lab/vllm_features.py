"""What people switch on in vLLM, stock and patched: `python -m patcher.bench.lab.vllm_features OUT
BUNDLE...`, on a GPU host; or on a CPU, with vLLM's build for it and `--model` for a small model.

Each feature is served by two layers of a model with random weights in three processes: stock,
patched, and stock without compilation or graphs as the reference. Logits over the same tokens are
compared as in every verdict (`patcher.bench.ab.quality`), after what the feature does, such as a
sleep, with the reference's before it; an engine that is to run eagerly is held to a compiled one.
With speculative decoding a step has several rows, so that only greedy tokens are compared.
OUT/features.json has a cell for each feature and patch; a second call goes on where a first ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from patcher.ab.options import argument, united
from patcher.bench import Workload
from patcher.bench.ab.quality import compare_logits
from patcher.bench.engines.architecture import full_config
from patcher.bench.lab.logged import run_logged
from patcher.bench.lab.lora_adapter import RANK, give_adapters
from patcher.bench.lab.mxfp4_checkpoint import write_checkpoint
from patcher.bench.workload import pick_device
from patcher.integrate import (
    Patch,
    await_engine,
    patch_environment,
    read_receipts,
    unpacked,
)

MODEL, DENSE, LAYERS, STEPS = "gpt-oss-20b", "qwen3-8b", 2, 24
ARMS = ("stock", "patched", "reference")
DTYPES: Mapping[str, Literal["bfloat16", "float32"]] = {"cuda": "bfloat16", "cpu": "float32"}
MEMORY_SHARE = 0.75
"""Of the GPU's memory, for all processes at a time."""
KV_CACHE_BYTES = 1 << 30
"""Given, since engines that start beside one another each take the others' memory for their own."""
TIMEOUT_S = 280
LEAST_AGREEMENT_PCT = 50
"""Of stock's greedy picks with the reference's; where fewer are equal, the reference computes
something else, and any error would be within stock's own."""


@dataclass(frozen=True)
class Feature:
    """Something that is switched on."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Of vLLM's `LLM`."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment."""
    passes: int = 1
    """How often the same prompts are run; the last is compared."""
    then: Callable[[Any], None] | None = None
    """What is done to the `LLM` between a first pass and the one that is compared."""
    adapters: bool = False
    """Whether every second request has a LoRA adapter."""
    checkpoint: bool = False
    """Whether the weights come from disk, from where they can be loaded again."""
    model: str = MODEL
    tokens_alone: bool = False
    """Whether tokens are compared, not logits."""
    gpus: int = 1
    """How many it needs."""
    offered: Callable[[], bool] = lambda: True
    """Whether the installed vLLM has it."""

    @property
    def reference(self) -> dict[str, Any]:
        """Arguments with which the same engine computes in another way."""
        return {"enforce_eager": not self.arguments.get("enforce_eager", False)}


def _sleep(llm: Any) -> None:
    llm.sleep(level=1)
    llm.wake_up()


def _sleep_and_load(llm: Any) -> None:
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])


def _has_sequence_parallel() -> bool:
    from vllm.config import PassConfig

    return "enable_sp" in PassConfig.__annotations__


_TWO = {"tensor_parallel_size": 2}
_PIECES = {"cudagraph_mode": "PIECEWISE"}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
FEATURES = {
    "as served": Feature(),
    "eager": Feature({"enforce_eager": True}),
    "piecewise graphs": Feature({"compilation_config": _PIECES}),
    "prefix cache, hit": Feature({"enable_prefix_caching": True}, passes=2),
    "chunked prefill": Feature({"max_num_batched_tokens": 64}),
    "fp8 KV cache": Feature({"kv_cache_dtype": "fp8"}),
    "KV offload": Feature({"enable_prefix_caching": True, "kv_offloading_size": 1}, passes=2),
    "weights offloaded": Feature({"cpu_offload_gb": 0.3}),
    "sleep 1, wake": Feature({"enable_sleep_mode": True}, then=_sleep),
    "sleep 2, wake, reload": Feature(
        {"enable_sleep_mode": True}, then=_sleep_and_load, checkpoint=True
    ),
    "sleep 2, wake, reload, dense model": Feature(
        {"enable_sleep_mode": True}, then=_sleep_and_load, checkpoint=True, model=DENSE
    ),
    "LoRA, every second request": Feature(
        {"enable_lora": True, "max_lora_rank": RANK}, adapters=True
    ),
    "n-gram speculation": Feature({"speculative_config": _NGRAM}, tokens_alone=True),
    "batch invariant": Feature(variables={"VLLM_BATCH_INVARIANT": "1"}),
    "layerwise NVTX": Feature({"enable_layerwise_nvtx_tracing": True}),
    "tensor parallel": Feature(_TWO, gpus=2),
    "sequence parallel": Feature(
        {**_TWO, "compilation_config": {"pass_config": {"enable_sp": True}}},
        gpus=2,
        offered=_has_sequence_parallel,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="patcher.bench.lab.vllm_features")
    parser.add_argument("out", type=Path)
    parser.add_argument("bundles", type=Path, nargs="*")
    parser.add_argument(
        "--only", action="append", help="a feature; may be repeated; else all for these GPUs"
    )
    parser.add_argument("--model", help="a preset or folder in place of the features' own models")
    parser.add_argument("--jobs", type=int, default=3, help="processes at a time")
    parser.add_argument(
        "--engine-arg", action="append", default=[], metavar="NAME=VALUE", help="for all processes"
    )
    parser.add_argument("--process", nargs=2, metavar=("FEATURE", "ARM"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    out: Path = given.out.resolve()
    if given.process:
        name, arm = given.process
        more = dict(map(argument, given.engine_arg))
        run(out, name, arm, given.model, MEMORY_SHARE / given.jobs, more)
        return 0
    gpus = max(torch.cuda.device_count(), 1)
    here = [name for name, one in FEATURES.items() if one.gpus <= gpus]
    names = given.only or here
    if unknown := [name for name in names if name not in FEATURES]:
        parser.error(f"no features: {', '.join(unknown)}; there are: {', '.join(FEATURES)}")
    for one in map(FEATURES.__getitem__, names):
        model = given.model or one.model
        write_model(folder_of(out, model, one.checkpoint), model, one.checkpoint)
    options = ["--jobs", str(given.jobs), *(f"--engine-arg={each}" for each in given.engine_arg)]
    options += ["--model", given.model] if given.model else []
    with ExitStack() as kept:
        patches = [Patch.load(kept.enter_context(unpacked(path))) for path in given.bundles]
        return compare(out, names, patches, given.jobs, options)


def compare(
    out: Path,
    names: Sequence[str],
    patches: Sequence[Patch],
    jobs: int,
    options: Sequence[str] = (),
) -> int:
    """Run all processes that have not run, with these options, and tell the outcomes; 1 if one is
    wrong."""
    # the tokens that all arms are forced to are stock's, which has to run first
    offered = [name for name in names if FEATURES[name].offered()]
    with ThreadPoolExecutor(jobs) as pool:
        for arms in (ARMS[:1], ARMS[1:]) if offered else ():
            begin = partial(start, out, patches=patches, options=options)
            list(pool.map(begin, *zip(*product(offered, arms), strict=True)))
    cells = {name: cell(out, name, patches) for name in names}
    (out / "features.json").write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    for name, found in cells.items():
        print(f"{name:28s} {found['outcome']:14s} {found['why']}")
        for patch, told in found["patches"].items():
            print(f"    {patch:40s} {told}")
    return 0 if all(found["outcome"] != "wrong" for found in cells.values()) else 1


def write_model(folder: Path, model: str, on_disk: bool) -> None:
    """Write the config.json of a model's first layers, and a checkpoint of them if asked."""
    config = full_config(model)
    kinds = config.get("layer_types")
    config |= {"num_hidden_layers": LAYERS, "layer_types": kinds and kinds[:LAYERS]}
    folder.mkdir(parents=True, exist_ok=True)
    if not on_disk:
        text = json.dumps({**config, "torch_dtype": DTYPES[pick_device(None)]})
        (folder / "config.json").write_text(text, encoding="utf-8")
    elif not (folder / "config.json").exists():
        write_checkpoint(folder, config)


def folder_of(out: Path, model: str, on_disk: bool) -> Path:
    return out / ("checkpoint" if on_disk else "model") / Path(model).name


def start(out: Path, name: str, arm: str, patches: Sequence[Patch], options: Sequence[str]) -> None:
    """Run one process, unless it has run; its log has what went wrong."""
    folder = place(out, name, arm)
    if (folder / "result.pt").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    enabled = patches if arm == "patched" else ()
    variables = patch_environment(enabled, folder / "home", folder / "receipts")
    # a patch that a feature leaves idle is an outcome here, not an error
    variables |= {"PATCHER_STRICT": "0", **FEATURES[name].variables}
    command = [sys.executable, "-P", "-m", __spec__.name, str(out), "--process", name, arm]
    command += options
    run_logged(command, variables, folder / "log", TIMEOUT_S)


def run(
    out: Path, name: str, arm: str, model: str | None, share: float, more: dict[str, Any]
) -> None:
    """Serve a feature in this process, and save what is compared."""
    from patcher.bench.engines.vllm import VllmEngine

    feature, device = FEATURES[name], pick_device(None)
    workload = Workload(
        model=str(folder_of(out, model or feature.model, feature.checkpoint)),
        weights="local" if feature.checkpoint else "random",
        engine="vllm",
        device=device,
        dtype=DTYPES[device],
        batch=8,
        input_len=160,
        output_len=STEPS,
    )
    arguments = {
        "gpu_memory_utilization": share,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        **united(more, feature.arguments),
    }
    if arm == "reference":
        arguments |= feature.reference
    await_engine("vllm")
    engine = VllmEngine(workload, arguments)
    if feature.adapters:
        text = (Path(workload.model) / "config.json").read_text(encoding="utf-8")
        give_adapters(engine, out / "adapter", json.loads(text))
    prompts = engine.prompts(1)
    forced_at = place(out, name, "stock") / "tokens.pt"
    if arm == "stock":
        torch.save(engine.generate(prompts, STEPS).tokens, forced_at)
    forced = torch.load(forced_at)

    def observe() -> torch.Tensor:
        if feature.tokens_alone:
            return engine.generate(prompts, STEPS).tokens
        return engine.served_logits(prompts, forced).flatten(0, 1)

    found = [observe() for _ in range(feature.passes)][-1]
    if feature.then is not None and arm != "reference":  # which is held to what was before
        torch.save(found, place(out, name, arm) / "before.pt")
        feature.then(engine._llm)
        found = observe()
    torch.save(found, place(out, name, arm) / "result.pt")
    engine.close()


def cell(out: Path, name: str, patches: Sequence[Patch]) -> dict[str, Any]:
    """The outcome of a feature, and of each patch under it."""
    results = {
        arm: torch.load(path)
        for arm in ARMS
        if (path := place(out, name, arm) / "result.pt").exists()
    }
    told = {patch.manifest.id: calls_of(place(out, name, "patched"), patch) for patch in patches}

    def found(outcome: str, why: str) -> dict[str, Any]:
        return {"outcome": outcome, "why": why, "patches": told}

    if not FEATURES[name].offered():
        return found("not offered", "this version of vLLM does not have it")
    missing = [arm for arm in ARMS if arm not in results]
    if "patched" in missing and "stock" not in missing:
        return found("wrong", f"patched, it stops: {end(out, name, 'patched')}")
    if missing:
        why = f"not tried: the {missing[0]} process stops: {end(out, name, missing[0])}"
        return found("not tried", why)
    stock, patched, reference = (results[arm] for arm in ARMS)
    if FEATURES[name].tokens_alone:
        same, first = (
            float((ours == theirs).float().mean())
            for ours, theirs in ((patched, stock), (patched[:, 0], stock[:, 0]))
        )
        why = f"{100 * same:.0f} % of greedy tokens agree, {100 * first:.0f} % of the first"
        return found("right" if first > 0.8 else "wrong", why)
    changed = FEATURES[name].then is not None
    way = "eager" if FEATURES[name].reference["enforce_eager"] else "compiled"
    way += ", before" if changed else ""
    quality = compare_logits(stock, stock, patched, reference, f"the same engine, {way}")
    same = quality.baseline_reference_agreement_pct
    if quality.passed and same < LEAST_AGREEMENT_PCT:
        followed = f"patched picks what stock picks in {quality.greedy_agreement_pct:.1f} %"
        if changed:
            before = torch.load(place(out, name, "stock") / "before.pt").argmax(-1)
            own = 100 * float((before == stock.argmax(-1)).float().mean())
            if own < LEAST_AGREEMENT_PCT:
                why = f"stock picks what it picked before in {own:.1f} % alone; {followed}"
                return found("stock is wrong", why)
        why = f"not tried: the reference agrees with stock on {same:.1f} % of greedy picks alone"
        return found("not tried", f"{why}; {followed}")
    return found("right" if quality.passed else "wrong", quality.reason)


def calls_of(folder: Path, patch: Patch) -> str:
    """What a patch did, by its receipts."""
    own = [one for one in read_receipts(folder / "receipts") if one.patch_id == patch.manifest.id]
    if not own:
        return "refused: no receipt"
    calls = sum(one.total_calls for one in own)
    why = {reason: count for one in own for reason, count in one.fallbacks.items()}
    failure = next((one.failure for one in own if one.failure), None)
    layers = ", ".join(dict.fromkeys(str(one.layers) for one in own if one.layers is not None))
    fell = "; ".join(f"{count:,}: {reason}" for reason, count in why.items())
    state = failure or ("runs" if calls else "falls back")
    return f"{state}; {layers}; {calls:,} calls; fell back {fell or 'never'}"


def place(out: Path, name: str, arm: str) -> Path:
    return out / name.replace(" ", "-").replace(",", "") / arm


def end(out: Path, name: str, arm: str) -> str:
    log = place(out, name, arm) / "log"
    said = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    return said.splitlines()[-1][-300:] if said else "it said nothing"


if __name__ == "__main__":
    raise SystemExit(main())
