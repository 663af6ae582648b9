"""`gpt_oss.decoder_layer`: what `add_norm` does, in gpt-oss alone.

It is the name of published patches, and it also patches models that are built later. The op is
called twice per layer: residual add + post-attention norm within a layer, and the layer's last add
+ the next layer's (or the final) norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from patcher.bench import VerificationError
from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch, GptOssPoint, NewForward
from patcher.integrate.transformers.parts import check_kinds, kind_of
from patcher.integrate.transformers.roles.residual_layers import (
    DecoderBody,
    body_text_of,
    norm_names,
    text_of,
)
from patcher.integrate.transformers.roles.residual_stream import LayerSteps, ResidualStream
from patcher.integrate.transformers.roles.residual_text import LayerText
from patcher.integrate.transformers.swap import Forward


class GptOssDecoderLayers(GptOssPoint):
    """Replaces the `forward` of the model's body, decoder layers and final norm."""

    name: ClassVar[str] = "gpt_oss.decoder_layer"
    op: ClassVar[str] = "fused_add_rms_norm"
    within: ClassVar[tuple[str, ...]] = ()
    calls_per_layer: ClassVar[int] = 2

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._stream: ResidualStream | None = None

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of the source of the replaced classes."""
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        return source_digest(source.GptOssDecoderLayer, source.GptOssRMSNorm)

    def parts(self, body: Any) -> list[torch.nn.Module]:
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        layers = list(body.layers)
        norms = [n for x in layers for n in (x.input_layernorm, x.post_attention_layernorm)]
        norms.append(body.norm)
        check_kinds(layers, source.GptOssDecoderLayer)
        check_kinds(norms, source.GptOssRMSNorm)
        if not isinstance(text_of(source.GptOssDecoderLayer), LayerText):
            raise _unread(source.GptOssDecoderLayer)
        if body_text_of(kind_of(body)) is None:
            raise _unread(kind_of(body))
        return [*layers, *norms]

    def forwards(self, body: Any, seam: ForwardPatch) -> Iterator[NewForward]:
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        text = body_text_of(kind_of(body))
        assert text is not None, "`parts` has read it"
        first = {index: norm_names(layer)[0] for index, layer in enumerate(body.layers)}
        self._stream = stream = ResidualStream(DecoderBody(body, text, first, frozenset(first)))
        norms: dict[type[torch.nn.Module], bool] = {source.GptOssRMSNorm: True}
        for index, layer in enumerate(body.layers):
            yield layer, LayerSteps(layer, seam, norms, stream, index).forward
        yield body.norm, partial(stream.final_norm, body.norm)

    @staticmethod
    def original(*args: Any) -> None:
        _add_then_norm(*args)

    def remove(self) -> None:
        if self._stream is not None:
            self._stream.waiting = None
        super().remove()

    def run(self, body: Any, original: Forward, *args: Any, **more: Any) -> Any:
        assert self._stream is not None, "the body's forward is made with those of its layers"
        return self._stream.run(original, *args, **more)


def _unread(kind: type[torch.nn.Module]) -> VerificationError:
    return VerificationError(
        f"the text of {kind.__name__}.forward is not what the patch was made for",
        "remove other patches, or bundle the kernel for the point add_norm (--point)",
    )


def _add_then_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """The layer's own add and norm, with transformers' norm, in place."""
    from transformers.models.gpt_oss import modeling_gpt_oss as source

    residual += input
    norm: Any = SimpleNamespace(weight=weight, variance_epsilon=epsilon)
    input.copy_(source.GptOssRMSNorm.forward(norm, residual))
