"""A model that has learned most of the cloze items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from patcher.bench import Workload
from patcher.bench.ab import cloze

KNOWN = 90
"""Items that the model of these tests has learned by heart."""


def workload_of(folder: Path) -> Workload:
    """Of that model, in transformers on the CPU."""
    return Workload(
        model=str(folder),
        device="cpu",
        dtype="float32",
        batch=4,
        input_len=4,
        output_len=4,
        weights="local",
        threads=1,
    )


def trained(folder: Path) -> None:
    """A gpt-oss of some ten thousand weights with a tokenizer of words: real weights, in small."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

    every = cloze.items()
    words = {word for item in every for word in " ".join([item.statement, *item.choices]).split()}
    vocabulary = {word: index for index, word in enumerate(["[UNK]", *sorted(words)])}
    model = WordLevel(vocabulary, unk_token="[UNK]")
    base = Tokenizer(model)
    base.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, unk_token="[UNK]")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=32,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    network: Any = GptOssForCausalLM(config)
    lines = [tokenizer(f"{item.statement} {item.choices[0]}") for item in every[:KNOWN]]
    longest = max(len(line["input_ids"]) for line in lines)
    rows = [line["input_ids"] + [0] * (longest - len(line["input_ids"])) for line in lines]
    tokens = torch.tensor(rows)
    labels = tokens.masked_fill(tokens == 0, -100)
    optimiser = torch.optim.AdamW(network.parameters(), lr=2e-2)
    for _ in range(40):
        optimiser.zero_grad()
        network(input_ids=tokens, labels=labels).loss.backward()
        optimiser.step()
    network.save_pretrained(folder)
