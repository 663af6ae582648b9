"""SGLang's model runner under its CUDA graphs, in this process, one decode step at a time.

Read against SGLang 0.5.23. Its own benchmark of one batch (`sglang.benchmark.one_batch`) loads the
model and runs each step. So kernels, graphs and sampling are those of serving; the scheduler, which
overlaps its work with the GPU's, is left out.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from patcher.bench.engines import (
    Decoding,
    Generation,
    entropy_pct,
    peak_memory_bytes,
    random_prompts,
)
from patcher.bench.engines.served_model import LENGTH_STEP, check_model, longest, served_model
from patcher.bench.engines.served_weights import LayerTypes, randomise
from patcher.bench.errors import MissingError, PatcherError, UsageError
from patcher.bench.workload import Shape, Workload

MEMORY_SHARE = 0.6
OPTIONS: tuple[tuple[dict[str, Any], ...], ...] = (
    tuple(
        {"moe_runner_backend": name} for name in ("triton_kernel", "triton", "marlin", "humming")
    ),
    tuple({"attention_backend": name} for name in ("fa3", "triton", "flashinfer")),
    tuple({"bf16_gemm_backend": name} for name in ("torch", "gemv")),
    ({"disable_hybrid_swa_memory": True},),
)
"""Options that the search for the best stock configuration tries (`arg_groups/choices.py`). SGLang
rejects those that do not fit the model or the GPU."""


class SglangEngine:
    """One model in this process. See `patcher.bench.engines.Decoder` for the methods."""

    in_process: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    options: ClassVar[Sequence[Sequence[dict[str, Any]]]] = OPTIONS
    cache_argument: ClassVar[str] = "max_total_tokens"
    reference_arguments: ClassVar[dict[str, Any]] = {"disable_cuda_graph": True}

    def __init__(
        self,
        workload: Workload,
        arguments: Mapping[str, Any] | None = None,
        *,
        memory_share: float | None = None,
        room: Sequence[Shape] = (),
    ) -> None:
        """Load the model.

        Args:
            workload: model, weights and traffic.
            arguments: of SGLang's `ServerArgs`; they override those that the workload asks for.
            memory_share: share of the free memory that weights and cache take in advance.
            room: other traffic that there must be room for.

        Raises:
            MissingError: SGLang or a GPU is missing.
            UsageError: the model is no preset, or SGLang would load its own dummy weights.
        """
        given = dict(arguments or {})
        if given.get("load_format") == "dummy":
            raise UsageError(
                "SGLang's dummy weights are near zero: all tokens pick the same experts",
                "use --weights random, whose routing is spread out",
            )
        self._modules = _Modules()
        on_cpu = given.get("device") == "cpu"
        if not on_cpu and not torch.cuda.is_available():
            raise MissingError("SGLang needs a GPU here", "run it on a GPU host")
        self.workload = workload
        self._device = "cpu" if on_cpu else "cuda"
        chosen = _arguments(workload, memory_share, room) | given
        self._eager = bool(chosen.get("disable_cuda_graph"))
        self._bench: Any = self._load(chosen)
        self.vocab_size: int = self.runner.model_config.vocab_size
        self._batches: list[Decoding] = []

    check_model = staticmethod(check_model)

    @staticmethod
    def cache_size(workload: Workload, room: Sequence[Shape] = ()) -> int:
        """See `cache_tokens`."""
        return cache_tokens(workload, room)

    def prompts(self, seed: int) -> torch.Tensor:
        return random_prompts(self.workload, self.vocab_size, seed)

    def prefill(self, prompts: torch.Tensor) -> Decoding:
        decoding, _ = self._prefill(prompts)
        return decoding

    def decode(self, decoding: Decoding, steps: int) -> None:
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self._step(decoding, decoding.picked[-1].view(-1))
        self.synchronize()
        decoding.decode_s += time.perf_counter() - begin

    def generate(self, prompts: torch.Tensor, steps: int) -> Generation:
        decoding = self.prefill(prompts)
        self.decode(decoding, steps)
        self.release(decoding)
        return Generation(decoding.tokens(), decoding.prefill_s, decoding.decode_s)

    def release(self, decoding: Decoding) -> None:
        """End a batch; once none is left, the whole cache is free again."""
        self._batches = [each for each in self._batches if each is not decoding]
        if not self._batches:
            self._bench.clear()

    def served_logits(self, prompts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
        """Logits of decode over forced tokens.

        Args:
            prompts: token ids, int64 of shape [batch, input_len].
            forced: token ids, int64 of shape [batch, steps + 1]; step `i` continues with column
                `i`.

        Returns:
            Logits, float32 of shape [batch, steps + 1, vocabulary] on the CPU.
        """
        decoding, logits = self._prefill(prompts)
        seen = [logits]
        for column in forced[:, :-1].unbind(dim=1):
            found = self._step(decoding, column.to(self._device))
            seen.append(found.to("cpu", torch.float32, copy=True))
        self.release(decoding)
        return torch.stack(seen, dim=1)

    @property
    def how(self) -> str:
        """Description of how the logits are computed."""
        return "the same engine without graphs" if self._eager else "as served"

    def routing_entropy_pct(self, prompts: torch.Tensor, steps: int) -> float | None:
        """Entropy of expert selection; None without experts or under graphs, whose replays do not
        call the routers.
        """
        routers = [each for each in self.runner.model.modules() if type(each).__name__ == "TopK"]
        if not self._eager or not routers:
            return None
        return entropy_pct(
            selections(routers, prompts.shape[0], lambda: self.generate(prompts, steps))
        )

    @property
    def runner(self) -> Any:
        """`ModelRunner` of this process, srt/model_executor/model_runner.py."""
        return self._bench.torch_runner

    def peak_memory_bytes(self) -> int:
        """Peak memory in bytes; on a GPU without the KV cache, which fills the engine's share."""
        peak = peak_memory_bytes(self._device)
        if self._device == "cpu":
            return peak
        return peak - int(sum(self.runner.token_to_kv_pool.get_kv_size_bytes()))

    def synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Free the model's memory. SGLang loads one model a process."""
        del self._bench
        self._modules.one_batch.destroy_model_parallel()
        self._modules.one_batch.destroy_distributed_environment()
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _prefill(self, prompts: torch.Tensor) -> tuple[Decoding, torch.Tensor]:
        """Run prefill; also returns the logits of the last position, float32 on the CPU."""
        make = self._modules.one_batch.prepare_synthetic_inputs_for_latency_test
        requests = make(*prompts.shape, custom_inputs=prompts.tolist())
        self.synchronize()
        begin = time.perf_counter()
        tokens, logits, batch = self._bench.extend(requests)
        self.synchronize()
        decoding = Decoding(batch, [tokens.view(-1, 1)], time.perf_counter() - begin)
        self._batches.append(decoding)
        return decoding, logits.to("cpu", torch.float32, copy=True)

    def _step(self, decoding: Decoding, tokens: torch.Tensor) -> torch.Tensor:
        """One decode step; returns its logits, on the device and valid until the next step."""
        picked, logits = self._bench.decode(tokens, decoding.cache)
        decoding.picked.append(picked.view(-1, 1))
        found: torch.Tensor = logits
        return found

    def _load(self, chosen: dict[str, Any]) -> Any:
        """Load the model as the benchmark does, without its tokenizer."""
        modules, one_batch = self._modules, self._modules.one_batch
        modules.plugins.load_plugins()
        arguments = modules.server_args.ServerArgs(**chosen)
        arguments.resolve_once()
        one_batch._set_envs_and_config(arguments)
        one_batch.publish(
            arguments, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=0, gpu_id=0)
        )
        one_batch._init_process_global_configs()
        ports = modules.server_args.PortArgs.init_new(arguments)
        seed = self.workload.seed

        def fill(model: torch.nn.Module) -> None:
            randomise(model, seed, _layer_types())

        with (
            _replaced(one_batch, "get_tokenizer", _no_tokenizer),
            _replaced(modules.loader, "initialize_dummy_weights", fill),
        ):
            runner, _ = one_batch.load_model(arguments, ports, 0, 0)
        return runner


class _Modules:
    """SGLang's modules."""

    def __init__(self) -> None:
        try:
            self.plugins: Any = importlib.import_module("sglang.srt.plugins")
            self.one_batch: Any = importlib.import_module("sglang.benchmark.one_batch")
            self.server_args: Any = importlib.import_module("sglang.srt.server_args")
            self.loader: Any = importlib.import_module("sglang.srt.model_loader.loader")
        except ImportError as error:
            missing = error.name or "sglang"
            raise MissingError(
                f"{missing} is not installed", "pip install sglang, in an environment of its own"
            ) from error


def _arguments(
    workload: Workload, memory_share: float | None, room: Sequence[Shape]
) -> dict[str, Any]:
    """Arguments of stock SGLang, made reproducible: no prefix cache, greedy, a fixed batch."""
    most = max(workload.batch, *(shape.batch for shape in room), 1)
    arguments = {
        "model_path": served_model(workload),
        "max_running_requests": most,
        "cuda_graph_max_bs_decode": most,
        "context_length": longest(workload, room),
        "dtype": workload.dtype,
        "random_seed": workload.seed,
        "disable_radix_cache": True,
        "mem_fraction_static": memory_share or MEMORY_SHARE,
        "skip_tokenizer_init": True,
    }
    # SGLang builds the model and processes its weights as ever; `_load` fills them
    return {**arguments, "load_format": "dummy"} if workload.weights == "random" else arguments


def cache_tokens(workload: Workload, room: Sequence[Shape] = ()) -> int:
    """Tokens of a KV cache that suffices for this traffic: a quarter more than all sequences of a
    window need, or one of the longest sequence.
    """
    shapes = [(workload.batch, workload.input_len), *((one.batch, one.context) for one in room)]
    decoded = max(workload.output_len, LENGTH_STEP // 4)
    tokens = max(batch * (context + decoded) for batch, context in shapes)
    return 5 * max(tokens, longest(workload, room)) // 4


def _layer_types() -> LayerTypes:
    embedding: Any = importlib.import_module("sglang.srt.layers.vocab_parallel_embedding")
    linear: Any = importlib.import_module("sglang.srt.layers.linear")
    layernorm: Any = importlib.import_module("sglang.srt.layers.layernorm")
    return LayerTypes(
        embedding=embedding.VocabParallelEmbedding,
        head=embedding.ParallelLMHead,
        adds=linear.RowParallelLinear,
        gemma_norm=layernorm.GemmaRMSNorm,
    )


def _no_tokenizer(*_: Any, **__: Any) -> None:
    """Prompts are token ids, and the model's folder has no tokenizer."""


@contextmanager
def _replaced(module: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def selections(routers: Iterable[Any], batch: int, run: Callable[[], object]) -> torch.Tensor:
    """How often each expert is selected in decode, of shape [routers, experts].

    Args:
        routers: SGLang's `TopK` modules.
        batch: number of sequences; a step has one row for each.
        run: decodes them, without graphs.

    Raises:
        PatcherError: a router was never called.
    """
    counts: dict[int, torch.Tensor] = {}

    def counting(index: int, top: int) -> Any:
        def count(_module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            logits = named["router_logits"] if "router_logits" in named else args[1]
            if logits.shape[0] == batch:
                experts = logits.shape[1]
                picked = logits.topk(top, dim=-1).indices.flatten().cpu()
                before = counts.get(index, torch.zeros(experts))
                counts[index] = before + torch.bincount(picked, minlength=experts)

        return count

    kept = list(routers)
    handles = [
        router.register_forward_pre_hook(
            counting(index, router.topk_config.top_k), with_kwargs=True
        )
        for index, router in enumerate(kept)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if len(counts) < len(kept):
        raise PatcherError("a router of the model was never called in decode")
    return torch.stack([counts[index] for index in range(len(kept))])
