"""`gpt_oss.rotary_embedding`: query and key rotated in place by one call of `rope`.

The attention's code is transformers' own; only the function that it calls for the rotation is
replaced. The KV cache is unchanged: a static layer stores keys and values as two tensors [batch,
heads, length, head_dim] and rolls them past the sliding window, and a dynamic one concatenates. So
a kernel that writes to pages does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from patcher.integrate.points import source_digest
from patcher.integrate.transformers.copied_forward import forward_with_function, with_function
from patcher.integrate.transformers.forwards import ForwardPatch, GptOssPoint, NewForward
from patcher.integrate.transformers.onlookers import Onlookers
from patcher.integrate.transformers.parts import check_kinds
from patcher.integrate.transformers.roles.rotation_table import SharedTable
from patcher.integrate.transformers.swap import Forward

_FUNCTION = "apply_rotary_pos_emb"


class GptOssRotaryEmbedding(GptOssPoint):
    """Replaces the `forward` of the attention modules by one with another rotation."""

    name: ClassVar[str] = "gpt_oss.rotary_embedding"
    op: ClassVar[str] = "rope"
    within: ClassVar[tuple[str, ...]] = ("self_attn",)

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._table = SharedTable()

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of the source of the rotation and of the attention that calls it."""
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        return source_digest(
            source._apply_rotary_emb, source.apply_rotary_pos_emb, source.GptOssAttention
        )

    def parts(self, body: Any) -> list[torch.nn.Module]:
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        attentions = [layer.self_attn for layer in body.layers]
        check_kinds(attentions, source.GptOssAttention)
        with_function(source.GptOssAttention.forward, _FUNCTION, lambda original: original)
        return attentions

    def forwards(self, body: Any, seam: ForwardPatch) -> Iterator[NewForward]:
        for layer in body.layers:
            yield layer.self_attn, partial(self._attention_forward, layer.self_attn, seam)

    @staticmethod
    def original(*args: Any) -> None:
        _rotate(*args)

    def remove(self) -> None:
        self._table.kept = None
        super().remove()

    def run(self, body: Any, original: Forward, *args: Any, **more: Any) -> Any:
        return self._table.run(original, *args, **more)

    def _attention_forward(self, attention: Any, seam: ForwardPatch, original: Forward) -> Forward:
        return forward_with_function(
            attention,
            _FUNCTION,
            lambda own: self._rotation(attention, own, seam),
            seam.refuse,
            original,
        )

    def _rotation(
        self, attention: Any, original: Callable[..., Any], seam: ForwardPatch
    ) -> Forward:
        # a hook of a projection would see its output change
        onlookers = Onlookers(lambda: ((), (attention.q_proj, attention.k_proj)))

        def rotate(
            q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            # [batch, heads, tokens, head_dim], from projections [batch, tokens, ...]
            query, key = q.transpose(1, 2), k.transpose(1, 2)
            if torch.is_grad_enabled():
                refusal: str | None = "gradients are on"
            else:
                refusal = onlookers.refusal()
            if refusal is None and not (query.is_contiguous() and key.is_contiguous()):
                refusal = "not contiguous"
            if refusal is None:
                if onlookers.keeps:
                    query, key = query.clone(), key.clone()
                    q, k = query.transpose(1, 2), key.transpose(1, 2)
                table = self._table.of(
                    cos,
                    (query[..., 0, 0].numel(), query.shape[-1]),
                    partial(_joined, cos, sin, len(query)),
                )
                if seam(query.flatten(0, 1), key.flatten(0, 1), table):
                    return q, k
            else:
                seam.refuse(refusal)
            rotated: tuple[torch.Tensor, torch.Tensor] = original(q, k, cos, sin)
            return rotated

        return rotate


def _joined(cos: torch.Tensor, sin: torch.Tensor, batch: int) -> torch.Tensor:
    """The table [batch * tokens, head_dim]: cosines, then sines, of each token."""
    return torch.cat((cos, sin), -1).expand(batch, -1, -1).flatten(0, 1).contiguous()


def _rotate(query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """transformers' own rotation, in place."""
    from transformers.models.gpt_oss import modeling_gpt_oss as source

    cos, sin = cos_sin.chunk(2, dim=-1)
    rotated = source.apply_rotary_pos_emb(query, key, cos, sin)
    query.copy_(rotated[0])
    key.copy_(rotated[1])
