"""What toyserve's models are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Residual add and norm, in place on both: x, residual [tokens, hidden]."""

    def __init__(self, hidden: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.epsilon = epsilon

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        scale = torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + self.epsilon)
        x.copy_(residual * scale * self.weight)
        return x, residual


class Block(nn.Module):
    """A norm and a small network behind it."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = self.norm(x, residual)
        return self.down(torch.nn.functional.gelu(self.up(normed))), residual


class Decoder(nn.Module):
    """A language model whose only memory is the mean of what it has read."""

    def __init__(self, vocabulary: int, hidden: int, inner: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, inner) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor, read: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Logits [batch, length, vocabulary], and the sum of all embeddings that were read.

        Args:
            tokens: [batch, length].
            read: that sum before these tokens, [batch, hidden], of `count` tokens.
        """
        embedded = self.embed(tokens)
        sums = read.unsqueeze(1) + embedded.cumsum(1)
        places = torch.arange(1, tokens.shape[1] + 1, dtype=embedded.dtype) + count
        x = embedded.flatten(0, 1)
        residual = (sums / places.unsqueeze(-1)).flatten(0, 1)
        for block in self.blocks:
            x, residual = block(x, residual)
        x, _ = self.norm(x.contiguous(), residual)
        return self.head(x).view(*tokens.shape, -1), sums[:, -1]
