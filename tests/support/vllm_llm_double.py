"""A double of the class `vllm.LLM`, for vLLM's own offline benchmarks on a CPU.

Put into a process by `stand_in`, which its `sitecustomize` calls, it stands for the module
`vllm.entrypoints.llm`. It answers prompts with as many tokens as are asked for, after a known time,
and writes down what it was given.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

TOKEN_S = 1e-4
"""Seconds for a token of each prompt of a call."""
SEEN = Path(os.devnull)
KEPT = ("model", "tokenizer", "dtype", "seed", "max_model_len", "max_num_seqs", "load_format")


class LLM:
    """Takes prompts of token ids or of text, all at once."""

    def __init__(self, arguments: Any) -> None:
        config = SimpleNamespace(max_model_len=arguments.max_model_len)
        self.llm_engine = SimpleNamespace(model_config=config)
        self._tokenizer_folder: str = arguments.tokenizer
        self._write({name: getattr(arguments, name) for name in KEPT})

    @classmethod
    def from_engine_args(cls, arguments: Any) -> Self:
        return cls(arguments)

    def generate(self, prompts: Sequence[Any], sampling_params: Any, **more: Any) -> list[Any]:
        """As many tokens as are asked for, 100 microseconds each."""
        from vllm.outputs import CompletionOutput, RequestOutput

        each = sampling_params if isinstance(sampling_params, list) else [sampling_params]
        each *= len(prompts) // len(each)
        assert all(one.ignore_eos for one in each)
        asked = [int(one.max_tokens) for one in each]
        tokens = [self._tokens(prompt) for prompt in prompts]
        self._write({"lengths": [len(one) for one in tokens], "asked": asked})
        time.sleep(max(asked) * TOKEN_S)
        return [
            RequestOutput(
                str(index),
                None,
                ids,
                None,
                [CompletionOutput(0, "", [5] * count, None, None)],
                True,
            )
            for index, (ids, count) in enumerate(zip(tokens, asked, strict=True))
        ]

    def _tokens(self, prompt: Any) -> list[int]:
        if "prompt_token_ids" in prompt:
            return list(prompt["prompt_token_ids"])
        from transformers import AutoTokenizer

        self._tokenizer = getattr(self, "_tokenizer", None) or AutoTokenizer.from_pretrained(
            self._tokenizer_folder
        )
        return list(self._tokenizer(prompt["prompt"])["input_ids"])

    def _write(self, line: dict[str, Any]) -> None:
        with SEEN.open("a") as seen:
            seen.write(json.dumps(line) + "\n")


def stand_in(seen: str) -> None:
    """Put the double in its place in this process, and write what it sees into a file."""
    global SEEN
    SEEN = Path(seen)
    module = ModuleType("vllm.entrypoints.llm")
    module.LLM = LLM  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
