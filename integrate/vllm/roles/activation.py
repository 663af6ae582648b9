"""The activation of gated MLPs: `SiluAndMul.forward`, and `GeluAndMul.forward` by its formula.

The layer is given gate and up as halves of one tensor. Inductor fuses it with its neighbours; the
patch puts an opaque operator there. Activations inside of vLLM's fused experts are no such layers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn import functional

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm.roles.tried import TriedLayers
from patcher.integrate.vllm.swap import SharedPatch

_ACTIVATION = "vllm.model_executor.layers.activation"
_CUSTOM_OP = "vllm.model_executor.custom_op:CustomOp"


class _Activation(TriedLayers):
    """Layers of one class whose formula is that of the op."""

    module: ClassVar[str] = _ACTIVATION
    formula: ClassVar[str | None] = None
    """The layer's `approximate`; None for a class with one formula."""

    def unlike(self, layer: Any, kind: Any) -> str | None:
        if type(layer) is not kind:
            return f"an activation of class {type(layer).__name__}"
        found = getattr(layer, "approximate", None)
        return None if found == self.formula else f"another formula: {found}"

    def trial(self, layer: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        # where its neighbours have their weights; the layer has none
        grid = torch.linspace(-6.0, 6.0, 64)
        both = torch.stack([torch.cat([grid, grid.flip(0)]), torch.cat([grid / 8, grid])])
        gate, up = both.chunk(2, -1)
        return layer.forward_native(both), {"gate": gate, "up": up, "output": gate}

    def _place(self) -> SharedPatch:
        return SharedPatch(self._class(), "forward", self.name, _sharing)

    def _part(self, kernel: Dispatcher) -> Any:
        operator, unlike, kind = kernel.op(self.engines_own), self.unlike, self._class()

        def part(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
            if unlike(layer, kind) is not None:
                return None
            size = x.shape[-1] // 2
            rows = x.reshape(-1, 2 * size)
            output = torch.empty(rows.shape[0], size, dtype=x.dtype, device=x.device)
            operator(rows[:, :size], rows[:, size:], output)
            return output.view(*x.shape[:-1], size)

        return part

    @classmethod
    def engines_own(cls, gate: torch.Tensor, up: torch.Tensor, output: torch.Tensor) -> None:
        """vLLM's C kernel where gate and up are halves of one tensor on a GPU, else PyTorch."""
        rows, size = gate.shape
        other = gate.data_ptr() + size * gate.element_size()
        built_in = getattr(torch.ops._C, cls.op, None)
        if gate.is_cuda and built_in is not None and up.data_ptr() == other:
            whole = gate.as_strided((rows, 2 * size), gate.stride())
            built_in(output, whole.contiguous())
        else:
            torch.mul(cls.activation(gate), up, out=output)

    @classmethod
    def activation(cls, gate: torch.Tensor) -> torch.Tensor:
        """PyTorch's function, as vLLM calls it."""
        return functional.gelu(gate, approximate=cls.formula or "none")


class SiluAndMul(_Activation):
    """silu(gate) * up."""

    name: ClassVar[str] = "activation.silu"
    op: ClassVar[str] = "silu_and_mul"
    layer: ClassVar[str] = "SiluAndMul"
    fused_by: ClassVar[tuple[str, ...]] = ("fuse_act_quant",)
    parts: ClassVar[tuple[str, ...]] = (
        f"{_ACTIVATION}:SiluAndMul.forward_native",
        f"{_ACTIVATION}:SiluAndMul.forward_cuda",
        f"{_CUSTOM_OP}.__new__",
        f"{_CUSTOM_OP}.forward",
    )

    @classmethod
    def activation(cls, gate: torch.Tensor) -> torch.Tensor:
        return functional.silu(gate)


class GeluAndMul(_Activation):
    """gelu(gate) * up, by the error function."""

    name: ClassVar[str] = "activation.gelu"
    op: ClassVar[str] = "gelu_and_mul"
    layer: ClassVar[str] = "GeluAndMul"
    formula: ClassVar[str | None] = "none"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_ACTIVATION}:GeluAndMul.forward_native",
        f"{_ACTIVATION}:GeluAndMul.forward_cuda",
        f"{_CUSTOM_OP}.__new__",
        f"{_CUSTOM_OP}.forward",
    )


class GeluTanhAndMul(GeluAndMul):
    """gelu(gate) * up, by the approximation with tanh."""

    name: ClassVar[str] = "activation.gelu_tanh"
    op: ClassVar[str] = "gelu_tanh_and_mul"
    formula: ClassVar[str | None] = "tanh"


def _sharing(original: Any, parts: dict[str, Any]) -> Any:
    def forward(layer: Any, x: torch.Tensor) -> Any:
        for part in parts.values():
            if (output := part(layer, x)) is not None:
                return output
        return original(layer, x)

    return forward
