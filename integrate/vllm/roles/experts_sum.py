"""The sum over a token's experts in vLLM's Triton experts.

It is a plain function that `matmul_ogs` looks up at every call, inside the operator
`vllm::moe_forward`, which compilers do not decompose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.roles.triton_experts import TritonExperts
from patcher.integrate.vllm.swap import SharedPatch

_MATMUL = "triton_kernels.matmul_ogs"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"


Sum = Callable[[Any, Any, Any, bool], bool]
"""Takes x [splits, 1, rows, hidden], the map [tokens, top_k] and out [1, tokens, hidden], and
whether the sum does more, such as an activation; says whether it did what the original would."""


class Reduce(TritonExperts):
    """The sum over a token's experts, after the second matmul: `_reduce_grouped`."""

    name: ClassVar[str] = "experts.sum.oai"
    op: ClassVar[str] = "moe_reduce"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_MATMUL}:reduce_grouped",
        f"{_MATMUL}:matmul_ogs",
        f"{_MATMUL}:init_allocation",
        f"{_MATMUL}:apply_allocation",
        "triton_kernels.matmul_ogs_details._reduce_grouped:_reduce_grouped",
        f"{_EXPERTS}:triton_kernel_fused_experts",
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        place_of_sums(self.name).must_have_room()
        return f"{_MATMUL}.reduce_grouped"

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        place = place_of_sums(self.name)
        place.install(summing(kernel))
        self._swaps = [place]


def summing(kernel: Dispatcher) -> Sum:
    """The part of the kernel of `moe_reduce`."""

    def run(x: Any, row_map: Any, out: Any, more: bool) -> bool:
        if more:
            kernel.book.reasons["more than a sum"] += 1
            return False
        no_scales = out.new_empty((0, row_map.shape[1]))
        return kernel(x.squeeze(1), row_map, no_scales, out.squeeze(0))

    return run


def place_of_sums(point: str) -> SharedPatch:
    """The place of a point's `Sum`.

    Args:
        point: the name of the patch point.
    """
    return SharedPatch(sources.module(_MATMUL), "reduce_grouped", point, _sharing)


def _sharing(original: Any, parts: dict[str, Sum]) -> Any:
    def reduce_grouped(
        x: Any,
        indx: Any,
        out: Any,
        out_mx_scale: Any,
        fused_activation: Any,
        epilogue: Any,
        **more: Any,
    ) -> Any:
        # after the first matmul there is nothing to sum
        if indx is not None:
            others = out_mx_scale is not None or does_more(fused_activation, epilogue, more)
            # who wants the rows comes before who sums them
            for _, part in sorted(parts.items(), key=lambda item: item[0] == Reduce.name):
                if part(x, indx, out, others):
                    return out, None
        return original(x, indx, out, out_mx_scale, fused_activation, epilogue, **more)

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
