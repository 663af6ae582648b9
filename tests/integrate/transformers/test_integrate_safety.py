"""What a patch must never do: write to another's tensor, hide another's patch, harm a request."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_matrix import feature
from patch_sample import LAYERS, TINY, add_norm_guards, kernel, make_patch, state
from torch.nn.modules.module import register_module_forward_hook
from transformers_sample import built, inside, original_kernel

from patcher import bench
from patcher.bench.engines import Engine, open_engine
from patcher.integrate import CallCounters, Patch, prepare
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.transformers.points import POINTS


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(TINY)


@pytest.fixture
def patch(tmp_path: Path) -> Patch:
    return make_patch(tmp_path / "patch")


class Watch:
    """A forward hook that keeps what it saw, and a copy made at that moment."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        kept = output[0] if isinstance(output, tuple) else output
        if isinstance(kept, torch.Tensor):
            self.seen.append((kept, kept.clone()))

    def check(self) -> None:
        assert self.seen
        for kept, copy in self.seen:
            assert torch.equal(kept, copy), "written to after it was handed out"


@pytest.mark.parametrize(
    "name",
    ["self_attn", "self_attn.o_proj", "mlp", "mlp.experts", "post_attention_layernorm"],
)
def test_what_an_inner_hook_keeps_is_not_written_to(
    engine: Engine, patch: Patch, name: str
) -> None:
    model: Any = engine.model
    watch = Watch()
    handle = model.model.layers[1].get_submodule(name).register_forward_hook(watch)
    try:
        with prepare(model, patch, kernel=kernel) as book:
            engine.logits(engine.prompts(1))
    finally:
        handle.remove()
    watch.check()
    # layer 0 runs the second layer's first norm ahead, layer 1 does the same for the third
    assert book.fallbacks == {"a module has hooks": 2}
    assert book.calls.total() == 2 * (LAYERS - 1)


def test_what_a_global_hook_keeps_is_not_written_to(engine: Engine, patch: Patch) -> None:
    watch = Watch()
    handle = register_module_forward_hook(watch)
    try:
        with prepare(engine.model, patch, kernel=kernel) as book:
            engine.logits(engine.prompts(1))
    finally:
        handle.remove()
    watch.check()
    assert book.fallbacks == {"a module has hooks": 2 * LAYERS}


def test_layers_called_one_by_one_keep_their_results(engine: Engine, patch: Patch) -> None:
    """As code does that looks at, or leaves early from, the layers of a model."""
    model: Any = engine.model

    def states() -> list[torch.Tensor]:
        hidden = model.get_input_embeddings()(engine.prompts(1))
        positions = torch.arange(hidden.shape[1])[None]
        rotary = model.model.rotary_emb(hidden, positions)
        kept = [hidden]
        for layer in model.model.layers:
            # position embeddings by place: the patched layer takes what the original takes
            kept.append(layer(kept[-1], None, positions, None, False, rotary))
        return kept

    with torch.inference_mode():
        before = states()
        with prepare(model, patch, kernel=kernel) as book:
            after = states()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert book.fallbacks == {
        "a layer is called on its own, or by several threads at a time": 2 * LAYERS
    }


@feature("several threads", "right", "gpt_oss.decoder_layer")
def test_overlapping_forwards_of_two_threads_do_not_mix(engine: Engine, patch: Patch) -> None:
    first, second = engine.prompts(1), engine.prompts(2)
    with prepare(engine.model, patch, kernel=kernel):
        alone = engine.logits(first), engine.logits(second)
    others: list[torch.Tensor] = []
    calls = 0

    def overlapping(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # in the midst of the first forward, a whole other one
            thread = threading.Thread(target=lambda: others.append(engine.logits(second)))
            thread.start()
            thread.join()
        kernel(*args)

    with prepare(engine.model, patch, kernel=overlapping) as book:
        mixed = engine.logits(first)
    assert torch.allclose(mixed, alone[0], atol=1e-5)
    assert torch.equal(others[0], alone[1])
    assert set(book.fallbacks) == {"a layer is called on its own, or by several threads at a time"}


def test_a_forward_that_was_broken_off_leaves_nothing(engine: Engine, patch: Patch) -> None:
    prompts = engine.prompts(1)
    fail = False

    def sometimes(*args: Any) -> None:
        if fail:
            raise RuntimeError("device lost")
        kernel(*args)

    installed = prepare(engine.model, patch, kernel=sometimes)
    with installed:
        whole = engine.logits(prompts)
        fail = True
        with pytest.raises(RuntimeError, match="device lost"):
            engine.logits(prompts)
        fail = False
        assert torch.equal(engine.logits(prompts), whole)


def test_a_forward_put_on_a_class_is_seen(
    engine: Engine, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint is of the source file, which such a forward leaves as it is."""
    from transformers.models.gpt_oss import modeling_gpt_oss as source

    original = source.GptOssRMSNorm.forward
    monkeypatch.setattr(source.GptOssRMSNorm, "forward", lambda self, x: original(self, x) * 2)
    patch.verify_target()
    with pytest.raises(bench.VerificationError, match=r"GptOssRMSNorm\.forward was replaced"):
        prepare(engine.model, patch, kernel=kernel)


def test_a_model_with_other_norms_is_refused(engine: Engine, patch: Patch) -> None:
    body: Any = engine.model.get_submodule("model")
    original = body.norm
    body.norm = torch.nn.RMSNorm(256)
    try:
        with pytest.raises(bench.VerificationError, match="is not transformers'"):
            prepare(engine.model, patch, kernel=kernel)
    finally:
        body.norm = original


def test_anothers_patch_over_ours_stays_and_is_told(engine: Engine, patch: Patch) -> None:
    body: Any = engine.model.get_submodule("model")
    clean = state(engine.model)
    installed = prepare(engine.model, patch, kernel=kernel)
    installed.install()
    body.norm.forward = theirs = lambda hidden: hidden
    with pytest.raises(bench.VerificationError, match="by other code"):
        installed.remove()
    assert body.norm.__dict__.pop("forward") is theirs
    assert state(engine.model) == clean
    installed.remove()
    assert state(engine.model) == clean


def dispatcher(run: Callable[..., object]) -> Dispatcher:
    return Dispatcher("op", run, add_norm_guards(), CallCounters("id", "digest"), strict=False)


def test_a_kernel_that_breaks_halfway_leaves_the_request_whole() -> None:
    def halfway(input: torch.Tensor, residual: torch.Tensor, *rest: object) -> None:
        residual.add_(input)
        raise MemoryError

    dispatch = dispatcher(halfway)
    tensors = torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)
    with torch.inference_mode():
        assert not dispatch(*tensors, 1e-5)
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_a_kernel_that_breaks_later_never_passes_off_what_it_left() -> None:
    runs = 0

    def later(*args: Any) -> None:
        nonlocal runs
        runs += 1
        if runs == 3:
            raise MemoryError
        kernel(*args)

    dispatch = dispatcher(later)

    def call() -> bool:
        return dispatch(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-5)

    with torch.inference_mode():
        assert call()
        assert call()
        with pytest.raises(MemoryError):
            call()
        assert not call()
    assert dispatch.book.calls.total() == 2
    assert dispatch.book.fallbacks == {"the patched kernel raised MemoryError": 2}


def test_serving_gives_what_the_kernel_wrote() -> None:
    dispatch = dispatcher(kernel)
    for _ in range(2):  # on copies, then in place
        tensors = torch.ones(2, 8), torch.ones(2, 8), torch.full((8,), 3.0)
        with torch.inference_mode():
            assert dispatch(*tensors, 0.0)
        assert torch.equal(tensors[1], torch.full((2, 8), 2.0))
        assert torch.allclose(tensors[0], torch.full((2, 8), 3.0))


def test_another_device_of_a_known_shape_is_looked_at_anew() -> None:
    dispatch = dispatcher(kernel)
    here = torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)
    with torch.inference_mode():
        assert dispatch(*here, 1e-5)
        away = here[0].to("meta"), here[1].to("meta"), here[2].to("meta")
        assert not dispatch(*away, 1e-5)
        assert not dispatch(here[0], away[1], here[2], 1e-5)
    assert dispatch.book.fallbacks == {"device meta": 2}


def test_the_room_is_imported_without_torch() -> None:
    code = "import patcher.integrate, sys; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


@feature("one buffer of cosines, filled anew", "right", "gpt_oss.rotary_embedding")
@torch.no_grad()
def test_cosines_that_are_written_over_are_read_again() -> None:
    """As a layer that is recorded in a CUDA graph by itself is given its arguments."""
    name, model = "gpt_oss.rotary_embedding", built()
    body, rows = model.model, torch.linspace(-1, 1, 8 * 64).view(1, 8, 64)
    attend = body.layers[0].self_attn

    def attended(table: tuple[torch.Tensor, ...]) -> torch.Tensor:
        found: torch.Tensor = attend(
            hidden_states=rows, position_embeddings=table, attention_mask=None
        )[0]
        return found

    buffer, other = (body.rotary_emb(rows, torch.arange(8).view(1, 8) * step) for step in (1, 5))
    expected = attended(other)
    assert not torch.allclose(expected, attended(buffer))
    with inside(POINTS[name](model), original_kernel(name)) as book:
        attended(buffer)
        for part, values in zip(buffer, other, strict=True):
            part.copy_(values)
        torch.testing.assert_close(attended(buffer), expected)
        assert sum(book.calls.values()) == 2
