"""What torch does with each of its operators: transforms, traces, modes, other kinds of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers
from feature_matrix import feature
from tiny_models import SIZES
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from transformers_sample import GPT_OSS, LAYERS, PER_LAYER, TOKENS, inside, original_kernel, patched
from transformers_sample import built as gpt_oss

from patcher.bench import VerificationError
from patcher.integrate.transformers.points import POINTS
from patcher.integrate.transformers.roles.gated_mlp import GatedMlps
from patcher.integrate.transformers.roles.norm import RmsNorms

FOREIGN = "a tensor with operators of its own"
ROWS = torch.linspace(-2, 3, 6 * 64).view(2, 3, 64)
Run = Callable[[torch.nn.Module], Any]


class Wrapped(torch.Tensor):
    """A tensor whose memory is another's: it has none itself, as DTensor and quantised ones."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: Wrapped = make(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tree_map = torch.utils._pytree.tree_map_only
        args, kwargs = tree_map(Wrapped, lambda one: one.inner, (args, kwargs or {}))
        return tree_map(torch.Tensor, Wrapped, function(*args, **kwargs))


class Leaves(torch.fx.Tracer):
    """Traces what a module does between its own parts."""

    def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear)


def tangent(module: torch.nn.Module) -> torch.Tensor:
    with forward_ad.dual_level():
        given = forward_ad.make_dual(ROWS, torch.ones_like(ROWS))
        found = forward_ad.unpack_dual(module(given)).tangent
        return torch.zeros_like(ROWS) if found is None else found


def nested(module: torch.nn.Module) -> torch.Tensor:
    rows = torch.nested.nested_tensor([*ROWS], layout=torch.jagged)
    found: torch.Tensor = module(rows).values()
    return found


def fake(module: torch.nn.Module) -> torch.Size:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found: torch.Size = module(mode.from_tensor(ROWS)).shape
    return found


def counted_operators(module: torch.nn.Module) -> int:
    seen: list[Any] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seen():
        module(ROWS)
    return len(seen)


OBSERVERS: list[tuple[str, Run, str]] = [
    ("`torch.func`", torch.func.vmap, "a transform of torch.func"),
    ("`torch.func`", torch.func.functionalize, "a transform of torch.func"),
    ("forward-mode differentiation", tangent, "forward-mode differentiation"),
    ("`make_fx`", lambda module: make_fx(module)(ROWS), "exported or traced"),
    (
        "`torch.fx.Tracer`",
        lambda module: torch.fx.GraphModule(module, Leaves().trace(module)),
        "exported or traced",
    ),
    ("a `TorchDispatchMode`", counted_operators, "a mode that sees every operator"),
    ("DTensor, nested, fake tensors", nested, FOREIGN),
    ("DTensor, nested, fake tensors", fake, FOREIGN),
    ("DTensor, nested, fake tensors", lambda module: module(Wrapped(ROWS)).inner, FOREIGN),
]


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)).eval()


def part_of(model: Any, name: str) -> torch.nn.Module:
    part: torch.nn.Module = model.model.norm if name == "norm" else model.model.layers[0].mlp
    return part


@pytest.mark.parametrize(
    ("name", "run", "reason"),
    [
        pytest.param(name, run, reason, marks=feature(title, "falls back", name))
        for title, run, reason in OBSERVERS
        for name in ("norm", "gated_mlp")
    ],
)
@torch.no_grad()
def test_what_sees_operators_sees_the_engines_own(name: str, run: Run, reason: str) -> None:
    def result(module: torch.nn.Module) -> Any:
        found = run(module)
        return found(ROWS * 2 + 1) if callable(found) else found

    part = part_of(model := llama(), name)
    expected = result(part)
    with inside(POINTS[name](model), original_kernel(name)) as book:
        found = result(part)
        assert (sum(book.calls.values()), set(book.fallbacks)) == (0, {reason})
        assert part(ROWS).shape == ROWS.shape
        assert sum(book.calls.values()) == 1, "what came after it runs the kernel"
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@feature("forward-mode differentiation", "falls back", *GPT_OSS)
@torch.no_grad()
def test_a_tangent_goes_through_a_patched_model() -> None:
    def tangents(model: Any) -> torch.Tensor:
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
        given = model.get_input_embeddings()(TOKENS)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(given, torch.ones_like(given))
            found = forward_ad.unpack_dual(model(inputs_embeds=dual, use_cache=False).logits)
        assert found.tangent is not None
        return found.tangent

    expected, model = tangents(gpt_oss()), gpt_oss()
    with patched(model) as books:
        found = tangents(model)
        for name, book in books.items():
            told = {"forward-mode differentiation": LAYERS * PER_LAYER[name]}
            assert (sum(book.calls.values()), dict(book.fallbacks)) == (0, told), name
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@feature("DTensor, nested, fake tensors", "falls back", "norm")
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_a_weight_that_became_another_tensor_is_the_engines(compiled: bool) -> None:
    torch._dynamo.reset()
    norm = (model := llama()).model.norm
    plain = norm.weight
    expected = norm(ROWS)
    with inside(RmsNorms(model), original_kernel("norm")) as book:
        norm.weight = torch.nn.Parameter(Wrapped(plain.detach()), requires_grad=False)
        found = (torch.compile(norm, backend="eager") if compiled else norm)(ROWS)
        said = f"{FOREIGN}, when it was compiled" if compiled else FOREIGN
        assert (sum(book.calls.values()), set(book.fallbacks)) == (0, {said})
    torch.testing.assert_close(found.inner, expected, rtol=0, atol=0)
    with pytest.raises(VerificationError, match=r"LlamaRMSNorm\.weight is a Wrapped"):
        RmsNorms(model).find()


@feature("`torch.func`", "falls back", "norm", "gated_mlp")
@pytest.mark.parametrize("name", ["norm", "gated_mlp"])
@torch.no_grad()
def test_a_compiled_transform_is_of_the_engines_own_code(name: str) -> None:
    torch._dynamo.reset()
    part = part_of(model := llama(), name)
    expected = part(ROWS)
    with inside(POINTS[name](model), original_kernel(name)) as book:
        found = torch.compile(torch.func.vmap(part), backend="eager")(ROWS)
        assert set(book.fallbacks) == {"a transform of torch.func, when it was compiled"}
    torch.testing.assert_close(found, expected)


@feature("norms in float32 in a model in bfloat16", "falls back", "norm")
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_a_norm_returns_the_dtype_that_it_returned_before(compiled: bool) -> None:
    torch._dynamo.reset()
    norm = (model := llama().bfloat16()).model.norm
    with inside(RmsNorms(model), original_kernel("norm")) as book:
        norm.float()
        found = (torch.compile(norm, backend="eager") if compiled else norm)(ROWS.bfloat16())
        assert "weight in another dtype" in "".join(book.fallbacks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, norm(ROWS.bfloat16()), rtol=0, atol=0)


@feature("arguments by their names", "right", "norm", "gated_mlp")
@pytest.mark.parametrize(("name", "argument"), [("norm", "hidden_states"), ("gated_mlp", "x")])
@torch.no_grad()
def test_an_argument_has_the_name_that_it_had(name: str, argument: str) -> None:
    part = part_of(model := llama(), name)
    expected = part(ROWS)
    with inside(POINTS[name](model), original_kernel(name)) as book:
        torch.testing.assert_close(part(**{argument: ROWS}), expected)
        assert sum(book.calls.values()) == 1


class Swish(torch.nn.Module):
    """An activation that is silu until its parameter is set."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = torch.nn.Parameter(torch.ones(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.sigmoid(self.beta * rows)


@feature("another activation later", "falls back", "gated_mlp")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.nn.SiLU(), torch.nn.GELU()),
        (torch.nn.SiLU(), torch.nn.functional.gelu),
        (torch.nn.functional.silu, torch.nn.functional.gelu),
        (torch.nn.functional.silu, torch.nn.GELU()),
    ],
)
@torch.no_grad()
def test_an_activation_that_is_put_in_later_is_the_one_that_runs(first: Any, second: Any) -> None:
    def put(activation: Any) -> None:
        del mlp.act_fn
        mlp.act_fn = activation

    mlp = (model := llama()).model.layers[0].mlp
    put(second)
    expected = mlp(ROWS)
    put(first)
    with inside(GatedMlps(model), original_kernel("gated_mlp")) as book:
        put(second)
        torch.testing.assert_close(mlp(ROWS), expected, rtol=0, atol=0)
        assert (sum(book.calls.values()), sum(book.fallbacks.values())) == (0, 1)


def test_an_activation_with_a_parameter_is_not_taken() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = Swish()
    with pytest.raises(VerificationError, match="has no MLP whose activation is silu"):
        GatedMlps(model).find()


@feature("`device_map`, offload: spread before it is patched", "refused", "norm", "gated_mlp")
@pytest.mark.parametrize("name", ["norm", "gated_mlp"])
def test_weights_that_are_not_in_memory_are_named(name: str) -> None:
    model = accelerate.cpu_offload(llama(), execution_device="cpu")
    with pytest.raises(VerificationError, match=r"hook of accelerate|are in memory") as caught:
        POINTS[name](model).find()
    assert "without device_map or offload" in str(caught.value.hint)
