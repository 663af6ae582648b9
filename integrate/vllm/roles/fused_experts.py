"""What points share that fuse a layer's experts with what stands beside them in the graph."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.engine import (
    forward_context,
    must_allow_another,
    must_not_split_sequences,
)
from patcher.integrate.vllm.graph_seam import BACKENDS
from patcher.integrate.vllm.roles.graph_reads import NotFusedError
from patcher.integrate.vllm.roles.triton_experts import TritonExperts
from patcher.integrate.vllm.swap import SharedPatch

_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"


class FusedExperts(TritonExperts):
    """A point that is an operator of its own in the graph, with a norm among what it fuses."""

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._library: Any = None
        """The library that owns the operator."""

    @abstractmethod
    def _places(self) -> list[SharedPatch]:
        """Where the parts go in that `_put_in` is given."""

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        must_allow_another("norm")
        must_not_split_sequences()
        for place in self._places():
            place.must_have_room()
        return f"{BACKENDS}.split_graph"

    def _put_in(self, *parts: Any) -> None:
        """Put a part in each place, in their order."""
        self._swaps = [*self._places()]
        for place, part in zip(self._swaps, parts, strict=True):
            place.install(part)
        self.name_lost_fusions()

    def remove(self) -> None:
        library, self._library = self._library, None
        try:
            super().remove()
        finally:
            if library is not None:
                library._destroy()


def top_k_of(point: TritonExperts, name: Any, index: int) -> int:
    """Experts a token of the layer that the engine is compiling; see `experts_graph.fuse`.

    Args:
        point: the point, which may not apply to the layer.
        name: the layer's name, as its operator is given it.
        index: the place of the call among all calls of experts.

    Raises:
        NotFusedError: the layer is unknown, or the point does not apply to it.
    """
    runner, context = sources.module(_RUNNER), forward_context()
    known = {} if context is None else context.no_compile_layers
    given = None if name is None else runner._resolve_layer_name(name)
    if given == "from_forward_context" and context is not None:
        # experts are counted in the order of their calls
        given = context.all_moe_layers[index]
    layer = known.get(given)
    if layer is None:
        raise NotFusedError("experts of an unknown layer")
    if (reason := point.applies(layer)) is not None:
        raise NotFusedError(reason)
    top_k: int = layer.moe_config.experts_per_token
    return top_k


def place_of_forward(point: str) -> SharedPatch:
    """The place of what a point counts at `MoERunner.forward`, a function without arguments.

    Args:
        point: the name of the patch point.
    """
    return SharedPatch(sources.module(_RUNNER).MoERunner, "forward", point, _counting)


def counted(kernel: Dispatcher) -> Callable[[], None]:
    """Counts a call that is in no graph of the engine's compiler."""

    def count() -> None:
        kernel.book.reasons["not in a graph that vLLM compiles"] += 1

    return count


def _counting(original: Any, parts: dict[str, Callable[[], None]]) -> Any:
    def forward(runner: Any, *args: Any, **more: Any) -> Any:
        if not torch.compiler.is_compiling():
            for count in list(parts.values()):
                count()
        return original(runner, *args, **more)

    return forward
