"""Prompts as text of an exact or nearly exact number of tokens, for clients that send text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from patcher.bench.engines.architecture import full_config
from patcher.bench.engines.served_model import served_model
from patcher.bench.engines.serving import word_tokenizer
from patcher.bench.errors import UsageError
from patcher.bench.workload import Workload

FIRST_WORD = 2
"""The first token of the word tokenizer that ends nothing and is known."""


class ServedPrompts:
    """The model that is served, its tokenizer, and texts of token ids.

    With random weights a text has exactly the tokens that it was made of. A trained tokenizer may
    join some of them, so that lengths differ by a few percent, equally for both arms.
    """

    def __init__(self, workload: Workload) -> None:
        """Set up the tokenizer.

        Raises:
            UsageError: the model or its tokenizer cannot be read.
        """
        self.model = served_model(workload)
        self.vocabulary: Sequence[int]
        self._tokenizer: Any = None
        if workload.weights == "random":
            self.tokenizer = str(word_tokenizer(workload.model))
            self.vocabulary = range(FIRST_WORD, int(full_config(workload.model)["vocab_size"]))
            return
        from transformers import AutoTokenizer

        self.tokenizer = self.model
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.model)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the tokenizer of {self.model} cannot be read: {str(error).splitlines()[0]}",
                "a client sends text: give a model with its tokenizer",
            ) from error
        special = set(self._tokenizer.all_special_ids)
        self.vocabulary = [
            token for token in range(self._tokenizer.vocab_size) if token not in special
        ]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of these token ids."""
        if self._tokenizer is None:
            return " ".join(f"t{token}" for token in tokens)
        return str(self._tokenizer.decode(tokens))
