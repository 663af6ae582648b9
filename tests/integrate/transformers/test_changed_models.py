"""Models that change after a patch was installed: right, or original and counted, never stale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from feature_matrix import feature
from transformers_sample import LAYERS, PER_LAYER, TOKENS, built, logits, original_kernel, patched

from patcher import bench
from patcher.integrate import CallCounters
from patcher.integrate.transformers import POINTS


def layers_of(model: Any) -> Any:
    return model.model.layers


def trained_norms(model: Any) -> None:
    for layer in layers_of(model):
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = copy.deepcopy(getattr(layer, name))
            norm.weight.data *= 3
            setattr(layer, name, norm)


def trained_last_norm(model: Any) -> None:
    model.model.norm = copy.deepcopy(model.model.norm)
    model.model.norm.weight.data *= 3


class Doubled(torch.nn.Module):
    """A part of someone else's around the engine's own, which keeps what it gave."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.kept = inner, []  # type: ignore[var-annotated]

    def forward(self, *args: Any, **more: Any) -> Any:
        output = self.inner(*args, **more)
        if isinstance(output, tuple):
            output = output[0] * 2, *output[1:]
            kept = output[0]
        else:
            output = kept = output * 2
        self.kept.append((kept, kept.clone()))
        return output


def wrap(path: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in layers_of(model):
            layer.set_submodule(path, Doubled(layer.get_submodule(path)))

    return change


def other_projections(model: Any) -> None:
    for layer in layers_of(model):
        for name in ("q_proj", "k_proj", "o_proj"):
            projection = copy.deepcopy(getattr(layer.self_attn, name))
            projection.weight.data *= 2
            setattr(layer.self_attn, name, projection)


def hook_on_new_projections(model: Any) -> None:
    other_projections(model)
    for layer in layers_of(model):
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: output + 1)
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: output + 1)


def hook_inside_a_new_part(model: Any) -> None:
    for layer in layers_of(model):
        layer.mlp.router = copy.deepcopy(layer.mlp.router)
        layer.mlp.register_module("more", torch.nn.Linear(1, 1))
        layer.mlp.router.register_forward_hook(
            lambda module, args, output: (output[0], output[1] * 2, output[2])
        )


def weighed_norms(model: Any) -> None:
    class Twice(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    for layer in layers_of(model):
        norm = layer.post_attention_layernorm
        torch.nn.utils.parametrize.register_parametrization(norm, "weight", Twice())


def wrapped_norms(model: Any) -> None:
    for norm in (*(layer.input_layernorm for layer in layers_of(model)), model.model.norm):
        own = norm.forward
        norm.forward = lambda hidden, own=own: own(hidden) * 2


def without_the_second(model: Any) -> None:
    del model.model.layers[1]


def shorter(model: Any) -> None:
    model.model.layers = model.model.layers[:2]


def other_layers(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])
    model.model.layers[1].input_layernorm.weight.data *= 3


def new_storage(model: Any) -> None:
    for layer in layers_of(model):
        layer.post_attention_layernorm.weight = torch.nn.Parameter(
            layer.post_attention_layernorm.weight.detach() * 3
        )


CHANGES = [
    trained_norms,
    trained_last_norm,
    wrap("mlp"),
    wrap("self_attn"),
    wrap("self_attn.o_proj"),
    wrap("self_attn.q_proj"),
    wrap("mlp.experts"),
    wrap("post_attention_layernorm"),
    wrap("input_layernorm"),
    other_projections,
    hook_on_new_projections,
    hook_inside_a_new_part,
    weighed_norms,
    wrapped_norms,
    without_the_second,
    shorter,
    other_layers,
    new_storage,
]


@feature("parts, norms, layers, hooks or weights changed later", "right", *POINTS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_part_that_is_replaced_later_is_used_and_every_call_is_counted(
    change: Callable[[Any], None], ran_before: bool
) -> None:
    model, plain = built(), built()
    with patched(model) as books:
        if ran_before:
            logits(model)
        before = {name: counted(book) for name, book in books.items()}
        change(model)
        change(plain)
        found = logits(model)
        torch.testing.assert_close(found, logits(plain))
        for name, book in books.items():
            calls = len(model.model.layers) * PER_LAYER[name]
            assert counted(book) - before[name] == calls, f"{name}: {dict(book.fallbacks)}"
        for module in model.modules():
            for kept, then in getattr(module, "kept", ()):
                assert torch.equal(kept, then), "written to after it was handed out"


def counted(book: CallCounters) -> int:
    return book.calls.total() + book.fallbacks.total()


def replica(module: Any) -> Any:
    """What `torch.nn.DataParallel` makes, with parameters of its own."""
    made = module._replicate_for_data_parallel()
    made._parameters = {name: value.detach() * 2 for name, value in module._parameters.items()}
    made._modules = {name: replica(child) for name, child in module._modules.items()}
    return made


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(replica, marks=feature("`DataParallel`", "falls back", *POINTS)),
        copy.deepcopy,
    ],
)
def test_replicas_and_copies_run_with_what_is_theirs(copied: Callable[[Any], Any]) -> None:
    model = built()

    def twice(body: Any) -> torch.Tensor:
        made = copied(body)
        made.norm = copied(body.norm)
        made.norm._parameters = {"weight": body.norm.weight.detach() * 2}
        with torch.inference_mode():
            found: torch.Tensor = made(TOKENS, use_cache=False).last_hidden_state
        return found

    before = twice(model.model)
    with patched(model) as books:
        assert torch.equal(twice(model.model), before)
        if copied is replica:
            for name, book in books.items():
                assert book.fallbacks == {"a copy of a patched module": LAYERS * PER_LAYER[name]}
                assert not book.calls
        elif copied is copy.deepcopy:
            assert not any(map(counted, books.values()))


@feature("`copy.copy` of a module", "falls back", "gpt_oss.router")
def test_a_shallow_copy_runs_with_parameters_of_its_own() -> None:
    model = built()
    router = model.model.layers[0].mlp.router
    rows = torch.randn(3, router.weight.shape[1])

    def other() -> torch.Tensor:
        made = copy.copy(router)
        made._parameters = {name: value * 2 for name, value in router._parameters.items()}
        with torch.inference_mode():
            scores: torch.Tensor = made(rows)[1]
        return scores

    before = other()
    with patched(model):
        assert torch.equal(other(), before)


@feature("wrappers over it when it is taken out", "right", *POINTS)
@pytest.mark.parametrize("name", POINTS)
def test_after_removal_no_wrapper_calls_the_kernel(name: str) -> None:
    kernel, point = original_kernel(name), POINTS[name]()
    point.install(kernel)
    first, second = built(), built()
    for module in [*first.modules()]:
        own = module.forward
        module.forward = lambda *args, own=own, **more: own(*args, **more)
    torch.nn.utils.parametrize.register_parametrization(
        second.model.layers[0].mlp.experts, "down_proj", torch.nn.Identity()
    )
    with pytest.raises(bench.VerificationError, match="by other code"):
        point.remove()
    before, clean = counted(kernel.book), built()
    for model in (first, second):
        assert torch.equal(logits(model), logits(clean))
    assert counted(kernel.book) == before
    assert not any(hasattr(type(module), "patch_point") for module in first.modules())
    point.remove()


@feature("other points beside it", "right", *POINTS)
def test_points_come_and_go_in_any_order() -> None:
    model = built()
    before = logits(model)
    points = [point(model) for point in POINTS.values()]
    kernels = [original_kernel(name) for name in POINTS]
    for point, kernel in zip(points, kernels, strict=True):
        point.install(kernel)
    for _ in range(2):  # each is out once while the others are in
        for point, kernel in zip(points, kernels, strict=True):
            point.remove()
            point.install(kernel)
    counts = [counted(kernel.book) for kernel in kernels]
    assert torch.equal(logits(model), before)
    found = [counted(kernel.book) - count for kernel, count in zip(kernels, counts, strict=True)]
    assert found == [LAYERS * PER_LAYER[name] for name in POINTS]
    for point in points:
        point.remove()
    assert not any(hasattr(type(module), "patch_point") for module in model.modules())


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_stands_alone(strict: bool) -> None:
    model = built()
    router = model.model.layers[0].mlp.router
    rows = torch.randn(3, router.weight.shape[1])
    with torch.inference_mode():
        before = router(rows)
    with patched(model) as books, torch.no_grad():
        program = torch.export.export(router, (rows,), strict=strict)
    assert "patcher" not in str(program.graph)
    assert any("exported" in reason for reason in books["gpt_oss.router"].fallbacks)
    with torch.no_grad():
        for found, expected in zip(program.module()(rows), before, strict=True):
            torch.testing.assert_close(found, expected)


@feature("`torch.export`", "falls back", *POINTS)
def test_a_whole_model_is_exported_without_the_patch() -> None:
    model = built()
    before = logits(model)
    with patched(model) as books, torch.no_grad():
        program = torch.export.export(model, (TOKENS,), {"use_cache": False}, strict=False)
    assert "patcher" not in str(program.graph)
    for name, book in books.items():
        assert any("exported" in reason for reason in book.fallbacks), name
        assert not book.calls
    with torch.no_grad():
        torch.testing.assert_close(program.module()(TOKENS, use_cache=False).logits, before)


@feature("`torch.jit.trace`", "falls back", "gpt_oss.router")
def test_a_traced_program_stands_alone() -> None:
    model = built().requires_grad_(False)
    router = model.model.layers[0].mlp.router
    rows = torch.randn(3, router.weight.shape[1])
    with patched(model) as books, torch.no_grad():
        traced: Any = torch.jit.trace(lambda rows: router(rows)[1], rows, check_trace=False)
    assert books["gpt_oss.router"].fallbacks == {"exported or traced": 1}
    with torch.no_grad():
        torch.testing.assert_close(traced(rows * 2), router(rows * 2)[1])


class Mxfp4(torch.nn.Module):
    """As transformers' MLP of quantised experts: it reads the router's weights alone."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.router = router

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.nn.functional.linear(hidden, self.router.weight, self.router.bias)
        return hidden * 0.5, scores


@feature("MXFP4 checkpoints", "falls back", "gpt_oss.experts", "gpt_oss.router")
@feature("`experts_implementation='eager'`", "falls back", "gpt_oss.experts")
def test_layers_that_a_patch_does_not_reach_are_told() -> None:
    with patched() as books:
        model = built()
        model.set_experts_implementation("eager")
        logits(model)
        assert books["gpt_oss.experts"].fallbacks == {"experts implementation eager": LAYERS}
    with patched() as books:
        model = built()
        for layer in layers_of(model):
            experts = layer.mlp.experts
            torch.nn.utils.parametrize.register_parametrization(
                experts, "down_proj", torch.nn.Identity()
            )
        logits(model)
        told = books["gpt_oss.experts"].fallbacks
        assert told == {"experts' weights are parametrised": LAYERS}
    with patched() as books:
        model = built()
        for layer in layers_of(model):
            layer.mlp = Mxfp4(layer.mlp.router)
        logits(model)
        for name in ("gpt_oss.experts", "gpt_oss.router"):
            assert books[name].fallbacks == {"mlp is Mxfp4": LAYERS}
        assert books["gpt_oss.decoder_layer"].calls.total() == 2 * LAYERS


def test_layers_that_a_compiled_model_does_not_reach_are_told_once() -> None:
    model = built()
    for layer in layers_of(model):
        layer.mlp.router = Doubled(layer.mlp.router)
    with pytest.raises(bench.VerificationError, match="not transformers'"):
        POINTS["gpt_oss.router"](model).install(original_kernel("gpt_oss.router"))
    model = built()
    step: Any = torch.compile(model, backend="eager")
    try:
        with patched(model) as books:
            for layer in layers_of(model):
                layer.mlp = Mxfp4(layer.mlp.router)
            logits(step)
            logits(step)
        reason = "mlp is Mxfp4, when it was compiled"
        assert books["gpt_oss.router"].fallbacks == {reason: LAYERS}
    finally:
        torch._dynamo.reset()


@feature("training, gradient checkpointing", "falls back", *POINTS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_the_engines_own(checkpointing: bool) -> None:
    def step(model: Any) -> list[torch.Tensor]:
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    expected, model = step(built()), built()
    with patched(model) as books:
        found = step(model)
        for name, book in books.items():
            assert not book.calls, name
            told = LAYERS * PER_LAYER[name]
            assert book.fallbacks["gradients are on"] >= told, (name, book.fallbacks)
    for mine, own in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, own)


@feature("`functional_call`, autocast", "right", *POINTS)
def test_parameters_of_a_call_are_those_that_it_was_given() -> None:
    model = built()
    with patched(model) as books, torch.inference_mode():
        given = {name: value * 1.5 for name, value in model.named_parameters()}
        found = torch.func.functional_call(model, given, (TOKENS,), {"use_cache": False}).logits
        with torch.autocast("cpu", torch.bfloat16):
            mixed = logits(model)
        for name, book in books.items():
            assert counted(book) == 2 * LAYERS * PER_LAYER[name], name
    other = built()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(mixed, logits(other))
    other.load_state_dict(given, strict=False)
    torch.testing.assert_close(found, logits(other))
