"""The points of the expert matmuls in the real vLLM, on the CPU: what its Triton kernels
would be given goes to the contracts' solutions in PyTorch."""

from __future__ import annotations

import runpy
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_here import attribute, dispatcher, guards_of, needs_vllm, nothing
from vllm_sample import EXPERTS, _reference, packed

from patcher import bench
from patcher.bench.runner.loading import load
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.vllm.points import POINTS

pytestmark = needs_vllm

GATE_UP, DOWN = "experts.gate_up.mxfp4", "experts.down.mxfp4"
REDUCE = "experts.sum.oai"
SEAM = "matmul_ogs", "make_routing_data"
TOKENS, TOP_K, N_EXPERTS, HIDDEN, INNER = 9, 2, 4, 128, 192
DTYPES = {
    **dict.fromkeys("TXS", torch.bfloat16),
    **{"U": torch.uint8, "B": torch.float32, "I": torch.int32},
}


def solution(op: str) -> Any:
    """The op's kernel in PyTorch."""
    path = bench.load_op(op).folder / "solutions" / "cpu_torch" / f"{op}.py"
    return load(str(path), "python", op)


def dispatching(point: str) -> Dispatcher:
    op = POINTS[point].op
    guards = replace(guards_of(op, **DTYPES), axes={"tokens": AxisBounds(maximum=128)})
    return dispatcher(op, solution(op), guards)


class Layer:
    """The experts of one layer, and a batch that its router has seen."""

    def __init__(self, seed: int = 1, tokens: int = TOKENS) -> None:
        torch.manual_seed(seed)
        routing = attribute("triton_kernels.routing:routing").__globals__
        precision = attribute("triton_kernels.matmul_ogs:PrecisionConfig")
        self.data, self.gather, self.scatter = _reference(
            routing, torch.randn(tokens, N_EXPERTS), TOP_K
        )
        self.data.gate_scal = self.data.gate_scal.bfloat16()
        self.x = torch.randn(tokens, HIDDEN).bfloat16()
        self.w1, scale1, self.first = packed(N_EXPERTS, 2 * INNER, HIDDEN, 1)
        self.w2, scale2, self.second = packed(N_EXPERTS, HIDDEN, INNER, 2)
        self.config = SimpleNamespace(
            w1_bias=torch.nn.Parameter(torch.randn(N_EXPERTS, 2 * INNER), requires_grad=False),
            w2_bias=torch.nn.Parameter(torch.randn(N_EXPERTS, HIDDEN), requires_grad=False),
            w1_precision=precision(weight_scale=scale1),
            w2_precision=precision(weight_scale=scale2),
        )

    def run(self) -> torch.Tensor:
        run = attribute(f"{EXPERTS}:triton_kernel_fused_experts")
        tables = self.data, self.gather, self.scatter
        output = torch.full_like(self.x, float("nan"))
        given = run(output, self.x, self.w1, self.w2, *tables, topk=TOP_K, quant_config=self.config)
        assert given.data_ptr() == output.data_ptr()
        assert isinstance(given, torch.Tensor)
        return given

    def expected(self, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        """By the library's own reference, which names a GPU for an index that it does not use."""
        arange = torch.arange
        reference = attribute("triton_kernels.matmul_ogs:matmul_ogs_torch")
        swiglu = attribute("triton_kernels.swiglu:swiglu_torch")
        with monkeypatch.context() as patch:
            patch.setattr(torch, "arange", lambda *a, device=None, **k: arange(*a, **k))
            hidden = reference(
                *(self.x.float(), self.first, self.config.w1_bias, self.data),
                gather_indx=self.gather,
            )
            rows = swiglu(hidden, 1.702, SimpleNamespace(limit=7.0)).bfloat16()
            summed: torch.Tensor = reference(
                *(rows.float(), self.second, self.config.w2_bias, self.data),
                scatter_indx=self.scatter,
                gammas=self.data.gate_scal.float(),
            )
        return summed


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `_swizzle_mxfp4` sets there."""
    flags = attribute("triton_kernels.matmul_ogs_details.opt_flags:make_opt_flags").__globals__
    monkeypatch.setitem(flags["_opt_flags_constraints"], "split_k", 1)


@torch.no_grad()
def test_the_experts_run_on_the_kernels_of_three_points(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    expected = layer.expected(monkeypatch)
    kernels = {name: dispatching(name) for name in (GATE_UP, DOWN, REDUCE)}
    points = {name: POINTS[name]() for name in kernels}
    for name, point in points.items():
        point.install(kernels[name])
    try:
        found = layer.run()
    finally:
        for point in points.values():
            point.remove()
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.05)
    for kernel in kernels.values():
        assert not kernel.book.fallbacks
        [(label, calls)] = kernel.book.calls.items()
        assert calls == 1
        assert f"tokens={TOKENS} " in label


def test_what_the_contracts_say_of_the_layout_is_what_the_library_makes() -> None:
    for op, columns, depth in (
        ("moe_matmul_swiglu", 2 * INNER, HIDDEN),
        ("moe_matmul_down", 320, 64),
    ):
        weights, scale, numbers = packed(N_EXPERTS, columns, depth, 3)
        folded = weights.storage.data.mT, scale.storage.data.mT
        contract = bench.load_op(op).contract
        half = {"moe_matmul_swiglu": columns // 2, "moe_matmul_down": columns}[op]
        axes = {"experts": N_EXPERTS, "tokens": 1, "top_k": 1}
        axes |= {"hidden": depth, "inner": half} if op.endswith("u") else {}
        axes |= {"hidden": half, "inner": depth} if op.endswith("n") else {}
        point = bench.Point(axes=axes, dtypes=contract.dtype_choices()[0])
        for tensor, value in zip(contract.tensors[1:3], folded, strict=True):
            assert value.is_contiguous()
            assert value.shape == contract.shape(tensor, point)
        reference = runpy.run_path(str(bench.load_op(op).folder / "reference.py"))
        places, table = reference["laid_out"](columns, depth, "cpu"), reference["numbers"]("cpu")
        for expert in range(N_EXPERTS):
            of_expert = folded[0][expert], folded[1][expert]
            found = reference["dequantised"](*of_expert, places, table)
            assert torch.equal(found, numbers[expert].T)


@feature("other points beside it", "right", GATE_UP, DOWN)
def test_two_points_share_a_seam_in_any_order() -> None:
    engines = attribute(f"{EXPERTS}:matmul_ogs")
    for names in ((GATE_UP, DOWN), (DOWN, GATE_UP)):
        first, second = POINTS[names[0]](), POINTS[names[1]]()
        first.install(dispatcher(first.op, nothing, guards_of(first.op, **DTYPES)))
        second.install(dispatcher(second.op, nothing, guards_of(second.op, **DTYPES)))
        with pytest.raises(bench.VerificationError, match="already patched"):
            POINTS[names[1]]().find()
        first.remove()
        assert attribute(f"{EXPERTS}:matmul_ogs") is not engines
        assert POINTS[names[0]]().find()
        second.remove()
        assert attribute(f"{EXPERTS}:matmul_ogs") is engines


@feature("several engines of one process", "right", GATE_UP, DOWN)
@torch.no_grad()
def test_a_second_engine_with_other_patches_leaves_nothing_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, plain = Layer(), [attribute(f"{EXPERTS}:{n}") for n in SEAM]
    expected = layer.expected(monkeypatch)
    old, new = dispatching(GATE_UP), dispatching(GATE_UP)
    first, down = POINTS[GATE_UP](), POINTS[DOWN]()
    first.install(old)
    first.remove()
    assert [attribute(f"{EXPERTS}:{n}") for n in SEAM] == plain
    second, other = POINTS[GATE_UP](), dispatching(DOWN)
    reduce = POINTS[REDUCE]()  # whose own kernel needs a GPU
    reduce.install(dispatching(REDUCE))
    down.install(other)
    second.install(new)
    first.remove()  # of the engine that is gone: nothing of the second's
    try:
        torch.testing.assert_close(layer.run().float(), expected, rtol=0.02, atol=0.05)
    finally:
        for point in (second, down, reduce):
            point.remove()
    assert [attribute(f"{EXPERTS}:{n}") for n in SEAM] == plain
    assert not old.book.calls
    assert sum(new.book.calls.values()) == sum(other.book.calls.values()) == 1


def swiglu(layer: Layer) -> Any:
    fused, specs = (
        attribute(f"triton_kernels.matmul_ogs:{n}") for n in ("FusedActivation", "FnSpecs")
    )
    fn = attribute("triton_kernels.swiglu:swiglu_fn")
    return fused(specs("swiglu", fn, ("alpha", "limit")), (1.702, 7.0), 2)


def first_call(layer: Layer, **more: Any) -> dict[str, Any]:
    """What vLLM passes for the first matmul."""
    return {
        **{"x": layer.x, "w": layer.w1, "bias": layer.config.w1_bias},
        **{"routing_data": layer.data, "gather_indx": layer.gather},
        **{"precision_config": layer.config.w1_precision, "gammas": None},
        **{"fused_activation": swiglu(layer)},
        "y": torch.empty(1, len(layer.x) * TOP_K, INNER, dtype=torch.bfloat16),
        **more,
    }


def second_call(layer: Layer, **more: Any) -> dict[str, Any]:
    """What vLLM passes for the second."""
    return {
        **{"x": torch.randn(len(layer.x) * TOP_K, INNER).bfloat16(), "w": layer.w2},
        **{"bias": layer.config.w2_bias, "routing_data": layer.data},
        **{"scatter_indx": layer.scatter, "precision_config": layer.config.w2_precision},
        **{"gammas": layer.data.gate_scal, "y": torch.empty(1, *layer.x.shape).bfloat16()},
        **more,
    }


@feature("LoRA on experts", "falls back", GATE_UP)
@feature("another layout, precision or activation", "falls back", GATE_UP, DOWN)
@torch.no_grad()
def test_whatever_is_not_as_it_was_read_is_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from patcher.integrate.vllm.roles import experts

    layer, many = Layer(), Layer(tokens=130)
    asked: list[Any] = []
    kernels = first, second = dispatching(GATE_UP), dispatching(DOWN)
    parts = dict(zip((GATE_UP, DOWN), kernels, strict=True))
    run = experts._dispatching(lambda *given: asked.append(given), parts)
    assert run(**first_call(layer)).shape == (TOKENS * TOP_K, INNER)
    assert not asked

    kinds = attribute("triton_kernels.tensor:Tensor").__init__.__globals__
    plain = kinds["Tensor"](kinds["Storage"](layer.w1.storage.data), dtype=kinds["FP4"], shape=[1])
    precision = layer.config.w1_precision
    marked = experts._marking(lambda: (replace(layer.data), None, None), {})()[0]
    alone = replace(layer.data, n_expts_act=1)
    other = {
        "another kind of matmul": [
            first_call(layer, out_alpha=2.0),
            first_call(layer, gammas=layer.data.gate_scal),
            first_call(layer, bias=None),
            first_call(layer, y=None),
        ],
        "another layout of weights": [
            first_call(layer, w=plain),
            first_call(layer, precision_config=None),
        ],
        "another precision": [
            first_call(layer, precision_config=replace(precision, out_dtype=torch.float32)),
            first_call(layer, precision_config=replace(precision, act_scale=layer.x)),
        ],
        "another activation": [first_call(layer, fused_activation=None)],
        "another kind of routing": [first_call(layer, routing_data=None)],
        "routing that may leave experts out": [first_call(layer, routing_data=marked)],
        "tokens above 128": [first_call(many)],
    }
    for reason, calls in other.items():
        for call in calls:
            asked.clear()
            run(**call)
            assert first.book.fallbacks[reason] > 0, (reason, dict(first.book.fallbacks))
            [given] = asked
            assert given[0] is call["x"]
            assert given[1] is call["w"]
            assert given[10] is call["y"]
        assert first.book.fallbacks[reason] == len(calls)
    for reason, call in {
        "another kind of matmul": second_call(layer, routing_data=alone),
        "another activation": second_call(layer, fused_activation=swiglu(layer)),
        "another precision": second_call(layer, y=torch.empty(1, *layer.x.shape)),
    }.items():
        run(**call)
        assert dict(second.book.fallbacks)[reason] == 1
    monkeypatch.delitem(
        attribute("triton_kernels.matmul_ogs_details.opt_flags:make_opt_flags").__globals__[
            "_opt_flags_constraints"
        ],
        "split_k",
    )
    run(**second_call(layer))
    assert second.book.fallbacks["another split of K"] == 1
    assert sum(first.book.calls.values()) == 1
    assert not second.book.calls


@torch.no_grad()
def test_a_call_that_is_left_to_the_engine_holds_no_rows_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are as large as what the engine takes itself, and were the patch's peak memory."""
    from patcher.integrate.vllm.roles import experts

    made: list[weakref.ref[torch.Tensor]] = []
    new_empty = torch.Tensor.new_empty

    def watched(self: torch.Tensor, *size: Any, **more: Any) -> torch.Tensor:
        tensor = new_empty(self, *size, **more)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", watched)
    alive: list[int] = []
    kernel = dispatching(DOWN)

    def engines(*given: Any) -> None:
        alive.append(sum(one() is not None for one in made))

    run = experts._dispatching(engines, {DOWN: kernel})
    run(**second_call(Layer(tokens=130)))
    assert kernel.book.fallbacks["tokens above 128"] == 1
    assert made
    assert alive == [0]
