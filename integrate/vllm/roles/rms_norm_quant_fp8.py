"""RMSNorm without a residual and the quantisation of what it gives, in one call, for any model.

vLLM traces the norm as its own operator and the quantisation as a chain or an operator of its own;
see `norm_quant_graph`. So the first norm of a model is fused with its projection's input, and those
of low-rank states (MLA) with theirs. Norms with a residual add are another op. The rewrite is of
the graph before vLLM splits it, so it is in before the pass that would fuse the same chain
(`fuse_norm_quant`), which then finds nothing, and a warning says so.

`quantize_fp8` and `linear_fp8` may stand beside it: of a chain that it takes, they compute nothing
and the matmul. With `norm.plain` in, that has the norms, and chains are left with this reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.graph_seam import BACKENDS, counted_rewrite, graph_rewrite
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles import norm_quant_graph
from patcher.integrate.vllm.roles.norm import RmsNorm
from patcher.integrate.vllm.roles.quantiser import (
    PARTS,
    QUANTISER,
    Given,
    Quantised,
    Run,
    bounded,
    by_groups,
    by_tokens,
    class_of_quantisers,
    kernel_of,
    must_be_e4m3,
    quantiser_of,
    quantiser_place,
    unlike_quantiser,
)
from patcher.integrate.vllm.swap import SharedPatch


class RmsNormQuantFp8(VllmPoint):
    """Inputs in fp8, with a scale for each block of a row or for each row, after a plain norm."""

    name: ClassVar[str] = "rms_norm_quant_fp8"
    op: ClassVar[str] = "rms_norm_quant_fp8"
    fusions: ClassVar[tuple[str, ...]] = (
        "fuse_norm_quant",
        "fuse_allreduce_rms",
        "fuse_mla_dual_rms_norm",
    )
    parts: ClassVar[tuple[str, ...]] = tuple(
        dict.fromkeys(
            (*PARTS, *RmsNorm.parts, "vllm._custom_ops:scaled_fp8_quant", f"{BACKENDS}:split_graph")
        )
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        for place in self._places():
            place.must_have_room()
        for layer in ("QuantFP8", "RMSNorm"):
            engine.must_not_be_replaced(layer)
        engine.must_allow_another("norm")
        engine.must_not_split_sequences()
        must_be_e4m3()
        return f"{QUANTISER}.QuantFP8.forward"

    def of_role(self, layer: Any) -> bool:
        return kernel_of(layer) is not None

    def applies(self, layer: Any) -> str | None:
        """See `VllmPoint`. Whether a plain norm comes before the layer, the graph says."""
        if not engine.compiles_graphs():
            return "vLLM compiles no graph in which norm and quantisation could be found"
        found = quantiser_of(layer)
        return found if isinstance(found, str) else unlike_quantiser(found, class_of_quantisers())

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        operation = kernel.op(_engines_own())
        keep: Any = torch.compiler.allow_in_graph  # as a node, instead of tracing into it
        for mark in norm_quant_graph.MARKS:
            keep(mark)

        quantiser, graph = self._places()
        self._swaps = [quantiser, graph]
        quantiser.install(_marking(kernel))
        graph.install(counted_rewrite(kernel, lambda it: norm_quant_graph.fuse(it, operation)))
        self.name_lost_fusions()

    def _places(self) -> tuple[SharedPatch, SharedPatch]:
        return quantiser_place(self.name), graph_rewrite(self.name)


def _marking(kernel: Dispatcher) -> Any:
    """What the point has in `QuantFP8.forward`."""
    kind = class_of_quantisers()

    def part(inner: Run, layer: Any, x: torch.Tensor, given: Given) -> Quantised:
        if not torch.compiler.is_compiling():
            kernel.book.reasons["outside vLLM's compiled graphs"] += 1
            return inner(layer, x, given)
        reason = unlike_quantiser(layer, kind)
        if reason is None and bounded(given):
            reason = "a scale that is given or bounded"
        if reason is not None:
            return inner(layer, norm_quant_graph.left_alone(x, reason), given)
        [marked] = norm_quant_graph.enter(x)
        quantised, scales = inner(layer, marked, given)
        return norm_quant_graph.leave(quantised, scales)

    return part


def _engines_own() -> Callable[..., None]:
    """vLLM's own norm and quantisation, with the arguments of the contract."""
    norm = engine.engines_norm()

    def run(
        rows: torch.Tensor,
        weight: torch.Tensor,
        output: torch.Tensor,
        scales: torch.Tensor,
        epsilon: float,
    ) -> None:
        normed = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        norm(rows, weight, normed, epsilon)
        (by_tokens if scales.shape[1] == 1 else by_groups)(normed, output, scales)

    return run
