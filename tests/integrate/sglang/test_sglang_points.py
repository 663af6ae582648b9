"""SGLang's patch points in the real SGLang, whose layers are called as on a GPU.

SGLang's own CUDA kernels are not here. A double in PyTorch stands for each of the three that the
layers call, and counts its calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patch_sample import kernel as add_norm
from sglang_here import KeyValuePoolDouble, kernel_of, needs_sglang, step

from patcher import bench
from patcher.bench import VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.sglang.points import POINTS
from patcher.integrate.sglang.sources import RECORD
from patcher.integrate.survey import survey

pytestmark = needs_sglang
HIDDEN, TOKENS = 64, 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
F32 = torch.float32


def matmul(x: torch.Tensor, weight: Any, bias: Any, output: torch.Tensor) -> None:
    output.copy_(x @ weight.t() + bias if bias.numel() else x @ weight.t())


def rope_kv_update() -> Any:
    folder = bench.load_op("rope_kv_update").folder / "solutions" / "cpu_torch"
    found: dict[str, Any] = {}
    exec((folder / "rope_kv_update.py").read_text(), found)
    return found["rope_kv_update"]


def kernels() -> dict[str, Dispatcher]:
    """A dispatcher for each point."""
    return {
        "add_norm": kernel_of("fused_add_rms_norm", add_norm, T=F32, W=F32),
        "linear": kernel_of("linear", matmul, T=F32),
        "rope_kv": kernel_of("rope_kv_update", rope_kv_update(), T=F32, C=F32, P=torch.int64),
    }


class SglKernelDouble:
    """Stands for `sgl_kernel` and SGLang's JIT kernel of the rotation."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        self.calls.append("rmsnorm")
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, epsilon)

    def fused_add_rmsnorm(self, x: Any, residual: Any, weight: Any, epsilon: float) -> None:
        self.calls.append("fused_add_rmsnorm")
        add_norm(x, residual, weight, epsilon)

    def apply_rope_with_cos_sin_cache_inplace(
        self, positions: Any, q: Any, k: Any, cos_sin_cache: Any, is_neox: bool, fused_args: Any
    ) -> None:
        """Rotates query and key in place, and writes the rotated key and the value, as SGLang's."""
        self.calls.append("rope" if fused_args is None else "rope_store")
        assert is_neox
        cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
        for rows in (q, k):
            first, second = rows.clone().chunk(2, -1)
            rows.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
        if fused_args is not None:
            fused_args.k_buffer[fused_args.cache_loc] = k.flatten(1)
            fused_args.v_buffer[fused_args.cache_loc] = fused_args.value.flatten(1)


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> SglKernelDouble:
    """What SGLang's layers call in place of its CUDA kernels."""
    from sglang.srt.layers import layernorm
    from sglang.srt.layers.rotary_embedding import base

    double = SglKernelDouble()
    for module, name in (
        (layernorm, "rmsnorm"),
        (layernorm, "fused_add_rmsnorm"),
        (base, "apply_rope_with_cos_sin_cache_inplace"),
    ):
        monkeypatch.setattr(module, name, getattr(double, name), raising=False)
    return double


def norm(**more: Any) -> Any:
    from sglang.srt.layers.layernorm import RMSNorm

    layer = RMSNorm(HIDDEN, eps=1e-5, **more)
    if layer.has_weight:
        layer.weight.data.uniform_(0.5, 1.5)
    layer._forward_method = layer.forward_cuda  # as SGLang resolves it on a GPU, at the first call
    return layer


def rotary() -> Any:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    layer = RotaryEmbedding(HEAD_DIM, HEAD_DIM, 128, 10_000, True, F32)
    layer._forward_method = layer.forward_cuda
    return layer


def linear(bias: bool) -> Any:
    from sglang.srt.layers.linear import ReplicatedLinear

    layer = ReplicatedLinear(HIDDEN, 40, bias=bias, params_dtype=F32)
    for parameter in layer.parameters():
        parameter.data.uniform_(-1, 1)
    return layer


def test_every_part_was_read_in_the_installed_version() -> None:
    for name, point in POINTS.items():
        RECORD.must_be_as_read(name, point.parts)
        assert point.fingerprint().unread == {}
    assert RECORD.untested() is None


@pytest.mark.parametrize("name", POINTS)
def test_a_point_goes_in_and_out_and_twice_out(name: str) -> None:
    from sglang.srt.models import gpt_oss, utils

    point, kernel = POINTS[name](), kernels()[name]
    owner = point._class()
    before, makes = owner.__dict__[point.method], utils.create_fused_set_kv_buffer_arg
    assert point.find() == f"{point.module}.{point.owner}.{point.method}"
    point.install(kernel)
    assert owner.__dict__[point.method] is not before
    assert (gpt_oss.create_fused_set_kv_buffer_arg is makes) is (name != "rope_kv")
    with pytest.raises(VerificationError, match="already patched"):
        POINTS[name]().install(kernel)
    point.remove()
    point.remove()
    assert owner.__dict__[point.method] is before
    assert gpt_oss.create_fused_set_kv_buffer_arg is utils.create_fused_set_kv_buffer_arg is makes
    point.install(kernel)
    point.remove()
    assert owner.__dict__[point.method] is before


def test_a_hook_of_another_plugin_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.plugins.hook_registry import HookType as Kind
    from sglang.srt.plugins.hook_registry import _wrap_fn

    def around(original: Any, *args: Any) -> Any:
        return original(*args)

    monkeypatch.setattr(
        RMSNorm, "forward_cuda", _wrap_fn(RMSNorm.forward_cuda, around, Kind.AROUND)
    )
    with pytest.raises(VerificationError, match=r"RMSNorm\.forward_cuda is already patched"):
        POINTS["add_norm"]().find()


def test_a_later_patch_of_others_stays_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    point = POINTS["add_norm"]()
    owner = point._class()
    monkeypatch.setattr(owner, "forward_cuda", owner.forward_cuda)  # so that the test puts it back
    point.install(kernels()["add_norm"])

    def theirs(*_: Any) -> None:
        """The patch of another plugin."""

    owner.forward_cuda = theirs
    with pytest.raises(VerificationError, match="patched by other code"):
        point.remove()
    assert owner.forward_cuda is theirs


def test_norms_with_a_residual_run_the_kernel_and_others_the_engines_own(
    own: SglKernelDouble,
) -> None:
    kernel, point = kernels()["add_norm"], POINTS["add_norm"]()
    x, residual = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    plain = norm()
    expected = plain.forward_native(x.clone(), residual.clone())
    point.install(kernel)
    layer, rounded = norm(), norm(cast_x_before_out_mul=True)
    layer.weight = plain.weight
    try:
        given = layer(x.clone(), residual.clone())
        for got, wanted in zip(given, expected, strict=True):
            torch.testing.assert_close(got, wanted)
        assert own.calls == []
        assert sum(kernel.book.calls.values()) == 1
        torch.testing.assert_close(layer(x.clone()), plain.forward_native(x.clone()))
        assert own.calls == ["rmsnorm"]
        rounded(x.clone(), residual.clone())
        layer(x.clone(), residual.clone(), post_residual_addition=residual)
        assert sum(kernel.book.calls.values()) == 1
        assert own.calls == ["rmsnorm", "fused_add_rmsnorm"]
        assert layer(x[:0], residual[:0])[0].shape == (0, HIDDEN)
        layer.fuse_input_quant(linear(bias=False))  # its weight is not quantised
        layer(x.clone(), residual.clone())
        assert sum(kernel.book.calls.values()) == 2
    finally:
        point.remove()
    # the layer holds the method that it called first
    layer(x.clone(), residual.clone())
    assert own.calls[2:] == ["fused_add_rmsnorm"]
    assert sum(kernel.book.calls.values()) == 2


def test_what_the_kernel_refuses_runs_the_engines_own(own: SglKernelDouble) -> None:
    kernel, point = kernels()["add_norm"], POINTS["add_norm"]()
    point.install(kernel)
    try:
        wide = torch.randn(TOKENS, 2 * HIDDEN)
        norm()(wide[:, :HIDDEN], torch.randn(TOKENS, HIDDEN))
    finally:
        point.remove()
    assert own.calls == ["fused_add_rmsnorm"]
    assert kernel.book.calls == {}
    assert dict(kernel.book.fallbacks) == {"not contiguous": 1}


def test_linear_layers_run_the_kernel_with_and_without_bias() -> None:
    kernel, point = kernels()["linear"], POINTS["linear"]()
    biased, bare = linear(bias=True), linear(bias=False)
    few, many = torch.randn(TOKENS, HIDDEN), torch.randn(70, HIDDEN)
    expected = [layer(x)[0] for layer in (biased, bare) for x in (few, many)]
    point.install(kernel)
    try:
        found = [layer(x)[0] for layer in (biased, bare) for x in (few, many)]
        assert biased(few[None])[0].shape == (1, TOKENS, 40)
    finally:
        point.remove()
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert sum(kernel.book.calls.values()) == 3
    assert dict(kernel.book.fallbacks) == {"tokens above 64": 2}
    assert torch.equal(biased(few)[0], expected[0])
    assert sum(kernel.book.calls.values()) == 3


def rotate(layer: Any, pool: KeyValuePoolDouble, mode: str) -> tuple[torch.Tensor, ...]:
    """A layer's rotation as gpt-oss calls it; query, key and value are views of one projection."""
    from sglang.srt.models import gpt_oss

    generator = torch.Generator().manual_seed(3)
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    qkv = torch.randn(TOKENS, sum(sizes), generator=generator)
    query, key, value = qkv.split(sizes, dim=-1)
    attention = SimpleNamespace(layer_id=0, k_scale=None, v_scale=None)
    batch = step(mode, torch.tensor([5, 0, 9]))
    cache = gpt_oss.create_fused_set_kv_buffer_arg(
        value=value, layer=attention, forward_batch=batch
    )
    positions = torch.tensor([7, 0, 100])
    query, key = layer(positions, query, key, fused_set_kv_buffer_arg=cache)
    return query, key, pool.keys.clone(), pool.values.clone()


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "TARGET_VERIFY"])
def test_a_decode_step_rotates_and_writes_with_the_kernel(
    own: SglKernelDouble, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    from sglang.srt.models import utils

    kernel, point = kernels()["rope_kv"], POINTS["rope_kv"]()
    pools = [KeyValuePoolDouble(12, KV_HEADS, HEAD_DIM) for _ in range(2)]
    monkeypatch.setattr(utils, "get_token_to_kv_pool", lambda: pools[0])
    expected = rotate(rotary(), pools[0], mode)
    assert own.calls == ["rope_store"]
    monkeypatch.setattr(utils, "get_token_to_kv_pool", lambda: pools[1])
    point.install(kernel)
    layer = rotary()
    try:
        query, key, *caches = rotate(layer, pools[1], mode)
        layer(torch.tensor([1]), torch.randn(1, HEAD_DIM), torch.randn(1, HEAD_DIM))
    finally:
        point.remove()
    for got, wanted in zip((query, *caches), (expected[0], *expected[2:]), strict=True):
        torch.testing.assert_close(got, wanted)
    assert caches[0].count_nonzero() == TOKENS * KV_HEADS * HEAD_DIM
    elsewhere = {"a KV cache that is written in attention": 1}
    if mode == "DECODE":
        # attention reads the cache alone, so the key may stay as it was
        assert own.calls == ["rope_store", "rope"]
        assert sum(kernel.book.calls.values()) == 1
        assert dict(kernel.book.fallbacks) == elsewhere
    else:
        torch.testing.assert_close(key, expected[1])
        assert own.calls == ["rope_store", "rope_store", "rope"]
        assert dict(kernel.book.fallbacks) == {"not a decode step": 1, **elsewhere}


def test_a_norm_that_quantises_for_its_projection_keeps_the_engines_own() -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    layer, projection = norm(), linear(bias=False)
    layer.fuse_input_quant(projection)
    assert POINTS["add_norm"]().applies(layer) is None
    projection.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    projection.input_scale = torch.ones(1)
    assert POINTS["add_norm"]().applies(layer) == "a quantised result"


def test_layers_of_a_role_say_why_they_are_left() -> None:
    from sglang.srt.layers.layernorm import GemmaRMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    half = RotaryEmbedding(HEAD_DIM, HEAD_DIM // 2, 128, 10_000, True, F32)
    router = linear(bias=True)
    router._use_tinygemm = True
    layers = [norm(), norm(cast_x_before_out_mul=True), norm(has_weight=False), half, rotary()]
    layers += [GemmaRMSNorm(HIDDEN), linear(bias=True), router, linear(bias=False).bfloat16()]
    all_kernels = kernels()
    found = {name: survey(POINTS[name](), all_kernels[name].guards, layers) for name in POINTS}
    assert found["add_norm"].taken == 1
    assert set(found["add_norm"].refused) == {
        "a row that is rounded before its weight",
        "no weight",
    }
    assert found["rope_kv"].taken == 1
    assert set(found["rope_kv"].refused) == {"another kind of rotation"}
    assert found["linear"].taken == 1
    assert found["linear"].refused == {
        "a router with a kernel of its own": 1,
        "weight in bfloat16": 1,
    }


def test_modes_that_bypass_layers_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.kernels import fused_op
    from sglang.srt import runtime_context

    capture = runtime_context.get_flags().capture
    monkeypatch.setattr(capture, "enable_torch_compile", True)
    with pytest.raises(VerificationError, match="--enable-torch-compile"):
        POINTS["linear"]().find()
    monkeypatch.setattr(capture, "enable_torch_compile", False)
    fused_op.set_fused_op_backend(fused_op.KernelBackend.TORCH)
    try:
        with pytest.raises(VerificationError, match="SGLANG_FORCE_FUSED_OP_BACKEND=torch"):
            POINTS["add_norm"]().find()
    finally:
        fused_op.set_fused_op_backend(None)
    chosen = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=True),
        kernel=SimpleNamespace(enable_nvidia_megakernel=True),
    )
    published = SimpleNamespace(is_config_namespace_published=lambda name: name == "exec")
    monkeypatch.setattr(runtime_context, "get_context", lambda: published)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: chosen)
    with pytest.raises(VerificationError, match="--enable-deterministic-inference"):
        POINTS["add_norm"]().find()
    chosen.deterministic.enable_deterministic_inference = False
    with pytest.raises(VerificationError, match="--enable-nvidia-megakernel"):
        POINTS["rope_kv"]().find()
    chosen.kernel.enable_nvidia_megakernel = False
    POINTS["rope_kv"]().find()
