"""The step of decode of vLLM's Mamba2 layers, with doubles for its Triton kernels."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_here import config, needs_vllm, patched, shipped

from patcher import bench
from patcher.bench import VerificationError
from patcher.bench.judge.contract_observation import observe
from patcher.integrate.recorders import recorder
from patcher.integrate.survey import survey
from patcher.integrate.vllm import engine

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

POINT = "mamba2_decode"
OP = bench.load_op("mamba2_decode")
SLOTS, HEADS, GROUPS, DIM, STATE, HIDDEN = 7, 4, 2, 8, 16, 24
INNER, CONV = HEADS * DIM, HEADS * DIM + 2 * GROUPS * STATE
FLOATS = dict.fromkeys("TSF", torch.float32)
NAMES = itertools.count()


class Gpu:
    """In the place of vLLM's Triton kernel, which needs a GPU: what it computes, a token after
    another, from slots to slots."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, **how: Any
    ) -> None:
        self.calls += 1
        read, written = how["state_batch_indices"], how["dst_state_batch_indices"]
        assert how["dt_softplus"]
        assert how["z"] is None
        for token in range(len(x)):
            slot, to = (int(each.view(len(each), -1)[token, 0]) for each in (read, written))
            step = torch.nn.functional.softplus(dt[token] + how["dt_bias"]).unsqueeze(-1)
            b, c = (each[token].repeat_interleave(HEADS // GROUPS, 0) for each in (B, C))
            before = state[slot] if slot != how["null_block_id"] else torch.zeros(HEADS, DIM, STATE)
            after = before * (A * step).exp() + step * b[:, None] * x[token].unsqueeze(-1)
            if slot != how["null_block_id"]:
                state[to] = after
            how["out"][token] = (after * c[:, None]).sum(-1) + D * x[token]


@pytest.fixture
def module(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the layer, its kernels doubled; the convolutions leave all as it is."""
    from vllm.model_executor.layers.mamba import mamba_mixer2 as found
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch

    def scan(*given: Any, **more: Any) -> torch.Tensor:
        more["out"].fill_(5.0)
        return torch.full((1, HEADS, DIM, STATE), 5.0)

    backend = ssu_dispatch.TritonSSUBackend(config.mamba_config)
    backend._kernel = Gpu()
    monkeypatch.setattr(ssu_dispatch, "_mamba_ssu_backend", backend)
    monkeypatch.setattr(found, "causal_conv1d_update", lambda x, *rest, **more: x)
    monkeypatch.setattr(found, "causal_conv1d_fn", lambda x, *rest, **more: x)
    monkeypatch.setattr(found, "mamba_chunk_scan_combined_varlen", scan)
    return SimpleNamespace(layer=found, kernel=backend._kernel, backend=backend)


def layer_of(module: Any, config: Any, **settings: Any) -> Any:
    """A layer as vLLM builds it; a slot of its cache has a convolution's state, too."""
    layer = module.layer.MambaMixer2(
        hidden_size=HIDDEN,
        ssm_state_size=STATE,
        conv_kernel_size=4,
        intermediate_size=INNER,
        use_conv_bias=True,
        use_bias=False,
        n_groups=GROUPS,
        num_heads=HEADS,
        head_dim=DIM,
        cache_config=dataclasses.replace(config.cache_config),
        prefix=f"layer.{next(NAMES)}",
    )
    for each in (layer.dt_bias, layer.D):
        each.data.normal_()
    layer.A.data.uniform_(-4, -1)
    layer.is_blackwell = False
    whole = torch.randn(SLOTS, 3 * CONV + INNER * STATE)
    convolved = whole[:, : 3 * CONV].view(SLOTS, 3, CONV)
    layer.kv_cache = convolved, whole[:, 3 * CONV :].view(SLOTS, HEADS, DIM, STATE)
    for name, value in settings.items():
        setattr(layer, name, value)
    return layer


def step(
    module: Any,
    layer: Any,
    monkeypatch: pytest.MonkeyPatch,
    given: torch.Tensor,
    slots: torch.Tensor,
    **said: Any,
) -> torch.Tensor:
    """A step with a request in decode for each slot, and `said` of the rest of its metadata."""
    kind = module.layer.Mamba2AttentionMetadata
    metadata = kind.__new__(kind)
    for field in dataclasses.fields(kind):
        setattr(metadata, field.name, None)
    here = {"num_decodes": len(slots), "num_decode_tokens": len(slots), **said}
    for name, value in {"num_prefills": 0, "num_prefill_tokens": 0, **here}.items():
        setattr(metadata, name, value)
    metadata.state_indices_tensor_d = slots
    context = SimpleNamespace(attn_metadata={layer.prefix: metadata})
    monkeypatch.setattr(module.layer, "get_forward_context", lambda: context)
    out = torch.full((len(given), INNER), 7.0)
    layer.conv_ssm_forward(projected_states=given.clone(), output=out)
    return out


def projected(tokens: int) -> torch.Tensor:
    """What the layer's projection gives: gate, x, B, C and dt."""
    return torch.randn(tokens, INNER + CONV + HEADS)


def kernel_of() -> Any:
    return shipped(OP.name, I=torch.int32, **FLOATS)


@feature("`enforce_eager`, mode NONE", "right", POINT)
def test_a_step_of_decode_is_one_call(
    module: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, given, kernel = layer_of(module, config), projected(5), kernel_of()
    slots = torch.tensor([[4], [0], [2], [6]], dtype=torch.int32)  # as vLLM has them; 0 is padding
    cache = layer.kv_cache[1]
    before = cache.clone()
    own = step(module, layer, monkeypatch, given, slots)
    after = cache.clone()
    assert module.kernel.calls == 1
    cache.copy_(before)
    rest = given[:4, INNER:]
    x, b, c, dt = rest.split([INNER, GROUPS * STATE, GROUPS * STATE, HEADS], 1)
    expected = OP.reference(
        state=before,
        **{"x": x, "dt": dt, "dt_bias": layer.dt_bias, "A": layer.A, "B": b, "C": c},
        **{"D": layer.D, "z": x[:, :0], "slots": slots[:, 0], "out": x},
    )
    with patched(POINT, kernel) as point:
        out = step(module, layer, monkeypatch, given, slots)
        seen = survey(point, kernel.guards, [layer, layer.norm])
        assert (seen.taken, seen.total) == (1, 1)
    assert list(kernel.book.calls.values()) == [1]
    assert not kernel.book.fallbacks
    assert module.kernel.calls == 1
    torch.testing.assert_close(out, own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache, after, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[:4].double(), expected["out"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.double(), expected["state"], rtol=1e-4, atol=1e-5)
    assert torch.equal(cache[[0, 1, 3, 5]], before[[0, 1, 3, 5]]), "slots of no request"
    assert out[4].eq(7).all(), "what is no token of the step"


def test_what_vllms_kernel_gives_confirms_the_contract(
    module: Any, config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layer, given, file = layer_of(module, config), projected(5), tmp_path / "calls.safetensors"
    slots = torch.tensor([[4], [0], [2], [6]], dtype=torch.int32)
    with recorder("vllm", POINT, file) as found:
        step(module, layer, monkeypatch, given, slots)
    assert (found.seen, found.record().left_out) == (1, {})
    [group] = observe(file).groups
    assert group.finding == "confirmed", group.problem
    assert set(group.error) == {"out", "state"}


@feature("prefill and decode in one step", "right", POINT)
def test_in_a_mixed_step_the_kernel_takes_what_is_in_decode(
    module: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, given, kernel = layer_of(module, config), projected(5), kernel_of()
    slots = torch.tensor([[3], [1]], dtype=torch.int32)
    said = {
        **{"num_prefills": 1, "num_prefill_tokens": 3, "chunk_size": 8},
        "state_indices_tensor_p": torch.tensor([5]),
    }
    before = layer.kv_cache[1].clone()
    own = step(module, layer, monkeypatch, given, slots, **said)
    after = layer.kv_cache[1].clone()
    layer.kv_cache[1].copy_(before)
    with patched(POINT, kernel):
        out = step(module, layer, monkeypatch, given, slots, **said)
        # a step of prefill alone does not come here
        alone = {**said, "num_prefill_tokens": 5, "num_decodes": 0, "num_decode_tokens": 0}
        step(module, layer, monkeypatch, given, slots[:0], **alone)
    [label] = kernel.book.calls
    assert " tokens=2 " in label
    assert not kernel.book.fallbacks
    assert module.kernel.calls == 1
    torch.testing.assert_close(out, own, rtol=1e-4, atol=1e-5)
    assert out[2:].eq(5).all()
    torch.testing.assert_close(layer.kv_cache[1][[1, 3]], after[[1, 3]], rtol=1e-4, atol=1e-5)


def call(module: Any, layer: Any, **how: Any) -> None:
    """The engine's function as the layer calls it, with some of it otherwise."""
    tokens = 2
    heads = layer.A[:, None, None].expand(-1, DIM, STATE)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    named = {
        "dt": torch.randn(tokens, HEADS, 1).expand(-1, -1, DIM),
        "A": heads,
        "B": torch.randn(tokens, GROUPS, STATE),
        "C": torch.randn(tokens, GROUPS, STATE),
        "D": layer.D[:, None].expand(-1, DIM),
        "dt_bias": layer.dt_bias[:, None].expand(-1, DIM),
    }
    named |= {name: how.pop(name) for name in list(how) if name in named}
    said = {
        **{"dt_softplus": True, "state_batch_indices": slots, "dst_state_batch_indices": slots},
        **{"num_accepted_tokens": None, "cu_seqlens": None, "is_blackwell": False},
        **{"out": torch.zeros(tokens, HEADS, DIM), **how},
    }
    x = torch.randn(tokens, HEADS, DIM)
    module.layer.selective_state_update(layer.kv_cache[1], x, **named, **said)


@feature("speculative decoding", "falls back", POINT)
@feature("prefix caching of states: a block read, another written", "falls back", POINT)
@feature("states rounded at random", "falls back", POINT)
def test_other_calls_are_the_engines_own_and_counted(
    module: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patcher.integrate.vllm.roles.mamba2_decode import MOVED, RANDOM, SPECULATION

    layer, kernel, given = layer_of(module, config), kernel_of(), projected(2)
    function = module.layer.selective_state_update
    one = torch.tensor([3, 1], dtype=torch.int32)
    with patched(POINT, kernel):
        call(module, layer)
        assert list(kernel.book.calls.values()) == [1]
        assert module.kernel.calls == 0
        # each request has a slot for each token that it may accept
        step(module, layer, monkeypatch, given, torch.tensor([[3, 4], [1, 2]], dtype=torch.int32))
        call(module, layer, num_accepted_tokens=torch.ones(2, dtype=torch.int32))
        call(module, layer, cu_seqlens=torch.tensor([0, 1, 2], dtype=torch.int32))
        call(module, layer, dst_state_batch_indices=one.clone())
        call(module, layer, null_block_id=-1)
        call(module, layer, out=torch.zeros(2, HEADS, 2 * DIM)[..., :DIM])
        for name, shape in {"dt": (2, HEADS, DIM), "A": (HEADS, DIM, STATE)}.items():
            call(module, layer, **{name: -torch.rand(shape)})
        for name in ("D", "dt_bias"):
            call(module, layer, **{name: torch.rand(HEADS, DIM)})
        wide = one.long()
        call(module, layer, state_batch_indices=wide, dst_state_batch_indices=wide)
        rounding = SimpleNamespace(
            enable_stochastic_rounding=True, stochastic_rounding_philox_rounds=0
        )
        monkeypatch.setattr(module.backend, "_mamba_config", rounding)
        call(module, layer)
    assert dict(kernel.book.fallbacks) == {
        SPECULATION: 3,
        MOVED: 1,
        "other slots": 1,
        "an output that is not contiguous": 1,
        "heads whose elements differ in step, decay or skip": 4,
        "dtype float32/float32/float32/int64": 1,
        RANDOM: 1,
    }
    assert module.kernel.calls == 12
    assert list(kernel.book.calls.values()) == [1]
    assert module.layer.selective_state_update is function


def test_a_layer_with_another_decode_is_left_to_the_engine(
    module: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(module.layer.MambaMixer2):  # type: ignore[misc, name-defined]
        def conv_ssm_forward(self, *given: Any, **more: Any) -> None:
            """Of a plugin."""

    layers = {
        "decode by ReplaySSM, which writes a state once in several steps": {"use_replayssm": True},
        "speculative decoding": {"num_spec": 2},
        "a state that is read from one block of the prefix cache and written to another": {
            "cache_config": SimpleNamespace(mamba_cache_mode="all")
        },
        "dt_bias in float64": {
            "dt_bias": torch.nn.Parameter(torch.ones(HEADS, dtype=torch.float64))
        },
    }
    kernel = kernel_of()
    with patched(POINT, kernel) as point:
        made = [layer_of(module, config, **settings) for settings in layers.values()]
        other = Other.__new__(Other)
        torch.nn.Module.__init__(other)
        seen = survey(point, kernel.guards, [*made, other])
        assert dict(seen.refused) == dict.fromkeys([*layers, "conv_ssm_forward of its own"], 1)
        monkeypatch.setattr(config.mamba_config, "enable_stochastic_rounding", True)
        assert point.applies(layer_of(module, config)) == "a state that is rounded at random"


@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT)
def test_where_batches_must_not_matter_it_stays_out(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patcher.integrate.vllm.points import POINTS

    monkeypatch.setattr(engine, "batch_invariant", lambda: True)
    with pytest.raises(VerificationError, match="requires vLLM's own state update"):
        POINTS[POINT]().find()
