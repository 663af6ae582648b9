"""vLLM as it serves: compiled, under CUDA graphs, in this process, one decode step at a time.

Read against vLLM 0.25.1: `LLM` (entrypoints/llm.py), `LLMEngine.add_request`, `step` and
`abort_request` (v1/engine/llm_engine.py), `EngineCore.step_with_batch_queue` (v1/engine/core.py),
`register_model_loader`.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from patcher.bench.engines import (
    Decoding,
    Generation,
    peak_memory_bytes,
    random_prompts,
    vllm_logits,
)
from patcher.bench.engines.architecture import causal_model, configuration
from patcher.bench.engines.random_weights import STD, spread_of
from patcher.bench.errors import MissingError, UsageError
from patcher.bench.presets import presets
from patcher.bench.toolchains import cache_root
from patcher.bench.workload import Shape, Workload

LOAD_FORMAT = "patcher_random"
RANDOM_WEIGHTS = "PATCHER_RANDOM_WEIGHTS"
"""Environment variable that makes a vLLM process register that format."""
MXFP4_SCALE = 120
"""Biased exponent of a block of MXFP4 weights: 2^-7, which gives a spread like normal(0, `STD`)."""
SPARE_TOKENS = 2048
"""Tokens of decode per sequence beyond those of the workload."""
LENGTH_STEP = 1024
"""The longest sequence is rounded up to a multiple of this."""
LEAST_CACHE_BYTES = 1 << 30
MEMORY_SHARE = 0.6
OPTIONS: tuple[tuple[dict[str, Any], ...], ...] = (
    tuple(
        {"moe_backend": name}
        for name in ("triton", "triton_unfused", "marlin", "humming", "flashinfer_cutlass")
    ),
    tuple({"attention_backend": name} for name in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")),
    tuple(
        {"compilation_config": {"cudagraph_mode": mode}}
        for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE")
    ),
)
"""Options that the search for the best stock configuration tries: `MoEBackend` (config/kernel.py),
`AttentionBackendEnum` (v1/attention/backends/registry.py), `CUDAGraphMode` (config/compilation.py).
vLLM rejects options that do not fit the model or the GPU."""


class VllmEngine:
    """One model in this process. See `patcher.bench.engines.Decoder` for the methods."""

    in_process: ClassVar[bool] = False
    options: ClassVar[Sequence[Sequence[dict[str, Any]]]] = OPTIONS
    reference_arguments: ClassVar[dict[str, Any]] = {"enforce_eager": True}

    def __init__(
        self,
        workload: Workload,
        arguments: dict[str, Any] | None = None,
        *,
        one_process: bool = True,
        memory_share: float | None = None,
        room: Sequence[Shape] = (),
    ) -> None:
        """`arguments`: of vLLM's `LLM`, over those that the workload asks for; `memory_share`: of
        the GPU's memory, taken in advance; `room`: other traffic that there must be room for.
        """
        # with one process, nsys and NVTX ranges cover the whole engine
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if one_process else "1"
        try:
            vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise MissingError(
                "vllm is not installed", "pip install vllm, in an environment of its own"
            ) from error
        if not torch.cuda.is_available():
            raise MissingError("vLLM needs a GPU here", "run it on a GPU host")
        self.workload = workload
        self._sampling: Any = importlib.import_module("vllm.sampling_params")
        share = {} if memory_share is None else {"gpu_memory_utilization": memory_share}
        chosen = _arguments(workload, room) | share | (arguments or {})
        refuse_dummy(chosen)
        self._eager = bool(chosen.get("enforce_eager"))
        self._llm: Any = vllm.LLM(**chosen)
        self._engine = self._llm.llm_engine
        self.vocab_size: int = self._llm.model_config.get_vocab_size()
        self.requests = 0
        """Number of requests until now; request ids contain it."""

    def prompts(self, seed: int) -> torch.Tensor:
        return random_prompts(self.workload, self.vocab_size, seed)

    def prefill(self, prompts: torch.Tensor) -> Decoding:
        parameters = self._sampling.SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=self.workload.output_len + SPARE_TOKENS,
            # only the new tokens, not all tokens at every step
            output_kind=self._sampling.RequestOutputKind.DELTA,
        )
        self.synchronize()
        begin = time.perf_counter()
        names = []
        for prompt in prompts.tolist():
            names.append(f"{vllm_logits.REQUEST}{self.requests}")
            self.requests += 1
            self._engine.add_request(names[-1], {"prompt_token_ids": prompt}, parameters)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        while not all(tokens.values()):
            self._step(tokens)
        self.synchronize()
        return Decoding(tokens, [_column(tokens, 0)], time.perf_counter() - begin)

    def decode(self, decoding: Decoding, steps: int) -> None:
        """Decode until every sequence has `steps` more tokens.

        vLLM schedules asynchronously: the next step is already running when a token is returned, so
        that a step of the engine may return none; see `synchronize`.
        """
        tokens, goal = decoding.cache, len(decoding.picked) + steps
        begin = time.perf_counter()
        while min(map(len, tokens.values())) < goal:
            self._step(tokens)
        decoding.decode_s += time.perf_counter() - begin
        decoding.picked += [_column(tokens, index) for index in range(goal - steps, goal)]

    def generate(self, prompts: torch.Tensor, steps: int) -> Generation:
        decoding = self.prefill(prompts)
        self.decode(decoding, steps)
        self.release(decoding)
        return Generation(decoding.tokens(), decoding.prefill_s, decoding.decode_s)

    def release(self, decoding: Decoding) -> None:
        """Abort the batch's requests, which have no limit on their length."""
        self._engine.abort_request(list(decoding.cache))
        self.synchronize()

    def routing_entropy_pct(self, prompts: torch.Tensor, steps: int) -> float | None:
        """Entropy of expert selection; None without experts or if the model is compiled, since
        compiled code does not call the routers.
        """
        if not self._eager:
            return None
        return vllm_logits.routing_entropy_pct(self, prompts, steps)

    def served_logits(self, prompts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
        """See `patcher.bench.engines.vllm_logits.served_logits`."""
        return vllm_logits.served_logits(self, prompts, forced)

    @property
    def how(self) -> str:
        """Description of how the logits are computed."""
        return "the same engine without compilation or graphs" if self._eager else "as served"

    @property
    def runner(self) -> Any:
        """`GPUModelRunner` of this process, v1/worker/gpu_model_runner.py."""
        return self._engine.model_executor.driver_worker.model_runner

    def peak_memory_bytes(self) -> int:
        """Peak memory in bytes without the KV cache, which fills the engine's share."""
        stores = {each.untyped_storage().data_ptr(): each for each in self.runner.kv_caches}
        cache: int = sum(each.untyped_storage().nbytes() for each in stores.values())
        return peak_memory_bytes("cuda") - cache

    def synchronize(self) -> None:
        """Wait for the device, including a step that the engine has already scheduled."""
        torch.cuda.synchronize()

    def close(self) -> None:
        del self._engine, self._llm
        gc.collect()
        torch.cuda.empty_cache()

    def _step(self, tokens: dict[str, list[int]]) -> None:
        for output in self._engine.step():
            if output.request_id in tokens:
                tokens[output.request_id] += output.outputs[0].token_ids


def _column(tokens: dict[str, list[int]], index: int) -> torch.Tensor:
    return torch.tensor([[each[index]] for each in tokens.values()])


def _arguments(workload: Workload, room: Sequence[Shape] = ()) -> dict[str, Any]:
    """Arguments of stock vLLM, made reproducible: no prefix cache, greedy, a fixed batch."""
    arguments = {
        "max_num_seqs": max(workload.batch, *(shape.batch for shape in room), 1),
        "max_model_len": _longest(workload, room),
        "dtype": workload.dtype,
        "seed": workload.seed,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": MEMORY_SHARE,
        "skip_tokenizer_init": True,
    }
    known = presets().get(workload.model)
    if workload.weights != "random":
        hub = known.hub_id if known is not None else workload.model
        if hub is None:
            raise UsageError(f"{workload.model} has no published weights", "use --weights random")
        return {"model": hub, **arguments}
    if known is None:
        raise UsageError(f"{workload.model!r} is no preset", f"presets: {', '.join(presets())}")
    config = configuration(known).to_dict()
    config |= {"architectures": [causal_model(known)], "torch_dtype": workload.dtype}
    folder = _model_folder(json.dumps({**config, **known.published}, sort_keys=True))
    register_loader()
    os.environ[RANDOM_WEIGHTS] = "1"
    return {"model": str(folder), "load_format": LOAD_FORMAT, **arguments}


def _longest(workload: Workload, room: Sequence[Shape]) -> int:
    """Longest sequence in tokens, rounded up.

    The number is part of the hash of compiled code, so that rounding lets windows of different
    lengths share it.
    """
    context = max(workload.input_len, *(shape.context for shape in room), 1)
    needed = context + workload.output_len + SPARE_TOKENS
    return -(-needed // LENGTH_STEP) * LENGTH_STEP


def cache_bytes(workload: Workload, room: Sequence[Shape] = ()) -> int | None:
    """Size of the KV cache in bytes that suffices for this traffic; None if the model is no preset.

    It is a quarter more than all sequences of a window need, or one of the longest sequence, as if
    all layers used full attention.
    """
    known = presets().get(workload.model)
    if known is None:
        return None
    shapes = [(workload.batch, workload.input_len), *((one.batch, one.context) for one in room)]
    decoded = max(workload.output_len, LENGTH_STEP // 4)
    tokens = max(batch * (context + decoded) for batch, context in shapes)
    sizes = configuration(known)
    heads, width = int(sizes.num_key_value_heads), int(sizes.head_dim)
    element = torch.finfo(getattr(torch, workload.dtype)).bits // 8
    each = known.layers * 2 * heads * width * element
    return max(5 * max(tokens, _longest(workload, room)) * each // 4, LEAST_CACHE_BYTES)


def _model_folder(config: str) -> Path:
    """A folder with this config.json, the same in every process.

    The model's path is part of vLLM's hash of compiled code (`ModelConfig.compute_hash`). With a
    new folder, each start would compile again, which takes a minute and a half.
    """
    name = hashlib.sha256(config.encode()).hexdigest()[:16]
    folder = cache_root() / "vllm-models" / name
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


def refuse_dummy(arguments: Mapping[str, Any]) -> None:
    """Reject vLLM's dummy weights, whose speed is not representative.

    Raises:
        UsageError: the arguments select dummy weights.
    """
    if str(arguments.get("load_format")).rsplit(".", 1)[-1].lower() == "dummy":
        raise UsageError(
            "vLLM's dummy weights are near zero: all tokens pick the same experts, decode reads a "
            "fraction of the model, and the faster backend can even change",
            "use --weights random, whose routing is spread out",
        )


def register_loader() -> None:
    """Register a loader of seeded random weights with even routing in vLLM's public registry. The
    plugin registers it in vLLM's other processes if `RANDOM_WEIGHTS` is set.

    vLLM's own `dummy` weights are near zero: all tokens pick the same experts, and decode reads a
    fraction of what a real model reads.
    """
    loading: Any = importlib.import_module("vllm.model_executor.model_loader")
    base: Any = importlib.import_module("vllm.model_executor.model_loader.base_loader")

    class RandomLoader(base.BaseModelLoader):  # type: ignore[misc]  # vllm is untyped here
        def download_model(self, model_config: Any) -> None:
            """Do nothing: random weights need no download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            randomise(model, int(model_config.seed))

    loading.register_model_loader(LOAD_FORMAT)(RandomLoader)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill a model with seeded random weights.

    Weights are normal as in `engines.random_weights`, and norms are one. Packed MXFP4 blocks are
    random bytes, with scales of `MXFP4_SCALE`, lowered by powers of two for smaller matrices.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    spread = spread_of(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif parameter.is_floating_point():
            parameter.normal_(0.0, spread[name], generator=generator)
        elif parameter.dtype == torch.uint8 and "scale" in name:
            parameter.fill_(MXFP4_SCALE + round(math.log2(spread[name] / STD)))
        elif parameter.dtype == torch.uint8:
            parameter.random_(0, 256, generator=generator)
        else:
            raise UsageError(
                f"cannot make random weights for {name} ({parameter.dtype})",
                "use --weights hub or local",
            )
