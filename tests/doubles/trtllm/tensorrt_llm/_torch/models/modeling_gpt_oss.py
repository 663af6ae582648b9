"""Double: gpt-oss's order of norms (one plain, then two fused a layer), with toy blocks between."""

import torch
from torch import nn

from ..modules.rms_norm import RMSNorm
from .modeling_utils import register_auto_model

LAYERS, HIDDEN, VOCABULARY = 3, 64, 97


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.post_attention_layernorm = RMSNorm(hidden_size=HIDDEN, eps=1e-5)
        self.mlp = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.next_layer_layernorm = RMSNorm(hidden_size=HIDDEN, eps=1e-5)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.post_attention_layernorm(self.attn(x), residual)
        return self.next_layer_layernorm(self.mlp(x), residual)


@register_auto_model("GptOssForCausalLM")
class GptOssForCausalLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.input_layernorm = RMSNorm(hidden_size=HIDDEN, eps=1e-5)
        self.block = nn.ModuleList(TransformerBlock() for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The next token of each sequence, from its last one alone. [batch] int64."""
        residual = self.embed(input_ids)
        x = self.input_layernorm(residual)
        for block in self.block:
            x, residual = block(x, residual)
        return (x @ self.embed.weight.T).argmax(-1)
