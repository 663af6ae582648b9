"""Prompts as text of an exact or nearly exact number of tokens, for clients that send text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from patcher.bench.engines.architecture import full_config
from patcher.bench.engines.served_model import served_model
from patcher.bench.engines.serving import word_tokenizer
from patcher.bench.errors import UsageError
from patcher.bench.workload import Workload

FIRST_WORD = 2
"""The first token of the word tokenizer that ends nothing and is known."""
MOST_TRIED, TRIED_TIMES = 5000, 64
"""Tokens that are tried, and how many times over."""


class ServedPrompts:
    """The model that is served, its tokenizer, and texts of token ids.

    With random weights a text has exactly the tokens that it was made of. A trained tokenizer may
    join or split some of them, so that prompts differ by a few percent, equally for both arms.
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
        except Exception as error:  # of a damaged file, transformers raises whatever it meets
            said = next(iter(str(error).splitlines()), type(error).__name__)
            raise UsageError(
                f"the tokenizer of {self.model} cannot be read: {said}",
                "a client sends text: give a model with its tokenizer",
            ) from error
        special = set(self._tokenizer.all_special_ids)
        self.vocabulary = [
            token for token in range(self._tokenizer.vocab_size) if token not in special
        ]

    def answer(self, length: int) -> str:
        """A text that a client counts as so many tokens: one word again and again, which a trained
        tokenizer does not join.

        Raises:
            UsageError: the tokenizer joins every word with the next one.
        """
        word, own = self._word
        return self.text([word] * (length - own))

    @cached_property
    def _word(self) -> tuple[int, int]:
        """A token that stays one where it is repeated, and how many a tokenizer adds to a text."""
        if self._tokenizer is None:
            return self.vocabulary[0], 0
        own = len(self._tokenizer.encode(""))
        for token in self.vocabulary[:MOST_TRIED]:
            if len(self._tokenizer.encode(self.text([token] * TRIED_TIMES))) == TRIED_TIMES + own:
                return token, own
        raise UsageError(
            f"the tokenizer of {self.model} joins words", "a client cannot ask it for a length"
        )

    def text(self, tokens: Sequence[int]) -> str:
        """The text of these token ids."""
        if self._tokenizer is None:
            return " ".join(f"t{token}" for token in tokens)
        return str(self._tokenizer.decode(tokens))
