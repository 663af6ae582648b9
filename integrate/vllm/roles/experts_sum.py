"""The sum over a token's experts in vLLM's Triton experts.

It is a plain function that `matmul_ogs` looks up at every call, inside the operator
`vllm::moe_forward`, which compilers do not decompose.
"""

from __future__ import annotations

from typing import Any, ClassVar

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.roles.triton_experts import TritonFunction

_MATMUL = "triton_kernels.matmul_ogs"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"


class Reduce(TritonFunction):
    """The sum over a token's experts, after the second matmul: `_reduce_grouped`."""

    name: ClassVar[str] = "experts.sum.oai"
    op: ClassVar[str] = "moe_reduce"
    module: ClassVar[str] = _MATMUL
    function: ClassVar[str] = "reduce_grouped"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_MATMUL}:reduce_grouped",
        f"{_MATMUL}:matmul_ogs",
        f"{_MATMUL}:init_allocation",
        f"{_MATMUL}:apply_allocation",
        "triton_kernels.matmul_ogs_details._reduce_grouped:_reduce_grouped",
        f"{_EXPERTS}:triton_kernel_fused_experts",
    )

    def _replacement(self, kernel: Dispatcher, original: Any) -> Any:
        def reduce_grouped(
            x: Any,
            indx: Any,
            out: Any,
            out_mx_scale: Any,
            fused_activation: Any,
            epilogue: Any,
            **more: Any,
        ) -> Any:
            call = (x, indx, out, out_mx_scale, fused_activation, epilogue)
            if indx is None:
                # after the first matmul there is nothing to sum
                return original(*call, **more)
            if out_mx_scale is not None or does_more(fused_activation, epilogue, more):
                kernel.book.reasons["more than a sum"] += 1
            elif kernel(x.squeeze(1), indx, out.new_empty((0, indx.shape[1])), out.squeeze(0)):
                return out, None
            return original(*call, **more)

        return reduce_grouped


def summed(rows: Any, row_map: Any, out: Any, out_flex: Any = None) -> Any:
    """Sum over each token's experts with vLLM's function, called as in `matmul_ogs`.

    The function is looked up at every call, since it is a patch point, too.

    Args:
        rows: [splits, 1, expert_rows, hidden].
        row_map: int32 [tokens, top_k].
        out: [1, tokens, hidden], which is written and returned.
        out_flex: vLLM's scales of the output.
    """
    library = sources.module(_MATMUL)
    result, _ = library.reduce_grouped(
        rows,
        row_map,
        out,
        None,
        library.FusedActivation(),
        library.Epilogue(library.FnSpecs.default(), (), (), False),
        x_flex=library.InFlexData(),
        out_flex=library.OutFlexData() if out_flex is None else out_flex,
        x_mx_scale=None,
        out_dtype=out.dtype,
        flexpoint_saturate_inf=False,
    )
    return result


def does_more(fused_activation: Any, epilogue: Any, more: dict[str, Any]) -> bool:
    """Whether an activation, an epilogue or scales are fused into the sum."""
    x_flex, out_flex = more.get("x_flex"), more.get("out_flex")
    scales = [
        more.get("x_mx_scale"),
        *([x_flex.scale, x_flex.dtype] if x_flex is not None else []),
        *([*out_flex, out_flex.dtype] if out_flex is not None else []),
    ]
    fused = fused_activation.specs.fn, epilogue.specs.fn
    return any(item is not None for item in (*scales, *fused))
