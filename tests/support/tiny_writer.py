"""A tiny model that writes kernels: whole replies are the words of its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SPECIAL = ["[UNK]", "[PAD]", "[EOS]"]


def tokenizer(replies: Sequence[str]) -> Any:
    """A prompt is one unknown word, and a reply of these is one, too."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate([*SPECIAL, *replies])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")),
        unk_token="[UNK]",
        pad_token="[PAD]",
        eos_token="[EOS]",
        padding_side="left",
    )


def tiny_model(replies: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + replies,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.15,  # of the head, too: else an adapter could not change a reply
        pad_token_id=1,
        eos_token_id=2,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def write_model(folder: Path, replies: Sequence[str], chats: bool = False) -> Path:
    """The folder of a model whose every reply is one of these, about as likely as another.

    Args:
        chats: whether it has a chat template.
    """
    tiny_model(len(replies)).save_pretrained(str(folder))
    reader = tokenizer(replies)
    if chats:
        reader.add_tokens(list(replies))  # found within a text, too
        reader.chat_template = (
            "{% for each in messages %}{{ each.content }}"
            "{% if each.role == 'assistant' %}[EOS]{% endif %}{% endfor %}"
        )
    reader.save_pretrained(str(folder))
    return folder


def chance_of(model: Any, reply: int) -> float:
    """That the model answers a prompt by this reply."""
    with torch.no_grad():
        logits = model(torch.tensor([[0]])).logits[0, -1]
    return float(logits.softmax(-1)[len(SPECIAL) + reply])
