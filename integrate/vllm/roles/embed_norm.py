"""The look-up of embeddings and the first layer's norm, in one call, for any model.

The rewrite is of the graph before vLLM splits it; see `embed_norm_graph`. Models whose embeddings
are scaled (Gemma) or normalised with another norm, several ranks that share the table, LoRA, and
graphs that are given embeddings (pictures, later stages of a pipeline) stay vLLM's, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.graph_seam import BACKENDS, counted_rewrite, graph_rewrite
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles import embed_norm_graph
from patcher.integrate.vllm.roles.add_norm import NORM_FUSIONS
from patcher.integrate.vllm.roles.norm import RmsNorm

_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"


class EmbedNorm(VllmPoint):
    """A plain table of embeddings on one rank, before a plain norm."""

    name: ClassVar[str] = "embed_norm"
    op: ClassVar[str] = "embed_norm"
    tells_tokens: ClassVar[bool] = True
    fusions: ClassVar[tuple[str, ...]] = NORM_FUSIONS
    parts: ClassVar[tuple[str, ...]] = (
        f"{_EMBEDDING}:VocabParallelEmbedding.forward",
        f"{_EMBEDDING}:UnquantizedEmbeddingMethod.embedding",
        f"{BACKENDS}:split_graph",
        *RmsNorm.parts,
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        graph_rewrite(self.name).must_have_room()
        for layer in ("VocabParallelEmbedding", "RMSNorm"):
            engine.must_not_be_replaced(layer)
        engine.must_allow_another("norm")
        engine.must_not_split_sequences()
        return f"{BACKENDS}.split_graph"

    def of_role(self, layer: Any) -> bool:
        kinds = sources.module(_EMBEDDING)
        return isinstance(layer, kinds.VocabParallelEmbedding) and not isinstance(
            layer, kinds.ParallelLMHead
        )

    def applies(self, layer: Any) -> str | None:
        """See `VllmPoint`. Whether a plain norm comes after the layer, the graph says."""
        kinds = sources.module(_EMBEDDING)
        if not engine.compiles_graphs():
            return "vLLM compiles no graph in which look-up and norm could be found"
        if type(layer) is not kinds.VocabParallelEmbedding:
            return f"embeddings of class {type(layer).__name__}"
        if type(layer.quant_method) is not kinds.UnquantizedEmbeddingMethod:
            return f"weights by {type(layer.quant_method).__name__}"
        if layer.tp_size > 1:
            return "a table that ranks share"
        return "LoRA may add to the embeddings" if engine.serves_lora() else None

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        return {"table": layer.weight.data}

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        operation = kernel.op(_engines_own())
        place = graph_rewrite(self.name)
        place.install(counted_rewrite(kernel, lambda it: embed_norm_graph.fuse(it, operation)))
        self._swaps = [place]
        self.name_lost_fusions()


def _engines_own() -> Callable[..., None]:
    """vLLM's own look-up and norm, with the arguments of the contract."""
    norm = engine.engines_norm()

    def run(
        ids: torch.Tensor,
        table: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor,
        output: torch.Tensor,
        epsilon: float,
    ) -> None:
        torch.index_select(table, 0, ids, out=residual)
        norm(residual, weight, output, epsilon)

    return run
