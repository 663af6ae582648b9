"""vLLM as it serves: compiled, under CUDA graphs, in this process, one decode step at a time.

Read against vLLM 0.25.1: `LLM`, `LLMEngine.add_request` and `step`, `register_model_loader`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.engines import Decoding, random_prompts
from bench.errors import MissingError, UsageError
from bench.workload import Workload, presets

LOAD_FORMAT = "patcher_random"
MXFP4_SCALE = 120
"""Biased exponent of a block of MXFP4 weights: 2^-7, so that they spread like normal(0, 0.02)."""
SPARE_TOKENS = 2048
"""Room for decode beyond what the workload asks for."""
MEMORY_SHARE = 0.6


class VllmEngine:
    """One model in this process. See `bench.engines.Decoder` for the methods."""

    def __init__(
        self,
        workload: Workload,
        arguments: dict[str, Any] | None = None,
        *,
        one_process: bool = True,
    ) -> None:
        """`arguments`: of vLLM's `LLM`, over those that the workload asks for."""
        # in one, nsys and NVTX ranges see all of it
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
        self._vllm = vllm
        self._folder = tempfile.TemporaryDirectory()
        chosen = _arguments(workload, Path(self._folder.name)) | (arguments or {})
        self._llm: Any = vllm.LLM(**chosen)
        self._engine = self._llm.llm_engine
        self.vocab_size: int = self._llm.model_config.get_vocab_size()
        self._requests = 0

    def prompts(self, seed: int) -> torch.Tensor:
        return random_prompts(self.workload, self.vocab_size, seed)

    def prefill(self, prompts: torch.Tensor) -> Decoding:
        parameters = self._vllm.SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=self.workload.output_len + SPARE_TOKENS,
        )
        self.synchronize()
        begin = time.perf_counter()
        names = []
        for prompt in prompts.tolist():
            names.append(f"patcher-{self._requests}")
            self._requests += 1
            self._engine.add_request(names[-1], {"prompt_token_ids": prompt}, parameters)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        while not all(tokens.values()):
            self._step(tokens)
        self.synchronize()
        return Decoding(tokens, [_column(tokens, 0)], time.perf_counter() - begin)

    def decode(self, decoding: Decoding, steps: int) -> None:
        """`steps` steps of the engine; a step is not waited for beyond what the engine waits."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._step(decoding.cache)
        decoding.decode_s += time.perf_counter() - begin
        ready = min(map(len, decoding.cache.values()))
        for index in range(len(decoding.picked), ready):
            decoding.picked.append(_column(decoding.cache, index))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        del self._engine, self._llm
        self._folder.cleanup()
        gc.collect()
        torch.cuda.empty_cache()

    def _step(self, tokens: dict[str, list[int]]) -> None:
        for output in self._engine.step():
            if output.request_id in tokens:
                tokens[output.request_id] = list(output.outputs[0].token_ids)


def _column(tokens: dict[str, list[int]], index: int) -> torch.Tensor:
    return torch.tensor([[each[index]] for each in tokens.values()])


def _arguments(workload: Workload, folder: Path) -> dict[str, Any]:
    """Stock vLLM, but for what makes a run repeatable: no prefix cache, greedy, this batch."""
    arguments = {
        "max_num_seqs": workload.batch,
        "max_model_len": workload.input_len + workload.output_len + SPARE_TOKENS,
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
    import transformers

    config = transformers.GptOssConfig(**known.config).to_dict()
    config |= {"architectures": ["GptOssForCausalLM"], "torch_dtype": workload.dtype}
    (folder / "config.json").write_text(json.dumps({**config, **known.published}))
    _register_loader()
    return {"model": str(folder), "load_format": LOAD_FORMAT, **arguments}


def _register_loader() -> None:
    """Seeded random weights with spread-out routing, as vLLM's public registry takes loaders.

    vLLM's own `dummy` weights are near zero: all tokens pick the same experts, and decode reads a
    fraction of what a real model reads.
    """
    loading: Any = importlib.import_module("vllm.model_executor.model_loader")
    base: Any = importlib.import_module("vllm.model_executor.model_loader.base_loader")

    class RandomLoader(base.BaseModelLoader):  # type: ignore[misc]  # vllm is untyped here
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            randomise(model, int(model_config.seed))

    loading.register_model_loader(LOAD_FORMAT)(RandomLoader)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Normal(0, 0.02); norms one; packed MXFP4 blocks any byte, their scales `MXFP4_SCALE`."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif parameter.is_floating_point():
            parameter.normal_(0.0, 0.02, generator=generator)
        elif parameter.dtype == torch.uint8 and "scale" in name:
            parameter.fill_(MXFP4_SCALE)
        elif parameter.dtype == torch.uint8:
            parameter.random_(0, 256, generator=generator)
        else:
            raise UsageError(
                f"cannot make random weights for {name} ({parameter.dtype})",
                "use --weights hub or local",
            )
